"""A link: one connection, as frames. It never blocks, bounds what it holds, and says once how it ended.

With a TLS context the same link runs through it: the bytes pass an ``SSLObject`` in memory, and the socket stays ours.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import suppress

from tenax.rendezvous.tcp.wire import MOST_BYTES, FrameReader, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

_READ_BYTES = 256 << 10
_MOST_UNSENT_BYTES = 16 << 20  # of one peer; a peer that reads nothing is not worth more
_SIOCOUTQ = 0x5411  # Linux: bytes that the other host has not acknowledged
# Linux: what was lost is sent again after at most a second (TCP_RTO_MAX_MS) or at first at a steady pace
# (TCP_THIN_LINEAR_TIMEOUTS). Else a network that was away for 3 s would be found again after 6.
_TRY_AGAIN_SOON = ((44, 1000), (16, 1))
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")  # an alert, a greeting; none of our frames begins so
_TLS_REFUSAL = b"\x15\x03\x01\x00\x02\x02\x28"  # an alert: fatal, no handshake; also understood by a side without TLS


class Link:
    """``on_body`` gets each frame's bytes; ``on_closed`` once a sentence, and whether the other host has told us so."""

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
        """With ``resets`` closing is no conclusion for the other side: it sees a reset, unless we ``finish``."""
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            for option, value in _TRY_AGAIN_SOON:
                with suppress(OSError):  # a kernel that does not know it
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock = sock
        self._on_body = on_body
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._is_closed = False
        self._resets = resets
        self.was_finished = False  # the other side has closed it in good order
        self._is_left = False  # ... and takes nothing more
        self.is_misfit = False  # it was closed because the two sides differ about TLS: trying again is of no use
        self._tls: ssl.SSLObject | None = None
        self._is_in_handshake = False
        self._held_back: list[bytes] = []  # until the TLS handshake is done
        if tls is not None:
            import ssl

            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = tls.wrap_bio(
                self._incoming, self._outgoing, server_side=is_server, server_hostname=server_hostname
            )
            self._is_in_handshake = True
            if not is_server:
                self._advance_handshake()

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
        """What the other side has not taken. What can wait, or be done without, is not added to much of it."""
        return len(self._unsent)

    @property
    def local_address(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def remote_address(self) -> str:
        """The peer's, without the interface; empty if the connection is gone."""
        try:
            return str(self._sock.getpeername()[0]).partition("%")[0]
        except OSError:
            return ""

    def trust(self) -> None:
        """The peer has proved itself: it may send more than a stranger."""
        self._reader.most_bytes = MOST_BYTES

    def all_has_arrived(self) -> bool:
        """Whether the other host's system has acknowledged every byte we sent. False where this cannot be known."""
        if self._unsent or self._is_closed or self._is_left:
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
        if self._tls is not None:
            if self._is_in_handshake:
                self._held_back.append(data)
                return
            self._tls.write(data)
            data = self._outgoing.read()
        self._push(data)

    def _push(self, data: bytes) -> None:
        if self._is_left:
            return
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                self.close("the other side does not read what it is sent")
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
        if error.errno == errno.EPIPE:  # it had closed in good order before: its last words and the end are yet to read
            self._is_left = True
            self._unsent.clear()
        else:
            self._break(error)

    def flush(self, patience_s: float) -> None:
        """Before leaving: give what is unsent a moment. Blocks."""
        import select
        import time

        until = time.monotonic() + patience_s
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
                self.close("its connection was closed", was_told=True)
                return
            follows = self._peek()  # known before we answer: then its system resets what it had closed
            self.was_finished = follows == b""
            self._take(data)
            if isinstance(follows, OSError):
                self._break(follows)
            elif len(data) < _READ_BYTES:
                return

    def _peek(self) -> bytes | OSError | None:
        """What follows: nothing yet, an end in good order (empty), or an error, which is told only once."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            return error

    def _take(self, data: bytes) -> None:
        try:
            if self._tls is not None:
                data = self._decrypt(data)
            for body in self._reader.feed(data):
                if self._is_closed:
                    return
                self._on_body(body)
        except WireError as error:
            if self._tls is None and data[:2] in _TLS_RECORDS:
                self.is_misfit = True
                if not data.startswith(_TLS_REFUSAL):
                    self._push(_TLS_REFUSAL)
                self.close("it speaks TLS, and this side was not told to")
            else:
                self.close(f"it sent {error}")

    def _decrypt(self, data: bytes) -> bytes:
        import ssl

        assert self._tls is not None
        self._incoming.write(data)
        if self._is_in_handshake:
            self._advance_handshake()
        plain = b""
        if not self._is_in_handshake and not self._is_closed:
            try:
                while chunk := self._tls.read(_READ_BYTES):
                    plain += chunk
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._break_tls(error)
        return plain

    def _advance_handshake(self) -> None:
        import ssl

        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._push(self._outgoing.read() or _TLS_REFUSAL)  # which tells the other side why
            self._break_tls(error)
            return
        else:
            self._is_in_handshake = False
        self._push(self._outgoing.read())
        if not self._is_in_handshake:
            held, self._held_back = self._held_back, []
            for each in held:
                self.send(each)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _break_tls(self, error: ssl.SSLError) -> None:
        """An alert is the other side's refusal; everything else is ours."""
        self.is_misfit = True
        reason = error.reason or str(error)
        _, is_theirs, alert = reason.partition("_ALERT_")
        if is_theirs:
            self.close(f"it refused what this side showed for TLS ({alert.replace('_', ' ').lower()})")
        else:
            self.close(f"TLS could not be agreed on: {getattr(error, 'verify_message', '') or reason}")

    def _break(self, error: OSError) -> None:
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED):
            self.close("its connection was closed", was_told=True)
        else:
            self.close(f"its connection broke: {error.strerror or error}")

    def finish(self, patience_s: float) -> None:
        """Say what is left to say, and close in good order."""
        self.flush(patience_s)
        self._resets = False
        self.close()

    def reset(self, why: str = "") -> None:
        """Close so that the other side can draw no conclusion."""
        self._resets = True
        self.close(why)

    def close(self, why: str = "", *, was_told: bool = False) -> None:
        """Without a reason it is our own wish, and nobody is told."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            if self._resets:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if why:
            self._on_closed(why, was_told)
