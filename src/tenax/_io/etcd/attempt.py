"""An attempt: one question to one place, within a time. Answers once, never from within ``start``.

A connection that idled and turns out to be closed is replaced, once, without that being a failure.
"""

from __future__ import annotations

from tenax._io.etcd import gateway
from tenax._io.etcd.errors import EtcdRefused
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import Head

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.etcd.address import Place
    from tenax._io.etcd.http_connection import Breakage, HttpConnection
    from tenax._io.etcd.http_response import Part
    from tenax._io.etcd.operations import AnyAnswer, AnyOperation
    from tenax._io.etcd.pool import Pool
    from tenax._io.ports import Cancellable, EventLoop

_TLS_GREETING_S = 1.0  # at least, for a connection that has to be opened and encrypted first
_MAX_BODY_BYTES = 512 << 20


def http_request(place: Place, path: str, body: bytes, token: str = "", more: str = "") -> bytes:
    """The bytes of a request. ``more`` are further lines of its head, each with its end."""
    authorization = f"Authorization: {token}\r\n" if token else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {place.name}\r\nContent-Type: application/json\r\n"
        f"{authorization}{more}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1", "replace") + body


class Attempt:
    """One question at one place."""

    def __init__(
        self,
        loop: EventLoop,
        pool: Pool,
        place: Place,
        operation: AnyOperation,
        token: str,
        answered: Callable[[AnyAnswer], None],
        failed: Callable[[Fault], None],
    ) -> None:
        self.place = place
        self.sent_at = 0.0
        self.local_address = ""
        self.token = token
        self._loop = loop
        self._pool = pool
        self._operation = operation
        self._answered = answered
        self._failed = failed
        self._connection: HttpConnection | None = None
        self._timer: Cancellable | None = None
        self._request = b""
        self._is_sent = False  # it may be carried out
        self._status = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def start(self, limit_s: float, most_s: float) -> None:
        """``limit_s`` for an answer; ``most_s`` with everything that must be done before."""
        try:
            self._request = http_request(self.place, *gateway.encode(self._operation), self.token)
            self._connection = self._pool.take(self.place, self)
        except EtcdRefused as error:
            self._fail_soon(Fault("refused", error.sentence, is_certain=True, was_answered=False))
            return
        if not self._connection.is_open and self._pool.is_encrypted:
            limit_s = max(limit_s, _TLS_GREETING_S)
        self._timer = self._loop.at(self._loop.now() + min(limit_s, most_s), self._time_is_up)
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
            self._judge()

    def on_broken(self, connection: HttpConnection, breakage: Breakage) -> None:
        self._pool.drop(connection)
        if connection.answered and not self._status:  # it idled too long; a new one may do
            self._pool.forget(self.place)
            try:
                self._connection = self._pool.take(self.place, self, is_new=True)
            except EtcdRefused as error:
                self._end(Fault("refused", error.sentence, was_answered=False))
            return
        if breakage.is_about_tls:
            self._pool.read_files_again()
            self._end(Fault("tls", breakage.sentence, is_certain=True, was_answered=False))
        else:
            # A member that wants TLS just closes on one who does not speak it; and so does one that ends.
            is_mute = self._is_sent and not self._status and not self._pool.is_encrypted
            hint = " without an answer (if it expects TLS, use https://)" if is_mute else ""
            self._end(Fault("again", breakage.sentence + hint, not self._is_sent, was_answered=False))

    def _judge(self) -> None:
        try:
            found = gateway.decode(self._operation, self._status, b"".join(self._body))
        except gateway.Nonsense as error:
            self._end(Fault("again", f"it sent {error}"))
            return
        self._end(found)

    def _time_is_up(self) -> None:
        connection = self._connection
        waited_for = "did not answer in time" if connection is not None and connection.is_open else "cannot be reached"
        self._pool.forget(self.place)
        self._end(Fault("again", waited_for, not self._is_sent, was_answered=False))

    def _end(self, found: AnyAnswer | Fault) -> None:
        self.cancel()
        if isinstance(found, Fault):
            self._failed(found)
        else:
            self._answered(found)

    def cancel(self) -> None:
        """Nobody wants the answer any more; what was sent may be carried out all the same."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None:
            self._pool.drop(self._connection)
            self._connection = None

    @property
    def may_be_carried_out(self) -> bool:
        return self._is_sent
