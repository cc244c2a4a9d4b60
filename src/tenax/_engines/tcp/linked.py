"""A node's links to the coordinator, on sockets: the shell of ``_core/link/client.py``, and the base of two engines.

    find -> connect -> handshake -> linked -> lost -> find ...

An engine defines how the coordinator is found and what its loss means. What follows from a frame, a deadline or a
closed connection is decided by the machine; here are sockets, TLS, timers, the store's address and operators' requests.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import msgspec

from tenax._core.bounds import MAX_NAME
from tenax._core.coordinator import RunSettings
from tenax._core.events import GenerationFormed, Tick
from tenax._core.lease import LeaseTerms
from tenax._core.link import client, wire
from tenax._core.messages import MAX_HOST_ADDRESSES, NodeInfo, NodeReady
from tenax._core.requests import OfNode, answer_safely
from tenax._core.text import concealed_repr, one_line
from tenax._engines.store_address import StoreAddress
from tenax._engines.tcp.link import Link, PendingRequests
from tenax._engines.tcp.server import CoordinatorServer
from tenax._io.loop import NO_TIMER, DeadlineTimer
from tenax._io.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable
    from typing import Any

    from tenax._core.messages import FromNode
    from tenax._core.requests import AnyRequest
    from tenax._engines.etcd.leader_address import LeaderProbe
    from tenax._io.connect import ConnectAttempt
    from tenax._io.endpoint import Lookup
    from tenax._io.interfaces import Cancellable, ControlledNode, Emit, EventLoop, RecordRun, Reply

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

    _rejection_causes = "it serves another run or has another secret"  # the coordinator does not reveal the cause
    _is_elected = False  # whether a coordinator that is stopped may have a successor
    _location = ""  # of the coordinator when the engine opens: "at HOST:PORT", or unknown

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
        self._machine: client.LinkClient
        self._link: Link | None = None
        self._linger_until: float | None = None
        self._timers: dict[str, Cancellable] = {}
        self._attempts: dict[str, Lookup | ConnectAttempt | LeaderProbe] = {}  # that have begun
        self._deadline: DeadlineTimer  # of the machine
        self._requests = PendingRequests()

    # --- defined by each engine ---------------------------------------------------------------------------------------

    @abstractmethod
    def _find_coordinator(self) -> None:
        """Find the coordinator and connect to it, or host it."""

    @abstractmethod
    def _reconnect(self, why: str, *, retry_s: float) -> None:
        """Handle a link that was lost, or a connection attempt that failed."""

    @abstractmethod
    def _stays_while_others_run(self) -> bool:
        """Return whether this node, which has left the run, must stay because it hosts the others' coordinator."""

    @property
    def _what_to_check(self) -> str:
        return "start the node that serves it, and check the address and the network"

    @property
    def _secret(self) -> bytes:
        return self._settings.secret

    @abstractmethod
    def _link_tls(self) -> tuple[ssl.SSLContext | None, str]:
        """Return the TLS context for the next link, and the host name that the coordinator's certificate must contain.

        Raises ValueError if the files cannot be used.
        """

    # --- interfaces.Control -------------------------------------------------------------------------------------------

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        settings, agent = self._settings, node.settings
        self._loop, self._emit, self._node = loop, emit, node
        self._deadline = DeadlineTimer(loop, self._on_deadline)
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
            grace_s=agent.grace_s,
        )
        self._machine = node.create(
            client.LinkClient,
            self._info,
            settings.run_id,
            settings.terms,
            loop.now(),
            join_timeout_s=settings.join_timeout_s,
            location=self._location,
            why_rejected=(
                f"{self._rejection_causes}; give every node the same --rdzv-id and the same secret (--rdzv-conf "
                "token_file=FILE or the variable TENAX_RDZV_TOKEN)"
            ),
            is_elected=self._is_elected,
        )
        self._store_address.open(loop, node.print_line)
        try:  # check the user's settings here: the coordinator would close the connection without a reason
            msgspec.convert(msgspec.to_builtins(self._info), NodeInfo)
        except msgspec.ValidationError as error:
            self._refused(f"invalid node settings: {error}")
            return
        self._find_coordinator()

    def send(self, message: FromNode) -> None:
        offered = self._with_offer(message) if self._machine.is_linked else message
        if offered is not None:
            self._do(self._machine.send(offered))

    def cancel(self, why: str) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None:  # otherwise it was never opened
            loop.soon(lambda: self._do(self._machine.cancel(why)))

    # --- operators ----------------------------------------------------------------------------------------------------

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        """Answer here if this process hosts the coordinator, else forward it over this node's authenticated link."""
        if self._server is not None:
            self._server.operator_api.submit(request, reply)
        elif self._link is None or not self._machine.is_linked:
            reply(None, f"this node is not connected to {self._machine.where}; try again")
        else:
            self._requests.send(request, reply, self._link.send)

    def _on_request(self, number: int, request: AnyRequest) -> None:
        link = self._link

        def reply(value: object, error: str) -> None:
            if link is not None and link is self._link:
                link.answer(number, value, error)

        if isinstance(request, OfNode):
            answer_safely(self._node.answer, request, reply)
        else:
            reply(None, "a node cannot answer this request; send it to the coordinator")

    @property
    def where(self) -> str:
        return self._machine.where

    def stays_for_others(self) -> bool:
        server = self._server
        if server is None or not server.links.others(self._info.node_id):
            return False
        if not server.links.is_over:
            return self._stays_while_others_run()
        if not self._linger_until:
            self._linger_until = self._loop.now() + _LINGER_S
            self._set_timer("linger", _LINGER_S, lambda: self._emit(Tick()))
        return self._loop.now() < self._linger_until

    def close(self) -> None:
        self._machine.is_finished = True
        self._deadline.cancel()
        for timer in self._timers.values():
            timer.cancel()
        for attempt in self._attempts.values():
            attempt.close()
        if self._link is not None:
            link, self._link = self._link, None
            self._loop.unwatch(link)
            link.finish(1.0)
        self._requests.fail("this node has left the run")
        if self._server is not None:
            self._node.set_operator_api(None)
            self._server.close()
        self._store_address.close()

    def _on_node_gone(self) -> None:
        if self._linger_until is not None:
            self._emit(Tick())  # makes the supervisor call stays_for_others() again

    def _create_server(
        self,
        listeners: list[socket.socket],
        tls: ssl.SSLContext | None,
        after_step: RecordRun = lambda *_: None,
        **options: Any,
    ) -> CoordinatorServer:
        """Create the server of a coordinator in this process. ``after_step`` is called once a step is recorded."""
        settings, node = self._settings, self._node
        run = RunSettings(
            settings.run_id,
            settings.min_nodes,
            settings.max_nodes,
            node.settings.max_restarts,
            join_timeout_s=settings.join_timeout_s,
            last_call_s=settings.last_call_s,
            scale_up=settings.scale_up,
            serving_node=self._info.node_id,
            on_hang=node.settings.on_hang,
            hang_after_s=node.settings.hang_after_s,
        )
        record_run = node.record_run(run)

        def record(*step: Any) -> None:
            record_run(*step)
            after_step(*step)

        return CoordinatorServer(
            listeners,
            run,
            settings.terms,
            self._secret,
            self._loop,
            policy=node.policy,
            tls=tls,
            record=record,
            on_node_gone=self._on_node_gone,
            create=node.create,
            **options,
        )

    @staticmethod
    def _jitter() -> float:
        return int.from_bytes(os.urandom(2), "big") / 65536

    def _retry(self, why: str, after_s: float, call: Callable[[], None]) -> None:
        self._do(self._machine.retry(why, self._what_to_check, self._loop.now()))
        if not self._machine.is_finished:
            self._set_timer("again", after_s, call)

    def _refused(self, reason: str) -> None:
        self._do(self._machine.refuse(reason))

    # --- the link -----------------------------------------------------------------------------------------------------

    def _start_handshake(self, sock: socket.socket) -> None:
        try:
            tls, host = self._link_tls()
        except ValueError as error:  # a TLS file was replaced by an unusable one
            sock.close()
            self._reconnect(str(error), retry_s=client.RETRY_SOON_S)
            return
        link = Link(
            sock,
            lambda body: self._do(self._machine.received(wire.decode_from_server(body), self._loop.now())),
            self._on_link_closed,
            tls,
            server_hostname=host,
            resets=True,  # an orderly close (FIN) means that nothing this agent started is alive
        )
        if link.is_closed:  # reset by the peer before the TLS handshake: _on_link_closed was called
            return
        self._link = link
        self._loop.watch(link)
        self._do(self._machine.opened(os.urandom(wire.NONCE_BYTES), self._secret, self._loop.now()))

    def _on_link_closed(self, why: str, by_peer: bool) -> None:
        is_mismatch = self._link is not None and self._link.is_tls_mismatch
        self._forget_link()
        self._do(self._machine.closed(why, self._loop.now(), by_peer=by_peer, is_mismatch=is_mismatch))

    def _forget_link(self, *, is_finished: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._loop.unwatch(link)
            if is_finished:
                link.finish(0.0)
            link.close()
        self._node.release("link")
        self._requests.fail(f"lost the link to {self._machine.where} before it answered")

    def _do(self, outputs: list[client.Output]) -> None:
        for output in outputs:
            match output:
                case client.SendFrame(frame):
                    if self._link is not None:
                        self._link.send(wire.encode(frame))
                case client.Close(is_finished):
                    self._forget_link(is_finished=is_finished)
                case client.Linked():
                    self._on_linked()
                case client.Lost(reason, retry_s):
                    self._reconnect(reason, retry_s=retry_s)
                case client.Emit(event):
                    if isinstance(event, GenerationFormed):
                        self._store_address.serve(event.assignment)
                    self._emit(event)
                case client.Forward(wire.Ask(number, request)):
                    self._on_request(number, request)
                case client.Forward(wire.Answer() as answer):
                    self._requests.answered(answer)
                case client.Hold(seconds):
                    self._node.hold(seconds)
                case client.Print(text):
                    self._node.print_line(text)
        self._deadline.set(self._machine.next_deadline())

    def _on_deadline(self, _: float) -> None:
        has_all_arrived = self._link is not None and not self._is_elected and self._link.all_has_arrived()
        self._do(self._machine.tick(self._loop.now(), has_all_arrived=has_all_arrived))

    def _on_linked(self) -> None:
        link = self._link
        assert link is not None
        link.trust()
        self._node.keep("link", link.fileno())
        if not self._has_own_address:
            self._store_address.addr, self._store_address.bind_to = self._reachable_at(link)
        messages = map(self._with_offer, self._node.messages_on_connecting(self._info))
        self._do(self._machine.announce([each for each in messages if each is not None], self._loop.now()))

    def _reachable_at(self, link: Link) -> tuple[str, str]:
        """Return the address that other nodes use to reach this node, and the address to listen on.

        The default is the local address of the link to the coordinator.
        """
        return link.local_address, link.local_address

    def _with_offer(self, message: FromNode) -> FromNode | None:
        """Add the address of the store that this node offers, if it is ready; None if it cannot offer one."""
        if not isinstance(message, NodeReady):
            return message
        from tenax._io.host_addresses import host_addresses

        # The link's local address comes first: other hosts most likely see that one.
        first = self._link.local_address if self._link is not None else ""
        try:
            return self._store_address.offer(message, host_addresses(first, MAX_HOST_ADDRESSES))
        except OSError as error:
            self._refused(self._store_address.why_not(error))
            return None

    def _set_timer(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        self._timers.get(name, NO_TIMER).cancel()
        self._timers[name] = self._loop.at(self._loop.now() + after_s, call)

    def _begin(self, name: str, attempt: Lookup | ConnectAttempt | LeaderProbe) -> None:
        """Start an attempt, which ends with the engine."""
        self._attempts[name] = attempt
        attempt.start()
