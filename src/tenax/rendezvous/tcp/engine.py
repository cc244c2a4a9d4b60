"""The tcp engine: this node's way to the coordinator, and the coordinator itself if the endpoint is ours.

    look up -> bind? -> serve              whoever can bind the endpoint serves it; no name is compared with any other
                    -> connect -> greet -> linked -> lost -> connect ...

Laws:

- Whatever the coordinator must know of this node is said at the beginning of every link, from the agent's state; in
  between nothing has to be kept.
- A coordinator that is *gone* (its host tells us so: closed, refused) harms nobody: nobody else can form a generation.
  Workers keep running, and this node looks for it, or takes its place if the endpoint is on this host.
- A coordinator that is *silent* may have given us up: workers are killed when the lease ends (``core/lease.py``), also
  if this very process is stopped (``hold``).
- After ``join_timeout`` without a coordinator the node gives up, with a reason.
"""

from __future__ import annotations

import errno
import os

import msgspec

from tenax.connecting import Connecting
from tenax.core.coordinator import Opened, RunSettings
from tenax.core.events import Fenced, GenerationFormed, JoinRefused, RunEnded, TimePassed
from tenax.core.lease import Lease, LeaseTerms
from tenax.core.messages import NodeInfo, NodeReady
from tenax.endpoint import Endpoint, Lookup, is_loopback, listen
from tenax.rendezvous.store_place import StorePlace
from tenax.rendezvous.tcp import wire
from tenax.rendezvous.tcp.link import Link
from tenax.rendezvous.tcp.marker import Marker, Note
from tenax.rendezvous.tcp.server import WRONG_SECRET, CoordinatorServer
from tenax.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tenax.core.coordinator import CoordinatorState
    from tenax.core.messages import FromNode
    from tenax.core.model import Assignment
    from tenax.endpoint import Address
    from tenax.ports import Cancellable, ControlledNode, Emit, EventLoop

_GREETING_S = 5.0
_SOON_S, _LATER_S = 0.1, 1.0
_SAY_EVERY_S = 10.0
_LOOK_UP_EVERY_S = 5.0  # while the coordinator is not to be found
_TOUCH_EVERY_S = 10.0
_NO_GREETING = "it did not answer a greeting"
_LINGER_S = 5.0  # after the end: how long nodes may take to hear of it


class TcpSettings(msgspec.Struct, frozen=True):
    """What the engine is told: the same on every node, but for what names the node."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    secret: bytes = b""
    tls: TlsFiles | None = None
    terms: LeaseTerms = LeaseTerms()
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    scale_up: bool = True
    node_rank: int = -1
    node_name: str = ""
    node_order: str = ""
    local_addr: str = ""
    store_port: int = 0
    use_agent_store: bool = True


class TcpRendezvous:
    """Implements ``ports.Control``."""

    def __init__(self, settings: TcpSettings, master_addr: str = "", master_port: int = 0) -> None:
        self._settings = settings
        self._endpoint = Endpoint.parse(settings.endpoint)
        self._place = StorePlace(
            master_addr or settings.local_addr,
            master_port or settings.store_port,
            in_agent=settings.use_agent_store,
        )
        self._has_own_address = bool(master_addr or settings.local_addr)
        self._loop: EventLoop
        self._emit: Emit
        self._node: ControlledNode
        self._info: NodeInfo
        self._addresses: list[Address] = []
        self._lookup: Lookup | None = None
        self._looked_up_at = 0.0
        self._server: CoordinatorServer | None = None
        self._marker = Marker(settings.run_id, str(self._endpoint))
        self._connecting: Connecting | None = None
        self._link: Link | None = None
        self._hello: wire.Hello | None = None
        self._is_proven = False  # it has proved that it knows the secret, and got our proof
        self._is_linked = False  # greeted, and accepted
        self._is_run_over = False
        self._wants_cancel = ""  # an operator's wish, with its reason
        self._lease: Lease
        self._is_guarding = False
        self._part: Assignment | None = None  # in the last generation that we were in
        self._saw_it_die = False
        self._asked_at = 0.0  # when we last tried to connect, or proved ourselves
        self._touched_at = 0.0
        self._lost_since = 0.0
        self._said_at = -_SAY_EVERY_S
        self._failures_in_a_row = 0
        self._is_finished = False
        self._linger_until: float | None = None
        self._timers: dict[str, Cancellable] = {}

    # --- ports.Control ------------------------------------------------------------------------------------------------

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        settings, agent = self._settings, node.settings
        self._loop, self._emit, self._node = loop, emit, node
        self._info = NodeInfo(
            node_id=os.urandom(16).hex(),
            host=os.uname().nodename,
            slots=agent.local_world_size,
            role=agent.role,
            rank=settings.node_rank,
            name=settings.node_name,
            order=settings.node_order,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
        )
        self._lost_since = loop.now()
        self._lease = Lease(settings.terms, loop.now())
        self._place.open(loop, node.say)
        self._look_up()

    def tell(self, message: FromNode) -> None:
        if self._is_linked:
            self._say_word(message)

    def cancel(self, why: str) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None:  # otherwise it was never opened
            loop.soon(lambda: self._cancel(why))

    def _cancel(self, why: str) -> None:
        """Said to the coordinator, or kept until there is one to say it to."""
        self._wants_cancel = why
        if self._is_linked and self._link is not None:
            self._link.send(wire.encode(wire.Cancel(why)))

    def stays_for_others(self) -> bool:
        server = self._server
        if server is None or not server.others(self._info.node_id):
            return False
        if not server.is_over:
            if self._linger_until is None:
                self._linger_until = 0.0
                self._node.say(
                    "this node has left the run, but it serves the coordinator of the others: it stays until they are "
                    "done; a further signal (Ctrl-C) ends it at once, and they must do without"
                )
            return True
        if not self._linger_until:
            self._linger_until = self._loop.now() + _LINGER_S
            self._later("linger", _LINGER_S, lambda: self._emit(TimePassed()))
        return self._loop.now() < self._linger_until

    def close(self) -> None:
        self._is_finished = True
        for timer in self._timers.values():
            timer.cancel()
        if self._lookup is not None:
            self._lookup.close()
            self._end_lookup()
        if self._connecting is not None:
            self._connecting.close()
        if self._link is not None:
            link, self._link = self._link, None
            self._loop.unwatch(link)
            link.finish(1.0)
        if self._server is not None:
            self._server.close()
            self._marker.remove()
        self._place.close()

    # --- finding ------------------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        def found(addresses: list[Address]) -> None:
            self._end_lookup()
            self._addresses = addresses
            self._serve_if_ours()
            self._connect()

        def failed(why: str) -> None:
            self._end_lookup()
            self._try_again(f"the name {self._endpoint.host!r} cannot be looked up: {why}", _LATER_S, self._look_up)

        self._start_lookup(found, failed)

    def _look_up_again(self) -> None:
        """The name may mean another host by now: who is started anew may have a new address. Nobody waits for this."""
        is_recent = self._loop.now() - self._looked_up_at < _LOOK_UP_EVERY_S
        if self._lookup is not None or is_recent or self._endpoint.is_address:
            return

        def found(addresses: list[Address]) -> None:
            self._end_lookup()
            self._addresses = addresses

        self._start_lookup(found, lambda _: self._end_lookup())

    def _start_lookup(self, found: Callable[[list[Address]], None], failed: Callable[[str], None]) -> None:
        lookup = Lookup(self._endpoint, found, failed)
        if lookup.start():
            self._lookup = lookup
            self._loop.watch(lookup)

    def _end_lookup(self) -> None:
        self._looked_up_at = self._loop.now()
        if self._lookup is not None:
            self._loop.unwatch(self._lookup)
            self._lookup = None

    def _serve_if_ours(self) -> bool:
        """Serve the endpoint if it is an address of this host and nobody else serves it."""
        if self._server is not None:
            return False
        try:
            listeners = listen(self._endpoint, self._addresses)
        except OSError as error:
            self._refused(f"the endpoint {self._endpoint} cannot be served on this host: {error.strerror}")
            return False
        if not listeners:
            return False
        settings = self._settings
        try:
            tls = settings.tls.for_server() if settings.tls is not None else None
        except ValueError as error:
            for listener in listeners:
                listener.close()
            self._refused(str(error))
            return False
        note = self._marker.read()
        is_heir = self._part is not None or note is not None
        run = RunSettings(
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            self._node.settings.max_restarts,
            join_timeout_s=settings.join_timeout_s,
            last_call_s=settings.last_call_s,
            scale_up=settings.scale_up,
            serving_node=self._info.node_id,
        )
        self._server = CoordinatorServer(
            listeners,
            run,
            settings.terms,
            settings.secret,
            self._loop,
            policy=self._node.policy,
            tls=tls,
            record=self._node.record_run(run),
            on_fewer=self._on_fewer,
            on_change=self._write_marker,
            on_tick=self._touch_marker,
        )
        for index, listener in enumerate(listeners):  # so that nobody serves here before what we started is gone
            self._node.keep(f"endpoint {index}", listener.fileno())
        self._say_that_we_serve(is_heir)
        self._server.open(self._opened(note or Note(), settings.terms.lease_s if is_heir else 0.0))
        return True

    def _opened(self, note: Note, recover_s: float) -> Opened:
        """What is known of the past: from our own part in it, and from the note of who served here before."""
        part = self._part
        generation = max(note.generation, part.generation if part is not None else 0)
        is_ours = part is not None and part.generation == generation
        store = part.store if part is not None and is_ours else note.store
        dead_rank = -1
        if part is not None and is_ours and self._saw_it_die and part.coordinator_rank != part.group_rank:
            dead_rank = part.coordinator_rank
        restarts_used = max(note.restarts_used, part.restarts_used if part is not None else 0)
        return Opened(recover_s, dead_rank, generation, restarts_used, store=store, verdict=note.verdict)

    def _say_that_we_serve(self, is_heir: bool) -> None:
        run = f"the coordinator of the run {self._settings.run_id!r} at {self._endpoint}"
        if is_heir:
            self._node.say(f"this node takes over {run}; the nodes of the last generation have a moment to come back")
        elif self._endpoint.is_loopback:
            self._node.say(f"this node serves {run}: a loopback address, so only agents on this host can join")
        else:
            self._node.say(f"this node serves {run}")
        if not self._settings.secret and not self._endpoint.is_loopback:
            self._node.say(
                f"warning: whoever reaches {self._endpoint} can join this run, because there is no secret; give every "
                "node the same one, with --rdzv-conf token_file=FILE or the variable TENAX_RDZV_TOKEN"
            )

    def _connect(self, index: int = 0, was_refused: bool = False) -> None:
        if self._is_finished:
            return
        family, address = self._addresses[index]
        if index == 0:
            self._asked_at = self._loop.now()

        def connected(sock: socket.socket) -> None:
            self._connecting = None
            self._greet(sock)

        def failed(number: int) -> None:
            self._connecting = None
            refused = was_refused or number == errno.ECONNREFUSED
            if index + 1 < len(self._addresses):
                self._connect(index + 1, refused)
            else:
                self._on_nobody_there(refused, os.strerror(number))

        self._connecting = Connecting(self._loop, family, address, connected, failed)
        self._connecting.start()

    def _on_nobody_there(self, was_refused: bool, why: str) -> None:
        if was_refused:
            # Its host is there and says that nobody serves: so nobody forms a generation without us.
            self._lease = Lease(self._settings.terms, max(self._lease.proven_at, self._asked_at))
            self._hold()
            self._guard()
            if self._serve_if_ours():
                self._connect()
                return
        self._look_up_again()
        self._try_again(f"there is no coordinator at {self._endpoint}: {why}", self._patience(), self._connect)

    def _patience(self) -> float:
        """Short for a member, longer and longer for a stranger; never the same for two of them."""
        longest = _SOON_S if self._part is not None else min(_LATER_S, _SOON_S * 2 ** min(self._failures_in_a_row, 8))
        self._failures_in_a_row += 1
        return longest * (1 + int.from_bytes(os.urandom(2), "big") / 32768)

    def _try_again(self, why: str, after_s: float, call: Callable[[], None]) -> None:
        if self._is_finished:
            return
        now = self._loop.now()
        waited = now - self._lost_since
        if waited > self._settings.join_timeout_s:
            self._refused(
                f"{why}, for {waited:.0f} s; start the node that is to serve it, check the address and the network, or "
                "allow more time with --rdzv-conf join_timeout=SECONDS"
            )
            return
        if now - self._said_at >= _SAY_EVERY_S and waited > 0.5:
            self._said_at = now
            left = self._settings.join_timeout_s - waited
            self._node.say(f"{why}; still trying, for {left:.0f} s at most")
        self._later("again", after_s, call)

    def _refused(self, reason: str) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._emit(JoinRefused(reason))

    # --- a link -------------------------------------------------------------------------------------------------------

    def _greet(self, sock: socket.socket) -> None:
        tls = self._settings.tls
        link = self._link = Link(
            sock,
            self._on_body,
            self._on_link_closed,
            tls.for_client() if tls is not None else None,
            server_hostname=self._endpoint.host if tls is not None else None,
            resets=True,  # in good order it is closed only when nothing of ours is alive
        )
        if link.is_closed:  # TLS refused at once
            return
        self._loop.watch(link)
        self._is_proven = False
        self._hello = wire.Hello(wire.VERSION, self._settings.run_id, self._info.node_id, os.urandom(wire.NONCE_BYTES))
        link.send(wire.encode(self._hello))
        self._later("greeting", _GREETING_S, lambda: link.close(_NO_GREETING))

    def _on_body(self, body: bytes) -> None:
        """Each frame has its place: nobody is believed who has not proved that it knows the secret."""
        frame = wire.decode_from_server(body)
        match frame:
            case wire.Event(event) if self._is_linked:
                self._on_event(event)
            case wire.BeatAnswer(number) if self._is_linked:
                self._lease.answered(number)
                self._hold()
            case wire.Challenge() if not self._is_proven:
                self._on_challenge(frame)
            case wire.Accepted(beat_s, lease_s) if self._is_proven and not self._is_linked:
                self._on_accepted(LeaseTerms(beat_s, lease_s))
            case wire.Refused(reason, is_final) if not self._is_linked:
                if is_final:
                    self._refused(reason)
                elif self._link is not None:
                    self._link.close(reason, was_told=True)
            case _:
                raise wire.WireError("the wrong frame for its place")

    def _on_challenge(self, challenge: wire.Challenge) -> None:
        if self._hello is None or self._link is None:
            raise wire.WireError("a challenge without a greeting")
        secret = self._settings.secret
        if not wire.is_same(challenge.proof, wire.prove(secret, "coordinator", self._hello, challenge.nonce)):
            self._refused(WRONG_SECRET)
            return
        self._is_proven = True
        self._asked_at = self._loop.now()
        proof = wire.prove(secret, "agent", self._hello, challenge.nonce)
        self._link.send(wire.encode(wire.Proof(proof)))

    def _on_accepted(self, terms: LeaseTerms) -> None:
        link = self._link
        assert link is not None
        self._timers.pop("greeting").cancel()
        link.trust()
        self._is_linked = True
        self._failures_in_a_row = 0
        self._said_at = self._loop.now() - _SAY_EVERY_S
        self._lease = Lease(terms, self._asked_at)
        self._node.keep("link", link.fileno())
        if not self._has_own_address:
            self._place.addr, self._place.bind_to = self._reachable_at(link)
        self._beat()  # first: its answer comes before everything that follows from our words
        for message in self._node.words(self._info):
            self._say_word(message)
        if self._wants_cancel:
            self._cancel(self._wants_cancel)
        self._guard()

    def _reachable_at(self, link: Link) -> tuple[str, str]:
        """Where the others reach this node, and where to listen for them.

        The address from which we reach the coordinator is one that the others can reach as well. Unless it is a
        loopback one, because this host knows the endpoint's name so: then that name is what the others know it by.
        """
        address = link.local_address
        if is_loopback(address) and not self._endpoint.is_loopback:
            return self._endpoint.host, ""
        return address, address

    def _say_word(self, message: FromNode) -> None:
        if isinstance(message, NodeReady):
            try:
                message = self._place.offer(message)
            except OSError as error:
                self._refused(f"there is no port for the workers' store: {error.strerror or error}")
                return
        if self._link is not None:
            self._link.send(wire.encode(wire.Word(message)))

    def _on_event(self, event: object) -> None:
        match event:
            case GenerationFormed() if not self._holds_lease():
                if self._link is not None:  # we were away for so long that the others may have gone on
                    self._link.close("its answer came too late")
            case GenerationFormed(part):
                self._part = part
                self._place.serve(part)
                self._hold()
                self._emit(event)
            case RunEnded() | JoinRefused():
                self._is_finished = True
                self._is_run_over = isinstance(event, RunEnded)
                self._hold()
                self._emit(event)
            case _:
                self._emit(event)  # type: ignore[arg-type]

    def _on_link_closed(self, why: str, was_told: bool) -> None:
        link, self._link = self._link, None
        if link is not None and self._hello is not None:
            self._loop.unwatch(link)
        self._hello = None
        self._node.release("link")
        for name in ("beat", "greeting"):
            if name in self._timers:
                self._timers.pop(name).cancel()
        was_linked, self._is_linked = self._is_linked, False
        if self._is_finished:
            return
        if was_linked:
            self._lost_since = self._loop.now()
            self._saw_it_die = was_told
            is_in_time = self._lease.ends_at() > self._loop.now()  # else the workers were just killed
            goes_on = "; workers go on, and this node looks for it" if self._part is not None and is_in_time else ""
            self._node.say(f"the coordinator at {self._endpoint} was lost: {why}{goes_on}")
        unreachable = f"the coordinator at {self._endpoint} cannot be reached: {why}"
        if not was_linked and (why.startswith("it sent") or why == _NO_GREETING):
            unreachable = (
                f"what listens at {self._endpoint} does not answer as a coordinator of tenax does; if that is another "
                "program, choose another port"
            )
        if link is not None and link.is_misfit and self._part is None:
            self._refused(f"{unreachable}; check the rendezvous options ssl_cert, ssl_cert_key and ca_cert on both")
            return
        self._try_again(unreachable, 0.0 if was_linked else _SOON_S, self._connect)

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        link = self._link
        if link is None or not self._is_linked:
            return
        if link.all_has_arrived():
            self._lease.all_has_arrived()
            self._hold()
        now = self._loop.now()
        link.send(wire.encode(wire.Beat(self._lease.beat(now), now)))
        self._later("beat", self._lease.terms.beat_s, self._beat)

    def _hold(self) -> None:
        """Tell the keeper how long the workers may live, should this process be stopped."""
        if self._server is not None or self._is_run_over:
            self._node.hold(0)  # if we are stopped, so is the coordinator; or nobody goes on at all
        elif self._part is not None:
            self._node.hold(max(0.001, self._lease.ends_at() - self._loop.now()))

    def _holds_lease(self) -> bool:
        return self._server is not None or self._lease.ends_at() > self._loop.now()

    def _guard(self) -> None:
        """Be there when the lease ends. Who serves needs none: nobody goes on without the coordinator."""
        if self._is_finished or self._server is not None:
            return
        left = self._lease.ends_at() - self._loop.now()
        if left > 0:
            self._later("guard", left, self._guard)
            return
        if self._link is not None and self._link.all_has_arrived():
            self._lease.all_has_arrived()
            if self._lease.ends_at() > self._loop.now():
                self._hold()
                self._guard()
                return
        why = f"nothing was heard of the coordinator at {self._endpoint} for {self._lease.terms.fence_s:.1f} s"
        if self._part is not None:
            self._emit(Fenced(self._part.generation, f"{why}, and the others may go on without this node"))
        if self._link is not None:
            self._link.close(why)

    # --- serving ------------------------------------------------------------------------------------------------------

    def _write_marker(self, state: CoordinatorState) -> None:
        verdict = state.verdict
        if verdict is not None:  # in brief: whoever asks later gets an answer, not a report
            verdict = msgspec.structs.replace(verdict, failures=(), stopped=(), earlier=())
        self._marker.write(Note(state.generation, state.restarts_used, state.store, verdict))

    def _touch_marker(self) -> None:
        if self._loop.now() - self._touched_at > _TOUCH_EVERY_S:
            self._touched_at = self._loop.now()
            self._marker.touch()

    def _on_fewer(self) -> None:
        if self._linger_until is not None:
            self._emit(TimePassed())  # wakes who waits for the others

    def _later(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.at(self._loop.now() + after_s, call)
