"""What a node answers to ``LogsRequest``: lines that its workers have printed. Pure values; the same for every viewer.

    answer = LogAnswer(...)                       lines, oldest first
    LogsRequest(node, cursor=answer.cursor)        what came after them; with wait_s, when there is something

1. Lines of one stream come in order, each once, as long as the viewer gives each cursor back.
2. Whatever is not shown although it was asked for is counted in ``left_out``, with a sentence that says why.
3. The text is harmless: bytes that are no text and escape sequences are shown as codes, colours are dropped, and of a
   progress bar that redraws its line the last state is told. It is still a stranger's: a page escapes it.
"""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct, frozen=True):
    """One line of one worker."""

    at: float  # seconds since the epoch, on that node's clock; 0: not known
    rank: int  # of the worker in its generation
    local_rank: int
    stream: str  # "stdout" or "stderr"
    generation: int
    text: str  # without the newline


class LeftOut(msgspec.Struct, frozen=True):
    """Bytes of a stream that are not in the answer although they were asked for."""

    rank: int
    local_rank: int
    stream: str
    generation: int
    bytes: int  # 0: nobody knows how many
    why: str  # a sentence without its subject: "are no longer in memory"


class LogAnswer(msgspec.Struct, frozen=True):
    """What one node has to say."""

    lines: tuple[LogLine, ...]  # by generation, then by time; each stream's in order
    cursor: str  # where this answer ends; give it back to get what follows
    generation: int  # the last that had workers on this node; 0: none had
    left_out: tuple[LeftOut, ...] = ()
    is_more: bool = False  # more is there already: ask again at once
    is_over: bool = False  # nothing more will come of what was asked for
