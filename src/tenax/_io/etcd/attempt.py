"""An exchange: one request on one connection. An attempt: an exchange that is one operation's request and answer.

If an idle connection turns out to be closed, it is replaced once; that is not a failure. Neither reports its result
within ``start``.
"""

from __future__ import annotations

import msgspec

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
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.http_connection import EtcdEndpoint, HttpConnection
    from tenax._io.etcd.http_response import Part
    from tenax._io.interfaces import Cancellable

_TLS_HANDSHAKE_S = 1.0  # the minimum timeout with a new TLS connection
_MAX_BODY_BYTES = 512 << 20


class Exchange(msgspec.Struct, eq=False, kw_only=True):
    """One request to one endpoint, and the user of its connection."""

    _client: EtcdClient
    endpoint: EtcdEndpoint
    token: str = ""
    sent_at: float = 0.0
    _connection: HttpConnection | None = None
    _timer: Cancellable = NO_TIMER
    _request: bytes = b""
    _is_sent: bool = False  # so it may be executed
    _status: int = 0

    __repr__ = object.__repr__  # token and request are secret

    def on_part(self, part: Part) -> None:
        """Take a part of the response."""
        raise NotImplementedError

    def _lost(self, message: str) -> None:
        """Handle the end of the connection."""
        raise NotImplementedError

    def _end(self, found: Any) -> None:
        """End with a fault, or with an answer."""
        raise NotImplementedError

    def _set_request(self, path: str, body: bytes, more: str = "") -> None:
        """``more`` are further header lines, each with its CRLF."""
        authorization = f"Authorization: {self.token}\r\n" if self.token else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.endpoint.name}\r\nContent-Type: application/json\r\n"
            f"{authorization}{more}Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode("latin-1", "replace") + body

    def _connect(self, *, is_new: bool = False) -> None:
        try:
            self._connection = self._client.pool.take(self.endpoint, self, is_new=is_new)
        except EtcdRefused as error:
            fault = Fault("refused", error.message, is_certain=True, was_answered=False)
            self._set_timer(0.0, lambda: self._end(fault))
            return
        if self._connection.is_open:
            self.on_open()

    def on_open(self) -> None:
        assert self._connection is not None
        self._is_sent = True
        self.sent_at = self._client.loop.now()
        self._connection.request(self._request)

    def on_broken(self, message: str, *, is_about_tls: bool) -> None:
        """Handle the end of the connection. ``is_about_tls``: no retry helps until the certificates change."""
        connection, self._connection = self._connection, None
        assert connection is not None
        pool = self._client.pool
        pool.drop(connection)
        if connection.answered and not self._status:  # an idle connection was closed; try a new one
            pool.forget(self.endpoint)
            self._connect(is_new=True)
        elif is_about_tls:
            pool.read_files_again()
            self._end(Fault("tls", message, is_certain=True, was_answered=False))
        else:
            self._lost(message)

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._timer.cancel()
        self._timer = self._client.loop.at(self._client.loop.now() + after_s, call)

    def close(self) -> None:
        """Stop without a callback. A request that was sent may still be executed."""
        self._timer.cancel()
        if self._connection is not None:
            self._client.pool.drop(self._connection)
            self._connection = None


class Attempt(Exchange, eq=False):
    """One operation at one endpoint, with a timeout. ``ended`` gets the answer or the fault, once."""

    _client: EtcdClient
    endpoint: EtcdEndpoint
    token: str
    _operation: Operation[Any]
    _ended: Callable[[Any], None]
    local_address: str = ""
    _body: list[bytes] = []
    _body_bytes: int = 0

    def start(self, limit_s: float, max_s: float) -> None:
        """Start with a timeout of ``limit_s``, longer for a TLS handshake, but at most ``max_s``."""
        self._set_request(*gateway.encode(self._operation))
        self._connect()
        if self._connection is not None:
            if not self._connection.is_open and self._client.pool.is_encrypted:
                limit_s = max(limit_s, _TLS_HANDSHAKE_S)
            self._set_timer(min(limit_s, max_s), self._timed_out)

    def on_part(self, part: Part) -> None:
        if isinstance(part, Head):
            self._status = part.status
        elif isinstance(part, bytes):
            self._body.append(part)
            self._body_bytes += len(part)
            if self._body_bytes > _MAX_BODY_BYTES:
                self._end(Fault("rejected", f"the answer is larger than {_MAX_BODY_BYTES >> 20} MiB"))
        else:
            assert self._connection is not None
            self.local_address = self._connection.local_address
            if part.keeps_open:
                self._client.pool.give_back(self._connection)
                self._connection = None
            try:
                found = gateway.decode(self._operation, self._status, b"".join(self._body))
            except gateway.InvalidResponse as error:
                found = Fault("again", f"invalid response: {error}")
            self._end(found)

    def _lost(self, message: str) -> None:
        # A member that expects TLS closes a plain connection without an answer; so does one that exits.
        closed_silently = self._is_sent and not self._status and not self._client.pool.is_encrypted
        hint = " without an answer (if it expects TLS, use https://)" if closed_silently else ""
        self._end(Fault("again", message + hint, not self._is_sent, was_answered=False))

    def _timed_out(self) -> None:
        is_open = self._connection is not None and self._connection.is_open
        self._client.pool.forget(self.endpoint)
        trouble = "did not answer in time" if is_open else "cannot be reached"
        self._end(Fault("again", trouble, not self._is_sent, was_answered=False))

    def _end(self, found: Any) -> None:
        self.close()
        self._ended(found)
