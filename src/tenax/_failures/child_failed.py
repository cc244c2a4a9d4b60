"""``ChildFailedError``: raised by a launcher when its workers failed. TorchElastic's name and interface.

When it leaves a function that ``record`` decorates, the first cause's error file is copied to that process's own.
"""

from __future__ import annotations

from typing import Any

from tenax._core.text import harmless
from tenax._failures.process_failure import NOT_AVAILABLE, ProcessFailure

__all__ = ["ChildFailedError"]

_MAX_WIDTH = 60


class ChildFailedError(Exception):
    """Workers failed. ``failures`` maps global ranks to failures; it is never empty."""

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
    import socket

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
