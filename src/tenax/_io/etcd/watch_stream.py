"""A watch stream: one watch at one endpoint, from a revision on. It reports once why it ended.

A silent stream is normal. After some silence a liveness check goes over another connection, because a member that hangs
keeps its connections open.
"""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdRefused
from tenax._core.etcd.operations import Status
from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt, Exchange
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import Head

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Change
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.http_connection import EtcdEndpoint
    from tenax._io.etcd.http_response import Part

_OPEN_S = 3.0  # the timeout for opening the watch
SILENT_S = 5.0  # the silence after which liveness is checked
_LIVENESS_S = 3.0
_MAX_LINE_BYTES = 512 << 20
_WITH_LEADER = "Grpc-Metadata-hasleader: true\r\n"  # a member without a leader ends the watch


class WatchStream(Exchange, eq=False):
    """One watch. ``changed`` gets changes as they arrive; ``ended`` gets the reason for the end."""

    _client: EtcdClient
    endpoint: EtcdEndpoint
    _body: bytes  # see ``gateway.encode_watch``
    _changed: Callable[[list[Change]], None]
    _ended: Callable[[Fault], None]
    _opened: Callable[[], None] = lambda: None
    _silent_s: float = SILENT_S  # the silence after which liveness is checked
    is_open: bool = False
    _received_at: float = 0.0
    _liveness_check: Attempt | None = None
    _line: bytearray = msgspec.field(default_factory=bytearray)
    _is_over: bool = False

    def start(self) -> None:
        self._client.streams.add(self)
        self._set_timer(_OPEN_S, lambda: self._lost("did not answer in time"))
        self._client.token.get(self._send, self._no_token)

    def _send(self, token: str) -> None:
        if not self._is_over:
            self.token = token
            self._set_request(gateway.WATCH_PATH, self._body, _WITH_LEADER)
            self._connect()

    def _no_token(self, error: EtcdError) -> None:
        kind: gateway.FaultKind = "refused" if isinstance(error, EtcdRefused) else "again"
        self._end(Fault(kind, error.message, was_answered=False))

    # --- the response -------------------------------------------------------------------------------------------------

    def on_part(self, part: Part) -> None:
        self._received_at = self._client.loop.now()
        if isinstance(part, Head):
            self._status = part.status
        elif isinstance(part, bytes):
            self._take_part(part)
        elif self._status == 200:
            self._take_part(b"\n")
            self._lost("the watch ended")
        else:
            self._end(gateway.decode_fault(self._status, bytes(self._line)))

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
            self._lost(f"a message is larger than {_MAX_LINE_BYTES >> 20} MiB")

    def _take_line(self, line: bytes) -> None:
        try:
            self._take(gateway.decode_watch(line))
        except gateway.InvalidResponse as error:
            self._lost(f"invalid response: {error}")

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

    # --- liveness -----------------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        silent_s = self._client.loop.now() - self._received_at
        if silent_s < self._silent_s:
            self._set_timer(self._silent_s - silent_s, self._check_liveness)
            return
        self._liveness_check = Attempt(self._client, self.endpoint, self.token, Status(), self._liveness_checked)
        self._liveness_check.start(_LIVENESS_S, _LIVENESS_S)

    def _liveness_checked(self, found: object) -> None:
        self._liveness_check = None
        if isinstance(found, Fault) and not found.was_answered:  # an error answer is a sign of life, too
            self._lost(found.message)
        else:
            self._set_timer(self._silent_s, self._check_liveness)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _lost(self, message: str) -> None:
        self._end(Fault("again", message, was_answered=False))

    def _end(self, found: Fault) -> None:
        if self._is_over:
            return
        self.close()
        if found.kind in ("token", "refused"):  # perhaps only this member has dropped the token
            self._client.token.was_refused(self.token)
        self._ended(found)

    def close(self) -> None:
        """Close without a callback."""
        super().close()
        self._is_over = True
        self._client.streams.discard(self)
        if self._liveness_check is not None:
            self._liveness_check.close()
            self._liveness_check = None
