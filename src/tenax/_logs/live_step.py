"""The step of a worker for the live line, from the file that ``tenax.progress`` writes. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress

from tenax.progress import LAYOUT, MAGIC


class LiveStep:
    """Of one progress file, which may not exist yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = (0, 0.0)  # step, and when it was reported
        self._step_s = 0.0

    def text(self) -> str:
        """Return ``step 1,234 (310 ms)``: the last step and the duration of the steps since the last call."""
        found = self._read()
        if found is None:
            return ""
        first, last, first_at, last_at, phase = found
        step, at = self._last if self._last[1] else (first, first_at)
        if last > step and last_at >= at:
            self._step_s = (last_at - at) / (last - step)
        self._last = last, last_at
        took_s = self._step_s
        took = "" if not took_s else f" ({took_s * 1000:.0f} ms)" if took_s < 0.9995 else f" ({took_s:.1f} s)"
        return f"step {last:,}{took}{f', {phase}' if phase.isprintable() and phase else ''}"

    def _read(self) -> tuple[int, int, float, float, str] | None:
        data = again = b""
        with suppress(OSError):  # no step so far
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                data, again = (os.pread(descriptor, LAYOUT.size, 0) for _ in range(2))
            finally:
                os.close(descriptor)
        if len(data) < LAYOUT.size or again != data:  # it is being written
            return None
        magic, first, last, first_at, last_at, count, phase = LAYOUT.unpack(data)
        name = phase.rstrip(b"\0").decode("utf-8", "replace")
        return (first, last, first_at, last_at, name) if magic == MAGIC and count else None
