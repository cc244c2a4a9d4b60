"""An operator's line: ask an agent at its door, or a coordinator at its endpoint, and wait for the answer.

For a person's tool: it blocks, has no loop and no thread. At a door the system has checked who may enter; at an
endpoint both sides prove that they know the job's secret, as a node would, and the greeting says that this is no node.
What the other side says is judged by nobody here: it is typed, bounded, and whoever shows it makes it harmless.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from tenax._engines.tcp import wire

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
    """Base of what may go wrong. The text is one sentence without a full stop, as strangers may have written it."""


class Unreachable(OperatorError):
    """Nobody is there, or nobody who speaks as we do."""


class AccessDenied(OperatorError):
    """Somebody is there who does not let us in: another secret, another run, another version."""


class LineLost(OperatorError):
    """The connection was closed, or nothing came in time. Whether the request was heard is not known."""


class Declined(OperatorError):
    """The request was heard, and this is why there is no answer to it."""


class OperatorLine:
    """One connection. Requests go one after the other."""

    def __init__(self, sock: socket.socket, *, is_trusted: bool = True) -> None:
        self._sock = sock
        self._reader = wire.FrameReader(wire.MAX_BYTES if is_trusted else wire.MAX_UNAUTHENTICATED_BYTES)
        self._bodies: list[bytes] = []
        self._request_count = 0

    def trust(self) -> None:
        self._reader.max_bytes = wire.MAX_BYTES

    def ask(self, request: AnyRequest, timeout_s: float) -> msgspec.Raw:
        """The answer, as JSON that is not looked at yet. Raises ``Declined`` and ``LineLost``."""
        return self.answer(self.send(request), timeout_s)

    def send(self, request: AnyRequest) -> int:
        """Only ask. Returns the number of the answer."""
        self._request_count += 1
        self.say(wire.Ask(self._request_count, request))
        return self._request_count

    def answer(self, number: int, timeout_s: float) -> msgspec.Raw:
        until = time.monotonic() + timeout_s
        while True:
            frame = self.hear(until)
            if isinstance(frame, wire.Answer) and frame.number == number:
                if frame.error:
                    raise Declined(frame.error)
                return frame.value

    def say(self, frame: wire.FromAgent) -> None:
        try:
            self._sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            self._sock.sendall(wire.encode(frame))
        except OSError as error:
            raise LineLost(_in_words(error)) from error

    def hear(self, until: float) -> wire.FromServer:
        """The next frame. Raises ``LineLost``; a frame that is not ours ends the line too."""
        try:
            while not self._bodies:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._sock.settimeout(left_s)
                data = self._sock.recv(_READ_BYTES)
                if not data:
                    raise LineLost("the connection was closed")
                self._bodies += self._reader.feed(data)
            return wire.decode_from_server(self._bodies.pop(0))
        except OSError as error:
            raise LineLost(_in_words(error)) from error
        except wire.WireError as error:
            raise LineLost(f"what was answered is not ours: {error}") from error

    def until_closed(self, beat: AnyRequest) -> None:
        """Wait until the other side closes, which is when its process ends. It hears of us meanwhile: who is quiet for
        too long is let go, and a host that has vanished is found out. Raises ``LineLost`` if it has."""
        unanswered = 0
        while True:
            self._sock.settimeout(_BEAT_S)
            try:
                if not self._sock.recv(_READ_BYTES):
                    return
                unanswered = 0
            except TimeoutError:
                if unanswered > _MAX_UNANSWERED:
                    raise LineLost("nothing was heard of it for a while") from None
                unanswered += 1
                self.send(beat)
            except OSError:
                return

    def close(self) -> None:
        self._sock.close()


def at_door(path: str, timeout_s: float = _HANDSHAKE_TIMEOUT_S) -> OperatorLine:
    """The line to an agent on this host. Raises ``ConnectionRefusedError`` and ``FileNotFoundError`` when nobody is
    there, and ``Unreachable``."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            raise
        raise Unreachable(_in_words(error)) from error
    return OperatorLine(sock)


def at_endpoint(
    addresses: Sequence[Address],
    run_id: str,
    secret: bytes,
    tls: ssl.SSLContext | None = None,
    tls_host: str = "",
    timeout_s: float = _HANDSHAKE_TIMEOUT_S,
) -> OperatorLine:
    """The line to a coordinator, greeted and let in. Raises ``Unreachable`` and ``AccessDenied``."""
    sock = _connected(addresses, timeout_s)
    try:
        if tls is not None:
            sock = _wrapped(sock, tls, tls_host)
        line = OperatorLine(sock, is_trusted=False)
        _start_handshake(line, run_id, secret, timeout_s)
    except BaseException:
        sock.close()
        raise
    return line


def _connected(addresses: Sequence[Address], timeout_s: float) -> socket.socket:
    why = "it has no address"
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            why = _in_words(error)
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
            f"TLS could not be agreed on ({reason}); check ssl_cert, ssl_cert_key and ca_cert in --rdzv-conf"
        ) from error
    except OSError as error:
        raise AccessDenied(
            f"TLS could not be agreed on ({_in_words(error)}); the run may use none: leave out ssl_cert, ssl_cert_key "
            "and ca_cert"
        ) from error


def _start_handshake(line: OperatorLine, run_id: str, secret: bytes, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    hello = wire.Hello(wire.VERSION, run_id, f"operator-{os.getpid()}", os.urandom(wire.NONCE_BYTES), is_operator=True)
    try:
        line.say(hello)
        frame = line.hear(until)
        if isinstance(frame, wire.Challenge):
            nonce = frame.nonce
            line.say(wire.Proof(wire.prove(secret, "operator", hello, nonce)))
            frame = line.hear(until)
            if isinstance(frame, wire.Accepted):
                if not wire.is_same(frame.proof, wire.prove(secret, "coordinator", hello, nonce)):
                    raise AccessDenied(
                        "the process that listens there does not know the secret; check who listens there"
                    )
                line.trust()
                return
    except LineLost as error:
        raise Unreachable(
            f"the process that listens there is not a tenax coordinator ({error}); if the run uses TLS, add its files "
            "to --rdzv-conf"
        ) from error
    if isinstance(frame, wire.Refused):
        raise AccessDenied(_rejection(frame))
    raise Unreachable("the process that listens there is not a tenax coordinator")


def _rejection(refused: wire.Refused) -> str:
    """What to do about it. Its text is not shown: anyone can send it."""
    if refused.version != wire.VERSION:
        return (
            f"it has version {refused.version} of the protocol and this tool version {wire.VERSION}; use the tenax of "
            "the run"
        )
    if refused.reason == wire.NO_SECRET:
        return (
            "a run without a secret is operated only on its nodes: run this command on one of them, without "
            "--endpoint, or start the run with a secret (--rdzv-conf token_file=FILE or TENAX_RDZV_TOKEN)"
        )
    if refused.reason == wire.TOO_MANY_OPERATORS:
        return "too many operators are connected to it; try again later"
    return (
        "it serves another run or has another secret; check the run id, and give the secret of the run "
        "(--rdzv-conf token_file=FILE or TENAX_RDZV_TOKEN)"
    )


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "nothing was answered in time"
    return error.strerror or str(error)
