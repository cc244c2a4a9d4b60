"""Preemption: a script asks whether a node of its job is going to leave, and how soon.

    from tenax import preemption

    for step in range(steps):
        train(step)
        if preemption.notice():
            save_checkpoint(step)     # every rank of every node sees the notice, so all can save together

It goes on after that: who must end is asked to by a signal, and the others form the next generation.

For use inside workers. It costs one look at the file system; there is nothing to set up and no thread. Without tenax
above (or before any notice) the answer is None.
"""

from __future__ import annotations

import os
import time

__all__ = ["Notice", "generation", "notice"]


class Notice:
    """A node is going to leave."""

    def __init__(self, host: str, is_this_host: bool, why: str, leaves_at: float | None) -> None:
        self.host = host
        self.is_this_host = is_this_host
        self.why = why
        self.leaves_at = leaves_at  # on time.monotonic() of this host; None: nobody knows when

    @property
    def seconds_left(self) -> float | None:
        """How long until it leaves, never negative; None: nobody knows."""
        return None if self.leaves_at is None else max(0.0, self.leaves_at - time.monotonic())

    def __repr__(self) -> str:
        return f"Notice(host={self.host!r}, why={self.why!r}, seconds_left={self.seconds_left!r})"


def notice() -> Notice | None:
    """The latest notice for this worker's generation, if there is one."""
    path = os.environ.get("TENAX_NOTICE_FILE", "")
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    import json

    said = json.loads(content)
    return Notice(said["host"], said["is_this_host"], said["why"], said["leaves_at"])


def generation() -> int:
    """The generation that this worker belongs to: the fencing token. 0 without tenax.

    It only grows during a run. Write it next to whatever must have one owner (a checkpoint, a lock) and refuse to
    replace what carries a greater one: then a worker of a generation that the others have left cannot do harm.
    """
    return int(os.environ.get("TENAX_GENERATION", "0"))
