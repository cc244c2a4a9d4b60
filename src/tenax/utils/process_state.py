"""The state of a process, from ``/proc``."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """Return the letter of its state (``R`` running, ``S`` sleeping, ``D`` uninterruptible, ``Z`` zombie).

    None if there is no such process or no readable ``/proc``.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the process name before it may contain anything
    except OSError:
        return None
    return fields[0] if fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Return whether a process in this state waits in the kernel, where SIGKILL has no effect."""
    return state is not None and state.startswith("D")
