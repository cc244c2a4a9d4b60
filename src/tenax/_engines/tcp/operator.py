"""An operator's connection: sends requests to an agent's control socket or to a coordinator, and waits for answers.

For command line tools: it blocks, without an event loop or a thread. On a control socket the kernel has checked the
user. At an endpoint both sides prove that they have the run's secret, as for a node. Answers are typed and bounded, but
not sanitized: the caller escapes what it prints.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from tenax._core.link import wire
from tenax._core.text import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from tenax._core.requests import AnyRequest
    from tenax._io.endpoint import Address

_READ_BYTES = 256 << 10
_HANDSHAKE_TIMEOUT_S = 5.0
_BEAT_S = 10.0
_MAX_UNANSWERED = 6


class OperatorError(Exception):
    """Base of these errors. The message has no full stop; a peer may have written it."""


class Unreachable(OperatorError):
    """No process listens there, or it is not tenax."""


class AccessDenied(OperatorError):
    """The peer rejects this operator: another secret, another run, or another version."""


class ConnectionLost(OperatorError):
    """The connection was closed or timed out. Whether the request was received is unknown."""


class Declined(OperatorError):
    """The peer received the request and answered with this error."""


class OperatorConnection:
    """One connection. Requests are numbered in the order in which they are sent."""

    def __init__(self, sock: socket.socket, *, is_trusted: bool = True) -> None:
        self._sock = sock
        self._reader = wire.FrameReader(wire.MAX_BYTES if is_trusted else wire.MAX_UNAUTHENTICATED_BYTES)
        self._bodies: list[bytes] = []
        self._request_count = 0

    def trust(self) -> None:
        self._reader.max_bytes = wire.MAX_BYTES

    def ask(self, request: AnyRequest, timeout_s: float) -> msgspec.Raw:
        """Send a request and return the answer as raw JSON. Raises ``Declined`` and ``ConnectionLost``."""
        return self.answer(self.send(request), timeout_s)

    def send(self, request: AnyRequest) -> int:
        """Send a request without waiting. Return its number."""
        self._request_count += 1
        self.send_frame(wire.Ask(self._request_count, request))
        return self._request_count

    def answer(self, number: int, timeout_s: float) -> msgspec.Raw:
        until = time.monotonic() + timeout_s
        while True:
            frame = self.receive(until)
            if isinstance(frame, wire.Answer) and frame.number == number:
                if frame.error:
                    raise Declined(frame.error)
                return frame.value

    def send_frame(self, frame: wire.FromAgent) -> None:
        try:
            self._sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            self._sock.sendall(wire.encode(frame))
        except OSError as error:
            raise ConnectionLost(_describe_error(error)) from error

    def receive(self, until: float) -> wire.FromServer:
        """Return the next frame. Raises ``ConnectionLost``, also for an invalid frame."""
        try:
            while not self._bodies:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._sock.settimeout(left_s)
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionLost("connection closed")
                self._bodies += self._reader.feed(data)
            return wire.decode_from_server(self._bodies.pop(0))
        except OSError as error:
            raise ConnectionLost(_describe_error(error)) from error
        except wire.WireError as error:
            raise ConnectionLost(f"invalid answer: {error}") from error

    def until_closed(self, beat: AnyRequest) -> None:
        """Wait until the peer closes the connection, which is when its process ends.

        Sends ``beat`` meanwhile, because the peer drops idle operators. Raises ``ConnectionLost`` if the answers stop.
        """
        unanswered = 0
        while True:
            self._sock.settimeout(_BEAT_S)
            try:
                if not self._sock.recv(_READ_BYTES):
                    return
                unanswered = 0
            except TimeoutError:
                if unanswered > _MAX_UNANSWERED:
                    raise ConnectionLost(f"no answer for {format_seconds(_BEAT_S * (_MAX_UNANSWERED + 1))}") from None
                unanswered += 1
                self.send(beat)
            except OSError:
                return

    def close(self) -> None:
        self._sock.close()


def connect_to_agent(path: str, timeout_s: float = _HANDSHAKE_TIMEOUT_S) -> OperatorConnection:
    """Connect to the control socket of an agent on this host.

    Raises ``ConnectionRefusedError`` or ``FileNotFoundError`` if no agent listens there, and ``Unreachable``.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            raise
        raise Unreachable(_describe_error(error)) from error
    return OperatorConnection(sock)


def connect_to_coordinator(
    addresses: Sequence[Address],
    run_id: str,
    secret: bytes,
    tls: ssl.SSLContext | None = None,
    tls_host: str = "",
    timeout_s: float = _HANDSHAKE_TIMEOUT_S,
) -> OperatorConnection:
    """Connect to a coordinator and authenticate. Raises ``Unreachable`` and ``AccessDenied``."""
    sock = _connected(addresses, timeout_s)
    try:
        if tls is not None:
            sock = _wrapped(sock, tls, tls_host)
        connection = OperatorConnection(sock, is_trusted=False)
        _start_handshake(connection, run_id, secret, timeout_s)
    except BaseException:
        sock.close()
        raise
    return connection


def _connected(addresses: Sequence[Address], timeout_s: float) -> socket.socket:
    why = "no address found"
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            why = _describe_error(error)
            continue
        return sock
    raise Unreachable(why)


def _wrapped(sock: socket.socket, tls: ssl.SSLContext, host: str) -> socket.socket:
    import ssl

    try:
        return tls.wrap_socket(sock, server_hostname=host)
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        raise AccessDenied(
            f"TLS handshake failed ({reason}); check ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        ) from error
    except OSError as error:
        raise AccessDenied(
            f"TLS handshake failed ({_describe_error(error)}); if the run does not use TLS, leave out ssl_cert, "
            "ssl_cert_key and ca_cert"
        ) from error


def _start_handshake(connection: OperatorConnection, run_id: str, secret: bytes, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    hello = wire.Hello(wire.VERSION, run_id, f"operator-{os.getpid()}", os.urandom(wire.NONCE_BYTES), is_operator=True)
    try:
        connection.send_frame(hello)
        frame = connection.receive(until)
        if isinstance(frame, wire.Challenge):
            nonce = frame.nonce
            connection.send_frame(wire.Proof(wire.prove(secret, "operator", hello, nonce)))
            frame = connection.receive(until)
            if isinstance(frame, wire.Accepted):
                if not wire.is_same(frame.proof, wire.prove(secret, "coordinator", hello, nonce)):
                    raise AccessDenied(
                        "the process that listens there does not know the secret of the run; check which process "
                        "that is"
                    )
                connection.trust()
                return
    except ConnectionLost as error:
        raise Unreachable(
            f"the process that listens there is not a tenax coordinator ({error}); if the run uses TLS, add its files "
            "to --rdzv-conf"
        ) from error
    if isinstance(frame, wire.Refused):
        raise AccessDenied(_rejection(frame))
    raise Unreachable("the process that listens there is not a tenax coordinator")


def _rejection(refused: wire.Refused) -> str:
    """Return the cause and the remedy. The peer's own text is not shown: any process can send it."""
    if refused.version != wire.VERSION:
        return (
            f"its protocol version is {refused.version}, this command's is {wire.VERSION}; use the tenax version "
            "of the run"
        )
    if refused.reason == wire.NO_SECRET:
        return (
            "a run without a secret is operated only on its nodes: run this command on one of them, without "
            "--endpoint, or start the run with a secret (--rdzv-conf token_file=FILE or TENAX_RDZV_TOKEN)"
        )
    if refused.reason == wire.TOO_MANY_OPERATORS:
        return "it has too many operator connections; try again later"
    return (
        "it serves another run or has another secret; check the run id, and give the secret of the run "
        "(--rdzv-conf token_file=FILE or TENAX_RDZV_TOKEN)"
    )


def _describe_error(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return error.strerror or str(error)
