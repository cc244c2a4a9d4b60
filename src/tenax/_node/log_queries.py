"""Log queries: answers requests for lines of this node's workers (``LogsRequest``).

Holds the generations of this node with their ranks and log destinations; the log writer holds the lines. This module
translates a request into streams and positions, and the lines into an answer. It reads no file and stores no line.

A cursor is ``INCARNATION:GENERATION:POSITIONS``: the incarnation of the log writer that gave the positions (another one
has lost what was in memory), the generation, and the position in each of its streams, in hexadecimal. All lines of
earlier generations were sent, none of later ones. Clients treat it as an opaque string.

A follower sends one request after another. At most ``_MAX_WAITING`` requests wait at once: one more answers the oldest
with no lines, and that client requests again. When the run ends, every answer is marked as the last.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax._core.requests import LogsRequest
from tenax._core.text import decoded, harmless
from tenax._view.log_lines import LeftOut, LogAnswer, LogLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._io.interfaces import Reply
    from tenax._logs.writer import LogWriter
    from tenax._node.worker_logs import LoggedGeneration

STREAMS = {1: "stdout", 2: "stderr"}
START = "start"
_MAX_WAITING = 32
_FOLLOW_UP_S = 2.0  # a live follower sends its next request sooner
_MAX_WAIT_S = 30.0
_MAX_LAST = 100_000
_MAX_RANK = 1 << 31


class InvalidRequest(Exception):
    """The request is invalid. The message says why."""


class Cursor(msgspec.Struct, frozen=True):
    """Where an answer ended."""

    incarnation: int
    generation: int
    positions: tuple[int, ...] = ()  # of local rank 0's stdout, its stderr, local rank 1's stdout, ...

    def encode(self) -> str:
        positions = ",".join(f"{position:x}" if position else "" for position in self.positions)
        return f"{self.incarnation:x}:{self.generation}:{positions.rstrip(',')}"

    @classmethod
    def decode(cls, text: str) -> Cursor:
        try:
            incarnation, generation, positions = text.split(":")
            return cls(
                int(incarnation, 16),
                int(generation),
                tuple(int(each, 16) if each else 0 for each in positions.split(",")) if positions else (),
            )
        except ValueError:
            raise InvalidRequest(f"invalid cursor {text!r}; pass the cursor of an answer, or none") from None

    def position(self, local_rank: int, number: int) -> int:
        index = _index(local_rank, number)
        return self.positions[index] if index < len(self.positions) else 0


class RankSet:
    """A set of ranks, written as ``0,3-5``; empty means all. Raises ``InvalidRequest``."""

    def __init__(self, text: str) -> None:
        self._ranges: list[tuple[int, int]] = []
        for part in text.split(",") if text else []:
            first, dash, last = part.strip().partition("-")
            is_valid = first.isdecimal() and (last.isdecimal() or not dash)
            low, high = (int(first), int(last) if dash else int(first)) if is_valid else (1, 0)
            if not low <= high < _MAX_RANK:
                raise InvalidRequest(f"invalid ranks {text!r}; write them as 0,3-5")
            self._ranges.append((low, high))

    def __contains__(self, rank: int) -> bool:
        return not self._ranges or any(low <= rank <= high for low, high in self._ranges)

    def overlaps(self, first: int, count: int) -> bool:
        """Return whether it contains any of ``count`` ranks from ``first`` on."""
        return not self._ranges or any(low < first + count and first <= high for low, high in self._ranges)


class _Stream(msgspec.Struct, frozen=True):
    generation: int
    local_rank: int
    number: int
    rank: int
    path: str
    key: str

    def line(self, at: float, data: bytes) -> LogLine:
        return LogLine(at, self.rank, self.local_rank, STREAMS[self.number], self.generation, shown(data))

    def left_out(self, count: int, why: str) -> LeftOut:
        return LeftOut(self.rank, self.local_rank, STREAMS[self.number], self.generation, count, why)


class _Pending(msgspec.Struct, eq=False):
    """A request without an answer yet."""

    number: int = 0  # of the query to the log writer


class LogQueries:
    """``generations`` is the node's, by number, and grows."""

    def __init__(self, writer: LogWriter, generations: dict[int, LoggedGeneration]) -> None:
        self._writer = writer
        self._generations = generations
        self._waiting: list[_Pending] = []  # the oldest first
        self._answered: list[tuple[str, float]] = []  # followers without a new request: cursor, time of the answer
        self._is_ended = False

    def followed_for(self) -> float:
        """Return for how many seconds a follower may still wait for lines or send its next request; 0: no follower."""
        if self._waiting:
            return _MAX_WAIT_S
        return max(0.0, *(at + _FOLLOW_UP_S - time.monotonic() for _, at in self._answered), 0.0)

    def on_generation(self) -> None:
        """Answer waiting requests now, because there are new streams."""
        if self._waiting:
            self._writer.answer_now()

    def end(self) -> None:
        self._is_ended = True
        self.on_generation()

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        """Reply exactly once, now or later."""
        try:
            self._query(request, reply)
        except InvalidRequest as error:
            reply(None, str(error))

    def _query(self, request: LogsRequest, reply: Reply) -> None:
        if request.stream not in ("", *STREAMS.values()):
            raise InvalidRequest(f"unknown stream {request.stream!r}; use stdout or stderr")
        cursor = self._start(request)
        generation = self._latest if cursor is None else cursor.generation
        if request.generation > 0:
            generation = request.generation
        streams = self._streams(request, cursor)
        starts = [-1 if cursor is None else cursor.position(each.local_rank, each.number) for each in streams]
        # A generation that is over writes no more lines: do not wait for any.
        can_wait = cursor is not None and self._latest <= generation and not self._is_ended
        wait_s = max(0.0, min(request.wait_s, _MAX_WAIT_S)) if can_wait else 0.0
        pending = _Pending()
        if wait_s > 0:
            while len(self._waiting) >= _MAX_WAITING:  # the oldest may belong to clients that disconnected
                self._writer.answer_now(self._waiting.pop(0).number)
            self._waiting.append(pending)
        answered = [sent for sent, _ in self._answered]
        if request.cursor in answered:
            del self._answered[answered.index(request.cursor)]

        def on_result(found: dict[str, Any]) -> None:
            if pending in self._waiting:
                self._waiting.remove(pending)
            if "error" in found:
                reply(None, found["error"])
                return
            answer = self._to_answer(found, request, cursor, generation, streams)
            if request.wait_s > 0 and not answer.is_over:  # it will send another request
                now = time.monotonic()
                recent = [each for each in self._answered if now - each[1] < _FOLLOW_UP_S]
                self._answered = [*recent, (answer.cursor, now)]
            reply(answer, "")

        pending.number = self._writer.query(
            [(each.key, each.path, each.generation, start) for each, start in zip(streams, starts, strict=True)],
            on_result,
            incarnation=0 if cursor is None else cursor.incarnation,
            wait_s=wait_s,
            until_over=request.generation > 0,
            last=max(0, min(request.last, _MAX_LAST)),
            needle=os.fsencode(request.containing),
            since=request.since,
            unfinished=request.unfinished,
        )

    def _start(self, request: LogsRequest) -> Cursor | None:
        """Return the cursor to start from; None: from the end."""
        if not request.cursor:
            return None
        if request.cursor != START:
            cursor = Cursor.decode(request.cursor)
            if cursor.generation in self._generations or request.generation > 0:
                return cursor
            # It had no workers on this node, or was dropped: continue with the next generation that had.
            following = self._next(cursor.generation)
            return Cursor(cursor.incarnation, following) if following else cursor
        if request.generation > 0:
            return Cursor(0, request.generation)
        known = list(self._generations) or [0]
        return Cursor(0, known[0] if request.generation < 0 else known[-1])

    def _streams(self, request: LogsRequest, cursor: Cursor | None) -> list[_Stream]:
        """Return the streams of the cursor's generation; without a cursor, of all requested generations."""
        ranks = RankSet(request.ranks)
        if cursor is not None:
            generations = [cursor.generation]
        elif request.generation < 0:
            generations = list(self._generations)
        else:
            generations = [request.generation or self._latest]
        return [
            _Stream(
                generation,
                local_rank,
                number,
                rank,
                path="" if files.get(local_rank) == os.devnull else files.get(local_rank, ""),
                key=f"{logged.origins[local_rank]}.{local_rank}.{number}",
            )
            for generation in generations
            if (logged := self._generations.get(generation)) is not None
            for local_rank, rank in logged.ranks.items()
            if request.local_rank in (-1, local_rank) and rank in ranks
            if request.generation > 0 or not self._continues(generation, local_rank)
            for number, files in ((1, logged.destination.stdouts), (2, logged.destination.stderrs))
            if request.stream in ("", STREAMS[number])
        ]

    @property
    def _latest(self) -> int:
        return next(reversed(self._generations), 0)

    def _to_answer(
        self,
        found: dict[str, Any],
        request: LogsRequest,
        cursor: Cursor | None,
        at: int,  # the generation where the answer ends
        streams: list[_Stream],
    ) -> LogAnswer:
        is_more, latest = found["is_more"], self._latest
        kept = self._continued(at, cursor)
        read = zip(streams, found["positions"], strict=True)
        positions = kept | {_index(each.local_rank, each.number): end for each, end in read if each.generation == at}
        # Streams that were still open when they were read may have received more since.
        is_complete = not is_more and (found["is_over"] or not streams)
        is_over = request.generation > 0 and is_complete and (bool(streams) or latest > at)
        if request.generation <= 0 and latest > at:
            is_more = True
            if cursor is not None and is_complete:
                at, positions = self._next(at), kept
        in_order = tuple(positions.get(index, 0) for index in range(max(positions, default=-1) + 1))
        return LogAnswer(
            lines=tuple(streams[index].line(came_at, data) for index, came_at, data in found["lines"]),
            cursor=Cursor(found["incarnation"], at, in_order).encode(),
            generation=latest,
            left_out=tuple(streams[index].left_out(count, why) for index, count, why in found["left_out"]),
            is_more=is_more,
            # After the end of the run, do not wait for a process that still holds a stream open.
            is_over=is_over or (self._is_ended and not is_more),
        )

    def _continued(self, generation: int, cursor: Cursor | None) -> dict[int, int]:
        """Return the positions of streams that are read in the next generation, by index: those of survivors."""
        logged = self._generations.get(generation)
        if cursor is None or logged is None:
            return {}
        ranks = [rank for rank in logged.ranks if self._continues(generation, rank)]
        return {_index(rank, number): cursor.position(rank, number) for rank in ranks for number in STREAMS}

    def _continues(self, generation: int, local_rank: int) -> bool:
        """Return whether the process of this worker, and with it its streams, continue in the next generation."""
        now, following = (self._generations.get(number) for number in (generation, self._next(generation)))
        return bool(now and following and following.origins.get(local_rank) == now.origins[local_rank])

    def _next(self, generation: int) -> int:
        """Return the next generation that had workers on this node; 0: none."""
        return min((number for number in self._generations if number > generation), default=0)


def shown(data: bytes) -> str:
    """Return a line as a terminal would finally show it: only the last state of a progress bar."""
    return harmless(decoded(data).rstrip("\r").rpartition("\r")[2])


def _index(local_rank: int, number: int) -> int:
    return 2 * local_rank + number - 1
