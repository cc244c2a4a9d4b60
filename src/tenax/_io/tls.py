"""TLS: its files (``TlsFiles``), the encryption of one connection (``TlsStream``), and its socket (``StreamSocket``).

With a certificate and its key a node can serve, and authenticate to others. With a certificate authority it checks the
peer: each node checks the coordinator's certificate against the endpoint's host, the coordinator checks each node's
(mutual TLS). Files are read when needed; a file that cannot be used raises ValueError with a message for the user.

Every encrypted connection of both engines runs through a ``TlsStream``. It does no I/O: the ``StreamSocket`` moves the
bytes, and its owner applies limits and closes.
"""

from __future__ import annotations

import errno

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from typing import Any

RECORDS = (b"\x15\x03", b"\x16\x03")  # how a TLS connection begins: an alert or a handshake
REFUSAL = b"\x15\x03\x01\x00\x02\x02\x28"  # a fatal alert (handshake failure), for a peer that does not agree on TLS
_READ_BYTES = 256 << 10
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")  # OpenSSL's reasons


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths; empty if not given."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def for_server(self) -> ssl.SSLContext:
        import ssl

        if not self.cert:
            raise ValueError("this node serves the endpoint and needs a certificate; set ssl_cert and ssl_cert_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_client(self) -> ssl.SSLContext:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.ca:
            context.load_default_certs()
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        import ssl

        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # otherwise a peer can force endless handshakes
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.cert, self.key, self.ca)))
            reason = getattr(error, "reason", None) or error.strerror or error
            raise ValueError(f"could not load the TLS files ({files}): {reason}") from error


class TlsFailure(msgspec.Struct, frozen=True):
    """Why TLS failed. ``is_rejection``: the peer sent an alert. ``is_not_tls``: the peer does not speak TLS."""

    reason: str
    is_rejection: bool = False
    is_not_tls: bool = False


class TlsStream:
    """TLS for one connection, in memory.

    After the constructor and after each ``receive`` the owner sends ``to_send()`` and checks ``failure`` and
    ``is_ended``. A failed stream is not used again.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool = False, server_hostname: str | None = None) -> None:
        import ssl

        self.is_open = False  # the handshake is complete
        self.is_ended = False  # the peer has announced that it sends nothing more
        self.failure: TlsFailure | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=server_hostname
        )
        self._held: list[bytes] = []  # data to send after the handshake
        self._refusal = b""
        if not is_server:
            self._shake_hands()

    def send(self, data: bytes) -> bytes:
        """Encrypt ``data`` and return the bytes to send now. Until the handshake is complete the data is held back."""
        if not self.is_open:
            self._held.append(data)
            return b""
        self._tls.write(data)
        return self._outgoing.read()

    def receive(self, data: bytes) -> bytes:
        """Return what ``data`` decrypts to."""
        import ssl

        self._incoming.write(data)
        if not self.is_open:
            self._shake_hands()
        plain: list[bytes] = []
        if self.is_open:
            try:
                while chunk := self._tls.read(_READ_BYTES):
                    plain.append(chunk)
                self.is_ended = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self.is_ended = True
            except ssl.SSLError as error:
                self._fail(error)
        return b"".join(plain)

    def to_send(self) -> bytes:
        """Take the bytes that TLS itself sends: handshake, alerts, and data that was held back."""
        refusal, self._refusal = self._refusal, b""
        return self._outgoing.read() or refusal

    def _shake_hands(self) -> None:
        import ssl

        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self._refusal = REFUSAL
            self._fail(error)
            return
        self.is_open = True
        held, self._held = self._held, []
        for each in held:
            self._tls.write(each)

    def _fail(self, error: ssl.SSLError) -> None:
        reason = error.reason or str(error)
        _, is_rejection, alert = reason.partition("_ALERT_")
        message = getattr(error, "verify_message", "") or (alert or reason).replace("_", " ").lower()
        self.failure = TlsFailure(message, bool(is_rejection), reason in _NOT_TLS)


class StreamSocket(msgspec.Struct, eq=False, kw_only=True):
    """A non-blocking stream socket, with or without TLS, as a loop watches it. Subclasses own and close the socket.

    Data that the socket does not take yet is queued.
    """

    _sock: socket.socket | None = None  # None: not connected
    _tls: TlsStream | None = None
    _unsent: bytearray = msgspec.field(default_factory=bytearray)
    is_closed: bool = False

    __repr__ = object.__repr__  # what is sent may be secret

    def _on_data(self, data: bytes) -> None:
        """Handle received bytes, which may be encrypted."""
        raise NotImplementedError

    def _on_end(self) -> None:
        """Handle the end of the stream (FIN)."""
        raise NotImplementedError

    def _on_broken(self, why: str, by_peer: bool) -> None:
        """Handle a connection that ended in any other way."""
        raise NotImplementedError

    def _on_send_error(self, error: OSError) -> None:
        """Do nothing: the next read reports the cause."""

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def local_address(self) -> str:
        return "" if self._sock is None else str(self._sock.getsockname()[0])

    def _start_tls(self, context: ssl.SSLContext, **options: Any) -> None:
        self._tls = TlsStream(context, **options)
        self._push(self._tls.to_send())

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes) -> None:
        if not self.is_closed:
            self._push(data if self._tls is None else self._tls.send(data))

    def _push(self, data: bytes) -> None:
        is_behind = self.wants_to_write
        self._unsent += data
        if not is_behind:
            self.on_writable()

    def on_writable(self) -> None:
        if self._sock is None or self.is_closed or not self._unsent:
            return
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._unsent.clear()
            self._on_send_error(error)
            return
        del self._unsent[:sent]

    def on_readable(self) -> None:
        while self._sock is not None and not self.is_closed:
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            if not data:
                self._on_end()
                return
            self._on_data(data)
            if len(data) < _READ_BYTES:
                return

    def _decrypt(self, data: bytes) -> bytes:
        if self._tls is None:
            return data
        plain = self._tls.receive(data)
        self._push(self._tls.to_send())
        return plain

    def _break(self, error: OSError) -> None:
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED):
            self._on_broken("connection closed", True)
        else:
            self._on_broken(f"connection failed: {error.strerror or error}", False)
