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
from tenax._core.etcd.operations import Range
from tenax._io.etcd.gateway import encode_watch
from tenax._io.etcd.watch_stream import SILENT_S, WatchStream
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Change, Header, RangeAnswer
    from tenax._io.etcd.call import EtcdCall
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.gateway import Fault
    from tenax._io.interfaces import Cancellable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class Subscription(msgspec.Struct, eq=False):
    """A watch that is resumed until it is closed. ``silent_s``: see ``WatchStream``."""

    _client: EtcdClient
    _key: bytes
    _end: bytes
    _begun: Callable[[RangeAnswer], None]
    _changed: Callable[[list[Change]], None]
    _troubled: Callable[[EtcdError], None]
    silent_s: float = SILENT_S
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
        self._call = self._client.call(Range(self._key, self._end), self._listed, self._call_failed)

    def _listed(self, answer: RangeAnswer) -> None:
        self._call = None
        self.next_revision = answer.revision + 1
        self._origin = answer.header
        self._begun(answer)
        if not self._is_closed:
            self._watch()

    def _call_failed(self, error: EtcdError) -> None:
        self._call = None
        self._fail(error)

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        body = encode_watch(self._key, self._end, self.next_revision)
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
            self._call = self._client.call(count, self._check_origin, self._call_failed)

    def _check_origin(self, answer: RangeAnswer) -> None:
        self._call = None
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
        self._call = self._stream = None
