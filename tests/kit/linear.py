"""Checks that a parser of foreign bytes does linear work: twice the input costs at most about twice the CPU time.

CPU time of one thread, and the minimum of several measurements: other processes can only make one measurement slower,
so the minimum converges on a loaded machine too. The input grows eightfold, so that linear work (8 times) and quadratic
work (64 times) lie far apart, and the limit lies between them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GROWTH = 8
_MAX_GROWTH = 24  # of the cost, when the input grows by GROWTH; quadratic work gives 64
_FLOOR_S = 0.0002  # cheaper is not measured: fixed costs hide how the work grows
_REPEATS = 2
_MAX_REPEATS = 20  # while the minimum may still fall below the limit


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time that this thread spends in ``work``, without garbage collection."""
    gc.disable()
    try:
        begun = time.thread_time()
        work()
        return time.thread_time() - begun
    finally:
        gc.enable()


def assert_linear(work: Callable[[T], object], make: Callable[[int], T], *, size: int = 16_384) -> None:
    """Fail unless ``work`` on ``make(size)`` costs at most about GROWTH times as much as on ``make(size // GROWTH)``.

    ``make`` returns an input of about so many bytes. ``work`` must not raise: a parser's own error is an outcome, which
    the caller turns into a value.
    """
    small, large = make(size // GROWTH), make(size)
    low = high = math.inf
    for repeats in range(1, _MAX_REPEATS + 1):
        low = min(low, cpu_s(lambda: work(small)))
        high = min(high, cpu_s(lambda: work(large)))
        if repeats >= _REPEATS and high <= max(low, _FLOOR_S) * _MAX_GROWTH:
            return
    growth = high / max(low, _FLOOR_S)
    raise AssertionError(
        f"{size // GROWTH} bytes cost {low * 1e3:.2f} ms, {size} bytes {high * 1e3:.2f} ms: "
        f"{GROWTH} times the input costs {growth:.0f} times the work"
    )


def pieces(data: bytes, length: int) -> list[bytes]:
    """``data`` as a peer may send it, in pieces of this length."""
    return [data[at : at + length] for at in range(0, len(data), length)]
