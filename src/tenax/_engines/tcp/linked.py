"""A node's link to the coordinator: handshake, heartbeats, lease and requests. The base of the tcp and etcd engines.

    find -> connect -> handshake -> linked -> lost -> find ...

An engine defines how the coordinator is found and what its loss means. Invariants:

- Every new link starts with the node's complete state, taken from the agent. Nothing is queued between links.
- A coordinator that is *silent* may have declared this node lost: the workers are killed when the lease ends
  (``_core/lease.py``), even if this process is stopped (``hold``).
- After ``join_timeout`` without a coordinator, the node gives up with a reason.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import msgspec

from tenax._core.bounds import MAX_NAME
from tenax._core.coordinator import RunSettings
from tenax._core.events import Fenced, GenerationFormed, JoinRefused, RunEnded, Tick
from tenax._core.lease import Lease, LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import MAX_HOST_ADDRESSES, NodeInfo, NodeReady
from tenax._core.requests import OfNode, answer_safely
from tenax._core.text import concealed_repr, one_line
from tenax._engines.store_address import StoreAddress
from tenax._engines.tcp.link import INVALID_FRAME, Link
from tenax._io.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from tenax._core.messages import FromNode
    from tenax._core.model import Assignment
    from tenax._core.requests import AnyRequest
    from tenax._engines.tcp.server import CoordinatorServer
    from tenax._io.interfaces import Cancellable, ControlledNode, Emit, EventLoop, Reply

_HANDSHAKE_TIMEOUT_S = 5.0
RETRY_SOON_S, RETRY_LATER_S = 0.1, 1.0
_REPORT_EVERY_S = 10.0
_NO_HANDSHAKE = "no answer to the handshake"
_MAX_PENDING_REQUESTS = 1024  # that the coordinator has not answered
_LINGER_S = 5.0  # after the end of the run: time for the other nodes to receive the verdict


class LinkedSettings(msgspec.Struct, frozen=True):
    """Settings of an engine. The same on every node, except those that identify the node."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    secret: bytes = b""
    tls: TlsFiles | None = None  # for the links
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
    store_allow: tuple[str, ...] = ()

    __repr__ = concealed_repr


class LinkedEngine(ABC):
    """Implements ``interfaces.Control``."""

    def __init__(self, settings: LinkedSettings, master_addr: str = "", master_port: int = 0) -> None:
        self._settings = settings
        self._store_address = StoreAddress(
            master_addr or settings.local_addr,
            master_port or settings.store_port,
            in_agent=settings.use_agent_store,
            allow=settings.store_allow,
        )
        self._has_own_address = bool(master_addr or settings.local_addr)
        self._loop: EventLoop
        self._emit: Emit
        self._node: ControlledNode
        self._info: NodeInfo
        self._server: CoordinatorServer | None = None
        self._link: Link | None = None
        self._hello: wire.Hello | None = None
        self._nonce = b""  # from the coordinator's challenge; empty: not received yet
        self._is_linked = False  # the handshake is done
        self._is_run_over = False
        self._cancel_reason = ""  # why the run is to be cancelled; empty: it is not
        self._lease: Lease
        self._assignment: Assignment | None = None  # in the last generation of this node
        self._has_offered = False  # NodeReady was sent since the last generation
        self._saw_coordinator_die = False
        self._attempted_at = 0.0  # when the last connection attempt began, or the proof was sent
        self._last_answer = 0  # the number of the last beat that was answered on this link
        self._lost_since = 0.0
        self._reported_at = -_REPORT_EVERY_S
        self._failures_in_a_row = 0
        self._is_finished = False
        self._linger_until: float | None = None
        self._timers: dict[str, Cancellable] = {}
        self._pending: dict[int, Reply] = {}  # operators' requests on this node, by number
        self._request_count = 0

    # --- defined by each engine ---------------------------------------------------------------------------------------

    @abstractmethod
    def _find_coordinator(self) -> None:
        """Find the coordinator and connect to it, or host it."""

    @abstractmethod
    def _reconnect(self, why: str, *, was_linked: bool) -> None:
        """Handle a link that was lost, or a connection attempt that failed."""

    @abstractmethod
    def _stays_while_others_run(self) -> bool:
        """Return whether this node, which has left the run, must stay because it hosts the others' coordinator."""

    @property
    @abstractmethod
    def _location(self) -> str:
        """The coordinator's address or host, for messages: "at HOST:PORT", "on HOST", or empty if unknown."""

    @property
    def _where(self) -> str:
        return f"the coordinator {self._location}".rstrip()

    @property
    def _what_to_check(self) -> str:
        return "start the node that serves it, and check the address and the network"

    @property
    def _secret(self) -> bytes:
        return self._settings.secret

    @property
    def _why_rejected(self) -> str:
        """Possible causes and the remedy. The coordinator does not reveal the cause to an unauthenticated peer."""
        return (
            "it serves another run or has another secret; give every node the same --rdzv-id and the same secret "
            "(--rdzv-conf token_file=FILE or the variable TENAX_RDZV_TOKEN)"
        )

    @property
    def _host_for_tls(self) -> str:
        """The host name that the coordinator's certificate must contain."""
        return ""

    @property
    def _trusts_acknowledgements(self) -> bool:
        """Whether TCP acknowledgements renew the lease: a coordinator whose host takes our bytes is only busy."""
        return True

    @property
    def _is_refusal_final(self) -> bool:
        """Whether a rejection ends the attempt to join: it surely came from the coordinator."""
        return True

    @property
    def _is_sole_host(self) -> bool:
        """Whether the coordinator is in this process and cannot move: no generation forms without this node."""
        return False

    def _link_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for the next link. Raises ValueError if the files cannot be used."""
        tls = self._settings.tls
        return tls.for_client() if tls is not None else None

    # --- interfaces.Control -------------------------------------------------------------------------------------------

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        settings, agent = self._settings, node.settings
        self._loop, self._emit, self._node = loop, emit, node
        self._info = NodeInfo(
            node_id=os.urandom(16).hex(),
            host=one_line(os.uname().nodename)[:MAX_NAME],
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
        self._store_address.open(loop, node.print_line)
        try:  # check the user's settings here: the coordinator would close the connection without a reason
            msgspec.convert(msgspec.to_builtins(self._info), NodeInfo)
        except msgspec.ValidationError as error:
            self._refused(f"invalid node settings: {error}")
            return
        self._find_coordinator()

    def send(self, message: FromNode) -> None:
        if self._is_linked:
            self._send_message(message)

    def cancel(self, why: str) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None:  # otherwise it was never opened
            loop.soon(lambda: self._cancel(why))

    def _cancel(self, why: str) -> None:
        """Send the request now, or when the next link is established."""
        self._cancel_reason = why
        if self._is_linked and self._link is not None:
            self._link.send(wire.encode(wire.Cancel(why)))

    # --- operators ----------------------------------------------------------------------------------------------------

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        """Answer here if this process hosts the coordinator, else forward it over this node's authenticated link."""
        if self._server is not None:
            self._server.operator_api.submit(request, reply)
        elif self._link is None or not self._is_linked:
            reply(None, f"this node is not connected to {self._where}; try again")
        elif len(self._pending) >= _MAX_PENDING_REQUESTS:
            reply(None, "too many pending requests on this node")
        else:
            try:
                data = wire.encode_ask(self._request_count + 1, request)
            except wire.WireError as error:
                reply(None, f"invalid request: {error}")
                return
            self._request_count += 1
            self._pending[self._request_count] = reply
            self._link.send(data)

    def _fail_requests(self, why: str) -> None:
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply(None, why)

    def _on_request(self, number: int, request: AnyRequest) -> None:
        link = self._link

        def reply(value: object, error: str) -> None:
            if link is None or link is not self._link:
                return
            if link.unsent_bytes > wire.MAX_UNSENT_ANSWER_BYTES:
                value, error = None, wire.TOO_MANY_ANSWERS
            link.send(wire.encode_answer(number, value, error))

        if isinstance(request, OfNode):
            answer_safely(self._node.answer, request, reply)
        else:
            reply(None, "a node cannot answer this request; send it to the coordinator")

    @property
    def where(self) -> str:
        return self._where

    def stays_for_others(self) -> bool:
        server = self._server
        if server is None or not server.others(self._info.node_id):
            return False
        if not server.is_over:
            return self._stays_while_others_run()
        if not self._linger_until:
            self._linger_until = self._loop.now() + _LINGER_S
            self._set_timer("linger", _LINGER_S, lambda: self._emit(Tick()))
        return self._loop.now() < self._linger_until

    def close(self) -> None:
        self._is_finished = True
        for timer in self._timers.values():
            timer.cancel()
        if self._link is not None:
            link, self._link = self._link, None
            self._loop.unwatch(link)
            link.finish(1.0)
        self._fail_requests("this node has left the run")
        if self._server is not None:
            self._node.set_operator_api(None)
            self._server.close()
        self._store_address.close()

    def _on_node_gone(self) -> None:
        if self._linger_until is not None:
            self._emit(Tick())  # makes the supervisor call stays_for_others() again

    def _run_settings(self) -> RunSettings:
        settings = self._settings
        return RunSettings(
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            self._node.settings.max_restarts,
            join_timeout_s=settings.join_timeout_s,
            last_call_s=settings.last_call_s,
            scale_up=settings.scale_up,
            serving_node=self._info.node_id,
            on_hang=self._node.settings.on_hang,
            hang_after_s=self._node.settings.hang_after_s,
        )

    def _backoff_s(self) -> float:
        """Return the delay before the next attempt: short for a member, exponential for a new node; with jitter."""
        delay_s = RETRY_SOON_S
        if self._assignment is None:
            delay_s = min(RETRY_LATER_S, RETRY_SOON_S * 2 ** min(self._failures_in_a_row, 8))
        self._failures_in_a_row += 1
        return delay_s * (1 + int.from_bytes(os.urandom(2), "big") / 32768)

    def _retry(self, why: str, after_s: float, call: Callable[[], None]) -> None:
        if self._may_retry(why):
            self._set_timer("again", after_s, call)

    def _may_retry(self, why: str) -> bool:
        if self._is_finished:
            return False
        now = self._loop.now()
        waited = now - self._lost_since
        if waited > self._settings.join_timeout_s:
            self._refused(
                f"{why}; gave up after {waited:.0f} s; {self._what_to_check}, or allow more time with --rdzv-conf "
                "join_timeout=SECONDS"
            )
            return False
        if now - self._reported_at >= _REPORT_EVERY_S and waited > 0.5:
            self._reported_at = now
            left = self._settings.join_timeout_s - waited
            self._node.print_line(f"{why}; retrying for up to {left:.0f} s")
        return True

    def _refused(self, reason: str) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._emit(JoinRefused(reason))

    # --- the link -----------------------------------------------------------------------------------------------------

    def _start_handshake(self, sock: socket.socket) -> None:
        try:
            tls = self._link_tls()
        except ValueError as error:  # a TLS file was replaced by an unusable one
            sock.close()
            self._reconnect(str(error), was_linked=False)
            return
        link = Link(
            sock,
            self._on_body,
            self._on_link_closed,
            tls,
            server_hostname=self._host_for_tls if tls is not None else None,
            resets=True,  # an orderly close (FIN) means that nothing this agent started is alive
        )
        if link.is_closed:  # reset by the peer before the TLS handshake: _on_link_closed was called
            return
        self._link = link
        self._loop.watch(link)
        self._nonce = b""
        self._hello = wire.Hello(wire.VERSION, self._settings.run_id, self._info.node_id, os.urandom(wire.NONCE_BYTES))
        link.send(wire.encode(self._hello))
        self._set_timer("handshake", _HANDSHAKE_TIMEOUT_S, lambda: link.close(_NO_HANDSHAKE))

    def _on_body(self, body: bytes) -> None:
        """Accept each frame only in its state: nothing is trusted before the coordinator has proved the secret."""
        frame = wire.decode_from_server(body)
        match frame:
            case wire.Event(event) if self._is_linked:
                self._on_event(event)
            case wire.Answer(number, value, error) if self._is_linked:
                if number in self._pending:
                    self._pending.pop(number)(value, error)
            case wire.Ask(number, request) if self._is_linked:
                self._on_request(number, request)
            case wire.BeatAnswer(number, counts) if self._is_linked:
                self._last_answer = max(self._last_answer, number)
                if counts:
                    self._lease.answered(number)
                    self._hold()
            case wire.Challenge(nonce) if not self._nonce and len(nonce) == wire.NONCE_BYTES:
                self._on_challenge(nonce)
            case wire.Accepted(proof, beat_s, lease_s, counts) if self._nonce and not self._is_linked:
                if self._is_proved_by(proof):
                    self._on_accepted(LeaseTerms(beat_s, lease_s), counts=counts)
            case wire.Refused() if not self._is_linked:
                self._on_refused(frame)
            case _:
                raise wire.WireError("unexpected frame")

    def _on_challenge(self, nonce: bytes) -> None:
        if self._hello is None or self._link is None:
            raise wire.WireError("challenge before hello")
        self._nonce = nonce
        self._attempted_at = self._loop.now()
        self._link.send(wire.encode(wire.Proof(wire.prove(self._secret, "agent", self._hello, nonce))))

    def _is_proved_by(self, proof: bytes) -> bool:
        """Return whether the proof is valid. If not, reject the coordinator."""
        if self._hello is None:
            raise wire.WireError("acceptance before hello")
        if wire.is_same(proof, wire.prove(self._secret, "coordinator", self._hello, self._nonce)):
            return True
        self._reject(
            f"{self._where} does not know the secret of the run; check which process listens there",
            is_final=True,
        )
        return False

    def _on_refused(self, refused: wire.Refused) -> None:
        if refused.version != wire.VERSION:
            why = (
                f"{self._where} rejected this node: its protocol version is {refused.version}, this node's is "
                f"{wire.VERSION}; use the same tenax version on every node"
            )
        else:
            why = f"{self._where} rejected this node: {self._why_rejected}"
        self._reject(why, is_final=refused.is_final)

    def _reject(self, why: str, *, is_final: bool) -> None:
        if is_final and self._is_refusal_final:
            self._refused(why)
        elif self._link is not None:
            self._link.close(why, by_peer=True)

    def _on_accepted(self, terms: LeaseTerms, *, counts: bool) -> None:
        link = self._link
        assert link is not None
        self._timers.pop("handshake").cancel()
        link.trust()
        self._is_linked = True
        self._failures_in_a_row = 0
        self._reported_at = self._loop.now() - _REPORT_EVERY_S
        self._lease = Lease(terms, self._attempted_at if counts else self._lease.proven_at)
        self._last_answer = 0
        self._node.keep("link", link.fileno())
        if not self._has_own_address:
            self._store_address.addr, self._store_address.bind_to = self._reachable_at(link)
        self._beat()  # first, so that its answer arrives before any reaction to the messages below
        for message in self._node.messages_on_connecting(self._info):
            self._send_message(message)
        if self._cancel_reason:
            self._cancel(self._cancel_reason)
        self._check_lease()

    def _reachable_at(self, link: Link) -> tuple[str, str]:
        """Return the address that other nodes use to reach this node, and the address to listen on.

        The default is the local address of the link to the coordinator.
        """
        return link.local_address, link.local_address

    def _send_message(self, message: FromNode) -> None:
        if isinstance(message, NodeReady):
            try:
                message = self._store_address.offer(message, self._own_addresses())
                self._has_offered = True
            except OSError as error:
                self._refused(self._store_address.why_not(error))
                return
        if self._link is not None:
            self._link.send(wire.encode(wire.Message(message)))

    def _own_addresses(self) -> tuple[str, ...]:
        """Return this host's addresses. The link's local address comes first: other hosts most likely see that one."""
        from tenax._io.host_addresses import host_addresses

        return host_addresses(self._link.local_address if self._link is not None else "", MAX_HOST_ADDRESSES)

    def _on_event(self, event: object) -> None:
        match event:
            case GenerationFormed() if not self._holds_lease() or not self._is_answered():
                if self._link is not None:  # too old: the others may have formed a later generation
                    self._link.close("its message arrived too late")
            case GenerationFormed(part) if part == self._assignment:
                pass  # sent again by a coordinator that did not know whether it had arrived
            case GenerationFormed() if not self._has_offered:
                raise wire.WireError("generation formed although this node was not ready")
            case GenerationFormed(part):
                self._has_offered = False
                self._assignment = part
                self._store_address.serve(part)
                self._hold()
                self._emit(event)
            case RunEnded() | JoinRefused():
                self._is_finished = True
                self._is_run_over = isinstance(event, RunEnded)
                self._hold()
                self._emit(event)
            case _:
                self._emit(event)  # type: ignore[arg-type]

    def _on_link_closed(self, why: str, by_peer: bool) -> None:
        link, self._link = self._link, None
        if link is not None and self._hello is not None:
            self._loop.unwatch(link)
        self._hello = None
        self._node.release("link")
        self._fail_requests(f"lost the link to {self._where} before it answered")
        for name in ("beat", "handshake"):
            if name in self._timers:
                self._timers.pop(name).cancel()
        was_linked, self._is_linked = self._is_linked, False
        if self._is_finished:
            return
        if was_linked:
            self._lost_since = self._loop.now()
            self._saw_coordinator_die = by_peer
            is_in_time = self._lease.ends_at() > self._loop.now()  # else the workers have just been killed
            has_workers = self._assignment is not None and is_in_time
            goes_on = "; workers keep running while this node reconnects" if has_workers else ""
            self._node.print_line(f"lost {self._where}: {why}{goes_on}")
        unreachable = f"cannot reach {self._where}: {why}"
        if not was_linked and (why.startswith(INVALID_FRAME) or why == _NO_HANDSHAKE):
            unreachable = (
                f"the process listening {self._location} is not a tenax coordinator; if another program uses that "
                "port, choose another"
            )
        if link is not None and link.is_tls_mismatch and self._assignment is None and self._is_refusal_final:
            self._refused(f"{unreachable}; check the rendezvous options ssl_cert, ssl_cert_key and ca_cert on both")
            return
        self._reconnect(unreachable, was_linked=was_linked)

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        link = self._link
        if link is None or not self._is_linked:
            return
        if self._trusts_acknowledgements and link.all_has_arrived():
            self._lease.all_has_arrived()
            self._hold()
        now = self._loop.now()
        link.send(wire.encode(wire.Beat(self._lease.beat(now), now, self._last_answer)))
        self._set_timer("beat", self._lease.terms.beat_s, self._beat)

    def _hold(self) -> None:
        """Renew the keeper's deadline for killing the workers if this process is stopped; 0 means no deadline."""
        if self._is_sole_host or self._is_run_over:
            self._node.hold(0)  # the coordinator stops with this process, or the run is over
        elif self._assignment is not None:
            self._node.hold(max(0.001, self._lease.ends_at() - self._loop.now()))

    def _holds_lease(self) -> bool:
        return self._is_sole_host or self._lease.ends_at() > self._loop.now()

    def _is_answered(self) -> bool:
        """Return whether a message received now is recent. It may have been delayed on the way or before the read."""
        return self._is_sole_host or self._lease.is_answered(self._loop.now())

    def _check_lease(self) -> None:
        """Set a timer for the end of the lease, and fence this node when it has ended. The sole host needs no lease."""
        if self._is_finished or self._is_sole_host:
            return
        left = self._lease.ends_at() - self._loop.now()
        if left > 0:
            self._set_timer("guard", left, self._check_lease)
            return
        link = self._link if self._is_linked else None  # in a handshake, acknowledged bytes are not beats
        if link is not None and self._trusts_acknowledgements and link.all_has_arrived():
            self._lease.all_has_arrived()
            if self._lease.ends_at() > self._loop.now():
                self._hold()
                self._check_lease()
                return
        silent_s = self._lease.terms.fence_s
        if self._assignment is not None:
            why = f"no answer from {self._where} for {silent_s:.1f} s; the other nodes may continue without this node"
            self._emit(Fenced(self._assignment.generation, why))
        if self._link is not None:
            self._link.close(f"no answer for {silent_s:.1f} s")

    def _set_timer(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.at(self._loop.now() + after_s, call)
