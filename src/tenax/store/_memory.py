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
    """Lives as long as somebody holds it or a clone of it. Thread-safe; a clone is only needed for its own timeout."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout)
        self._table = Table()
        self._changed = threading.Condition()

    def clone(self) -> MemoryStore:
        twin = MemoryStore(self._timeout_s)
        twin._table, twin._changed = self._table, self._changed
        return twin

    def __str__(self) -> str:
        return "the store in memory"

    def _change(self, change: Callable[[Table], T]) -> T:
        with self._changed:
            try:
                return change(self._table)
            finally:
                self._changed.notify_all()

    def _look(self, look: Callable[[Table], T]) -> T:
        with self._changed:
            return look(self._table)

    def _wait_until(self, look: Callable[[Table], T | None], deadline: float) -> T | None:
        with self._changed:
            while (result := look(self._table)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
        return result
