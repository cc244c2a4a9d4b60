"""Recalls: who wants to see lines of the scribe's streams, and waits for them.

1. The scribe's loop never reads a file for them: a thread does (a ``DeviceThread``), started when somebody asks. What
it needs
   of memory it is given as copies.
2. Whoever asked to wait is answered when there is something new, a moment later so that a flood is one answer, or when
   its time is up; what had come by then is in the answer. That streams have ended is new only to those who asked for
   these alone: others wait for streams that do not exist yet.
3. A disk that does not answer costs those who asked their answer, and nobody else anything.
4. What has come is in memory before it is in its file. Who wants more than memory has waits, a moment, until the file
   has what is on its way.
"""

from __future__ import annotations

from tenax._logs.device_thread import DeviceThread
from tenax._logs.query import LOST, MAY_BE_LOST, Query, Source, following, last

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from tenax._logs.query import QueryResult
    from tenax._logs.writer_main import Stream

    Want = tuple[Any, bytes, int, int]  # key, file, group, start (-1: the last lines)

_TOGETHER_S = 0.05  # what is new within that time is one answer
_DISK_S = 5.0  # how long a disk may take
_ON_ITS_WAY_S = 1.0  # how long what is on its way to a file is waited for
NO_DISK = "the disk with the log files does not answer"


class _Recall:
    """One who asked."""

    def __init__(self, request: int, wants: list[Want], query: Query, incarnation: int, deadline: float) -> None:
        self.request = request
        self.wants = wants
        self.query = query
        self.incarnation = incarnation  # of the scribe that gave the positions
        self.deadline = deadline  # answer then, whatever there is
        self.look_at: float | None = deadline  # when to look; None: when something has come
        self.seen: list[tuple[int, bool]] = []  # how far the streams were when it was looked at
        self.reading_until: float | None = None
        self.patient_until: float | None = None  # for what is on its way to a file
        self.has_looked_again = False  # although its time was up
        self.until_over = False  # the end of the streams is worth an answer


class LogQueries:
    """All of them. ``answer`` gets the request's number and the values for the agent."""

    def __init__(
        self,
        find: Callable[[Any], Stream | None],
        answer: Callable[[int, dict[str, Any]], None],
        wake_loop: Callable[[], None],
        incarnation: int,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_behind``: whether something is on its way to a file."""
        self._find = find
        self._answer = answer
        self._wake_loop = wake_loop
        self._incarnation = incarnation
        self._is_behind = is_behind
        self._open: dict[int, _Recall] = {}
        self._read: list[tuple[int, QueryResult | str]] = []  # what the thread has found
        # Never full, never judged: what is asked is bounded by the agent.
        self._lane = DeviceThread(self._look_up, wake_loop, limit_bytes=1 << 30, stuck_after_s=_DISK_S)

    def add(self, request: int, wants: list[Want], asked: dict[str, Any], incarnation: int, now: float) -> None:
        wait_s, until_over = asked.pop("wait_s"), asked.pop("until_over", False)
        query = Query(**asked)
        recall = self._open[request] = _Recall(request, wants, query, incarnation, now + wait_s)
        recall.until_over = until_over
        if wants:
            recall.look_at = now  # something may be there already

    def hurry(self, now: float, requests: Iterable[int] = ()) -> None:
        """Something has changed that only the agent knows: answer these, or everybody."""
        meant = set(requests)
        for recall in self._open.values():
            if not meant or recall.request in meant:
                recall.deadline = recall.look_at = now

    @property
    def next_deadline(self) -> float | None:
        moments = []
        for recall in self._open.values():
            if recall.reading_until is not None:
                moments.append(recall.reading_until)
            else:
                moments.append(recall.deadline if recall.look_at is None else min(recall.look_at, recall.deadline))
        return min(moments, default=None)

    def look(self, now: float) -> None:
        """After every round of the loop."""
        while self._read:
            request, found = self._read.pop(0)
            if request in self._open:
                self._on_found(self._open[request], found, now)
        for recall in list(self._open.values()):
            if recall.reading_until is not None:
                if now >= recall.reading_until:
                    self._done(recall, {"error": NO_DISK})
            elif now >= recall.deadline or (recall.look_at is not None and now >= recall.look_at):
                self._begin(recall, now)
            elif recall.look_at is None and self._how_far(recall) != recall.seen:
                recall.look_at = now + _TOGETHER_S

    def _how_far(self, recall: _Recall) -> list[tuple[int, bool]]:
        streams = [self._find(key) for key, *_ in recall.wants]
        return [(stream.tail.end, stream.descriptor >= 0) if stream is not None else (0, False) for stream in streams]

    def _begin(self, recall: _Recall, now: float) -> None:
        if recall.patient_until is None:
            recall.patient_until = now + _ON_ITS_WAY_S
        if now < recall.patient_until and self._is_behind() and any(map(self._needs_file, recall.wants)):
            recall.look_at = now + _TOGETHER_S
            recall.deadline = max(recall.deadline, recall.look_at)
            return
        recall.seen = self._how_far(recall)
        recall.look_at = None
        recall.reading_until = now + _DISK_S
        makers = [self._snapshot(want, recall.incarnation) for want in recall.wants]
        self._lane.put((recall.request, makers, recall.query), 1)

    def _needs_file(self, want: Want) -> bool:
        stream = self._find(want[0])
        return stream is None or (stream.file is not None and want[3] < stream.tail.first)

    def _snapshot(self, want: Want, incarnation: int) -> dict[str, Any]:
        """What a ``Source`` is made of. The file is opened by the thread."""
        key, path, group, start = want
        stream = self._find(key)
        if stream is None:
            return {"group": group, "path": path, "start": start, "in_memory": False}
        tail, file = stream.tail, stream.file
        is_lost = start > 0 and incarnation != self._incarnation
        start = 0 if is_lost and file is None else min(start, tail.end)
        needs_file = start < tail.first  # also when the last lines are wanted
        is_usable = file is not None and needs_file and file.is_in_step
        return {
            "group": group,
            "data": tail.since(start),
            "first": max(tail.first, start),
            "marks": tail.marks,
            "path": file.path if file is not None and is_usable else b"",
            "base": file.began_at if file is not None and not stream.is_resumed else 0,
            "is_open": stream.descriptor >= 0,
            "start": start,
            "lost_why": "" if not is_lost else LOST if file is None else MAY_BE_LOST,
            "is_resumed": stream.is_resumed,
        }

    def _look_up(self, batch: list[tuple[int, list[dict[str, Any]], Query]]) -> None:
        """In the thread."""
        for request, makers, query in batch:
            found: QueryResult | str
            try:
                sources = [Source(**maker) for maker in makers]
                found = (following if any(source.start >= 0 for source in sources) else last)(sources, query)
            except Exception as error:  # whoever asks must never be the end of the scribe
                found = f"{type(error).__name__}: {error}"
            self._read.append((request, found))
            self._wake_loop()

    def _on_found(self, recall: _Recall, found: QueryResult | str, now: float) -> None:
        recall.reading_until = None
        if isinstance(found, str):
            self._done(recall, {"error": found})
            return
        is_end = found.is_over and recall.until_over and bool(recall.wants)
        is_news = found.lines or found.left_out or found.is_more or is_end
        is_late = now >= recall.deadline
        if not is_news and (not is_late or self._has_come_meanwhile(recall)):
            recall.has_looked_again = is_late
            # What was looked at in vain is not looked at again.
            starts = zip(recall.wants, found.positions, strict=True)
            recall.wants = [(key, path, group, start) for (key, path, group, _), start in starts]
            recall.incarnation = self._incarnation
            return
        self._done(
            recall,
            {
                "lines": [(line.source, line.at, line.text) for line in found.lines],
                "positions": found.positions,
                "left_out": found.left_out,
                "is_more": found.is_more,
                "is_over": found.is_over,
                "incarnation": self._incarnation,
            },
        )

    def _has_come_meanwhile(self, recall: _Recall) -> bool:
        """While it was being looked: the answer must not be that there was nothing. But only once."""
        return not recall.has_looked_again and self._how_far(recall) != recall.seen

    def _done(self, recall: _Recall, answer: dict[str, Any]) -> None:
        del self._open[recall.request]
        self._answer(recall.request, answer)
