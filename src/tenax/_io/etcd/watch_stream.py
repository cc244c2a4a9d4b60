"""A watch stream: one watch at one place, from a revision on, until it ends. It says once how it ended.

A stream that says nothing is normal. That its place still lives is asked over another connection whenever it was silent
for a while: a member that hangs keeps its connections open.
"""

from __future__ import annotations

from tenax._io.etcd import gateway
from tenax._io.etcd.attempt import Attempt, http_request
from tenax._io.etcd.errors import EtcdRefused
from tenax._io.etcd.gateway import Fault
from tenax._io.etcd.http_response import End, Head
from tenax._io.etcd.operations import Status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.etcd.address import Place
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.http_connection import Breakage, HttpConnection
    from tenax._io.etcd.http_response import Part
    from tenax._io.etcd.operations import AnyAnswer, Change
    from tenax._io.etcd.token import TokenWait
    from tenax._io.ports import Cancellable

_OPEN_S = 3.0  # at most, until etcd says that the watch is there
SILENT_S = 5.0  # then its place is asked whether it lives
_LIFE_SIGN_S = 3.0
_MAX_LINE_BYTES = 512 << 20
_WITH_LEADER = "Grpc-Metadata-hasleader: true\r\n"  # a member that has lost the others ends the watch


class WatchStream:
    """One watch. ``changed`` gets changes as they come; ``ended`` why there will be no more."""

    def __init__(
        self,
        client: EtcdClient,
        place: Place,
        key: bytes,
        end: bytes,
        from_revision: int,
        changed: Callable[[list[Change]], None],
        ended: Callable[[Fault], None],
        opened: Callable[[], None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.place = place
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
        self._timer: Cancellable | None = None
        self._heard_at = 0.0
        self._life_sign: Attempt | None = None
        self._status = 0
        self._line = bytearray()
        self._is_over = False

    def start(self) -> None:
        loop = self._client.loop
        self._client.add_stream(self)
        self._timer = loop.at(loop.now() + _OPEN_S, lambda: self._fail("did not answer in time"))
        self._wait = self._client.token.get(self._connect, self._no_token)

    def _connect(self, token: str) -> None:
        self._wait = None
        self._token = token
        try:
            self._connection = self._client.pool.take(self.place, self)
        except EtcdRefused as error:
            self._end_soon(Fault("refused", error.sentence, was_answered=False))
            return
        if self._connection.is_open:
            self.on_open(self._connection)

    def _end_soon(self, fault: Fault) -> None:
        self._set_timer(0.0, lambda: self._end(fault))

    def _no_token(self, error: EtcdError) -> None:
        kind: gateway.FaultKind = "refused" if isinstance(error, EtcdRefused) else "again"
        self._end(Fault(kind, error.sentence, was_answered=False))

    # --- as the user of a connection ----------------------------------------------------------------------------------

    def on_open(self, connection: HttpConnection) -> None:
        connection.request(http_request(self.place, gateway.WATCH_PATH, self._body, self._token, _WITH_LEADER))

    def on_part(self, connection: HttpConnection, part: Part) -> None:  # noqa: ARG002
        self._heard_at = self._client.loop.now()
        if isinstance(part, Head):
            self._status = part.status
        elif isinstance(part, End):
            self._take_last_line()
        else:
            self._take_part(part)

    def _take_part(self, part: bytes) -> None:
        """Take the lines that end in this part. The rest is kept, and not looked at again until its line ends."""
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
            self._fail(f"it sent a message of more than {_MAX_LINE_BYTES >> 20} MiB")

    def _take_line(self, line: bytes) -> None:
        try:
            self._take(gateway.decode_watch(line))
        except gateway.Nonsense as error:
            self._fail(f"it sent {error}")

    def _take_last_line(self) -> None:
        if self._status != 200:
            self._end(gateway.decode_fault(self._status, bytes(self._line)))
            return
        self._take_part(b"\n")
        self._fail("it ended the watch")

    def _take(self, news: gateway.WatchNews) -> None:
        if news.fault is not None:
            self._end(news.fault)
            return
        if news.is_open and not self.is_open:
            self.is_open = True
            self._set_timer(self._silent_s, self._look_whether_it_lives)
            self._opened()
        if news.changes and not self._is_over:
            self._changed(list(news.changes))

    def on_broken(self, connection: HttpConnection, breakage: Breakage) -> None:
        if connection.answered and not self._status:  # it idled too long; a new one may do
            self._client.pool.drop(connection)
            try:
                self._connection = self._client.pool.take(self.place, self, is_new=True)
            except EtcdRefused as error:
                self._end(Fault("refused", error.sentence, was_answered=False))
            return
        kind: gateway.FaultKind = "tls" if breakage.is_about_tls else "again"
        self._end(Fault(kind, breakage.sentence, was_answered=False))

    # --- whether it lives ---------------------------------------------------------------------------------------------

    def _look_whether_it_lives(self) -> None:
        loop = self._client.loop
        silent_s = loop.now() - self._heard_at
        if silent_s < self._silent_s:
            self._set_timer(self._silent_s - silent_s, self._look_whether_it_lives)
            return
        self._timer = None
        self._life_sign = Attempt(
            loop, self._client.pool, self.place, Status(), self._token, self._lives, self._seems_dead
        )
        self._life_sign.start(_LIFE_SIGN_S, _LIFE_SIGN_S)

    def _lives(self, _: AnyAnswer) -> None:
        self._life_sign = None
        self._set_timer(self._silent_s, self._look_whether_it_lives)

    def _seems_dead(self, fault: Fault) -> None:
        self._life_sign = None
        if fault.was_answered:  # whatever it said, it lives
            self._set_timer(self._silent_s, self._look_whether_it_lives)
        else:
            self._fail(fault.message)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._client.loop.at(self._client.loop.now() + after_s, call)

    def _fail(self, why: str) -> None:
        self._end(Fault("again", why, was_answered=False))

    def _end(self, fault: Fault) -> None:
        if self._is_over:
            return
        self.close()
        if fault.kind in ("token", "refused"):  # this member may only have forgotten our token
            self._client.token.was_refused(self._token)
        self._ended(fault)

    def close(self) -> None:
        """Our own wish: nobody is told."""
        self._is_over = True
        self._client.forget_stream(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        if self._life_sign is not None:
            self._life_sign.cancel()
            self._life_sign = None
        if self._connection is not None:
            self._client.pool.drop(self._connection)
            self._connection = None
