"""How far the training has got, said by the script: ``tenax.progress.step(n)`` after step n, and nothing else.

What it is good for: the ledger knows which steps were done twice, ``tenax status`` and the page show the step, and a
job that hangs is noticed by its own rhythm. The cost of a call is one short write into a small file of the run's log
folder, a microsecond or two; no message, no thread. It never fails: a disk that is full costs the progress, not the
worker (which is why the file is written and not mapped). Outside of tenax a call does nothing.

    from tenax import progress

    for n in range(first, last):
        train(n)
        progress.step(n)
        if n % 1000 == 0:
            with progress.phase("checkpoint"):  # takes its time, and that is no hang
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
# The first and the last step, when they were done (CLOCK_MONOTONIC), how many were said, and the phase.
LAYOUT = struct.Struct("<8sqqddQ32s")
MOST = 1 << 53  # no step has a greater number: what is greater does not travel
_PHASE_BYTES = 32


class _Page:
    """What one worker has said, made at its first word."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self.pid = os.getpid()
        self._first: tuple[int, float] | None = None
        self._last = (-1, 0.0)
        self._said = 0
        self.phase = b""

    def step(self, number: int, at: float) -> None:
        if self._first is None:
            self._first = (number, at)
        self._last = (number, at)
        self._said += 1
        self.write()

    def write(self) -> None:
        first, first_at = self._first if self._first is not None else (-1, 0.0)
        last, last_at = self._last
        data = LAYOUT.pack(MAGIC, first, last, first_at, last_at, self._said, self.phase)
        try:
            os.pwrite(self._descriptor, data, 0)
        except OSError as error:
            _worker.give_up(error)


class _Worker:
    """This process, if it is a worker of tenax."""

    def __init__(self) -> None:
        self._page: _Page | None = None
        self._is_silent = False  # nobody would read it

    def page(self) -> _Page | None:
        if self._page is not None and self._page.pid == os.getpid():
            return self._page
        # A child that the worker has forked is not the worker.
        if not self._is_silent and (self._page is not None or not self._open()):
            self._is_silent = True
        return None if self._is_silent else self._page

    def _open(self) -> bool:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if not error_file:
            return False
        try:
            self._page = _Page(os.path.join(os.path.dirname(error_file), NAME))
        except OSError as error:
            self.give_up(error)
            return False
        return True

    def give_up(self, error: OSError | str) -> None:
        import sys

        if self._is_silent:
            return
        self._is_silent, self._page = True, None
        sys.stderr.write(f"tenax: the progress of this worker cannot be told: {error}\n")


_worker = _Worker()


def step(number: int) -> None:
    """Step ``number`` is done. Numbers grow, and begin where the last checkpoint ended."""
    page = _worker.page()
    if page is None:
        return
    number = int(number)
    if -MOST <= number <= MOST:
        page.step(number, time.monotonic())
    else:
        _worker.give_up(f"no step has a number of {number.bit_length()} bits")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Something that is no step and may take its time: a checkpoint, an evaluation. Shown, and never called a hang."""
    page = _worker.page()
    if page is None:
        yield
        return
    before, page.phase = page.phase, name.encode("utf-8", "replace")[:_PHASE_BYTES]
    page.write()
    try:
        yield
    finally:
        page.phase = before
        page.write()
