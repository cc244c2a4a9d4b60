"""How a process ended, in a word or two: for lines that have room for no more."""

from __future__ import annotations

import signal


def how_it_ended(exit_code: int) -> str:
    """``SIGKILL`` or ``exit code 3``; a negative code is the number of the signal that ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has only a number
        return f"signal {-exit_code}"
