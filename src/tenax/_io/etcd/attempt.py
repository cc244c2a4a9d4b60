"""An attempt: one request to one endpoint, with a timeout. Reports its result once, never within ``start``.

If an idle connection turns out to be closed, it is replaced once; that is not a failure.
"""

from __future__ import annotations

from tenax._core.etcd.errors import EtcdRefused
from tenax._io.etcd import gateway
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import Head
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._core.etcd.operations import Operation
    from tenax._io.etcd.http_connection import Breakage, EtcdEndpoint, HttpConnection
    from tenax._io.etcd.http_response import Part
    from tenax._io.etcd.pool import Pool
    from tenax._io.interfaces import Cancellable, EventLoop

_TLS_HANDSHAKE_S = 1.0  # the minimum timeout with a new TLS connection
_MAX_BODY_BYTES = 512 << 20


def http_request(endpoint: EtcdEndpoint, path: str, body: bytes, token: str = "", more: str = "") -> bytes:
    """Return the bytes of a request. ``more`` are further header lines, each with its CRLF."""
    authorization = f"Authorization: {token}\r\n" if token else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {endpoint.name}\r\nContent-Type: application/json\r\n"
        f"{authorization}{more}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1", "replace") + body


class Attempt:
    """One request to one endpoint."""

    def __init__(
        self,
        loop: EventLoop,
        pool: Pool,
        endpoint: EtcdEndpoint,
        operation: Operation[Any],
        token: str,
        answered: Callable[[Any], None],
        failed: Callable[[Fault], None],
    ) -> None:
        self.endpoint = endpoint
        self.sent_at = 0.0
        self.local_address = ""
        self.token = token
        self._loop = loop
        self._pool = pool
        self._operation = operation
        self._answered = answered
        self._failed = failed
        self._connection: HttpConnection | None = None
        self._timer: Cancellable = NO_TIMER
        self._request = b""
        self._is_sent = False  # so it may be executed
        self._status = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def start(self, limit_s: float, max_s: float) -> None:
        """Start with a timeout of ``limit_s``, longer for a TLS handshake, but at most ``max_s``."""
        try:
            self._request = http_request(self.endpoint, *gateway.encode(self._operation), self.token)
            self._connection = self._pool.take(self.endpoint, self)
        except EtcdRefused as error:
            self._fail_soon(Fault("refused", error.message, is_certain=True, was_answered=False))
            return
        if not self._connection.is_open and self._pool.is_encrypted:
            limit_s = max(limit_s, _TLS_HANDSHAKE_S)
        self._timer = self._loop.at(self._loop.now() + min(limit_s, max_s), self._timed_out)
        if self._connection.is_open:
            self._send(self._connection)

    def _fail_soon(self, fault: Fault) -> None:
        self._timer = self._loop.at(self._loop.now(), lambda: self._end(fault))

    def _send(self, connection: HttpConnection) -> None:
        self._is_sent = True
        self.sent_at = self._loop.now()
        connection.request(self._request)

    # --- as the user of a connection ----------------------------------------------------------------------------------

    def on_open(self, connection: HttpConnection) -> None:
        self._send(connection)

    def on_part(self, connection: HttpConnection, part: Part) -> None:
        if isinstance(part, Head):
            self._status = part.status
        elif isinstance(part, bytes):
            self._body.append(part)
            self._body_bytes += len(part)
            if self._body_bytes > _MAX_BODY_BYTES:
                self._end(Fault("rejected", f"the answer is larger than {_MAX_BODY_BYTES >> 20} MiB"))
        else:
            self.local_address = connection.local_address
            if part.keeps_open:
                self._connection = None
                self._pool.give_back(connection)
            self._decode()

    def on_broken(self, connection: HttpConnection, breakage: Breakage) -> None:
        self._pool.drop(connection)
        if connection.answered and not self._status:  # an idle connection was closed; try a new one
            self._pool.forget(self.endpoint)
            try:
                self._connection = self._pool.take(self.endpoint, self, is_new=True)
            except EtcdRefused as error:
                self._end(Fault("refused", error.message, was_answered=False))
            return
        if breakage.is_about_tls:
            self._pool.read_files_again()
            self._end(Fault("tls", breakage.message, is_certain=True, was_answered=False))
        else:
            # A member that expects TLS closes a plain connection without an answer; so does one that exits.
            closed_silently = self._is_sent and not self._status and not self._pool.is_encrypted
            hint = " without an answer (if it expects TLS, use https://)" if closed_silently else ""
            self._end(Fault("again", breakage.message + hint, not self._is_sent, was_answered=False))

    def _decode(self) -> None:
        try:
            found = gateway.decode(self._operation, self._status, b"".join(self._body))
        except gateway.InvalidResponse as error:
            self._end(Fault("again", f"invalid response: {error}"))
            return
        self._end(found)

    def _timed_out(self) -> None:
        connection = self._connection
        trouble = "did not answer in time" if connection is not None and connection.is_open else "cannot be reached"
        self._pool.forget(self.endpoint)
        self._end(Fault("again", trouble, not self._is_sent, was_answered=False))

    def _end(self, found: Any) -> None:
        self.cancel()
        if isinstance(found, Fault):
            self._failed(found)
        else:
            self._answered(found)

    def cancel(self) -> None:
        """Stop without a callback. A request that was sent may still be executed."""
        self._timer.cancel()
        if self._connection is not None:
            self._pool.drop(self._connection)
            self._connection = None
