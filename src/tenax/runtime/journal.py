"""The journal: every fact and every decision of a run, one JSON line each, in the order they happened.

Metrics, events, the live page and a replay are derived from it. It is bounded: past the limit lines are counted instead
of written, and the last line says how many. Writing never fails a run: a full disk costs lines, which are counted too.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax import __version__
from tenax.core.commands import AnyCommand
from tenax.core.events import AnyEvent
from tenax.core.model import AgentSettings
from tenax.core.policy import AnyDecision

FORMAT = 1
_LIMIT_BYTES = 16 << 20


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="line", omit_defaults=True):
    """The first line: everything that a replay must know."""

    format: int
    tenax: str
    settings: AgentSettings
    entrypoint: str
    host: str
    policy: str  # the class; a replay takes the decisions of one it does not know from the journal
    wall_time: float  # of the same moment as `at`
    at: float


class Step(msgspec.Struct, frozen=True, tag="step", tag_field="line", omit_defaults=True):
    """One fact and what was decided about it."""

    at: float
    event: AnyEvent
    commands: list[AnyCommand] = []
    decision: AnyDecision | None = None


class Footer(msgspec.Struct, frozen=True, tag="end", tag_field="line", omit_defaults=True):
    """The last line of a run that ended: nothing is missing but what it counts."""

    at: float
    steps_not_written: int = 0


AnyLine = Header | Step | Footer


class Journal:
    """Writes lines to a file, or nowhere."""

    def __init__(self, path: str = "", limit_bytes: int = _LIMIT_BYTES) -> None:
        self.path = path
        self._left = limit_bytes
        self._lost = 0
        self._encode = msgspec.json.Encoder().encode
        self._descriptor = -1
        if path:
            try:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError:  # a run is worth more than its journal; the story goes on without
                self.path = ""

    def begin(self, settings: AgentSettings, entrypoint: str, policy: str, now: float) -> None:
        host = os.uname().nodename
        self._write(Header(FORMAT, __version__, settings, entrypoint, host, policy, time.time(), now))

    def step(self, at: float, event: AnyEvent, commands: list[AnyCommand], decision: AnyDecision | None) -> None:
        self._write(Step(at, event, commands, decision))

    def close(self, now: float) -> None:
        self._left += 1024  # the last line always fits
        self._write(Footer(now, self._lost))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: AnyLine) -> None:
        if self._descriptor < 0:
            return
        data = self._encode(line) + b"\n"
        if len(data) > self._left:
            self._lost += 1
            return
        try:
            written = os.write(self._descriptor, data)
        except OSError:
            self._lost += 1
        else:
            self._left -= written


class JournalUnreadable(Exception):
    """This file is not a journal of ours, or is damaged; the message says where."""


def read_journal(path: str) -> tuple[Header, list[Step], Footer | None]:
    """A journal back from its file. A torn last line (the agent was killed while writing) is left out."""
    decoder = msgspec.json.Decoder(AnyLine)
    try:
        with open(path, "rb") as file:
            raw_lines = file.read().split(b"\n")
    except OSError as error:
        raise JournalUnreadable(f"{path!r} cannot be read: {error.strerror}") from error
    torn = raw_lines.pop()
    lines: list[AnyLine] = []
    for number, raw in enumerate(raw_lines, 1):
        try:
            lines.append(decoder.decode(raw))
        except msgspec.DecodeError as error:
            raise JournalUnreadable(f"line {number} of {path!r} is not a line of a tenax journal: {error}") from error
    if not lines or not isinstance(lines[0], Header):
        what = "is empty" if not lines and not torn else "does not begin with a header"
        raise JournalUnreadable(f"{path!r} {what}; expected the journal.jsonl of a run")
    if lines[0].format != FORMAT:
        raise JournalUnreadable(
            f"{path!r} has format {lines[0].format}, this tenax reads format {FORMAT}; use tenax {lines[0].tenax}"
        )
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    return lines[0], [line for line in lines if isinstance(line, Step)], footer
