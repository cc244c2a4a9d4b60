"""A watch stream: one watch at one endpoint, from a revision on. It reports once why it ended.

A silent stream is normal. After some silence a liveness check goes over another connection, because a member that hangs
keeps its connections open.
"""

from __future__ import annotations

from tenax._core.etcd.errors import EtcdRefused
from tenax._core.etcd.operations import Status
from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt, http_request
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import End, Head
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Change
    from tenax._io.etcd.client import EtcdClient, TokenWait
    from tenax._io.etcd.http_connection import Breakage, EtcdEndpoint, HttpConnection
    from tenax._io.etcd.http_response import Part
    from tenax._io.interfaces import Cancellable

_OPEN_S = 3.0  # the timeout for opening the watch
SILENT_S = 5.0  # the silence after which liveness is checked
_LIVENESS_S = 3.0
_MAX_LINE_BYTES = 512 << 20
_WITH_LEADER = "Grpc-Metadata-hasleader: true\r\n"  # a member without a leader ends the watch


class WatchStream:
    """One watch. ``changed`` gets changes as they arrive; ``ended`` gets the reason for the end."""

    def __init__(
        self,
        client: EtcdClient,
        endpoint: EtcdEndpoint,
        key: bytes,
        end: bytes,
        from_revision: int,
        changed: Callable[[list[Change]], None],
        ended: Callable[[Fault], None],
        opened: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.endpoint = endpoint
        self.is_open = False
        self._client = client
        self._body = gateway.encode_watch(key, end, from_revision)
        self._changed = changed
        self._ended = ended
        self._opened = opened
        self._silent_s = silent_s
        self._token = ""
        self._wait: TokenWait | None = None
        self._connection: HttpConnection | None = None
        self._timer: Cancellable = NO_TIMER
        self._received_at = 0.0
        self._liveness_check: Attempt | None = None
        self._status = 0
        self._line = bytearray()
        self._is_over = False

    def start(self) -> None:
        loop = self._client.loop
        self._client.streams.add(self)
        self._timer = loop.at(loop.now() + _OPEN_S, lambda: self._fail("did not answer in time"))
        self._wait = self._client.token.get(self._connect, self._no_token)

    def _connect(self, token: str) -> None:
        self._wait = None
        self._token = token
        try:
            self._connection = self._client.pool.take(self.endpoint, self)
        except EtcdRefused as error:
            self._end_soon(Fault("refused", error.message, was_answered=False))
            return
        if self._connection.is_open:
            self.on_open(self._connection)

    def _end_soon(self, fault: Fault) -> None:
        self._set_timer(0.0, lambda: self._end(fault))

    def _no_token(self, error: EtcdError) -> None:
        kind: gateway.FaultKind = "refused" if isinstance(error, EtcdRefused) else "again"
        self._end(Fault(kind, error.message, was_answered=False))

    # --- as the user of a connection ----------------------------------------------------------------------------------

    def on_open(self, connection: HttpConnection) -> None:
        connection.request(http_request(self.endpoint, gateway.WATCH_PATH, self._body, self._token, _WITH_LEADER))

    def on_part(self, connection: HttpConnection, part: Part) -> None:  # noqa: ARG002
        self._received_at = self._client.loop.now()
        if isinstance(part, Head):
            self._status = part.status
        elif isinstance(part, End):
            self._take_last_line()
        else:
            self._take_part(part)

    def _take_part(self, part: bytes) -> None:
        """Take the lines that end in this part. The rest is buffered, and not scanned again until its line ends."""
        *ends, rest = part.split(b"\n") if self._status == 200 else [part]
        for end in ends:
            if self._is_over:
                return
            line = bytes(self._line + end)
            self._line.clear()
            if line:
                self._take_line(line)
        self._line += rest
        if len(self._line) > _MAX_LINE_BYTES:
            self._fail(f"a message is larger than {_MAX_LINE_BYTES >> 20} MiB")

    def _take_line(self, line: bytes) -> None:
        try:
            self._take(gateway.decode_watch(line))
        except gateway.InvalidResponse as error:
            self._fail(f"invalid response: {error}")

    def _take_last_line(self) -> None:
        if self._status != 200:
            self._end(gateway.decode_fault(self._status, bytes(self._line)))
            return
        self._take_part(b"\n")
        self._fail("the watch ended")

    def _take(self, message: gateway.WatchMessage) -> None:
        if message.fault is not None:
            self._end(message.fault)
            return
        if message.is_open and not self.is_open:
            self.is_open = True
            self._set_timer(self._silent_s, self._check_liveness)
            self._opened()
        if message.changes and not self._is_over:
            self._changed(list(message.changes))

    def on_broken(self, connection: HttpConnection, breakage: Breakage) -> None:
        if connection.answered and not self._status:  # an idle connection was closed; try a new one
            self._client.pool.drop(connection)
            try:
                self._connection = self._client.pool.take(self.endpoint, self, is_new=True)
            except EtcdRefused as error:
                self._end(Fault("refused", error.message, was_answered=False))
            return
        kind: gateway.FaultKind = "tls" if breakage.is_about_tls else "again"
        self._end(Fault(kind, breakage.message, was_answered=False))

    # --- liveness -----------------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        loop = self._client.loop
        silent_s = loop.now() - self._received_at
        if silent_s < self._silent_s:
            self._set_timer(self._silent_s - silent_s, self._check_liveness)
            return
        self._liveness_check = Attempt(
            loop, self._client.pool, self.endpoint, Status(), self._token, self._is_alive, self._liveness_failed
        )
        self._liveness_check.start(_LIVENESS_S, _LIVENESS_S)

    def _is_alive(self, _: object) -> None:
        self._liveness_check = None
        self._set_timer(self._silent_s, self._check_liveness)

    def _liveness_failed(self, fault: Fault) -> None:
        self._liveness_check = None
        if fault.was_answered:  # an error answer is a sign of life, too
            self._set_timer(self._silent_s, self._check_liveness)
        else:
            self._fail(fault.message)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._timer.cancel()
        self._timer = self._client.loop.at(self._client.loop.now() + after_s, call)

    def _fail(self, why: str) -> None:
        self._end(Fault("again", why, was_answered=False))

    def _end(self, fault: Fault) -> None:
        if self._is_over:
            return
        self.close()
        if fault.kind in ("token", "refused"):  # perhaps only this member has dropped the token
            self._client.token.was_refused(self._token)
        self._ended(fault)

    def close(self) -> None:
        """Close without a callback."""
        self._is_over = True
        self._client.streams.discard(self)
        self._timer.cancel()
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        if self._liveness_check is not None:
            self._liveness_check.cancel()
            self._liveness_check = None
        if self._connection is not None:
            self._client.pool.drop(self._connection)
            self._connection = None
