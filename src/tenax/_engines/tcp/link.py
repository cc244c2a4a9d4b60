"""One connection that carries frames. It never blocks, bounds what it buffers, and reports once how it ended."""

from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import suppress

import msgspec

from tenax._core.link import wire
from tenax._io.tls import RECORDS, REFUSAL, StreamSocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from tenax._core.requests import AnyRequest
    from tenax._io.interfaces import Reply
    from tenax._io.tls import TlsFailure

_MAX_UNSENT_BYTES = 16 << 20  # per peer
_MAX_PENDING_REQUESTS = 1024
_SIOCOUTQ = 0x5411  # Linux: bytes that the other host has not acknowledged
# Linux: retransmit at least every second (TCP_RTO_MAX_MS), or on older kernels without backoff at first
# (TCP_THIN_LINEAR_TIMEOUTS). With exponential backoff a network outage of 3 s would last 6 s.
_RETRANSMIT_OPTIONS = ((44, 1000), (16, 1))


class Link(StreamSocket, eq=False):
    """``on_body`` gets each frame's bytes. ``on_closed`` gets the reason and whether the peer closed it, once."""

    _sock: socket.socket
    _on_body: Callable[[bytes], None]
    _on_closed: Callable[[str, bool], None]
    tls: ssl.SSLContext | None = None
    server_hostname: str | None = None
    is_server: bool = False
    resets: bool = False  # ``close`` sends a reset, from which the peer concludes nothing; ``finish`` sends a FIN
    was_finished: bool = False  # the peer has closed it in good order (FIN)
    is_tls_mismatch: bool = False  # closed because the TLS settings differ: a retry cannot help
    _is_peer_gone: bool = False  # writing fails, but there may be data to read
    _reader: wire.FrameReader = msgspec.field(default_factory=wire.FrameReader)

    def __post_init__(self) -> None:
        self._sock.setblocking(False)
        options = ((socket.TCP_NODELAY, 1), *(_RETRANSMIT_OPTIONS if sys.platform == "linux" else ()))
        for option, value in options:
            with suppress(OSError):  # not supported by this kernel
                self._sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self.tls is not None:
            self._start_tls(self.tls, is_server=self.is_server, server_hostname=self.server_hostname)

    def trust(self) -> None:
        """Raise the frame limit: the peer is authenticated."""
        self._reader.max_bytes = wire.MAX_BYTES

    def all_has_arrived(self) -> bool:
        """Return whether the peer's kernel has acknowledged every byte sent. False where this is unknown."""
        if self._unsent or self.is_closed or self._is_peer_gone:
            return False
        import fcntl

        if sys.platform != "linux":
            return False
        left = bytearray(4)
        fcntl.ioctl(self._sock.fileno(), _SIOCOUTQ, left)
        return left == b"\0\0\0\0"

    # --- sending ------------------------------------------------------------------------------------------------------

    def _push(self, data: bytes) -> None:
        if self._is_peer_gone:
            return
        is_behind = self.wants_to_write
        super()._push(data)
        if is_behind and len(self._unsent) > _MAX_UNSENT_BYTES:
            self.close("the peer does not read what it is sent")

    def answer(self, number: int, value: object, error: str) -> None:
        """Answer a request of the peer, unless it leaves too many answers unread."""
        if len(self._unsent) > wire.MAX_UNSENT_ANSWER_BYTES:
            value, error = None, wire.TOO_MANY_ANSWERS
        self.send(wire.encode_answer(number, value, error))

    def _on_send_error(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:  # closed in good order by the peer: its last frames are still to be read
            self._is_peer_gone = True
        else:
            self._break(error)

    def flush(self, timeout_s: float) -> None:
        """Block until everything is sent, or until the timeout."""
        import select
        import time

        until = time.monotonic() + timeout_s
        while self._unsent and not self.is_closed and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(left * 1000)
            self.on_writable()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        follows = self._peek()  # before answering: our answer makes the kernel of a closed peer send a reset
        self.was_finished = follows == b""
        self._take(data)
        if isinstance(follows, OSError):
            self._break(follows)

    def _peek(self) -> bytes | OSError | None:
        """Return the next byte, b"" at the end of the stream, None if nothing has arrived, or the pending error."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            return error

    def _take(self, data: bytes) -> None:
        plain = self._decrypt(data)
        try:
            for body in self._reader.feed(plain):
                if self.is_closed:
                    return
                self._on_body(body)
        except wire.WireError as error:
            if self._tls is None and data.startswith(RECORDS):
                self._refuse_tls(data)
            else:
                self.close(f"{wire.INVALID}: {error}")
        if self._tls is not None and self._tls.failure is not None:
            self._fail_tls(self._tls.failure)

    def _refuse_tls(self, data: bytes) -> None:
        """The peer uses TLS and this side does not: send an alert, so that the peer can report the cause, and close."""
        self.is_tls_mismatch = True
        if not data.startswith(REFUSAL):
            self._push(REFUSAL)
        self.close("the peer uses TLS and this side does not")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail_tls(self, failure: TlsFailure) -> None:
        if not self.is_closed:
            self.is_tls_mismatch = True
            what = "the peer rejected the TLS handshake" if failure.is_rejection else "TLS handshake failed"
            self.close(f"{what}: {failure.reason}")

    def _on_end(self) -> None:
        self.was_finished = True
        self.close("connection closed", by_peer=True)

    def _on_broken(self, why: str, by_peer: bool) -> None:
        self.close(why, by_peer=by_peer)

    def finish(self, timeout_s: float) -> None:
        """Flush, then close in good order (FIN)."""
        self.flush(timeout_s)
        self.resets = False
        self.close()

    def reset(self, why: str = "") -> None:
        """Close with a reset, from which the peer concludes nothing."""
        self.resets = True
        self.close(why)

    def close(self, why: str = "", *, by_peer: bool = False) -> None:
        """Close the socket. ``on_closed`` is called only if there is a reason."""
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(OSError):
            if self.resets:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self._sock.shutdown(socket.SHUT_RDWR)
        try:
            if why:
                self._on_closed(why, by_peer)  # before the close: epoll cannot forget a closed descriptor with a copy
        finally:
            self._sock.close()


class PendingRequests(msgspec.Struct, eq=False):
    """Operators' requests that were sent over links and are not answered yet."""

    _pending: dict[int, tuple[str, float, Reply]] = {}  # by number: the node, when it was sent, who gets the answer
    _count: int = 0

    def send(
        self, request: AnyRequest, reply: Reply, send: Callable[[bytes], None], node_id: str = "", now: float = 0.0
    ) -> None:
        if len(self._pending) >= _MAX_PENDING_REQUESTS:
            reply(None, "too many pending requests" if node_id else "too many pending requests on this node")
            return
        try:
            data = wire.encode_ask(self._count + 1, request)
        except wire.WireError as error:
            reply(None, f"invalid request: {error}")
            return
        self._count += 1
        self._pending[self._count] = (node_id, now, reply)
        send(data)

    def answered(self, answer: wire.Answer, node_id: str = "") -> None:
        """Pass on an answer. One to a request that another node got is ignored."""
        if answer.number in self._pending and self._pending[answer.number][0] == node_id:
            self._pending.pop(answer.number)[2](answer.value, answer.error)

    def fail(self, why: str, which: Callable[[str, float], bool] = lambda *_: True) -> None:
        """Fail all requests, or those that ``which`` selects by node and time."""
        for number, (node_id, at, reply) in list(self._pending.items()):
            if which(node_id, at) and self._pending.pop(number, None) is not None:
                reply(None, why)
