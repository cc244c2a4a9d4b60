"""The state of a process as Linux tells it."""

from __future__ import annotations

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The letter of its state (``R`` runs, ``S`` sleeps, ``D`` is stuck in the kernel, ``Z`` is dead); None: unknown.

    It is unknown when there is no such process, or no ``/proc`` that may be read.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            after_the_name = file.read().rpartition(")")[2].split()  # the name itself may contain anything
    except OSError:
        return None
    return after_the_name[0] if after_the_name else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in this state waits inside the kernel, where not even SIGKILL reaches it."""
    return state is not None and state.startswith("D")
