"""Short names for failures: the kind, by which failures are counted, and the exit code. Pure."""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._view.status import FailureStatus

_MAX_NAME = 60
_GENERAL = frozenset({"exception", "signal", "exit_code", "unknown"})  # less specific than the class or the number


def kind_of(failure: FailureStatus) -> str:
    """Return the cause if it is specific, else the exception's class, else how the process ended."""
    if failure.cause and failure.cause not in _GENERAL:
        return failure.cause
    how = exit_summary(failure.exit_code)
    name = failure.what.removeprefix(how).removeprefix(": ").partition(":")[0]
    if name and len(name) <= _MAX_NAME and _is_class(name):
        return name
    return failure.cause or how


def _is_class(name: str) -> bool:
    """Return True for a class as a traceback shows it: an identifier with an upper-case letter after its last dot."""
    return name.replace(".", "").isidentifier() and name.rpartition(".")[2][:1].isupper()


def exit_summary(exit_code: int) -> str:
    """Return ``SIGKILL`` or ``exit code 3``. A negative code is the number of the signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exit_code}"
