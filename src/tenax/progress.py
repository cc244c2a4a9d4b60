"""How far the training has got, said by the script: ``tenax.progress.step(n)`` after step n, and nothing else.

What it is good for: the ledger knows which steps were done twice, ``tenax status`` and the page show the step, and a
job that hangs is noticed by its own rhythm. The cost is a few stores into a page of memory that the worker shares with
its agent through a file: no message, no system call, no thread. Outside of tenax a call does nothing.

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
    import mmap
    from collections.abc import Iterator

__all__ = ["phase", "step"]

NAME = "progress"  # next to the worker's error file
MAGIC = b"tenaxpr1"
# A number that is odd while the rest is being written, so that a reader never believes half of it; then the first and
# the last step, when they were done (CLOCK_MONOTONIC), how many were said, and the phase.
LAYOUT = struct.Struct("<8sQqqddQ32s")
_PHASE_BYTES = 32


class _Page:
    """One worker's, made at the first word."""

    def __init__(self, path: str) -> None:
        import mmap

        # Never cut short: the agent may be reading.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, LAYOUT.size)
            self._memory: mmap.mmap = mmap.mmap(descriptor, LAYOUT.size)
        finally:
            os.close(descriptor)
        self.pid = os.getpid()
        self._sequence = 0
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
        memory = self._memory
        self._sequence += 1
        struct.pack_into("<Q", memory, 8, self._sequence)
        LAYOUT.pack_into(memory, 0, MAGIC, self._sequence, first, last, first_at, last_at, self._said, self.phase)
        self._sequence += 1
        struct.pack_into("<Q", memory, 8, self._sequence)


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
            import sys

            sys.stderr.write(f"tenax: the progress of this worker cannot be told: {error}\n")
            return False
        return True


_worker = _Worker()


def step(number: int) -> None:
    """Step ``number`` is done. Numbers grow, and begin where the last checkpoint ended."""
    page = _worker.page()
    if page is not None:
        page.step(int(number), time.monotonic())


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
