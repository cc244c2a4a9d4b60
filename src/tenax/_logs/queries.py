"""Log queries in the log writer: clients that request lines and wait for them.

1. The loop never reads a file: a ``DeviceThread`` does, started by the first query. It gets copies of what is in
   memory.
2. A waiting query is answered when there is something new, shortly after it arrived so that a burst is one answer, or
   when its time is up, with everything that has arrived by then. The end of the streams counts as new only with
   ``until_over``: other clients wait for streams that do not exist yet.
3. A disk that does not respond costs only the queries their answer.
4. Data is in memory before it is in its file. A query that needs more than memory has waits briefly until the file has
   been written.
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

    StreamRequest = tuple[Any, bytes, int, int]  # key, file, group, start (-1: the last lines)

_COALESCE_S = 0.05  # new data within that time is one answer
_DISK_TIMEOUT_S = 5.0
_WRITE_WAIT_S = 1.0  # for data that is still being written to a file
_NEVER = float("inf")
NO_DISK = "the disk with the log files does not respond"


class _PendingQuery:
    disk_deadline: float | None = None  # set while the thread reads
    write_deadline: float | None = None  # for data that is still being written to a file
    has_retried = False  # after its deadline

    def __init__(
        self, request: int, streams: list[StreamRequest], asked: dict[str, Any], incarnation: int, now: float
    ) -> None:
        self.request = request
        self.streams = streams
        self.incarnation = incarnation  # of the log writer that returned the positions
        self.deadline = now + asked.pop("wait_s")  # answer then in any case
        self.due_at = now if streams else _NEVER  # when to read: there may be lines already; never: at new data
        self.until_over = asked.pop("until_over", False)  # the end of the streams is an answer
        self.query = Query(**asked)
        self.seen: list[tuple[int, bool]] = []  # state of the streams at the last read


class LogQueries:
    """All pending queries. ``answer`` gets the request's number and the result for the agent."""

    def __init__(
        self,
        find: Callable[[Any], Stream | None],
        answer: Callable[[int, dict[str, Any]], None],
        wake_loop: Callable[[], None],
        incarnation: int,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_behind``: whether data is still being written to a file."""
        self._find = find
        self._answer = answer
        self._wake_loop = wake_loop
        self._incarnation = incarnation
        self._is_behind = is_behind
        self._open: dict[int, _PendingQuery] = {}
        self._results: list[tuple[int, QueryResult | str]] = []  # of the thread
        # Never updated, so never full: the agent bounds the number of queries.
        self._device = DeviceThread(self._run_queries, wake_loop, limit_bytes=1 << 30, stuck_after_s=_DISK_TIMEOUT_S)

    def add(
        self, request: int, streams: list[StreamRequest], asked: dict[str, Any], incarnation: int, now: float
    ) -> None:
        self._open[request] = _PendingQuery(request, streams, asked, incarnation, now)

    def answer_now(self, now: float, requests: Iterable[int] = ()) -> None:
        """Answer these queries now, or all of them: the agent has news for them."""
        selected = set(requests)
        for pending in self._open.values():
            if not selected or pending.request in selected:
                pending.deadline = pending.due_at = now

    @property
    def next_deadline(self) -> float:
        waits = (pending.disk_deadline or min(pending.due_at, pending.deadline) for pending in self._open.values())
        return min(waits, default=_NEVER)

    def update(self, now: float) -> None:
        """Process results and start what is due. Called after every round of the loop."""
        while self._results:
            request, found = self._results.pop(0)
            if request in self._open:
                self._on_found(self._open[request], found, now)
        for pending in list(self._open.values()):
            if pending.disk_deadline is not None:
                if now >= pending.disk_deadline:
                    self._finish(pending, {"error": NO_DISK})
            elif now >= min(pending.due_at, pending.deadline):
                self._start(pending, now)
            elif pending.due_at == _NEVER and self._stream_states(pending) != pending.seen:
                pending.due_at = now + _COALESCE_S

    def _stream_states(self, pending: _PendingQuery) -> list[tuple[int, bool]]:
        streams = [self._find(key) for key, *_ in pending.streams]
        return [(stream.tail.end, stream.descriptor >= 0) if stream is not None else (0, False) for stream in streams]

    def _start(self, pending: _PendingQuery, now: float) -> None:
        if pending.write_deadline is None:
            pending.write_deadline = now + _WRITE_WAIT_S
        if now < pending.write_deadline and self._is_behind() and any(map(self._needs_file, pending.streams)):
            pending.due_at = now + _COALESCE_S
            pending.deadline = max(pending.deadline, pending.due_at)
            return
        pending.seen = self._stream_states(pending)
        pending.due_at = _NEVER
        pending.disk_deadline = now + _DISK_TIMEOUT_S
        makers = [self._snapshot(stream_request, pending.incarnation) for stream_request in pending.streams]
        self._device.put((pending.request, makers, pending.query), 1)

    def _needs_file(self, stream_request: StreamRequest) -> bool:
        stream = self._find(stream_request[0])
        return stream is None or (stream.file is not None and stream_request[3] < stream.tail.first)

    def _snapshot(self, stream_request: StreamRequest, incarnation: int) -> dict[str, Any]:
        """Return the arguments of a ``Source``. The thread opens the file."""
        key, path, group, start = stream_request
        stream = self._find(key)
        if stream is None:
            return {"group": group, "path": path, "start": start, "in_memory": False}
        tail, file = stream.tail, stream.file
        is_lost = start > 0 and incarnation != self._incarnation
        start = 0 if is_lost and file is None else min(start, tail.end)
        needs_file = start < tail.first  # also for the last lines (-1)
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

    def _run_queries(self, batch: list[tuple[int, list[dict[str, Any]], Query]]) -> None:
        """Runs in the thread."""
        for request, makers, query in batch:
            found: QueryResult | str
            try:
                sources = [Source(**maker) for maker in makers]
                found = (following if any(source.start >= 0 for source in sources) else last)(sources, query)
            except Exception as error:  # a query must never crash the log writer
                found = f"{type(error).__name__}: {error}"
            self._results.append((request, found))
            self._wake_loop()

    def _on_found(self, pending: _PendingQuery, found: QueryResult | str, now: float) -> None:
        pending.disk_deadline = None
        if isinstance(found, str):
            self._finish(pending, {"error": found})
            return
        is_end = found.is_over and pending.until_over and bool(pending.streams)
        is_news = found.lines or found.left_out or found.is_more or is_end
        is_late = now >= pending.deadline
        # Data that arrived during the read must not be answered as empty. Read again only once.
        has_new_data = not pending.has_retried and self._stream_states(pending) != pending.seen
        if not is_news and (not is_late or has_new_data):
            pending.has_retried = is_late
            # Continue after what was searched without a match.
            starts = zip(pending.streams, found.positions, strict=True)
            pending.streams = [(key, path, group, start) for (key, path, group, _), start in starts]
            pending.incarnation = self._incarnation
            return
        lines = [(line.source, line.at, line.text) for line in found.lines]
        self._finish(pending, {**found._asdict(), "lines": lines, "incarnation": self._incarnation})

    def _finish(self, pending: _PendingQuery, answer: dict[str, Any]) -> None:
        del self._open[pending.request]
        self._answer(pending.request, answer)
