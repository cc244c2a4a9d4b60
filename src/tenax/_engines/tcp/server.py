"""The coordinator's server, on sockets: one coordinator, one link per node, and the shell of ``_core/link/server.py``.

It is one watchable in the agent's event loop (its own selector is a descriptor), so a thousand quiet links cost the
agent nothing. What follows from a frame, a closed connection or silence is decided by the machine; here are sockets,
TLS, the limit on descriptors, and operators' requests. Everything that has arrived is read before a node is declared
silent.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket

import msgspec

from tenax._core.link import server as links
from tenax._core.link import wire
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.operator_api import OperatorApi
from tenax._engines.tcp.link import Link, PendingRequests
from tenax._io.interfaces import Watchable, create_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from typing import Any

    from tenax._core.coordinator import Opened, RunSettings, Send
    from tenax._core.lease import LeaseTerms
    from tenax._core.policy import RestartPolicy
    from tenax._core.requests import OfNode
    from tenax._io.interfaces import Cancellable, CreateMachine, EventLoop, RecordRun, Reply

_MAX_LINKS = 65_536
_MAX_READ_ROUNDS = 8  # per tick: the first reads all that has arrived, the others serve new connections
_ACCEPTS_AT_ONCE = 256
_FINAL_FLUSH_S = 1.0  # shared by all links when the server closes
_REQUEST_TIMEOUT_S = 60.0  # longer than any request may wait on a node
_RESERVED_DESCRIPTORS = 32  # not available to links: for starting workers and opening files


class _Connection(msgspec.Struct, eq=False):
    """The link of a peer, as the selector knows it."""

    peer: links.Peer
    link: Link
    descriptor: int  # also after the link has closed it
    interest: int = selectors.EVENT_READ


class CoordinatorServer(Watchable):
    """Watched by the agent's loop. ``on_node_gone`` is called when the link of a node has closed."""

    def __init__(
        self,
        listeners: list[socket.socket],
        settings: RunSettings,
        terms: LeaseTerms,
        secret: bytes,
        loop: EventLoop,
        *,
        policy: RestartPolicy | None = None,
        tls: ssl.SSLContext | None = None,
        record: RecordRun = lambda *_: None,
        on_node_gone: Callable[[], None] = lambda: None,
        hold_back: Callable[[Send], None] | None = None,
        on_deposed: Callable[[wire.Replaced], None] = lambda _: None,
        print_line: Callable[[str], None] = lambda _: None,
        create: CreateMachine = create_machine,
        **of_links: Any,
    ) -> None:
        """Create a server that is not open yet. Without a secret no operator is accepted.

        ``hold_back``: gets each message, and calls ``deliver`` once the decision is stored.
        ``on_deposed``: called when a node reports that another node leads.
        ``print_line``: prints a line on this node's console.
        ``create``: creates the machines, and may record their calls.
        ``of_links``: further settings of the ``LinkServer``.
        """
        self._listeners = listeners
        self._loop = loop
        self._tls = tls
        self._on_node_gone = on_node_gone
        self._on_deposed = on_deposed
        self._print_line = print_line
        self._selector = selectors.DefaultSelector()
        self._connections: dict[links.Peer, _Connection] = {}
        self.coordinator = CoordinatorHost(
            settings, policy, loop, hold_back or self.deliver, record, terms.freeze_s, create
        )
        self.operator_api = OperatorApi(self.coordinator, loop, self._forward)
        self._requests = PendingRequests()
        self._timer: Cancellable | None = None
        self._is_listening = False
        self._max_links = _max_links()
        self.links = create(
            links.LinkServer,
            settings.run_id,
            terms,
            secret,
            lambda: self.coordinator.state,
            loop.now(),
            max_unauthenticated=max(8, min(links.MAX_UNAUTHENTICATED, self._max_links // 2)),
            **of_links,
        )

    def open(self, opened: Opened) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
        self._listen()
        self._loop.watch(self)
        self.coordinator.step(opened)
        self._tick_later()

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._selector.fileno() if self._timer is not None else -1

    def on_readable(self) -> None:
        self._serve()

    def _serve(self) -> bool:
        """Handle everything that is ready now. Return whether there was anything."""
        ready = self._selector.select(0)
        for key, mask in ready:
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
                continue
            connection: _Connection = key.data
            if mask & selectors.EVENT_WRITE:
                connection.link.on_writable()
            if mask & selectors.EVENT_READ and not connection.link.is_closed:
                connection.link.on_readable()
            self._update_interest(connection)
        return bool(ready)

    def _update_interest(self, connection: _Connection) -> None:
        link = connection.link
        if link.is_closed:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_to_write else 0)
        if wanted != connection.interest:
            connection.interest = wanted
            self._selector.modify(link.fileno(), wanted, connection)

    # --- connections --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, None)

    def _stop_listening(self) -> None:
        """Stop accepting: new connections wait in the listen backlog until there is room."""
        if self._is_listening:
            self._is_listening = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._connections) >= self._max_links:
                self._stop_listening()
                return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._stop_listening()
                return  # any other error concerns only this connection, which is gone
            self._add_peer(sock, str(address[0]))

    def _add_peer(self, sock: socket.socket, address: str) -> None:
        peer = links.Peer(self._loop.now(), os.urandom(wire.NONCE_BYTES), address)

        def on_body(body: bytes) -> None:
            self._do(self.links.received(peer, wire.decode_from_agent(body), self._loop.now()))

        def on_closed(why: str, by_peer: bool) -> None:  # noqa: ARG001 - a closed link is a lost node either way
            self._do(self.links.closed(peer, why, was_finished=connection.link.was_finished))

        descriptor = sock.fileno()
        connection = _Connection(peer, Link(sock, on_body, on_closed, self._tls, is_server=True), descriptor)
        self._connections[peer] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._do(self.links.opened(peer))

    def _do(self, outputs: list[links.Output]) -> None:
        for output in outputs:
            match output:
                case links.SendFrame(peers, frame):
                    data = wire.encode(frame)
                    for peer in peers:
                        self._send(peer, data)
                case links.Trust(peer):
                    self._connections[peer].link.trust()
                case links.Close(peer, is_reset):
                    self._close(peer, is_reset=is_reset)
                case links.Step(event):
                    self.coordinator.step(event)
                case links.Forward(peer, frame):
                    self._on_request(peer, frame)
                case links.Deposed(frame):
                    self._on_deposed(frame)
                case links.Unlinked(node_id):
                    why = "lost the link to that node before it answered"
                    self._requests.fail(why, lambda each, _, gone=node_id: each == gone)  # type: ignore[misc]
                    self._on_node_gone()
                case links.Print(text):
                    self._print_line(text)

    def _send(self, peer: links.Peer, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.link.send(data)
            self._update_interest(connection)

    def _close(self, peer: links.Peer, *, is_reset: bool) -> None:
        connection = self._connections.pop(peer)
        self._selector.unregister(connection.descriptor)
        if is_reset:
            connection.link.reset()
        else:
            connection.link.close()
        self._listen()

    def deliver(self, send: Send) -> None:
        self._do(self.links.deliver(send))

    # --- operators ----------------------------------------------------------------------------------------------------

    def _on_request(self, peer: links.Peer, frame: wire.Ask | wire.Answer) -> None:
        if isinstance(frame, wire.Ask):
            number = frame.number
            self.operator_api.submit(frame.request, lambda value, error: self._answer(peer, number, value, error))
        else:
            self._requests.answered(frame, peer.node_id)

    def _answer(self, peer: links.Peer, number: int, value: object, error: str) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.link.answer(number, value, error)
            self._update_interest(connection)

    def _forward(self, node_id: str, request: OfNode, reply: Reply) -> None:
        peer = self.links.nodes.get(node_id)
        if peer is None:
            reply(None, "that node is not connected")
        else:
            self._requests.send(request, reply, lambda data: self._send(peer, data), node_id, self._loop.now())

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick_later(self) -> None:
        self._timer = self._loop.at(self.links.next_deadline(), self._on_tick)

    def _on_tick(self) -> None:
        for _ in range(_MAX_READ_ROUNDS):  # bounded: unauthenticated peers may send without end
            if not self._serve():
                break
        now = self._loop.now()
        self._do(self.links.tick(now))
        self._requests.fail("that node did not answer in time", lambda _, at: now - at > _REQUEST_TIMEOUT_S)
        if len(self._connections) < self._max_links:
            self._listen()
        self._tick_later()

    def close(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._loop.unwatch(self)
        self.coordinator.close()
        for listener in self._listeners:
            listener.close()
        self._requests.fail("the coordinator stopped before that node answered")
        self.operator_api.close()
        until = self._loop.now() + _FINAL_FLUSH_S
        for peer in sorted(self._connections, key=lambda peer: not peer.node_id):  # nodes first
            link = self._connections[peer].link
            link.flush(until - self._loop.now())
            link.close()
        self._selector.close()


def _max_links() -> int:
    """Return how many links fit into the descriptor limit. Raises the soft limit, which workers do not inherit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_LINKS
    wanted = _MAX_LINKS if hard == resource.RLIM_INFINITY else min(hard, _MAX_LINKS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(_MAX_LINKS, soft - len(os.listdir("/dev/fd")) - _RESERVED_DESCRIPTORS))
