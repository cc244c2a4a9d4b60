"""Log answers: what a node says to whoever wants to see lines of its workers (``LogsRequest``).

It knows the generations of this node, who had which rank in them and where their output went; the writer has the lines.
So this translates: a request into streams and positions, lines back into words. It reads no file and keeps no line.

A cursor is ``INCARNATION:GENERATION:POSITIONS``: which writer has told the positions (another one does not know what
memory held), and how far each stream of that generation was told, in hexadecimal. Everything of an older generation was
told, nothing of a later one was. To others it is a word without a meaning.

Whoever follows asks again and again. Only so many may wait at once: for one more the one who has waited longest is
answered, with nothing, and asks again. When the run ends, each of them hears that nothing more will come.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax._core.requests import LogsRequest
from tenax._failures.plain_text import decoded, harmless
from tenax._view.log_lines import LeftOut, LogAnswer, LogLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._io.ports import Reply
    from tenax._logs.specs import LogsDest
    from tenax._logs.writer import LogWriter

STREAMS = {1: "stdout", 2: "stderr"}
START = "start"
_MAX_WAITING = 32
_COMES_BACK_S = 2.0  # who was answered and lives asks again sooner
_LONGEST_WAIT_S = 30.0
_MAX_LAST = 100_000
_MAX_RANK = 1 << 31


class InvalidRequest(Exception):
    """The request cannot be followed. The message is a sentence."""


class Cursor(msgspec.Struct, frozen=True):
    """Where an answer ended."""

    incarnation: int
    generation: int
    positions: tuple[int, ...] = ()  # of local rank 0's stdout, its stderr, local rank 1's stdout ...

    def written(self) -> str:
        positions = ",".join(f"{position:x}" if position else "" for position in self.positions)
        return f"{self.incarnation:x}:{self.generation}:{positions.rstrip(',')}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        try:
            incarnation, generation, positions = text.split(":")
            return cls(
                int(incarnation, 16),
                int(generation),
                tuple(int(each, 16) if each else 0 for each in positions.split(",")) if positions else (),
            )
        except ValueError:
            raise InvalidRequest(f"{text!r} is no cursor; give back that of an answer, or none") from None

    def position(self, local_rank: int, number: int) -> int:
        index = 2 * local_rank + number - 1
        return self.positions[index] if index < len(self.positions) else 0


class RankSet:
    """Which ranks are meant, as a person writes it: ``0,3-5``; nothing written means all. Raises ``InvalidRequest``."""

    def __init__(self, text: str) -> None:
        self._ranges: list[tuple[int, int]] = []
        for part in text.split(",") if text else []:
            first, dash, last = part.strip().partition("-")
            is_right = first.isdecimal() and (last.isdecimal() or not dash)
            low, high = (int(first), int(last) if dash else int(first)) if is_right else (1, 0)
            if not low <= high < _MAX_RANK:
                raise InvalidRequest(f"{text!r} does not say which ranks are meant: write them as 0,3-5")
            self._ranges.append((low, high))

    def __contains__(self, rank: int) -> bool:
        return not self._ranges or any(low <= rank <= high for low, high in self._ranges)

    def meets(self, first: int, count: int) -> bool:
        """Whether it has any of so many ranks from the first on."""
        return not self._ranges or any(low < first + count and first <= high for low, high in self._ranges)


class _Stream(msgspec.Struct, frozen=True):
    """One that was asked for."""

    generation: int
    local_rank: int
    number: int
    rank: int
    path: str

    @property
    def key(self) -> str:
        return f"{self.generation}.{self.local_rank}.{self.number}"

    def line(self, at: float, data: bytes) -> LogLine:
        return LogLine(at, self.rank, self.local_rank, STREAMS[self.number], self.generation, shown(data))

    def left_out(self, count: int, why: str) -> LeftOut:
        return LeftOut(self.rank, self.local_rank, STREAMS[self.number], self.generation, count, why)


class _Waiting:
    """Somebody who asked."""

    def __init__(self, comes_back: bool) -> None:
        self.comes_back = comes_back  # follows, and so will ask again
        self.number = 0  # of the request to the writer


class LogQueries:
    """``generations`` is the node's, and grows: number -> ranks by local rank, and where the output went."""

    def __init__(self, writer: LogWriter, generations: dict[int, tuple[dict[int, int], LogsDest]]) -> None:
        self._writer = writer
        self._generations = generations
        self._waiting: list[_Waiting] = []  # the one who has waited longest first
        self._told: list[tuple[str, float]] = []  # cursors of those who will ask again, and when they were answered
        self._is_ended = False

    def followed_for(self) -> float:
        """How many seconds somebody may still wait for lines, or may take to ask for the next ones; 0: nobody does."""
        if self._waiting:
            return _LONGEST_WAIT_S
        return max(0.0, *(at + _COMES_BACK_S - time.monotonic() for _, at in self._told), 0.0)

    def on_generation(self) -> None:
        """There are new streams: those who wait hear of it now, and ask again."""
        if self._waiting:
            self._writer.hurry()

    def end(self) -> None:
        """There will be no more streams, and those that there are have ended."""
        self._is_ended = True
        self.on_generation()

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        """Exactly once, now or later."""
        try:
            self._ask(request, reply)
        except InvalidRequest as error:
            reply(None, str(error))

    def _ask(self, request: LogsRequest, reply: Reply) -> None:
        if request.stream not in ("", *STREAMS.values()):
            raise InvalidRequest(f"there is no stream {request.stream!r}; there are stdout and stderr")
        cursor = self._beginning(request)
        meant = self._last if cursor is None else cursor.generation
        if request.generation > 0:
            meant = request.generation
        streams = self._streams(request, cursor)
        wants = [
            (
                each.key,
                each.path,
                each.generation,
                -1 if cursor is None else cursor.position(each.local_rank, each.number),
            )
            for each in streams
        ]
        # Nothing more will come of a generation that is over: whoever is there goes on with the next one at once.
        can_wait = cursor is not None and self._last <= meant and not self._is_ended
        wait_s = max(0.0, min(request.wait_s, _LONGEST_WAIT_S)) if can_wait else 0.0
        waiting = _Waiting(request.wait_s > 0)
        if wait_s > 0:
            self._make_room()
            self._waiting.append(waiting)
        if request.cursor:
            self._has_come_back(request.cursor)
        waiting.number = self._writer.recall(
            wants,
            self._on_recalled(request, cursor, meant, streams, waiting, reply),
            incarnation=0 if cursor is None else cursor.incarnation,
            wait_s=wait_s,
            until_over=request.generation > 0,
            last=max(0, min(request.last, _MAX_LAST)),
            needle=os.fsencode(request.containing),
            since=request.since,
            unfinished=request.unfinished,
        )

    def _make_room(self) -> None:
        """For one more who waits. Those who have left keep their places only until others want them."""
        while len(self._waiting) >= _MAX_WAITING:
            self._writer.hurry(self._waiting.pop(0).number)

    def _has_come_back(self, cursor: str) -> None:
        for index, (told, _) in enumerate(self._told):
            if told == cursor:
                del self._told[index]
                return

    def _beginning(self, request: LogsRequest) -> Cursor | None:
        """Where to begin; None: at the end."""
        if not request.cursor:
            return None
        if request.cursor != START:
            cursor = Cursor.read(request.cursor)
            if cursor.generation in self._generations or request.generation > 0:
                return cursor
            # It had no workers here, or was forgotten: go on with the next one that had.
            later = [number for number in self._generations if number > cursor.generation]
            return Cursor(cursor.incarnation, min(later)) if later else cursor
        if request.generation > 0:
            return Cursor(0, request.generation)
        known = list(self._generations) or [0]
        return Cursor(0, known[0] if request.generation < 0 else known[-1])

    def _streams(self, request: LogsRequest, cursor: Cursor | None) -> list[_Stream]:
        """One generation's if there is a cursor; else those of all that are meant."""
        ranks = RankSet(request.ranks)
        if cursor is not None:
            meant = [cursor.generation]
        elif request.generation < 0:
            meant = list(self._generations)
        else:
            meant = [request.generation or self._last]
        return [
            _Stream(generation, local_rank, number, rank, _path(places, local_rank))
            for generation in meant
            if generation in self._generations
            for local_rank, rank in self._generations[generation][0].items()
            if request.local_rank in (-1, local_rank) and rank in ranks
            for number, places in _places(self._generations[generation][1])
            if request.stream in ("", STREAMS[number])
        ]

    @property
    def _last(self) -> int:
        return next(reversed(self._generations), 0)

    def _on_recalled(
        self,
        request: LogsRequest,
        cursor: Cursor | None,
        meant: int,  # the generation where the answer ends
        streams: list[_Stream],
        waiting: _Waiting,
        reply: Reply,
    ) -> Callable[[dict[str, Any]], None]:
        def on_recalled(found: dict[str, Any]) -> None:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            if "error" in found:
                reply(None, found["error"])
                return
            at, is_more = meant, found["is_more"]
            positions = _positions(streams, found["positions"], at)
            # Streams that were still open when they were looked at may have said more since.
            is_told = not is_more and (found["is_over"] or not streams)
            if request.generation > 0:
                is_over = is_told and (bool(streams) or self._last > at)
            else:
                is_over = False  # another generation may follow
                if self._last > at:
                    is_more = True
                    if cursor is not None and is_told:
                        at, positions = self._next(at), ()
            # Whoever still holds a stream of a run that is over is not waited for.
            is_over = is_over or (self._is_ended and not is_more)
            written = Cursor(found["incarnation"], at, positions).written()
            if waiting.comes_back and not is_over:
                now = time.monotonic()
                self._told = [each for each in self._told if now - each[1] < _COMES_BACK_S] + [(written, now)]
            answer = LogAnswer(
                lines=tuple(streams[index].line(came_at, data) for index, came_at, data in found["lines"]),
                cursor=written,
                generation=self._last,
                left_out=tuple(streams[index].left_out(count, why) for index, count, why in found["left_out"]),
                is_more=is_more,
                is_over=is_over,
            )
            reply(answer, "")

        return on_recalled

    def _next(self, generation: int) -> int:
        return min(number for number in self._generations if number > generation)


def shown(data: bytes) -> str:
    """A line as a terminal would show it in the end: of a progress bar that redraws its line the last state."""
    return harmless(decoded(data).rstrip("\r").rpartition("\r")[2])


def _positions(streams: list[_Stream], positions: list[int], generation: int) -> tuple[int, ...]:
    """By place, those of the generation where the next answer begins."""
    found = {
        2 * stream.local_rank + stream.number - 1: position
        for stream, position in zip(streams, positions, strict=True)
        if stream.generation == generation
    }
    return tuple(found.get(index, 0) for index in range(max(found, default=-1) + 1))


def _places(to: LogsDest) -> list[tuple[int, dict[int, str]]]:
    return [(1, to.stdouts), (2, to.stderrs)]


def _path(places: dict[int, str], local_rank: int) -> str:
    path = places.get(local_rank, "")
    return "" if path == os.devnull else path
