"""One connection that carries frames. It never blocks, bounds what it buffers, and reports once how it ended.

With a TLS context the bytes pass through a ``TlsStream``; the socket stays with the link.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import suppress

from tenax._core.link.wire import INVALID, MAX_BYTES, FrameReader, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from tenax._io.tls import TlsFailure, TlsStream

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 16 << 20  # per peer
_SIOCOUTQ = 0x5411  # Linux: bytes that the other host has not acknowledged
# Linux: retransmit at least every second (TCP_RTO_MAX_MS), or on older kernels without backoff at first
# (TCP_THIN_LINEAR_TIMEOUTS). With exponential backoff a network outage of 3 s would last 6 s.
_RETRANSMIT_OPTIONS = ((44, 1000), (16, 1))


class Link:
    """``on_body`` gets each frame's bytes. ``on_closed`` gets the reason and whether the peer closed it, once."""

    def __init__(
        self,
        sock: socket.socket,
        on_body: Callable[[bytes], None],
        on_closed: Callable[[str, bool], None],
        tls: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        is_server: bool = False,
        resets: bool = False,
    ) -> None:
        """With ``resets``, ``close`` sends a reset, from which the peer concludes nothing; ``finish`` sends a FIN."""
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            for option, value in _RETRANSMIT_OPTIONS:
                with suppress(OSError):  # not supported by this kernel
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self._on_body = on_body
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._is_closed = False
        self._resets = resets
        self.was_finished = False  # the peer has closed it in good order (FIN)
        self._is_peer_gone = False  # writing fails, but there may be data to read
        self.is_tls_mismatch = False  # closed because the TLS settings differ: a retry cannot help
        self._tls: TlsStream | None = None
        if tls is not None:
            from tenax._io.tls import TlsStream

            self._tls = TlsStream(tls, is_server=is_server, server_hostname=server_hostname)
            self._push(self._tls.to_send())

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet. Callers hold back optional data while this is large."""
        return len(self._unsent)

    @property
    def local_address(self) -> str:
        return str(self._sock.getsockname()[0])

    def trust(self) -> None:
        """Raise the frame limit: the peer is authenticated."""
        self._reader.max_bytes = MAX_BYTES

    def all_has_arrived(self) -> bool:
        """Return whether the peer's kernel has acknowledged every byte sent. False where this is unknown."""
        if self._unsent or self._is_closed or self._is_peer_gone:
            return False
        import fcntl

        if sys.platform != "linux":
            return False
        left = bytearray(4)
        fcntl.ioctl(self._sock.fileno(), _SIOCOUTQ, left)
        return left == b"\0\0\0\0"

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._push(data if self._tls is None else self._tls.send(data))

    def _push(self, data: bytes) -> None:
        if self._is_peer_gone or not data:
            return
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                self.close("the peer does not read what it is sent")
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail_to_send(error)
            return
        if sent < len(data):
            self._unsent += data[sent:]

    def on_writable(self) -> None:
        if self._is_closed or not self._unsent:
            return
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail_to_send(error)
            return
        del self._unsent[:sent]

    def _fail_to_send(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:  # closed in good order by the peer: its last frames are still to be read
            self._is_peer_gone = True
            self._unsent.clear()
        else:
            self._break(error)

    def flush(self, timeout_s: float) -> None:
        """Block until everything is sent, or until the timeout."""
        import select
        import time

        until = time.monotonic() + timeout_s
        while self._unsent and not self._is_closed and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(left * 1000)
            self.on_writable()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        while not self._is_closed:
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            if not data:
                self.was_finished = True
                self.close("connection closed", by_peer=True)
                return
            follows = self._peek()  # before answering: our answer makes the kernel of a closed peer send a reset
            self.was_finished = follows == b""
            self._take(data)
            if isinstance(follows, OSError):
                self._break(follows)
            elif len(data) < _READ_BYTES:
                return

    def _peek(self) -> bytes | OSError | None:
        """Return the next byte, b"" at the end of the stream, None if nothing has arrived, or the pending error."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            return error

    def _take(self, data: bytes) -> None:
        plain = data
        if self._tls is not None:
            plain = self._tls.receive(data)
            self._push(self._tls.to_send())
        try:
            for body in self._reader.feed(plain):
                if self._is_closed:
                    return
                self._on_body(body)
        except WireError as error:
            from tenax._io.tls import RECORDS

            if self._tls is None and data.startswith(RECORDS):
                self._refuse_tls(data)
            else:
                self.close(f"{INVALID}: {error}")
        if self._tls is not None and self._tls.failure is not None and not self._is_closed:
            self._fail_tls(self._tls.failure)

    def _refuse_tls(self, data: bytes) -> None:
        """The peer uses TLS and this side does not: send an alert, so that the peer can report the cause, and close."""
        from tenax._io.tls import REFUSAL

        self.is_tls_mismatch = True
        if not data.startswith(REFUSAL):
            self._push(REFUSAL)
        self.close("the peer uses TLS and this side does not")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail_tls(self, failure: TlsFailure) -> None:
        self.is_tls_mismatch = True
        if failure.is_rejection:
            self.close(f"the peer rejected the TLS handshake: {failure.reason}")
        else:
            self.close(f"TLS handshake failed: {failure.reason}")

    def _break(self, error: OSError) -> None:
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED):
            self.close("connection closed", by_peer=True)
        else:
            self.close(f"connection failed: {error.strerror or error}")

    def finish(self, timeout_s: float) -> None:
        """Flush, then close in good order (FIN)."""
        self.flush(timeout_s)
        self._resets = False
        self.close()

    def reset(self, why: str = "") -> None:
        """Close with a reset, from which the peer concludes nothing."""
        self._resets = True
        self.close(why)

    def close(self, why: str = "", *, by_peer: bool = False) -> None:
        """Close the socket. ``on_closed`` is called only if there is a reason."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            if self._resets:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self._sock.shutdown(socket.SHUT_RDWR)
        try:
            if why:
                self._on_closed(why, by_peer)  # before the close: epoll cannot forget a closed descriptor with a copy
        finally:
            self._sock.close()
