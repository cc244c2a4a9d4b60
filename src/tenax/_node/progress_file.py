"""The other side of ``tenax.progress``: what a worker has written down about its steps. Never raises, never waits."""

from __future__ import annotations

import os

from tenax._core.bounds import MAX_SECONDS
from tenax._core.messages import WorkerProgress
from tenax.progress import LAYOUT, MAGIC, MOST

_TRIES = 8  # a reader may meet a writer; not eight times in a row


def read_progress(path: str, local_rank: int) -> WorkerProgress | None:
    """None: it said nothing, or nothing that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        for _ in range(_TRIES):
            data = os.pread(descriptor, LAYOUT.size, 0)
            if len(data) < LAYOUT.size:
                return None
            magic, first, last, first_at, last_at, said, phase = LAYOUT.unpack(data)
            # What somebody else wrote there must not travel: a frame with such a number costs its sender the link.
            in_bounds = all(-MOST <= step <= MOST for step in (first, last)) and all(
                -MAX_SECONDS <= at <= MAX_SECONDS for at in (first_at, last_at)
            )
            if magic != MAGIC or not in_bounds:
                return None
            if os.pread(descriptor, LAYOUT.size, 0) == data:
                name = phase.rstrip(b"\0").decode("utf-8", "replace")
                return WorkerProgress(local_rank, first, last, first_at, last_at, name) if said or name else None
    except OSError:  # a disk that went away
        return None
    finally:
        os.close(descriptor)
    return None
