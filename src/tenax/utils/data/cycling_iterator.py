"""An iterator over several epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["CyclingIterator"]


class CyclingIterator(Iterator[T], Generic[T]):
    """Iterates over ``generator_fn(start_epoch)``, then over the next epoch, up to epoch ``n - 1``."""

    def __init__(self, n: int, generator_fn: Callable[[int], Iterable[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._iter = iter(generator_fn(start_epoch))

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._iter)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            self._epoch += 1
            self._iter = iter(self._generator_fn(self._epoch))
