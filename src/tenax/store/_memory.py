"""MemoryStore: a store for the threads of one process."""

from __future__ import annotations

import threading
import time

from tenax.store._api import DEFAULT_TIMEOUT_S
from tenax.store._local import LocalStore
from tenax.store._table import Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from tenax.store._api import Timeout

    T = TypeVar("T")


class MemoryStore(LocalStore):
    """A store in memory, shared with its clones. Thread-safe; a clone is needed only for another timeout."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()

    def clone(self) -> MemoryStore:
        copy = MemoryStore(self._timeout_s)
        copy._table, copy._changed = self._table, self._changed
        return copy

    def __str__(self) -> str:
        return "the store in memory"

    def _change(self, change: Callable[[Table], T]) -> T:
        with self._changed:
            try:
                return change(self._table)
            finally:
                self._changed.notify_all()

    def _read(self, read: Callable[[Table], T]) -> T:
        with self._changed:
            return read(self._table)

    def _wait_until(self, read: Callable[[Table], T | None], deadline: float) -> T | None:
        with self._changed:
            while (result := read(self._table)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
        return result
