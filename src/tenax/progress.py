"""Progress of the training, reported by the script: call ``tenax.progress.step(n)`` after step n.

With it, the goodput figures show which steps were repeated, ``tenax status`` and the dashboard show the current step,
and hangs are detected by the job's own step time. A call costs one short write to a small file in the run's log folder,
one or two microseconds; it sends no message and starts no thread. It never raises: on a full disk the progress is lost
and the worker continues (the file is written, not mapped, for this reason). Outside of tenax a call does nothing.

    from tenax import progress

    for n in range(first, last):
        train(n)
        progress.step(n)
        if n % 1000 == 0:
            with progress.phase("checkpoint"):  # slow, but not a hang
                save(n)
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["phase", "step"]

NAME = "progress"  # next to the worker's error file
MAGIC = b"tenaxpr1"
# Magic, first and last step, their times (CLOCK_MONOTONIC), number of reported steps, phase.
LAYOUT = struct.Struct("<8sqqddQ32s")
MAX_STEP = 1 << 53  # the wire rejects greater integers
_PHASE_BYTES = 32


class _ProgressFile:
    """The progress file of one worker, created by its first report."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self.pid = os.getpid()
        self._first: tuple[int, float] | None = None
        self._last = (-1, 0.0)
        self._count = 0
        self.phase = b""

    def step(self, number: int, at: float) -> None:
        if self._first is None:
            self._first = (number, at)
        self._last = (number, at)
        self._count += 1
        self.write()

    def begin_generation(self) -> None:
        self._first, self._last, self._count, self.phase = None, (-1, 0.0), 0, b""
        self.write()

    def write(self) -> None:
        first, first_at = self._first if self._first is not None else (-1, 0.0)
        last, last_at = self._last
        data = LAYOUT.pack(MAGIC, first, last, first_at, last_at, self._count, self.phase)
        try:
            os.pwrite(self._descriptor, data, 0)
        except OSError as error:
            _worker.disable(error)


class _Worker:
    """This process, if it is a worker of tenax."""

    def __init__(self) -> None:
        self._file: _ProgressFile | None = None
        self._is_disabled = False

    def file(self) -> _ProgressFile | None:
        if self._file is not None and self._file.pid == os.getpid():
            return self._file
        # A child that the worker has forked does not report.
        if not self._is_disabled and (self._file is not None or not self._open()):
            self._is_disabled = True
        return None if self._is_disabled else self._file

    def has_reported(self) -> bool:
        return self._file is not None

    def _open(self) -> bool:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if not error_file:
            return False
        try:
            self._file = _ProgressFile(os.path.join(os.path.dirname(error_file), NAME))
        except OSError as error:
            self.disable(error)
            return False
        return True

    def disable(self, error: OSError | str) -> None:
        import sys

        if self._is_disabled:
            return
        self._is_disabled, self._file = True, None
        sys.stderr.write(f"tenax: could not report the progress of this worker: {error}\n")


_worker = _Worker()


def step(number: int) -> None:
    """Report that step ``number`` is done. Numbers increase; after a restart they continue from the last checkpoint."""
    file = _worker.file()
    if file is None:
        return
    number = int(number)
    if -MAX_STEP <= number <= MAX_STEP:
        file.step(number, time.monotonic())
    else:
        _worker.disable(f"the step number has {number.bit_length()} bits; the maximum is 53")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark slow work that is not a step: a checkpoint, an evaluation. It is shown, and never reported as a hang."""
    file = _worker.file()
    if file is None:
        yield
        return
    before, file.phase = file.phase, name.encode("utf-8", "replace")[:_PHASE_BYTES]
    file.write()
    try:
        yield
    finally:
        file.phase = before
        file.write()


def begin_generation() -> None:
    """This process takes part in another generation: its first step has not been reported yet."""
    if _worker.has_reported():
        file = _worker.file()
        if file is not None:
            file.begin_generation()
