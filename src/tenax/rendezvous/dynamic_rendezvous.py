"""The dynamic rendezvous: nodes agree on a group through a backend that holds one small document.

For users who bring their own ``RendezvousBackend``: anything with a compare-and-set. It is one of the two parts of
tenax that poll, because such a backend sends no notifications. The rules are in
``tenax.rendezvous._dynamic.decisions``; this module applies them.

Differences from TorchElastic's:

- Rounds: the workers' store is published anew in every round, under keys of that round, and a store server started
  here is new in every round. Known members form the next round at once; the last call is for new nodes.
- Death: heartbeats are counters, measured on the observer's own monotonic clock. A dead member counts in
  ``num_nodes_waiting()``, so agents, which poll it, form the next round without it.
- Nodes that do not fit in are spares. They wait without a deadline, do not count, and exit when the run ends.
- Nodes are identified by a random id. The document is JSON; nothing in it is executed.
- The run is closed by ``set_closed()``, and by ``shutdown()`` of a node whose work ended.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tenax._core.model import assert_never
from tenax._core.text import format_seconds
from tenax._engines.store_address import may_use_agent_store
from tenax.rendezvous._dynamic import decisions
from tenax.rendezvous._dynamic.decisions import Done, Joiner, Put, Refused, Wait
from tenax.rendezvous._dynamic.event_recorder import SUCCEEDED, EventRecorder, recorder_of
from tenax.rendezvous._dynamic.holder import Heartbeat, Pause, StateHolder
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
from tenax.rendezvous.utils import STORE_ERRORS
from tenax.store import PrefixStore, StoreServer

__all__ = ["DynamicRendezvousHandler", "RendezvousBackend", "RendezvousSettings", "RendezvousTimeout", "create_handler"]

Token = Any  # a backend's token for one version of the state

_LOOPBACK = "127.0.0.1"
_HERE = "dynamic_rendezvous.py:"
_OF_HANDLER = f"{_HERE}DynamicRendezvousHandler."  # prefix of the method's name in events
_LEAVE_TIMEOUT_S = 3.0


def get_method_name(depth: int = 2) -> str:
    """Return the name of the function ``depth`` calls above this one."""
    frame = sys._getframe()
    for _ in range(depth):
        if frame.f_back is None:
            return "no_method_name"
        frame = frame.f_back
    return frame.f_code.co_name


class RendezvousBackend(ABC):
    """Holds one document for all nodes of a run, changed by compare-and-set.

    Both methods raise RendezvousConnectionError if the backend cannot be reached, and RendezvousStateError if the
    stored value cannot be a state. They may be called by two threads, but never at the same time.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which a handler with this backend is registered."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if there is no state yet."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write the state if the stored one still has this token; without a token, if there is none yet.

        Returns the state stored afterwards, its token, and whether it is the one just written; None if there is none.
        """


class RendezvousTimeout:
    """Timeouts of a rendezvous.

    ``join``: for a group to form (600 s). A spare node waits without a limit.
    ``last_call``: for more new nodes, once there are enough nodes (30 s). Members of the last round that are alive get
    twice as long, because they may have to stop their workers first.
    ``close``: for closing a run (30 s).
    ``heartbeat``: for one heartbeat (5 s).
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
        raise ValueError(f"the rendezvous timeout {name!r} is {chosen}; expected a positive time")
    return chosen


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """Settings of a dynamic rendezvous.

    ``keep_alive_interval``: time between two heartbeats of a node.
    ``keep_alive_max_attempt``: missed heartbeats after which a node counts as dead.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    @property
    def keep_alive_limit(self) -> timedelta:
        """The time without a heartbeat after which a node counts as dead."""
        return self.keep_alive_interval * self.keep_alive_max_attempt


@dataclass(frozen=True)
class _ThisNode:
    """``id`` is random for every start: host names and pids repeat in containers."""

    id: str
    addr: str | None  # at which other nodes reach it; None: its host name


class DynamicRendezvousHandler(RendezvousHandler):
    """A rendezvous over a ``RendezvousBackend``. Create it with ``from_backend``.

    ``store`` is a key-value store with torch's methods that all nodes can reach; every round gets its own keys in it.
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
        """Create a handler. ``keep_alive_interval`` is in seconds; ``local_addr`` is this node's address."""
        timeout, interval = timeout or RendezvousTimeout(), timedelta(seconds=keep_alive_interval)
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, keep_alive_max_attempt)
        node = _ThisNode(os.urandom(16).hex(), local_addr)
        return cls(node, settings, backend.name, store, StateHolder(backend, settings))

    def __init__(
        self, node: _ThisNode, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: StateHolder
    ) -> None:
        _check(settings)
        self._node = node
        self._settings = settings
        self._backend_name = backend_name
        self._store = store
        self._holder = state_holder
        self._heartbeat: Heartbeat | None = None
        self._round = 0  # the current round; 0: none
        self._last_round = 0  # the last round that this node was in
        self._server = ExitStack()  # of the workers' store, on rank 0
        self._recorder = EventRecorder(settings.run_id, self._name(), node.id)
        weakref.finalize(self, self._recorder.close).atexit = False  # a forked child must not wait for this thread

    @property
    def settings(self) -> RendezvousSettings:
        return self._settings

    def get_backend(self) -> str:
        return self._backend_name

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's agent serves the workers' store. False if TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1."""
        return may_use_agent_store()

    # --- joining ------------------------------------------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round with this node. Calling this again while in a round ends that round."""
        where = f"{_OF_HANDLER}next_rendezvous"
        self._recorder.record(where, f"requests the next round of the run {self._settings.run_id!r}")
        with self._recorder.errors_of(where):
            info = self._next_rendezvous()
        found = info.bootstrap_store_info
        endpoint = f"{found.master_addr}:{found.master_port}" if found is not None else ""
        text = f"is in round {self._round} as rank {info.rank} of {info.world_size}"
        self._recorder.record(where, text, rank=info.rank, master_endpoint=endpoint)
        return info

    def _next_rendezvous(self) -> RendezvousInfo:
        self._raise_recorded(calls_backend=True)
        joiner = Joiner(self._node.id, self._name(), self._settings, self._last_round, time.monotonic())
        self._round = 0
        try:
            if self._heartbeat is None:
                self._heartbeat = Heartbeat(self._holder, self._node.id, self._settings, self._recorder)
                weakref.finalize(self, self._heartbeat.stop_requested.set)
            while True:
                done = self._join(joiner)
                self._round = self._last_round = joiner.last_round = done.round
                info = self._enter(done)
                if info is not None:
                    return info
        except BaseException:
            self._withdraw()
            raise

    def _join(self, joiner: Joiner) -> Done:
        where = f"{_OF_HANDLER}_join"
        is_spare = False
        pause = Pause()
        snapshot = self._read_with_retries(pause)
        while True:
            match decision := joiner.decide(snapshot.state, snapshot.view, time.monotonic()):
                case Done() as done:
                    return done
                case Refused(error):
                    raise error
                case Put(state):
                    self._recorder.record_changes(where, snapshot.state, state)
                    try:
                        snapshot, is_written = self._holder.put(state, snapshot.token)
                    except RendezvousConnectionError:  # the write may have succeeded: read
                        snapshot, is_written = self._read_with_retries(pause), True
                    if is_written:
                        self._recorder.record(where, "wrote the change")
                    else:
                        self._recorder.record(where, "could not write the change: another node wrote first")
                        pause.sleep(snapshot)
                case Wait(why, is_spare_now):
                    if is_spare_now and not is_spare:
                        self._recorder.record(where, f"is a spare: {why}")
                    is_spare = is_spare_now
                    pause.before_next_read(snapshot)
                    snapshot = self._read_with_retries(pause)
                case _:
                    assert_never(decision)

    def _read_with_retries(self, pause: Pause) -> Any:
        """Read the state. Retry an unreachable backend for as long as other nodes count this one as alive."""
        while True:
            try:
                return self._holder.read()
            except RendezvousConnectionError:
                if not self._counts_as_alive():
                    raise
                pause.sleep(self._holder.snapshot)

    def _counts_as_alive(self) -> bool:
        silent_s = time.monotonic() - self._holder.reached_at
        return silent_s < self._settings.keep_alive_limit.total_seconds()

    def _enter(self, done: Done) -> RendezvousInfo | None:
        """Agree on the workers' store of this round. Return None if the round broke before it began."""
        store = _with_prefix(f"tenax.rendezvous.{self._settings.run_id}.{done.round}", self._store)
        # A single node uses loopback and needs no name lookup.
        loopback = _LOOPBACK if done.world_size == 1 and self._node.addr is None else ""
        try:
            with ExitStack() as server:  # closed unless this node enters the round
                port = None
                if done.rank == 0 and self.use_agent_store:
                    port = server.enter_context(StoreServer.in_thread(loopback)).port
                if done.rank != 0 and not self._wait_for_rank_0(store):
                    return None
                found = RendezvousStoreInfo.build(done.rank, store, self._node.addr or loopback or None, port)
                before, self._server = self._server, server.pop_all()
        except STORE_ERRORS as error:
            raise RendezvousConnectionError(
                f"cannot use the store of round {done.round} of the run {self._settings.run_id!r}: {error}"
            ) from error
        before.close()  # only now: until all members have joined, workers of the last round may still use it
        return RendezvousInfo(store, done.rank, done.world_size, found)

    def _wait_for_rank_0(self, store: Any) -> bool:
        """Return whether rank 0 has published its address; False if the round broke, for example because it died."""
        keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
        pause = Pause()
        give_up_at = time.monotonic() + self._settings.timeout.join.total_seconds()
        while not store.check(keys):
            if self._pending() > 0 or self._is_over():
                return False
            if time.monotonic() >= give_up_at:
                raise RendezvousTimeoutError(
                    f"rank 0 of round {self._round} of the run {self._settings.run_id!r} is alive, but did not "
                    "publish the address of the workers' store within "
                    f"{format_seconds(self._settings.timeout.join.total_seconds())}"
                )
            pause.before_next_read(self._holder.snapshot)
        return True

    # --- polling ------------------------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Return how many changes of the group are pending. If it is not 0, a polling agent forms the next round.

        Counts waiting nodes that fit in, and members of the current round that died or moved on. Spares do not count.
        The result is at most a second old and costs no traffic. Raises the error of the heartbeats if other nodes must
        count this one as dead by now.
        """
        with self._recorder.errors_of(f"{_OF_HANDLER}num_nodes_waiting"):
            self._raise_recorded()
            if self._heartbeat is None:
                self._holder.read()
            return self._pending()

    def _is_over(self) -> bool:
        """Return whether the run is closed in the last state read."""
        state = self._holder.snapshot.state
        return state is not None and bool(state.closed)

    def _pending(self) -> int:
        snapshot = self._holder.snapshot
        return decisions.pending(snapshot.state, snapshot.view, self._node.id, self._round)

    def is_closed(self) -> bool:
        with self._recorder.errors_of(f"{_OF_HANDLER}is_closed"):
            self._raise_recorded()
            self._holder.read()
            return self._is_over()

    # --- ending -------------------------------------------------------------------------------------------------------

    def set_closed(self) -> None:
        """End the run for all nodes. Nodes that join later get RendezvousClosedError."""
        where = f"{_OF_HANDLER}set_closed"
        why = f"it was closed on {self._name()}"
        terms = self._settings
        if_absent = State(terms.run_id, terms.min_nodes, terms.max_nodes, closed=why)
        with self._recorder.errors_of(where):
            self._raise_recorded(calls_backend=True)
            self._holder.change(
                lambda state: decisions.closed(state, why), terms.timeout.close.total_seconds(), if_absent
            )
        self._recorder.record(where, f"has closed the run {terms.run_id!r}", state=SUCCEEDED)

    def shutdown(self) -> bool:
        """Leave. If this node's work ended in the latest round, the run is closed for all nodes.

        The run stays open if this node was a spare, if the group has moved on without it, or if it is being stopped:
        during the handling of KeyboardInterrupt or of a signal's exception only this node leaves.
        """
        return self._leave(ended_in=0 if _is_being_stopped() else self._round)

    def leave(self) -> None:
        """Leave the run, which continues without this node. Other nodes see it at once."""
        self._leave(ended_in=0)

    def _leave(self, ended_in: int) -> bool:
        if self._heartbeat is None:  # not in the state
            self._recorder.close()
            return True
        where = f"{_OF_HANDLER}shutdown"
        self._stop_heartbeat()
        self._round = 0
        timeout_s = self._settings.timeout.close.total_seconds()
        try:
            with self._recorder.errors_of(where):
                before = self._holder.change(lambda state: self._left(state, ended_in), timeout_s)
            if before is not None:
                self._recorder.record_changes(where, before, self._left(before, ended_in))
            if self._is_over():
                self._wait_for_spares()
        except RendezvousError as error:
            warnings.warn(
                f"this node could not leave the run {self._settings.run_id!r}: {error}", RuntimeWarning, stacklevel=2
            )
            return False
        finally:
            self._server.close()
            self._recorder.close()
        return True

    def _left(self, state: State, ended_in: int) -> State:
        if decisions.ends_with(state, ended_in):
            state = decisions.closed(state, f"the workers of {self._name()} finished")
        return decisions.without(state, {self._node.id})

    def _wait_for_spares(self) -> None:
        """Wait a moment for spares to read that the run is closed: the state may live in this process."""
        give_up_at = time.monotonic() + _LEAVE_TIMEOUT_S
        pause = Pause()
        while time.monotonic() < give_up_at:
            snapshot = self._holder.read()
            waiting = [] if snapshot.state is None else snapshot.state.with_standing(Standing.WAITING)
            if all(node.id in snapshot.view.dead for node in waiting):
                return
            pause.before_next_read(snapshot)

    def _withdraw(self) -> None:
        """Remove this node from the state after a failed attempt to join."""
        self._stop_heartbeat()
        self._round = 0
        self._server.close()
        is_reachable = time.monotonic() - self._holder.reached_at < _LEAVE_TIMEOUT_S
        if is_reachable and self._holder.snapshot.state is not None:
            try:
                timeout_s = self._settings.timeout.heartbeat.total_seconds()
                self._holder.change(lambda state: decisions.without(state, {self._node.id}), timeout_s)
            except RendezvousError as error:
                warnings.warn(
                    f"this node could not be removed from the run {self._settings.run_id!r}, so other nodes wait "
                    f"until its heartbeats are overdue: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _raise_recorded(self, *, calls_backend: bool = False) -> None:
        """Raise the error of the heartbeats, except a lost connection that does not matter.

        A short outage must not disturb the workers. After the run was closed, the backend may be gone with the node
        that hosted it: no other group can form. A caller that calls the backend detects a lost connection itself.
        """
        error = self._heartbeat.error if self._heartbeat is not None else None
        is_unreachable = isinstance(error, (RendezvousConnectionError, RendezvousTimeoutError))
        if is_unreachable and (calls_backend or self._is_over() or self._counts_as_alive()):
            return
        if error is not None:
            raise error

    def _name(self) -> str:
        return (self._node.addr or os.uname().nodename)[:255]


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create a handler from parameters.

    Options: ``join_timeout`` (or ``timeout``), ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout`` in
    seconds; ``keep_alive_interval`` and ``keep_alive_max_attempt`` as whole numbers.
    """
    with recorder_of(params, f"{_HERE}create_handler"):
        join = _timeout(params, "join_timeout")
        interval = params.get_as_int("keep_alive_interval", 5)
        attempts = params.get_as_int("keep_alive_max_attempt", 3)
        if interval is None or attempts is None:
            raise TypeError(
                "keep_alive_interval and keep_alive_max_attempt need a number; leave them out for the defaults"
            )
        others = [_timeout(params, f"{name}_timeout") for name in ("last_call", "close", "heartbeat")]
        timeout = RendezvousTimeout(_timeout(params, "timeout") if join is None else join, *others)
        nodes = (params.min_nodes, params.max_nodes, params.local_addr)
        return DynamicRendezvousHandler.from_backend(params.run_id, store, backend, *nodes, timeout, interval, attempts)


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
            f"keep_alive_interval is {settings.keep_alive_interval} and keep_alive_max_attempt "
            f"{settings.keep_alive_max_attempt}; expected a positive time and at least 1"
        )


def _with_prefix(prefix: str, store: Any) -> Any:
    """Return a PrefixStore: torch's for a store of torch, which only torch can use. Never imports torch."""
    torch_distributed = sys.modules.get("torch.distributed")
    torch_store = getattr(torch_distributed, "Store", None)
    if torch_store is not None and isinstance(store, torch_store):
        return torch_distributed.PrefixStore(prefix, store)  # type: ignore[union-attr]
    return PrefixStore(prefix, store)


def _is_being_stopped() -> bool:
    """Return whether KeyboardInterrupt or a signal's exception is being handled, as in a launcher's ``finally``."""
    error = sys.exc_info()[1]
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "sigval")
