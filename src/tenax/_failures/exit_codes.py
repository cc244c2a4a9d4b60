"""The exit code of a run.

| how the run ended                                     | exit code                                     |
| ----------------------------------------------------- | --------------------------------------------- |
| succeeded                                             | 0                                             |
| a worker failed                                       | the first failed worker's own code, 1 to 255  |
| a worker was killed by signal n                       | 128 + n, as in a shell                        |
| a worker could not be started                         | 127 not found, 126 not executable, 1 otherwise|
| a worker failed although it exited with code 0        | 1                                             |
| a worker had failed, hung, and was stopped by tenax   | 1                                             |
| cancelled by signal n                                 | 128 + n: 130 for Ctrl-C, 143 for SIGTERM      |
| cancelled without a signal                            | 130                                           |
| wrong usage                                           | 2                                             |
| an error inside tenax                                 | 70                                            |
| the launcher could not do its work                    | 71                                            |
| a process survived SIGKILL: the host needs attention  | 72                                            |

A worker may use a code with another meaning here; the report always shows which it was.
"""

from __future__ import annotations

from typing import Final

from tenax._core.model import Failure, Outcome, Verdict, assert_never

SUCCEEDED: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERNAL_ERROR: Final = 70
BROKEN: Final = 71
ABANDONED: Final = 72
SIGNAL_BASE: Final = 128
CANCELLED: Final = 130


def exit_code_for(verdict: Verdict) -> int:
    """Return the exit code by the module's table."""
    match verdict.outcome:
        case Outcome.SUCCEEDED:
            return SUCCEEDED
        case Outcome.FAILED:
            return _of_worker(verdict.failures[0]) if verdict.failures else FAILED
        case Outcome.CANCELLED:
            return SIGNAL_BASE + verdict.signal if verdict.signal else CANCELLED
        case Outcome.ABANDONED:
            return ABANDONED
        case Outcome.BROKEN:
            return BROKEN
        case _:
            return assert_never(verdict.outcome)


def _of_worker(failure: Failure) -> int:
    code = failure.exit_code
    if failure.was_stopped:
        return code if 0 < code < SIGNAL_BASE else FAILED  # tenax sent the signal; the worker failed before
    if code < 0:
        return SIGNAL_BASE - code
    return code if 0 < code <= 255 else FAILED
