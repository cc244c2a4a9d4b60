"""The dynamic rendezvous: nodes agree on a group through a backend that can only hold one small document.

For people who bring their own ``RendezvousBackend``: anything with a compare-and-set. It is one of the two places in
tenax that poll, because such a backend can only be asked. What is decided, and by which rules, stands in
``tenax.rendezvous._dynamic.decisions``; here is what carries the decisions out.

How it differs from TorchElastic's:

- Rounds: the workers' store is published anew in every round, under keys of that round, and a server of ours for it is
  a new one every time. Known members form the next round at once; the last call is for strangers.
- Death: heartbeats are counters, judged on the observer's own monotonic clock. A dead member of the group counts in
  ``num_nodes_waiting()``, so that agents, which poll it, form the next round without it.
- Nodes that do not fit in are spares. They wait without a deadline, do not count, and are excused when the run ends.
- Nodes are told apart by a random id. The document is JSON; nothing that a stranger wrote there is executed.
- The run is closed by ``set_closed()``, and by ``shutdown()`` of a node whose work ended. See there.
"""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tenax.rendezvous._dynamic import decisions
from tenax.rendezvous._dynamic.decisions import Done, Joiner, Put, Refused, Terms, Wait
from tenax.rendezvous._dynamic.event_recorder import SUCCEEDED, EventRecorder
from tenax.rendezvous._dynamic.heartbeat import Heartbeat
from tenax.rendezvous._dynamic.holder import Pause, StateHolder
from tenax.rendezvous._dynamic.state import Standing, State
from tenax.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

Token = Any  # what a backend hands out with a state, to recognise it again

_DISABLE_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_LOOPBACK = "127.0.0.1"
_HERE = "dynamic_rendezvous.py:"
_OF_HANDLER = f"{_HERE}DynamicRendezvousHandler."  # before the name of the method, in events
_FAREWELL_S = 3.0
_STORE_ERRORS = (
    RuntimeError,
    ValueError,
    OSError,
)  # what stores of torch and of tenax raise; TimeoutError is an OSError


def get_method_name(depth: int = 2) -> str:
    """The name of the function ``depth`` calls above this one."""
    frame = sys._getframe()
    for _ in range(depth):
        if frame.f_back is None:
            return "no_method_name"
        frame = frame.f_back
    return frame.f_code.co_name


class RendezvousBackend(ABC):
    """Holds one document for all nodes of a run, and changes it only for those who know what it was.

    Both methods raise RendezvousConnectionError if the place cannot be reached, and RendezvousStateError if what is
    there cannot be a state. They may be called by two threads, but never at the same time.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that a handler over it is registered under."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and the token that stands for it; None if there is none yet."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write the state if the one that is there is still the one that ``token`` stands for.

        Without a token: write it if there is none yet. Returns what is there afterwards, its token, and whether that is
        what we wanted to write; None if there is nothing.
        """


class RendezvousTimeout:
    """How long a rendezvous waits.

    ``join``: for a group to form (600 s). A spare, for which there is no place, waits for as long as it takes.
    ``last_call``: for strangers, once there are enough nodes (30 s). Living members of the last round are waited for
    twice as long, because they may have to end their workers first.
    ``close``: for closing a run to succeed (30 s).
    ``heartbeat``: for a heartbeat to succeed (5 s).
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = _positive("join", join, 600)
        self._last_call = _positive("last_call", last_call, 30)
        self._close = _positive("close", close, 30)
        self._heartbeat = _positive("heartbeat", heartbeat, 5)

    @property
    def join(self) -> timedelta:
        return self._join

    @property
    def last_call(self) -> timedelta:
        return self._last_call

    @property
    def close(self) -> timedelta:
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        return self._heartbeat


def _positive(name: str, timeout: timedelta | None, default_s: int) -> timedelta:
    chosen = timedelta(seconds=default_s) if timeout is None else timeout
    if chosen <= timedelta(0):
        raise ValueError(f"the {name} timeout of the rendezvous is {chosen}; expected a positive time")
    return chosen


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """What a dynamic rendezvous goes by.

    ``keep_alive_interval``: between two heartbeats of a node.
    ``keep_alive_max_attempt``: heartbeats that may be missed before a node counts as dead.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    @property
    def keep_alive_limit(self) -> timedelta:
        """After so long without a sign of life a node is dead."""
        return self.keep_alive_interval * self.keep_alive_max_attempt


@dataclass(frozen=True)
class _ThisNode:
    """``id`` is a random one for every start: host names and pids repeat in containers."""

    id: str
    addr: str | None  # under which the others reach it; None: its name


class DynamicRendezvousHandler(RendezvousHandler):
    """A rendezvous over a ``RendezvousBackend``. Make it with ``from_backend``.

    ``store`` is any key-value store with torch's methods that all nodes reach; every round gets its own keys in it.
    """

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """A handler for one node. ``keep_alive_interval`` is in seconds, ``local_addr`` how others reach this node."""
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        _check(settings)
        holder = StateHolder(backend, run_id, settings.keep_alive_interval.total_seconds(), keep_alive_max_attempt)
        return cls(_ThisNode(os.urandom(16).hex(), local_addr), settings, backend.name, store, holder)

    def __init__(
        self, node: _ThisNode, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: StateHolder
    ) -> None:
        _check(settings)
        self._node = node
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._holder = state_holder
        self._heart: Heartbeat | None = None
        self._round = 0  # that we are in; 0: none
        self._last_round = 0  # that we ever were in
        self._server: Any = None  # of the workers' store, while we are rank 0
        self._teller = EventRecorder(settings.run_id, self._name(), node.id)
        weakref.finalize(self, self._teller.close).atexit = False  # a forked child must not wait for our thread

    @property
    def settings(self) -> RendezvousSettings:
        return self._settings

    def get_backend(self) -> str:
        return self._backend_name

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's agent serves the workers' store: unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1."""
        return os.environ.get(_DISABLE_SHARING, "0") != "1"

    # --- joining ------------------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that we are in. Whoever was in a round and calls this again ends that round."""
        where = f"{_OF_HANDLER}next_rendezvous"
        self._teller.say(where, "asks for the next round of the run {!r}", self._settings.run_id)
        with self._teller.errors_of(where):
            info = self._next_rendezvous()
        found = info.bootstrap_store_info
        self._teller.say(
            where,
            "is in round {} as rank {} of {}",
            self._round,
            info.rank,
            info.world_size,
            rank=info.rank,
            master_endpoint=f"{found.master_addr}:{found.master_port}" if found is not None else "",
        )
        return info

    def _next_rendezvous(self) -> RendezvousInfo:
        self._raise_unless_unreachable()
        joiner = Joiner(self._node.id, self._name(), self._terms(), self._last_round, self._holder.clock())
        self._round = 0
        try:
            self._start_heart()
            while True:
                place = self._join(joiner)
                self._round = self._last_round = joiner.last_round = place.round
                info = self._enter(place)
                if info is not None:
                    return info
        except BaseException:
            self._withdraw()
            raise

    def _join(self, joiner: Joiner) -> Done:
        where = f"{_OF_HANDLER}_join"
        is_spare = False
        pause = Pause()
        sight = self._look_patiently(pause)
        while True:
            match joiner.decide(sight.state, sight.view, self._holder.clock()):
                case Done() as place:
                    return place
                case Refused(error):
                    raise error
                case Put(state):
                    self._teller.say_changes(where, sight.state, state)
                    try:
                        sight, is_ours = self._holder.put(state, sight.token)
                    except RendezvousConnectionError:  # whether it was written is not known: read
                        sight, is_ours = self._look_patiently(pause), True
                    self._teller.say(
                        where, "has written that" if is_ours else "could not write that: another node was faster"
                    )
                    if not is_ours:
                        pause.after_a_lost_write(sight)
                case Wait(why, is_spare_now):
                    if is_spare_now and not is_spare:
                        self._teller.say(where, "is a spare: {}", why)
                    is_spare = is_spare_now
                    pause.before_the_next_look(sight)
                    sight = self._look_patiently(pause)

    def _look_patiently(self, pause: Pause) -> Any:
        """Read; a backend that cannot be reached is tried again for as long as the others would think us alive."""
        while True:
            try:
                return self._holder.look()
            except RendezvousConnectionError:
                if not self._may_still_come_back():
                    raise
                pause.after_a_lost_write(self._holder.sight)

    def _may_still_come_back(self) -> bool:
        silent_s = self._holder.clock() - self._holder.reached_at
        return silent_s < self._settings.keep_alive_limit.total_seconds()

    def _enter(self, place: Done) -> RendezvousInfo | None:
        """Agree on the workers' store of this round. None: the round broke before it began."""
        store = _with_prefix(f"tenax.rendezvous.{self._settings.run_id}.{place.round}", self._store)
        server = None
        try:
            if place.rank == 0:
                if self.use_agent_store:
                    server = _serve_a_store(_LOOPBACK if self._is_alone(place) else "")
            elif not self._wait_for_rank_0(store):
                return None
            # A node that is alone need not be found, and a name server need not be asked.
            addr = self._node.addr or (_LOOPBACK if self._is_alone(place) else None)
            found = RendezvousStoreInfo.build(place.rank, store, addr, server.port if server is not None else None)
        except _STORE_ERRORS as error:
            _close(server)
            raise RendezvousConnectionError(
                f"the store of round {place.round} of the run {self._settings.run_id!r} cannot be used: {error}"
            ) from error
        except BaseException:
            _close(server)
            raise
        # Only now: until everybody was here, workers of the last round may still have been using it.
        self._server, before = server, self._server
        _close(before)
        return RendezvousInfo(store, place.rank, place.world_size, found)

    def _is_alone(self, place: Done) -> bool:
        return place.world_size == 1 and self._node.addr is None

    def _wait_for_rank_0(self, store: Any) -> bool:
        """Whether rank 0 published its address. It may die before it does; the others must not wait for it then."""
        keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
        pause = Pause()
        give_up_at = self._holder.clock() + self._settings.timeout.join.total_seconds()
        while not store.check(keys):
            if self._pending() > 0 or self._is_over():
                return False
            if self._holder.clock() >= give_up_at:
                raise RendezvousTimeoutError(
                    f"rank 0 of round {self._round} of the run {self._settings.run_id!r} lives, but did not publish "
                    f"the address of the workers' store within {self._settings.timeout.join.total_seconds():g} s"
                )
            pause.before_the_next_look(self._holder.sight)
        return True

    # --- asking -------------------------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """How many changes of the group are due. An agent that polls this forms the next round when it is not 0.

        Counted are nodes that wait and fit in, and members of our round that died or moved on: their death is a
        change of membership like any other. Spares do not count. The answer is at most a second old and costs no
        traffic. Raises what went wrong with our heartbeats, if the others must think us dead by now.
        """
        with self._teller.errors_of(f"{_OF_HANDLER}num_nodes_waiting"):
            self._raise_recorded()
            if self._heart is None:
                self._holder.look()
            return self._pending()

    def _is_over(self) -> bool:
        """Whether the run was closed, as far as we have heard."""
        state = self._holder.sight.state
        return state is not None and bool(state.closed)

    def _pending(self) -> int:
        sight = self._holder.sight
        return decisions.pending(sight.state, sight.view, self._node.id, self._round)

    def is_closed(self) -> bool:
        with self._teller.errors_of(f"{_OF_HANDLER}is_closed"):
            self._raise_recorded()
            self._holder.look()
            return self._is_over()

    # --- ending -------------------------------------------------------------------------------------------------------

    def set_closed(self) -> None:
        """End the run for everybody: an operator's cancel. Whoever joins afterwards gets RendezvousClosedError."""
        where = f"{_OF_HANDLER}set_closed"
        timeout_s = self._settings.timeout.close.total_seconds()
        why = f"it was closed on {self._name()}"
        terms = self._settings
        if_nobody_came_yet = State(terms.run_id, terms.min_nodes, terms.max_nodes, closed=why)
        with self._teller.errors_of(where):
            self._raise_unless_unreachable()
            self._holder.change(lambda state: decisions.closed(state, why), timeout_s, if_nobody_came_yet)
        self._teller.say(where, "has closed the run {!r}", terms.run_id, state=SUCCEEDED)

    def shutdown(self) -> bool:
        """Leave. If our work ended in the latest round, that was the run: it is closed for everybody.

        It is not closed by a node that got no place, that the others have gone on without, or that was told to stop: a
        Ctrl-C or a signal on one node, seen here as the exception that is on its way, leaves the run to the others.
        """
        return self._go(ended_in=0 if _is_being_stopped() else self._round)

    def leave(self) -> None:
        """This node was told to stop: the others learn it at once, and the run is theirs."""
        self._go(ended_in=0)

    def _go(self, ended_in: int) -> bool:
        if self._heart is None:  # we are nowhere
            self._teller.close()
            return True
        where = f"{_OF_HANDLER}shutdown"
        self._stop_heart()
        self._round = 0
        before: State | None = None

        def left(state: State) -> State:
            nonlocal before
            before = state
            return self._left(state, ended_in)

        try:
            with self._teller.errors_of(where):
                sight = self._holder.change(left, self._settings.timeout.close.total_seconds())
            if before is not None:
                self._teller.say_changes(where, before, self._left(before, ended_in))
            if sight.state is not None and sight.state.closed:
                self._wait_for_those_who_wait()
        except RendezvousError as error:
            import warnings

            warnings.warn(
                f"this node could not leave the run {self._settings.run_id!r}: {error}", RuntimeWarning, stacklevel=2
            )
            return False
        finally:
            self._close_server()
            self._teller.close()
        return True

    def _left(self, state: State, ended_in: int) -> State:
        if decisions.ends_with(state, ended_in):
            state = decisions.closed(state, f"the work of {self._name()} ended")
        return decisions.without(state, {self._node.id})

    def _wait_for_those_who_wait(self) -> None:
        """Spares learn from the state that they may go, and the state may live in our process: give them a moment."""
        give_up_at = self._holder.clock() + _FAREWELL_S
        pause = Pause()
        while self._holder.clock() < give_up_at:
            sight = self._holder.look()
            left = [] if sight.state is None else sight.state.nodes
            if not any(node.standing is Standing.WAITING and node.id not in sight.view.dead for node in left):
                return
            pause.before_the_next_look(sight)

    def _withdraw(self) -> None:
        """We did not get in: do not let the others count on us."""
        self._stop_heart()
        self._round = 0
        self._close_server()
        if self._holder.sight.state is not None and self._holder.clock() - self._holder.reached_at < _FAREWELL_S:
            try:
                timeout_s = self._settings.timeout.heartbeat.total_seconds()
                self._holder.change(lambda state: decisions.without(state, {self._node.id}), timeout_s)
            except RendezvousError as error:
                import warnings

                warnings.warn(
                    f"the others learn by our silence that we are gone: {error}", RuntimeWarning, stacklevel=3
                )

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def _start_heart(self) -> None:
        if self._heart is None:
            settings = self._settings
            self._heart = Heartbeat(
                self._holder,
                self._node.id,
                settings.keep_alive_interval.total_seconds(),
                settings.timeout.heartbeat.total_seconds(),
                self._teller,
            )
            weakref.finalize(self, self._heart.ask_to_stop)
            self._heart.start()

    def _stop_heart(self) -> None:
        if self._heart is not None:
            self._heart.stop()
            self._heart = None

    def _raise_recorded(self) -> None:
        """Raise what the heart met.

        A backend that is away for a moment is no reason to disturb the workers; nor is one that went away after the run
        was closed, perhaps with the node that hosted it: no other group can form there.
        """
        error = self._heart.error if self._heart is not None else None
        is_unreachable = isinstance(error, (RendezvousConnectionError, RendezvousTimeoutError))
        if error is not None and not (is_unreachable and (self._is_over() or self._may_still_come_back())):
            raise error

    def _raise_unless_unreachable(self) -> None:
        """Raise what the heart met, but for a lost connection: the call that is about to be made finds out itself."""
        error = self._heart.error if self._heart is not None else None
        if error is not None and not isinstance(error, (RendezvousConnectionError, RendezvousTimeoutError)):
            raise error

    def _close_server(self) -> None:
        server, self._server = self._server, None
        _close(server)

    def _name(self) -> str:
        return (self._node.addr or os.uname().nodename)[:255]

    def _terms(self) -> Terms:
        settings = self._settings
        timeout = settings.timeout
        return Terms(
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            timeout.join.total_seconds(),
            timeout.last_call.total_seconds(),
        )


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """A handler from parameters: ``join_timeout`` (or ``timeout``), ``last_call_timeout``, ``close_timeout``,
    ``heartbeat_timeout`` in seconds; ``keep_alive_interval`` and ``keep_alive_max_attempt`` as whole numbers."""
    teller = EventRecorder(params.run_id, params.local_addr or os.uname().nodename)
    try:
        with teller.errors_of(f"{_HERE}create_handler"):
            return _handler(store, backend, params)
    finally:
        teller.close()


def _handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    join = _timeout(params, "join_timeout")
    interval, attempts = (params.get_as_int("keep_alive_interval", 5), params.get_as_int("keep_alive_max_attempt", 3))
    if interval is None or attempts is None:
        raise TypeError("keep_alive_interval and keep_alive_max_attempt need a number; leave them out for the defaults")
    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(
            _timeout(params, "timeout") if join is None else join,
            _timeout(params, "last_call_timeout"),
            _timeout(params, "close_timeout"),
            _timeout(params, "heartbeat_timeout"),
        ),
        keep_alive_interval=interval,
        keep_alive_max_attempt=attempts,
    )


def _timeout(params: RendezvousParameters, key: str) -> timedelta | None:
    value = params.get(key)
    if value is None:
        return None
    try:
        return timedelta(seconds=float(value))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the rendezvous option {key!r} is {value!r}; expected a number of seconds") from None


def _check(settings: RendezvousSettings) -> None:
    if not settings.run_id:
        raise ValueError("the run id is empty; give the run a name")
    if settings.min_nodes < 1:
        raise ValueError(f"min_nodes is {settings.min_nodes}; expected at least 1")
    if settings.max_nodes < settings.min_nodes:
        raise ValueError(f"max_nodes is {settings.max_nodes}; expected at least min_nodes, {settings.min_nodes}")
    if settings.keep_alive_interval <= timedelta(0) or settings.keep_alive_max_attempt < 1:
        raise ValueError(
            f"the keep-alive interval is {settings.keep_alive_interval} and its attempts "
            f"{settings.keep_alive_max_attempt}; expected a positive time and at least 1"
        )


def _with_prefix(prefix: str, store: Any) -> Any:
    """Torch's stores stay torch's, so that torch can use them. Whoever has one has imported torch: we never do."""
    torch_distributed = sys.modules.get("torch.distributed")
    torch_store = getattr(torch_distributed, "Store", None)
    if torch_store is not None and isinstance(store, torch_store):
        return torch_distributed.PrefixStore(prefix, store)  # type: ignore[union-attr]
    from tenax.store import PrefixStore

    return PrefixStore(prefix, store)


def _serve_a_store(host: str) -> Any:
    from tenax.store import StoreServer

    return StoreServer.in_thread(host, 0)


def _close(server: Any) -> None:
    if server is not None:
        server.close()


def _is_being_stopped() -> bool:
    """Whether an exception that stands for a signal is being handled right now, as in a launcher's ``finally``."""
    error = sys.exc_info()[1]
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "sigval")
