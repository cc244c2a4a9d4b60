"""The journal: every event and decision of a run, one JSON line per step, in order.

``tenax replay``, ``tenax timeline`` and ``tenax report`` read it. Its size is bounded: past a limit, steps are counted
instead of written, and the last line holds their number. Writing never fails a run: steps lost to a full disk are
counted too. After the first lost step no other step is written, so the file is always a complete beginning of the run
and can be replayed. The first loss prints one warning.

Progress events repeat while nothing else happens, and each replaces the one before. Only the latest is written, before
the next step of another kind, so a job that trains for a month does not fill its journal.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import msgspec

from tenax import __version__
from tenax._core.bounds import DECODE_ERRORS, MAX_TEXT
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent, ProgressSeen
from tenax._core.model import AgentSettings
from tenax._core.text import encodable, shortened_texts

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


AnyLine = Header | Step | Footer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


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
        host = os.uname().nodename
        self.write(Header(FORMAT, __version__, settings, entrypoint, host, time.time(), now))

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


class JournalUnreadable(Exception):
    """The file is not a tenax journal, or is damaged. The message says where. ``beginning``: the lines before that."""

    def __init__(self, message: str, beginning: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.beginning = beginning


def read_journal(path: str) -> tuple[Header, list[Step], Footer | None]:
    """Read a journal, without a torn last line (the agent was killed while writing). Raises JournalUnreadable."""
    lines = read_lines(path, AnyLine, Header)
    assert isinstance(lines[0], Header)
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    return lines[0], [line for line in lines if isinstance(line, Step)], footer


def read_lines(path: str, kinds: Any, header: type[msgspec.Struct]) -> list[Any]:
    """Return the lines of a journal, which starts with its header and holds one run. Raises JournalUnreadable."""
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
    return lines


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
