"""Reads the progress files that workers write with ``tenax.progress``. Never raises, never blocks."""

from __future__ import annotations

import os

from tenax._core.bounds import MAX_SECONDS
from tenax._core.messages import WorkerProgress
from tenax.progress import LAYOUT, MAGIC, MAX_STEP

_MAX_ATTEMPTS = 8  # a read may overlap a write, but not eight times in a row


def read_progress(path: str, local_rank: int) -> WorkerProgress | None:
    """Return the worker's progress, or None if it has reported none or the file is invalid."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        for _ in range(_MAX_ATTEMPTS):
            data = os.pread(descriptor, LAYOUT.size, 0)
            if len(data) < LAYOUT.size:
                return None
            magic, first, last, first_at, last_at, count, phase = LAYOUT.unpack(data)
            # Any process may write this file. Drop values out of bounds: a peer closes the link on such a frame.
            in_bounds = all(-MAX_STEP <= step <= MAX_STEP for step in (first, last)) and all(
                -MAX_SECONDS <= at <= MAX_SECONDS for at in (first_at, last_at)
            )
            if magic != MAGIC or not in_bounds:
                return None
            if os.pread(descriptor, LAYOUT.size, 0) == data:
                name = phase.rstrip(b"\0").decode("utf-8", "replace")
                return WorkerProgress(local_rank, first, last, first_at, last_at, name) if count or name else None
    except OSError:  # the file system is gone
        return None
    finally:
        os.close(descriptor)
    return None
