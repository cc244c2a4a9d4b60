"""Following: what some keys are, and every change of them, for ever.

Laws:

1. ``begun`` gets all of them at one revision; ``changed`` then every change after it, in order, each exactly once,
   however many streams that takes.
2. Where the past is lost (compacted, or etcd was wiped or restored from a backup), ``begun`` is called again; nothing
   that was told before counts any more. That etcd went back is seen by a linearizable read before every resumption: its
   revision, its term or its cluster are not what they were. One that was wiped while we were away, and has by then
   come further than the one before, cannot be told from it: who must know reads again.
3. ``troubled`` is told each failure. Only what etcd will never grant (``EtcdRefused``, ``EtcdRejected``) ends it.
"""

from __future__ import annotations

from tenax._io.etcd.errors import EtcdRefused, EtcdRejected
from tenax._io.etcd.operations import Change, Range
from tenax._io.etcd.watch_stream import SILENT_S, WatchStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.etcd.call import EtcdCall
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.gateway import Fault
    from tenax._io.etcd.operations import Origin, RangeAnswer
    from tenax._io.ports import Cancellable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class Subscription:
    """One watch, resumed for ever."""

    def __init__(
        self,
        client: EtcdClient,
        key: bytes,
        end: bytes,
        begun: Callable[[RangeAnswer], None],
        changed: Callable[[list[Change]], None],
        troubled: Callable[[EtcdError], None],
        *,
        silent_s: float = SILENT_S,
    ) -> None:
        """A member that said nothing for ``silent_s`` is asked whether it lives."""
        self._client = client
        self._key = key
        self._end = end
        self._begun = begun
        self._changed = changed
        self._troubled = troubled
        self._silent_s = silent_s
        self._call: EtcdCall | None = None
        self._stream: WatchStream | None = None
        self._timer: Cancellable | None = None
        self._next_revision = 0
        self._origin: Origin | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._refusals = 0  # in a row
        self._is_closed = False

    def start(self) -> None:
        self._list()

    @property
    def place(self) -> str:
        """The endpoint that it is connected to at the moment; empty while there is none."""
        return self._stream.place.name if self._stream is not None and self._stream.is_open else ""

    def _list(self) -> None:
        self._timer = None
        self._call = self._client.call(Range(self._key, self._end), self._listed, self._no_answer)

    def _listed(self, answer: RangeAnswer) -> None:
        self._call = None
        self._next_revision = answer.revision + 1
        self._origin = answer.origin
        self._begun(answer)
        if not self._is_closed:
            self._watch()

    def _no_answer(self, error: EtcdError) -> None:
        self._call = None
        self._fail(error)

    # --- the stream ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._stream = WatchStream(
            self._client,
            self._client.best_place,
            self._key,
            self._end,
            self._next_revision,
            self._take,
            self._stream_ended,
            self._stream_opened,
            self._silent_s,
        )
        self._stream.start()

    def _stream_opened(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        self._refusals = 0

    def _take(self, changes: list[Change]) -> None:
        new = [change for change in changes if change.kv.mod_revision >= self._next_revision]
        if new:
            self._next_revision = new[-1].kv.mod_revision + 1
            self._changed(new)

    def _stream_ended(self, fault: Fault) -> None:
        assert self._stream is not None
        place, self._stream = self._stream.place, None
        error = fault.error(place.name)
        if fault.kind == "compacted":
            self._next_revision = 0
        elif fault.kind in ("again", "tls"):
            self._client.place_after(place)
        if fault.kind in ("token", "refused", "tls"):
            self._refusals += 1
            if self._refusals <= self._client.place_count:  # it may be this member alone, or a token that it forgot
                self._go_on_later()
                return
        self._fail(error)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, error: EtcdError) -> None:
        if isinstance(error, EtcdRefused | EtcdRejected):
            self.close()
        else:
            self._go_on_later()
        self._troubled(error)

    def _go_on_later(self) -> None:
        loop = self._client.loop
        self._timer = loop.at(loop.now() + self._pause_s, self._go_on)
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)

    def _go_on(self) -> None:
        """Look first whether it is still the etcd that we knew."""
        self._timer = None
        if self._next_revision == 0:
            self._list()
        else:
            question = Range(self._key, self._end, count_only=True)
            self._call = self._client.call(question, self._compare, self._no_answer)

    def _compare(self, answer: RangeAnswer) -> None:
        self._call = None
        was = self._origin
        assert was is not None
        is_another = (
            answer.revision < self._next_revision - 1
            or answer.origin.cluster_id != was.cluster_id
            or answer.origin.term < was.term
        )
        if is_another:
            self._list()
        else:
            self._origin = answer.origin
            self._watch()

    def close(self) -> None:
        """Nobody is told anything any more."""
        self._is_closed = True
        for thing in (self._timer, self._call):
            if thing is not None:
                thing.cancel()
        if self._stream is not None:
            self._stream.close()
        self._timer = self._call = self._stream = None


__all__ = ["Change", "Subscription"]
