"""A node's answer to ``LogsRequest``: lines that its workers printed. Values only.

    answer = LogAnswer(...)                       lines, oldest first
    LogsRequest(node, cursor=answer.cursor)        the lines after them; with wait_s, as soon as there are any

1. Lines of one stream come in order and once each, if the viewer sends back each cursor.
2. Requested bytes that are not in the answer are counted in ``left_out``, with the reason.
3. Invalid bytes and escape sequences are shown as codes, colours are dropped, and a progress bar that redraws its line
   is shown in its last state. The text is still untrusted: an HTML page must escape it.
"""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct, frozen=True):
    at: float  # seconds since the epoch, on that node's clock; 0: unknown
    rank: int  # of the worker in its generation
    local_rank: int
    stream: str  # "stdout" or "stderr"
    generation: int
    text: str  # without the newline


class LeftOut(msgspec.Struct, frozen=True):
    """Requested bytes of a stream that are not in the answer."""

    rank: int
    local_rank: int
    stream: str
    generation: int
    bytes: int  # 0: unknown
    why: str  # a predicate: "are no longer in memory"


class LogAnswer(msgspec.Struct, frozen=True):
    lines: tuple[LogLine, ...]  # by generation, then by time; each stream's in order
    cursor: str  # where this answer ends; send it back to get the next lines
    generation: int  # the last with workers on this node; 0: none
    left_out: tuple[LeftOut, ...] = ()
    is_more: bool = False  # more lines exist already
    is_over: bool = False  # no further lines will match the request
