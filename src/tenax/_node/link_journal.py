"""The journal of a node's links: the calls of the machines of links and leadership, for a replay.

Only nodes with a coordinator on the network have it. It has the format and limits of the other journals. Calls are
written after a moment, so that a rendezvous does not wait for it; a killed agent loses the last ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from tenax._core.link.recording import Call, Quiet, Recorder
from tenax._io.interfaces import EventLoop
from tenax._node.journal import Footer, Journal, read_lines

NAME = "links.jsonl"
_WRITE_AFTER_S = 1.0
_WRITE_AT_ONCE, _WRITE_NEXT_S = 50, 0.01  # a few ms of every 10, so that no event waits for long


class LinkHeader(msgspec.Struct, frozen=True, tag="link header", tag_field="line", omit_defaults=True):
    """The first line."""

    format: int
    tenax: str
    host: str
    wall_time: float  # wall clock at `at`
    at: float


class LinkJournal(Journal):
    """Writes it. ``recorder`` creates the machines that are recorded."""

    def __init__(self, path: str, loop: EventLoop, warn: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(path, warn=warn)
        self._loop = loop
        self.write_header(LinkHeader, loop.now())
        self.recorder = Recorder(self.write, loop.now, os.urandom(32), self._plan)

    def _plan(self, is_first: bool) -> None:
        after_s = _WRITE_AFTER_S if is_first else _WRITE_NEXT_S
        self._loop.at(self._loop.now() + after_s, lambda: self.recorder.flush(_WRITE_AT_ONCE))

    def close(self, now: float) -> None:
        self.recorder.flush()
        super().close(now)


def read_link_journal(path: str) -> tuple[LinkHeader, list[Call | Quiet], Footer | None]:
    """Read a journal of links. Raises JournalUnreadable."""
    return read_lines(path, LinkHeader | Call | Quiet | Footer, LinkHeader)
