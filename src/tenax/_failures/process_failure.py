"""ProcessFailure: one worker that ended badly, as TorchElastic's users know it.

A real dataclass, because they use ``dataclasses.replace`` and ``asdict`` on it; so this module is not on the launcher's
start path. Making one never raises, whatever lies at ``error_file``, and never touches another one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenax._failures import error_file as error_files
from tenax._failures import exit_text as words

if TYPE_CHECKING:
    from tenax._core.model import Failure

__all__ = ["NOT_AVAILABLE", "ProcessFailure"]

NOT_AVAILABLE = "<N/A>"
_MAX_SHARPENING_S = 2.0  # how far the file's own time may be behind the second that it names


@dataclass
class ProcessFailure:
    """How a worker failed: its exit code (negative: a signal) and what its error file says, if it left one.

    ``message`` is what the file holds under that name (in TorchElastic's format an object, in the older one a string),
    or a sentence about the exit code. ``timestamp`` is when the error was raised, or else when this object was made, in
    seconds since the epoch. Without an error file ``error_file`` becomes ``"<N/A>"``. ``host`` is where it ran; empty:
    on this host.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)
    host = ""  # no field: TorchElastic's has none
    is_consequence = False  # neither is this: what it says follows from what happened to another

    def __post_init__(self) -> None:
        found = error_files.read(self.error_file)
        self._set_time(found.timestamp, found.said_s)
        self.error_file_data = {"message": "<NONE>"}
        self.message = ""
        if found.data and not found.problem:
            self.error_file_data = found.data
            self.message = found.data["message"]
        elif found.message or found.traceback:
            # Torn or too big: what could be saved of it, in the shape of a whole one.
            self.error_file_data = error_files.content(found.message, found.traceback, self._raised_at)
            self.message = self.error_file_data["message"]
        if not _is_regular_file(self.error_file):
            self.error_file = NOT_AVAILABLE
        if not self.message:
            self._explain_exit_code(found.problem)

    @classmethod
    def from_failure(cls, failure: Failure, *, wall_to_agent_clock: float = 0.0) -> ProcessFailure:
        """The same failure as tenax knows it: with evidence that was found without an error file, and its true time.

        ``wall_to_agent_clock``: what to add to the wall clock's time to get the agent's.
        """
        evidence = failure.evidence
        this = cls(failure.local_rank, failure.pid, failure.exit_code, evidence.error_file)
        began = failure.seen_at if evidence.raised_at is None else evidence.raised_at
        this._set_time(began - wall_to_agent_clock, this.timestamp if this.error_file != NOT_AVAILABLE else None)
        this.host = failure.host
        this.is_consequence = evidence.is_consequence
        if this.error_file == NOT_AVAILABLE:
            message = evidence.message or evidence.out_of_memory or failure.reason
            if not message and evidence.last_lines:
                message = "\n".join(
                    [f"{words.ended_in_words(failure.exit_code)}; the last of its stderr:", *evidence.last_lines]
                )
            if message:
                # Of a worker that hung nobody has a traceback, but it wrote down where its threads were.
                told = f"{message}\n{evidence.stacks}" if evidence.stacks else message
                this.error_file_data = error_files.content(message, evidence.traceback or told, this._raised_at)
                this.message = this.error_file_data["message"]
        return this

    @property
    def raised_at(self) -> float:
        """``timestamp``, but exact: two workers often fail within one second."""
        return self._raised_at if self.timestamp == self._given_s else float(self.timestamp)

    def signal_name(self) -> str:
        """``SIGSEGV``, or ``<N/A>`` if no signal with a name ended it."""
        name = words.signal_name(-self.exitcode) if self.exitcode < 0 else ""
        return name if name.startswith("SIG") else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Local time as ``YYYY-MM-DD_HH:MM:SS``."""
        from datetime import datetime

        try:
            return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")
        except (ValueError, OverflowError, OSError):
            return NOT_AVAILABLE

    def _set_time(self, seconds: float | None, said_s: int | None) -> None:
        """``said_s``: the second that the error file names. What is known more exactly may lie a little later."""
        import time

        self._raised_at = time.time() if seconds is None else seconds
        is_true = said_s is not None and 0 <= self._raised_at - said_s <= _MAX_SHARPENING_S
        self.timestamp = self._given_s = said_s if is_true and said_s is not None else int(self._raised_at)

    def _explain_exit_code(self, problem: str) -> None:
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        self.message = (
            f"{words.ended_in_words(self.exitcode)}; {problem or 'it wrote no error file'}"
            " (tenax.multiprocessing.errors.record around its main function makes it write one)"
        )


def _is_regular_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:
        return False
