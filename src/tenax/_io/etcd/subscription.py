"""A subscription: the current values of a range of keys, and every later change, across any number of streams.

Invariants:

1. ``begun`` gets all keys at one revision. ``changed`` then gets every later change, in order, exactly once.
2. If history is lost (compacted, or etcd was wiped or restored from a backup), ``begun`` is called again and replaces
   everything reported before. A linearizable read before every resumption detects this: the revision, the term or the
   cluster went back or changed. A cluster that was wiped during a disconnect and has a higher revision by then cannot
   be detected; a caller that must be sure reads again.
3. ``troubled`` gets each failure. Only a final error (``EtcdRefused``, ``EtcdRejected``) ends the subscription.
"""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdRefused, EtcdRejected
from tenax._core.etcd.operations import Range, Status
from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt, Exchange
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import Head
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Change, Header, RangeAnswer
    from tenax._io.etcd.call import EtcdCall
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.http_connection import EtcdEndpoint
    from tenax._io.etcd.http_response import Part
    from tenax._io.interfaces import Cancellable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_OPEN_S = 3.0  # the timeout for opening the watch
_SILENT_S = 5.0  # the silence after which liveness is checked
_LIVENESS_S = 3.0
_MAX_LINE_BYTES = 512 << 20
_WITH_LEADER = "Grpc-Metadata-hasleader: true\r\n"  # a member without a leader ends the watch


class Subscription(msgspec.Struct, eq=False):
    """A watch that is resumed until it is closed. ``silent_s``: see ``WatchStream``."""

    _client: EtcdClient
    _key: bytes
    _end: bytes
    _begun: Callable[[RangeAnswer], None]
    _changed: Callable[[list[Change]], None]
    _troubled: Callable[[EtcdError], None]
    silent_s: float = _SILENT_S
    next_revision: int = 0  # 0: all keys are listed first
    _call: EtcdCall | None = None
    _stream: WatchStream | None = None
    _timer: Cancellable = NO_TIMER
    _origin: Header | None = None
    _pause_s: float = _FIRST_PAUSE_S
    _refusals: int = 0  # in a row
    _is_closed: bool = False

    def start(self) -> None:
        self._list()

    @property
    def endpoint(self) -> str:
        """The endpoint of the open stream; empty without one."""
        return self._stream.endpoint.name if self._stream is not None and self._stream.is_open else ""

    def _list(self) -> None:
        self._call = self._client.call(Range(self._key, self._end), self._listed, self._fail)

    def _listed(self, answer: RangeAnswer) -> None:
        self.next_revision = answer.revision + 1
        self._origin = answer.header
        self._begun(answer)
        if not self._is_closed:
            self._watch()

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        body = gateway.encode_watch(self._key, self._end, self.next_revision)
        at, ended, opened = self._client.preferred_endpoint, self._stream_ended, self._stream_opened
        self._stream = WatchStream(self._client, at, body, self._take, ended, opened, self.silent_s)
        self._stream.start()

    def _stream_opened(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._refusals = 0

    def _take(self, changes: list[Change]) -> None:
        new = [change for change in changes if change.kv.mod_revision >= self.next_revision]
        if new:
            self.next_revision = new[-1].kv.mod_revision + 1
            self._changed(new)

    def _stream_ended(self, fault: Fault) -> None:
        assert self._stream is not None
        endpoint, self._stream = self._stream.endpoint, None
        error = fault.error(endpoint.name)
        if fault.kind == "compacted":
            self.next_revision = 0
        else:
            self._client.endpoint_after(endpoint)
        if fault.kind in ("token", "refused", "tls"):
            self._refusals += 1
            if self._refusals <= self._client.endpoint_count:  # perhaps only this member, or a dropped token
                self._resume_later()
                return
        self._fail(error)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRefused | EtcdRejected):
            self.close()
        else:
            self._resume_later()
        self._troubled(error)

    def _resume_later(self) -> None:
        loop = self._client.loop
        self._timer = loop.at(loop.now() + self._pause_s, self._resume)
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)

    def _resume(self) -> None:
        """Check first that etcd has not been wiped or restored."""
        if self.next_revision == 0:
            self._list()
        else:
            count = Range(self._key, self._end, count_only=True)
            self._call = self._client.call(count, self._check_origin, self._fail)

    def _check_origin(self, answer: RangeAnswer) -> None:
        was = self._origin
        assert was is not None
        has_changed = (
            answer.revision < self.next_revision - 1
            or answer.header.cluster_id != was.cluster_id
            or answer.header.raft_term < was.raft_term
        )
        if has_changed:
            self._list()
        else:
            self._origin = answer.header
            self._watch()

    def close(self) -> None:
        """Close without a callback."""
        self._is_closed = True
        self._timer.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class WatchStream(Exchange, eq=False):
    """One watch at one endpoint. ``changed`` gets changes as they arrive; ``ended`` gets the reason for the end, once.

    A silent stream is normal. After some silence a liveness check goes over another connection, because a member that
    hangs keeps its connections open.
    """

    _client: EtcdClient
    endpoint: EtcdEndpoint
    _body: bytes  # see ``gateway.encode_watch``
    _changed: Callable[[list[Change]], None]
    _ended: Callable[[Fault], None]
    _opened: Callable[[], None] = lambda: None
    _silent_s: float = _SILENT_S  # the silence after which liveness is checked
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
