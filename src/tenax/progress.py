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


class _Progress:
    """The progress file of this process, if it is a worker of tenax. The first report creates it."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._pid = 0
        self._is_disabled = False
        self.forget()

    def forget(self) -> None:
        """Forget the steps and the phase."""
        self._first = self._last = (-1, 0.0)
        self._count = 0
        self.phase = b""

    @property
    def is_open(self) -> bool:
        """Whether a report has created the file."""
        return self._descriptor >= 0

    def can_report(self) -> bool:
        if self.is_open and self._pid == os.getpid():
            return True
        # A child that the worker has forked does not report.
        self._is_disabled = self._is_disabled or self.is_open or not self._open()
        return not self._is_disabled

    def _open(self) -> bool:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if not error_file:
            return False
        path = os.path.join(os.path.dirname(error_file), NAME)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            self.disable(error)
            return False
        self._pid = os.getpid()
        return True

    def step(self, number: int, at: float) -> None:
        self._last = (number, at)
        if not self._count:
            self._first = self._last
        self._count += 1
        self.write()

    def write(self) -> None:
        (first, first_at), (last, last_at) = self._first, self._last
        data = LAYOUT.pack(MAGIC, first, last, first_at, last_at, self._count, self.phase)
        try:
            os.pwrite(self._descriptor, data, 0)
        except OSError as error:
            self.disable(error)

    def disable(self, error: OSError | str) -> None:
        import sys

        if self._is_disabled:
            return
        self._is_disabled, self._descriptor = True, -1
        sys.stderr.write(f"tenax: could not report the progress of this worker: {error}\n")


_progress = _Progress()


def step(number: int) -> None:
    """Report that step ``number`` is done. Numbers increase; after a restart they continue from the last checkpoint."""
    if not _progress.can_report():
        return
    number = int(number)
    if -MAX_STEP <= number <= MAX_STEP:
        _progress.step(number, time.monotonic())
    else:
        _progress.disable(f"the step number has {number.bit_length()} bits; the maximum is 53")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark slow work that is not a step: a checkpoint, an evaluation. It is shown, and never reported as a hang."""
    if not _progress.can_report():
        yield
        return
    before, _progress.phase = _progress.phase, name.encode("utf-8", "replace")[:_PHASE_BYTES]
    _progress.write()
    try:
        yield
    finally:
        _progress.phase = before
        _progress.write()


def begin_generation() -> None:
    """This process takes part in another generation: its first step has not been reported yet."""
    if _progress.is_open and _progress.can_report():
        _progress.forget()
        _progress.write()
