"""``ProcessFailure``: one failed worker, and ``ChildFailedError``: raised if workers failed, in TorchElastic's API.

The first is a real dataclass, because users call ``dataclasses.replace`` and ``asdict`` on it; so this module is not
imported at startup. Its constructor never raises, whatever is at ``error_file``.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from tenax._core.model import Evidence, Failure, failure_began_at
from tenax._core.text import harmless
from tenax._failures import error_file as error_files
from tenax._view import exit_text

NOT_AVAILABLE = "<N/A>"
_MAX_WIDTH = 60
_MAX_REFINEMENT_S = 2.0  # how much later than the stated second the precise time may be


@dataclass
class ProcessFailure:
    """How a worker failed: its exit code (negative: a signal) and the content of its error file, if it wrote one.

    ``message`` is the file's ``message`` (in TorchElastic's format an object, in the older one a string), or a text
    about the exit code. ``timestamp`` is when the error was raised, otherwise when this object was created, in seconds
    since the epoch. Without an error file, ``error_file`` becomes ``"<N/A>"``. ``host`` is where the worker ran; empty:
    on this host.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)
    host = ""  # not a field: TorchElastic's class has none
    is_consequence = False  # not a field either; whether it follows from another worker's failure
    evidence = Evidence()  # nor this: what tenax found out, for a restart policy

    def __post_init__(self) -> None:
        found = error_files.read(self.error_file)
        self._set_timestamp(found.timestamp, found.stated_s)
        self.error_file_data = {"message": "<NONE>"}
        self.message = ""
        if found.data and not found.problem:
            self.error_file_data = found.data
            self.message = found.data["message"]
        elif found.message or found.traceback:
            # Truncated or too large: what could be recovered, in the usual format.
            self.error_file_data = error_files.content(found.message, found.traceback, self._raised_at)
            self.message = self.error_file_data["message"]
        if not os.path.isfile(self.error_file):
            self.error_file = NOT_AVAILABLE
        if not self.message:
            self._explain_exit_code(found.problem)

    @classmethod
    def from_failure(cls, failure: Failure, *, wall_to_agent_clock: float = 0.0) -> ProcessFailure:
        """Convert tenax's failure, with evidence found without an error file and the precise time.

        ``wall_to_agent_clock``: the agent's clock minus the wall clock.
        """
        evidence = failure.evidence
        this = cls(failure.local_rank, failure.pid, failure.exit_code, evidence.error_file)
        stated_s = None if this.error_file == NOT_AVAILABLE else this.timestamp
        this._set_timestamp(failure_began_at(failure) - wall_to_agent_clock, stated_s)
        this.host = failure.host
        this.is_consequence = evidence.is_consequence
        this.evidence = evidence
        if this.error_file == NOT_AVAILABLE:
            message = evidence.message or evidence.out_of_memory or failure.reason
            if not message and evidence.last_lines:
                message = "\n".join(
                    [f"{exit_text.describe_exit(failure.exit_code)}; last lines of its stderr:", *evidence.last_lines]
                )
            if message:
                # A hung worker has no traceback, but it dumped its stacks.
                text = f"{message}\n{evidence.stacks}" if evidence.stacks else message
                this.error_file_data = error_files.content(message, evidence.traceback or text, this._raised_at)
                this.message = this.error_file_data["message"]
        return this

    @property
    def raised_at(self) -> float:
        """``timestamp`` with fractions: two workers often fail within one second."""
        return self._raised_at if self.timestamp == self._given_s else float(self.timestamp)

    def signal_name(self) -> str:
        """Return ``SIGSEGV``, or ``<N/A>`` if it was not killed by a named signal."""
        name = exit_text.signal_name(-self.exitcode) if self.exitcode < 0 else ""
        return name if name.startswith("SIG") else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time as ``YYYY-MM-DD_HH:MM:SS``."""
        from datetime import datetime

        try:
            return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")
        except (ValueError, OverflowError, OSError):
            return NOT_AVAILABLE

    def _set_timestamp(self, seconds: float | None, stated_s: int | None) -> None:
        """``stated_s``: the whole second in the error file; ``seconds``, more precise, may be a little later."""
        self._raised_at = time.time() if seconds is None else seconds
        is_true = stated_s is not None and 0 <= self._raised_at - stated_s <= _MAX_REFINEMENT_S
        self.timestamp = self._given_s = stated_s if is_true and stated_s is not None else int(self._raised_at)

    def _explain_exit_code(self, problem: str) -> None:
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        self.message = (
            f"{exit_text.describe_exit(self.exitcode)}; {problem or 'no error file was written'}"
            " (decorate its main function with tenax.multiprocessing.errors.record)"
        )


class ChildFailedError(Exception):
    """Workers failed. ``failures`` maps global ranks to failures; it is never empty.

    When it leaves a function that ``record`` decorates, the first cause's error file is copied to that process's own.
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure]) -> None:
        if not failures:
            raise AssertionError("a ChildFailedError needs at least one failure, got none")
        self.name = name
        self.failures = failures
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the rank that failed first and its failure.

        A worker that only lost a peer comes after one with a cause of its own; ties go to the one observed first.
        """
        rank = min(self.failures, key=lambda rank: by_cause(self.failures[rank]))
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the failures as text: the first cause last, after all others."""
        first_rank, _ = self.get_first_failure()
        blocks = {rank: _block(index, rank, failure) for index, (rank, failure) in enumerate(self.failures.items())}
        first = blocks.pop(first_rank)
        title = f"{self.name} FAILED"
        longest = max(len(line) for block in (title, first, *blocks.values()) for line in block.split("\n"))
        width = min(longest, _MAX_WIDTH)
        border, section = boarder_delim * width, section_delim * width
        others = blocks.values() or ["  <NO_OTHER_FAILURES>"]
        lines = ["", border, title, section, "Failures:", *others, section]
        return "\n".join([*lines, "Root Cause (first observed failure):", first, border])


def by_cause(failure: ProcessFailure) -> tuple[bool, float]:
    """Sort causes before consequences, then by time."""
    # Callers may pass torch's own ProcessFailure, which has whole seconds and no causes.
    return getattr(failure, "is_consequence", False), getattr(failure, "raised_at", failure.timestamp)


def _block(index: int, rank: int, failure: ProcessFailure) -> str:
    name = failure.signal_name()
    fields = {
        "time": failure.timestamp_isoformat(),
        # Not the fully qualified name: that would wait for a name server.
        "host": getattr(failure, "host", "") or socket.gethostname(),
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        "exitcode": f"{failure.exitcode} (pid: {failure.pid})" + ("" if name == NOT_AVAILABLE else f" ({name})"),
        "error_file": failure.error_file,
        "traceback": _traceback_of(failure.message),
    }
    return "\n".join([f"[{index}]:", *(f"  {key:<10}: {harmless(value)}" for key, value in fields.items())])


def _traceback_of(message: Any) -> str:
    """Return the traceback if there is one, otherwise the message, indented below its key."""
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    candidates = (
        extra.get("py_callstack") if isinstance(extra, dict) else None,
        message.get("message") if isinstance(message, dict) else message,
    )
    found = next((text for text in candidates if isinstance(text, str) and text), NOT_AVAILABLE)
    return found.replace("\n", "\n  ")
