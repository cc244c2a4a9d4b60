"""Queries lines of several streams, from memory and from files, merged by time. Bounded, whatever the streams hold.

Two kinds: the *last* lines (``last``), or what *follows* given positions (``following``). Both take sources of bytes
with positions, and return lines, the positions where they end, and what was left out.

1. Lines of one stream are in order, and each is returned once if the caller passes every position back.
2. Lines of different streams are merged by arrival time, as far as it is known.
3. A result holds at most ``MAX_BYTES``; at most ``MAX_SEARCHED`` bytes of each stream are searched for it.
4. An unreadable stream is not an error: it is left out and reported.
5. At most two files are open at a time, however many streams are queried: descriptors are reserved for workers.

Runs in a thread of the log writer, and in ``tenax logs`` for folders. Uses the standard library alone.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

from tenax._logs.tail import TAIL_BYTES, Mark
from tenax._logs.times import FOR_READING, TimesReader

MAX_BYTES = 256 << 10
MAX_SEARCHED = 16 << 20
_CHUNK = 256 << 10
_LINE_COST = 128  # of a line in a result, besides its text
_END_KEPT = 8 << 10  # at each end of a line that is too long
_MAX_LINE = 2 * _END_KEPT
_ENDLESS = float("inf")
CUT = b"[...] "  # before the rest of a line whose start is gone

FORGOTTEN = "are no longer in memory"
LOST = "are lost: they were only in memory, and the log writer died"
MAY_BE_LOST = "may be lost: the log writer died"
BEHIND = "cannot be read yet: they are not on disk"
TOO_MUCH = "do not fit into one answer"
NOT_SEARCHED = "are beyond the search limit"
UNREADABLE = "cannot be read"


class Query(NamedTuple):
    """Which lines of every stream to return."""

    last: int = 0
    needle: bytes = b""
    since: float = 0.0
    unfinished: bool = False
    max_bytes: int = MAX_BYTES


class Source:
    """One stream: its end in memory, its complete file, or both."""

    def __init__(
        self,
        *,
        group: int = 0,  # lower groups come first, whatever the time
        data: bytes = b"",
        first: int = 0,  # position of ``data``
        marks: Sequence[Mark] = (),
        path: bytes = b"",
        base: int = 0,  # where in the file the stream begins
        in_memory: bool = True,
        is_open: bool = False,
        start: int = -1,  # for ``following``
        lost_why: str = "",  # why data after ``start`` may be lost
        is_resumed: bool = False,  # an earlier log writer's memory of this stream was lost
    ) -> None:
        self.group = group
        self.data = data
        self.first = first
        self.end = first + len(data)
        self.marks = list(marks)
        self.is_open = is_open
        self.start = start
        self.lost: list[tuple[int, str]] = []  # bytes and why
        self.begin = first
        self._base = base
        self._path = b""  # of the file, if it can be read
        self._times: TimesReader | None = None
        self._limit = first  # the file is read up to here
        if path:
            self._open(path, in_memory)
        if lost_why:
            self.lost.append((0, lost_why))
        if not in_memory and not self._path:
            self.lost.append((0, UNREADABLE if path else FORGOTTEN))
        self.is_resumed = is_resumed
        # Whether nothing came before ``begin``; otherwise it is gone.
        self.is_whole = self.begin == 0 and (bool(self._path) or not is_resumed)

    def _open(self, path: bytes, in_memory: bool) -> None:
        try:
            descriptor = os.open(path, FOR_READING)
        except OSError:
            return
        found = os.fstat(descriptor)
        os.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return
        size = max(0, found.st_size - self._base)
        if not in_memory:
            self.first = self.end = self._limit = size
        elif size < self.first:  # the file is behind
            if self.start < 0:
                self.lost.append((self.first - size, BEHIND))
                return
            # Return what the file has; the rest is for the next query.
            self.data, self.first, self.end, self._limit = b"", size, size, size
            self.is_open = True
        self.begin = 0
        self._path = path
        self._times = TimesReader(path)

    def read(self, start: int, end: int) -> bytes:
        """Return these bytes; fewer at the end of the file's part, none at the end or on a disk error."""
        if start >= self._limit:
            return self.data[start - self.first : end - self.first]
        with suppress(OSError):
            descriptor = os.open(self._path, FOR_READING)
            try:
                return os.pread(descriptor, min(end, self._limit) - start, self._base + start)
            finally:
                os.close(descriptor)
        return b""

    def marks_of(self, start: int, end: int) -> list[Mark]:
        """Return the time marks for these positions, in order."""
        own = self.marks
        if self._times is None or (own and own[0][0] <= start):
            return own
        recorded = [
            (position - self._base, at) for position, at in self._times.between(start + self._base, end + self._base)
        ]
        until = own[0][0] if own else end
        return [mark for mark in recorded if mark[0] < until] + own

    def position_at(self, at: float) -> int:
        """Return the position of the first data that arrived at that time or later, or a little before it."""
        later = next((index for index, (_, arrived) in enumerate(self.marks) if arrived > at), len(self.marks))
        if later:  # the first mark: the clock may have been set back later
            return max(self.begin, self.marks[later - 1][0])
        if self._times is not None:
            return max(self.begin, self._times.position_at(at) - self._base)
        return self.begin


class Line(NamedTuple):
    source: int
    at: float
    text: bytes
    end: int  # the position after it; of an unfinished line, the position before it
    order: tuple[int, float]  # group and time, which is monotonic within a source even if the clock is set back
    is_unfinished: bool = False  # the stream is open, and the next query returns the line again


_ORDER = attrgetter("order")


class QueryResult(NamedTuple):
    lines: list[Line]
    positions: list[int]  # by source: where to continue
    left_out: list[tuple[int, int, str]]  # source, bytes (0: unknown), why
    is_more: bool = False
    is_over: bool = False  # every stream has ended and was returned completely


def following(sources: list[Source], query: Query) -> QueryResult:
    """Return what follows each source's ``start``, oldest first. Unfinished lines come when there is no more."""
    found: list[list[Line]] = []
    unfinished: list[list[Line]] = []
    starts: list[int] = []
    positions: list[int] = []
    left_out: list[tuple[int, int, str]] = []
    horizon: tuple[int, float] | None = None
    for index, source in enumerate(sources):
        start = source.start
        if start < source.begin:
            if source.begin - start and not source.is_whole:
                left_out.append((index, source.begin - start, FORGOTTEN))
            start = source.begin
        if query.since and source.start <= 0:
            start = max(start, source.position_at(query.since))
        starts.append(start)
        lines, position = _forward(index, source, start, query)
        unfinished.append([lines.pop()] if lines and lines[-1].is_unfinished else [])
        if (query.needle or lines) and _has_more(source, position):
            at = _time(source.marks_of(position, position + 1), position)
            stopped_at = lines[-1].order if lines else (source.group, at)
            horizon = min(horizon or stopped_at, stopped_at)
        found.append(lines)
        positions.append(position)
        left_out += [(index, count, why) for count, why in source.lost]
    taken: list[Line] = []
    size = 0
    for line in merge(*found, key=_ORDER):
        cost = len(line.text) + _LINE_COST
        is_late = horizon is not None and line.order > horizon
        if is_late or (taken and size + cost > query.max_bytes):
            break
        size += cost
        taken.append(line)
    kept = Counter(line.source for line in taken)
    for index, lines in enumerate(found):
        if kept[index] < len(lines):  # the rest is for the next query
            positions[index] = lines[kept[index] - 1].end if kept[index] else starts[index]
    is_more = len(taken) < sum(map(len, found)) or horizon is not None
    if not is_more:
        for line in merge(*unfinished, key=_ORDER):
            size += len(line.text) + _LINE_COST
            if taken and size > query.max_bytes:
                left_out.append((line.source, len(line.text), TOO_MUCH))
            else:
                taken.append(line)
        taken.sort(key=_ORDER)  # stable: each stream's lines stay in order
    is_over = not is_more and all(
        position >= source.end and not source.is_open for position, source in zip(positions, sources, strict=True)
    )
    return QueryResult(taken, positions, left_out, is_more, is_over)


def last(sources: list[Source], query: Query) -> QueryResult:
    """Return the last lines of all sources together."""
    found: list[list[Line]] = []
    positions: list[int] = []
    beginnings: list[tuple[int, int, str]] = []  # what is left out at the start of each
    left_out: list[tuple[int, int, str]] = []
    for index, source in enumerate(sources):
        lines, position, reached = _backward(index, source, query)
        found.append(lines)
        positions.append(position)
        if reached is None:
            pass  # everything that was requested was read
        elif reached > source.begin:
            beginnings.append((index, reached - source.begin, NOT_SEARCHED if query.needle else TOO_MUCH))
        elif not source.is_whole:
            beginnings.append((index, source.begin, LOST if source.is_resumed else FORGOTTEN))
        left_out += [(index, count, why) for count, why in source.lost]
    ordered = list(merge(*found, key=_ORDER))
    taken: list[Line] = []
    size = 0
    for line in reversed(ordered):
        size += len(line.text) + _LINE_COST
        if len(taken) == query.last or (taken and size > query.max_bytes):
            break
        taken.append(line)
    taken.reverse()
    if len(taken) < query.last:
        dropped: Counter[int] = Counter()
        for line in ordered[: len(ordered) - len(taken)]:
            dropped[line.source] += len(line.text) + 1
        left_out += [(index, count, TOO_MUCH) for index, count in dropped.items()]
        if not dropped:
            left_out += [each for each in beginnings if not _is_older_than(sources[each[0]], query.since)]
    return QueryResult(taken, positions, left_out)


def _is_older_than(source: Source, since: float) -> bool:
    """Return whether everything that is gone arrived before ``since``."""
    if not since:
        return False
    return 0 < _time(source.marks_of(source.begin, source.begin + 1), source.begin) < since


def _has_more(source: Source, position: int) -> bool:
    """Return whether more than an unfinished line follows that position."""
    while position < source.end and (data := source.read(position, min(position + _CHUNK, source.end))):
        if not source.is_open or b"\n" in data:
            return True
        position += len(data)
    return False


def _forward(index: int, source: Source, start: int, query: Query) -> tuple[list[Line], int]:
    """Return the lines after ``start``, and the position after what was searched."""
    lines: list[Line] = []
    size = 0
    position = start
    is_cut = start == source.begin > max(0, source.start)
    for line in _lines(index, source, start, source.end, query, is_cut):
        position = line.end
        if line.text is not _SKIPPED:
            lines.append(line)
            size += len(line.text) + _LINE_COST
        if size >= query.max_bytes or position - start >= MAX_SEARCHED:
            break
    return lines, position


def _backward(index: int, source: Source, query: Query) -> tuple[list[Line], int, int | None]:
    """Return the last lines, the position after the last whole line, and where the search began; None: far enough."""
    window = TAIL_BYTES
    while True:
        start = max(source.begin, source.end - window)
        is_cut = start > 0
        lines: deque[Line] = deque(maxlen=max(query.last, 0))
        position = start
        is_first = True
        reached_since = False
        for line in _lines(index, source, start, source.end, query, is_cut):
            is_partial, is_first = is_first and is_cut, False
            position = line.end
            if is_partial and start > source.begin and window < MAX_SEARCHED:
                start = line.end  # its start was not read
                continue
            if line.text is _SKIPPED:
                reached_since = reached_since or 0 < line.at < query.since
            else:
                lines.append(line)
        size = sum(len(line.text) + _LINE_COST for line in lines)
        is_all = len(lines) == query.last or reached_since
        if is_all or start <= source.begin or size >= query.max_bytes or window >= MAX_SEARCHED:
            return list(lines), position, None if is_all else start
        window *= 4


_SKIPPED = bytes(bytearray(b"skipped"))  # a distinct object: marks text that does not match


def _lines(index: int, source: Source, start: int, end: int, query: Query, is_cut: bool) -> Iterator[Line]:
    """Yield all lines of this range. Lines that do not match are yielded as ``_SKIPPED``, several at once."""
    needle, since = query.needle, query.since
    position = line_start = start
    line = bytearray(CUT) if is_cut else bytearray()
    dropped = 0
    is_hit = not needle
    at = latest = 0.0  # of the line, and the latest so far
    while position < end and (data := source.read(position, min(position + _CHUNK, end))):
        marks = source.marks_of(position, position + len(data))
        after, hit = 0, -1
        while (newline := data.find(b"\n", after)) >= 0:
            if line_start >= position:  # otherwise the line began in an earlier chunk, which set its time
                at = _time(marks, line_start)
            if needle and not line and hit < after:  # search once: a chunk has many lines
                found = data.find(needle, after)
                hit = found if found >= 0 else len(data)
            without = data.rfind(b"\n", after, hit) if needle and not line else -1
            if without >= 0:
                newline, text = without, _SKIPPED
                at = _time(marks, position + newline)
            else:
                piece = data[after:newline]
                is_wanted = (is_hit or needle in piece or (line and needle in line + piece)) and at >= since
                text = _whole(line, piece, dropped) if is_wanted else _SKIPPED
            latest = max(latest, at)
            yield Line(index, at, text, position + newline + 1, (source.group, latest))
            after = newline + 1
            line_start = position + after
            line.clear()
            dropped, is_hit = 0, not needle
        if line_start >= position:
            at = _time(marks, line_start)
        line += data[after:]
        if len(line) > 2 * _MAX_LINE:
            is_hit = is_hit or needle in line
            dropped += len(line) - _MAX_LINE
            del line[_END_KEPT:-_END_KEPT]
        position += len(data)
    if position > line_start and (query.unfinished or not source.is_open) and position >= source.end:
        is_wanted = (is_hit or needle in line) and at >= since
        text = _whole(line, b"", dropped) if is_wanted else _SKIPPED
        # The end of a stream ends its last line; of an open stream the next query returns the line again.
        is_unfinished = source.is_open
        stop = line_start if is_unfinished else position
        yield Line(index, at, text, stop, (source.group, max(latest, at)), is_unfinished)


def _whole(line: bytearray, piece: bytes, dropped: int) -> bytes:
    text = bytes(line) + piece if line else piece
    if dropped or len(text) > _MAX_LINE:
        left_out = dropped + len(text) - _MAX_LINE
        return text[:_END_KEPT] + b" [... %d bytes left out ...] " % left_out + text[-_END_KEPT:]
    return text


def _time(marks: list[Mark], position: int) -> float:
    index = bisect_right(marks, (position, _ENDLESS)) - 1
    return marks[index][1] if index >= 0 else 0.0
