"""The journals: every event and decision of an agent, and of the coordinator on the node that serves it.

One JSON line per step, in order. ``tenax replay``, ``tenax timeline`` and ``tenax report`` read them. Their size is
bounded: past a limit, steps are counted instead of written, and the last line holds their number. Writing never fails a
run: steps lost to a full disk are counted too. After the first lost step no other step is written, so the file is
always a complete beginning of the run and can be replayed. The first loss prints one warning.

Progress events repeat while nothing else happens, and each replaces the one before. Only the latest is written, before
the next step of another kind, so a job that trains for a month does not fill its journal.

The coordinator's journal shows why generations began and ended on all nodes. It replays, too: the same events at the
same times must give the same messages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tenax import __version__
from tenax._core import coordinator
from tenax._core.bounds import DECODE_ERRORS, MAX_TEXT
from tenax._core.commands import AnyCommand
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, Received, RunSettings, Send
from tenax._core.events import AnyEvent, ProgressSeen
from tenax._core.messages import NodeProgress
from tenax._core.model import AgentSettings
from tenax._core.policy import AnyDecision, RecordedPolicy
from tenax._core.text import encodable, shortened_texts

RUN_NAME = "coordinator.jsonl"
FORMAT = 3
_LIMIT_BYTES = 16 << 20
_MAX_READ_BYTES = 256 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Header(msgspec.Struct, frozen=True, tag="header", tag_field="line", omit_defaults=True):
    """The first line: everything that a replay needs."""

    format: int
    tenax: str
    settings: AgentSettings
    entrypoint: str
    host: str
    wall_time: float  # wall clock at `at`
    at: float


class Step(msgspec.Struct, frozen=True, tag="step", tag_field="line", omit_defaults=True):
    """One event and the commands that followed."""

    at: float
    event: AnyEvent
    commands: list[AnyCommand] = []


class Footer(msgspec.Struct, frozen=True, tag="end", tag_field="line", omit_defaults=True):
    """The last line of a run that ended, with the number of steps that were not written."""

    at: float
    steps_not_written: int = 0


class RunHeader(msgspec.Struct, frozen=True, tag="run header", tag_field="line", omit_defaults=True):
    """The first line."""

    format: int
    tenax: str
    settings: RunSettings
    host: str
    wall_time: float  # wall clock at `at`
    at: float


class RunStep(msgspec.Struct, frozen=True, tag="run step", tag_field="line", omit_defaults=True):
    """One event and the messages that followed."""

    at: float
    event: AnyCoordinatorEvent
    sent: list[Send] = []
    decision: AnyDecision | None = None  # of the restart policy, if this step called it


AnyLine = Header | Step | Footer
AnyRunLine = RunHeader | RunStep | Footer


class Journal:
    """Writes lines to a file; without a path, discards them."""

    def __init__(
        self,
        path: str = "",
        limit_bytes: int = _LIMIT_BYTES,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._warn = warn
        self._left = limit_bytes
        self._lost = 0
        self._encode = msgspec.json.Encoder().encode
        self._held: dict[str, msgspec.Struct] = {}  # the latest progress, by source
        self._descriptor = -1
        self._size = 0
        if path:
            try:
                self._descriptor = os.open(path, _FLAGS, 0o644)
                self._size = os.fstat(self._descriptor).st_size
            except OSError as error:  # the run does not depend on its journal
                self.path = ""
                warn(f"could not open the journal: {error.strerror}: {path}; the job is not affected")

    def begin(self, settings: AgentSettings, entrypoint: str, now: float) -> None:
        self.write_header(Header, now, settings=settings, entrypoint=entrypoint)

    def write_header(self, kind: type[msgspec.Struct], now: float, **more: object) -> None:
        when_and_where = {"host": os.uname().nodename, "wall_time": time.time(), "at": now}
        self.write(kind(format=FORMAT, tenax=__version__, **when_and_where, **more))

    def step(self, at: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        if isinstance(event, ProgressSeen):
            self.hold("", Step(at, event, commands))
        else:
            self.write(Step(at, event, commands))

    def hold(self, source: str, line: msgspec.Struct) -> None:
        """Write this before the next line, unless ``hold`` gets a newer one from the same source."""
        self._held.pop(source, None)
        self._held[source] = line

    def close(self, now: float) -> None:
        self._left += 1024  # the last line always fits
        self.write(Footer(now, self._lost))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, line: msgspec.Struct) -> None:
        if self._descriptor < 0:
            return
        held, self._held = self._held, {}
        for each in (*held.values(), line):
            self._write(each)

    def _write(self, line: msgspec.Struct) -> None:
        try:
            data = self._encode(line) + b"\n"
        except UnicodeEncodeError:  # surrogates from a file name or an error file, which JSON cannot encode
            data = self._encode(encodable(msgspec.to_builtins(line))) + b"\n"
        if len(data) > MAX_TEXT:  # a string in it may be longer than readers accept
            data = self._encode(shortened_texts(encodable(msgspec.to_builtins(line)), MAX_TEXT)) + b"\n"
        if self._lost > 0 and not isinstance(line, Footer):
            self._lost += 1
            return
        trouble = "it has reached its size limit" if len(data) > self._left else self._append(data)
        if trouble:
            self._lost += 1
            if not isinstance(line, Footer):
                self._warn(f"the journal {self.path} ends here: {trouble}; the job is not affected")

    def _append(self, data: bytes) -> str:
        """Write the whole line or nothing, since a partial line would corrupt the next. Returns the error, or ""."""
        trouble = "the disk is full"
        try:
            if os.write(self._descriptor, data) == len(data):
                self._size += len(data)
                self._left -= len(data)
                return ""
        except OSError as error:
            trouble = error.strerror or str(error)
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
        return trouble


class RunJournal(Journal):
    """The coordinator's. Opened when this node starts to serve it."""

    def begin_run(self, settings: RunSettings, now: float) -> None:
        self.write_header(RunHeader, now, settings=settings)

    def run_step(
        self, at: float, event: AnyCoordinatorEvent, step: coordinator.Step, _: coordinator.CoordinatorState
    ) -> None:
        line = RunStep(at, event, step.sends, step.decision)
        if isinstance(event, Received) and isinstance(event.message, NodeProgress) and not step.sends:
            self.hold(event.node_id, line)
        else:
            self.write(line)


class JournalUnreadable(Exception):
    """The file is not a tenax journal, or is damaged. The message says where. ``beginning``: the lines before that."""

    def __init__(self, message: str, beginning: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.beginning = beginning


def read_journal(path: str) -> tuple[Header, list[Step], Footer | None]:
    """Read a journal, without a torn last line (the agent was killed while writing). Raises JournalUnreadable."""
    return read_lines(path, AnyLine, Header)


def read_run_journal(path: str) -> tuple[RunHeader, list[RunStep], Footer | None]:
    """Read a coordinator's journal. Raises JournalUnreadable."""
    return read_lines(path, AnyRunLine, RunHeader)


def read_lines(path: str, kinds: Any, header: type[Any]) -> tuple[Any, list[Any], Footer | None]:
    """Return header, steps and footer of a journal, which holds one run. Raises JournalUnreadable."""
    decoder = msgspec.json.Decoder(kinds)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_READ_BYTES + 1)
    except OSError as error:
        raise JournalUnreadable(f"{path!r} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_READ_BYTES:
        raise JournalUnreadable(f"{path!r} is too large for a journal: more than {_MAX_READ_BYTES >> 20} MiB")
    raw_lines = data.split(b"\n")
    torn = raw_lines.pop()
    _check_format(path, raw_lines)
    lines: list[Any] = []
    for number, raw in enumerate(raw_lines, 1):
        try:
            line = decoder.decode(raw)
        except DECODE_ERRORS as error:
            message = f"line {number} of {path!r} is not a line of a tenax journal: {error}"
            raise JournalUnreadable(message, lines) from error
        if lines and isinstance(line, header):
            raise JournalUnreadable(f"line {number} of {path!r} begins another run; expected one run per file", lines)
        lines.append(line)
    if not lines or not isinstance(lines[0], header):
        what = "is empty" if not lines and not torn else "does not begin with a header"
        raise JournalUnreadable(f"{path!r} {what}; expected the journal.jsonl of a run")
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    return lines[0], [line for line in lines[1:] if not isinstance(line, Footer)], footer


class _AnyHeader(msgspec.Struct):
    """The fields that headers of all formats have."""

    format: int
    tenax: str
    line: str = ""


def kind_of(path: str) -> str:
    """Return the kind of the journal's first line: "header", "run header", "link header"; else an empty string."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.readline(MAX_TEXT), type=_AnyHeader).line
    except (OSError, *DECODE_ERRORS):
        return ""


def _check_format(path: str, raw_lines: list[bytes]) -> None:
    """Raise JournalUnreadable if another version of tenax wrote this, before its lines fail to decode."""
    try:
        header = msgspec.json.decode(raw_lines[0], type=_AnyHeader)
    except (IndexError, *DECODE_ERRORS):
        return  # not a header: the caller reports it
    if header.format != FORMAT:
        raise JournalUnreadable(
            f"{path!r} has format {header.format}, this tenax reads format {FORMAT}; use tenax {header.tenax}"
        )


def replay_run(header: RunHeader, steps: list[RunStep]) -> tuple[list[tuple[float, str]], list[str]]:
    """Return the run's messages with the time since its start, and where this version of tenax behaves differently."""
    from tenax._view.run_messages import RunMessages

    machine = CoordinatorMachine(header.settings, RecordedPolicy(step.decision for step in steps))
    lines: list[tuple[float, str]] = []
    differences: list[str] = []
    run_messages = RunMessages()
    for number, step in enumerate(steps, 1):
        sent = machine.step(step.event, step.at).sends
        if sent != step.sent:
            differences.append(f"step {number}, {type(step.event).__name__}: the journal has {step.sent}, not {sent}")
        lines += [(step.at - header.at, line) for line in run_messages.lines_for(step.event, step.sent)]
    return lines, differences
