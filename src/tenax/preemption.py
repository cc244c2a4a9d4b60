"""Preemption notices: whether a node of the job will leave soon, and when.

    from tenax import preemption

    for step in range(steps):
        train(step)
        if preemption.notice():
            save_checkpoint(step)     # every rank of every node sees the notice, so all can save together

Continue training after the checkpoint: the workers of the leaving node get a stop signal, and the other nodes form the
next generation.

For use inside workers. A call reads one small file; there is no setup and no thread. Outside of tenax, and without a
notice, it returns None.
"""

from __future__ import annotations

import os
import time

__all__ = ["Notice", "generation", "notice"]


class Notice:
    """A node will leave. ``leaves_at`` is on this host's ``time.monotonic()``; None: unknown."""

    def __init__(self, host: str, is_this_host: bool, why: str, leaves_at: float | None) -> None:
        self.host = host
        self.is_this_host = is_this_host
        self.why = why
        self.leaves_at = leaves_at

    @property
    def seconds_left(self) -> float | None:
        """Seconds until it leaves, never negative; None: unknown."""
        return None if self.leaves_at is None else max(0.0, self.leaves_at - time.monotonic())

    def __repr__(self) -> str:
        return f"Notice(host={self.host!r}, why={self.why!r}, seconds_left={self.seconds_left!r})"


def notice() -> Notice | None:
    """Return the latest notice for this worker's generation, or None."""
    path = os.environ.get("TENAX_NOTICE_FILE", "")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    import json

    found = json.loads(content)
    return Notice(found["host"], found["is_this_host"], found["why"], found["leaves_at"])


def generation() -> int:
    """Return the generation of this worker, to use as a fencing token. 0 outside of tenax.

    It only grows during a run. Store it with each resource that must have one owner (a checkpoint, a lock), and refuse
    to overwrite one with a greater generation: then a worker of an old generation cannot damage it.
    """
    return int(os.environ.get("TENAX_GENERATION", "0"))
