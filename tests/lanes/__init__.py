"""Lanes: long runs with random faults or input. A short part of each is in the test run."""

from __future__ import annotations

import sys
import threading

_printing = threading.Lock()


def print_line(text: str) -> None:
    """Print at once, from any thread, without mixing lines."""
    with _printing:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
