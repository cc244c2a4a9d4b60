"""LocalStore: the operations of stores whose processes can see the whole table; MemoryStore: one in memory.

Subclasses provide access to the table: ``_change`` it exclusively, ``_read`` it, ``_wait_until`` a change makes a
condition true. The store in a file is in ``_file``.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

from tenax._io.latch import Latch
from tenax.store._api import DEFAULT_TIMEOUT_S, QueueEmptyError, Store, StoreError, as_amount, as_bytes, as_text, pairs
from tenax.store._table import NotANumber, Table, as_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from tenax.store._api import Timeout

    T = TypeVar("T")

_PREFIX = b"/"  # of users' keys; internal keys have none


class LocalStore(Store):
    """See the module. Thread-safe."""

    @abstractmethod
    def _change(self, change: Callable[[Table], T]) -> T:
        """Call ``change`` with exclusive access to the table, and publish its changes."""

    @abstractmethod
    def _read(self, read: Callable[[Table], T]) -> T:
        """Call ``read``, which changes nothing, with the current table."""

    @abstractmethod
    def _wait_until(self, read: Callable[[Table], T | None], deadline: float) -> T | None:
        """Call ``read`` now and after each change until it returns a result. Return None at the deadline."""

    def set(self, key: str, value: str | bytes) -> None:
        self._change(lambda table: table.put(_name(key), as_bytes(value)))

    def add(self, key: str, amount: int) -> int:
        try:
            return self._change(lambda table: table.add(_name(key), as_amount(amount)))
        except NotANumber as error:
            raise StoreError(f"cannot add to the key {key!r}: {error}.") from error

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)
        return self._change(lambda table: table.compare_set(_name(key), expected, desired))

    def append(self, key: str, value: str | bytes) -> None:
        self._change(lambda table: table.append(_name(key), as_bytes(value)))

    def delete_key(self, key: str) -> bool:
        return self._change(lambda table: table.drop(_name(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [_name(key) for key in keys]

        def values(table: Table) -> list[bytes] | None:
            if not all(map(table.has, names)):
                return None
            return [table.values.get(name, b"") for name in names]

        found = self._wait_until(values, time.monotonic() + self._timeout_s)
        if found is None:
            raise self._keys_missing(keys, self._timeout_s)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        named = [(_name(key), as_bytes(value)) for key, value in pairs(keys, values)]

        def put_all(table: Table) -> None:
            for name, value in named:
                table.put(name, value)

        self._change(put_all)

    def check(self, keys: Sequence[str]) -> bool:
        names = [_name(key) for key in keys]
        return self._read(lambda table: all(map(table.has, names)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit_s = self._limit_s(timeout)
        missing = {_name(key) for key in keys}

        def are_set(table: Table) -> bool | None:
            missing.difference_update([name for name in missing if table.has(name)])
            return not missing or None

        if not self._wait_until(are_set, time.monotonic() + limit_s):
            raise self._keys_missing([key for key in keys if _name(key) in missing], limit_s)

    def list_keys(self) -> list[str]:
        names = self._read(lambda table: list(table.values))
        return [as_text(name[len(_PREFIX) :]) for name in names if name.startswith(_PREFIX)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._change(lambda table: table.push(_name(key), as_bytes(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = _name(key)
        deadline = time.monotonic() + self._timeout_s
        while (value := self._change(lambda table: table.pop(name) if name in table.queues else None)) is None:
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty.")
            if not self._wait_until(lambda table: name in table.queues or None, deadline):
                raise self._item_missing(key)
        return value

    def queue_len(self, key: str) -> int:
        return self._read(lambda table: table.queue_length(_name(key)))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        limit_s = self._limit_s(timeout)
        name = _name(key)
        deadline = time.monotonic() + limit_s
        self.add(key, 1)

        def is_complete(table: Table) -> bool | None:
            return as_number(table.values.get(name, b"0")) >= world_size or None

        try:
            if self._wait_until(is_complete, deadline):
                return
        except NotANumber as error:
            raise StoreError(f"the key of the barrier {key!r} was overwritten: {error}.") from error
        raise self._callers_missing(key, world_size, limit_s)


class MemoryStore(LocalStore):
    """A store for the threads of one process, shared with its clones. A clone is needed only for another timeout."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(timeout)
        self._table = Table()
        # An exception of a signal handler leaves no lock behind; in a threading.Condition it may.
        self._lock = threading.RLock()
        self._waiting: set[Latch] = set()  # opened by every change

    def clone(self) -> MemoryStore:
        copy = MemoryStore(self._timeout_s)
        copy._table, copy._lock, copy._waiting = self._table, self._lock, self._waiting
        return copy

    def __str__(self) -> str:
        return "the store in memory"

    def _change(self, change: Callable[[Table], T]) -> T:
        with self._lock:
            for latch in list(self._waiting):  # before the change: an exception in between loses no wake-up
                latch.open()
            return change(self._table)

    def _read(self, read: Callable[[Table], T]) -> T:
        with self._lock:
            return read(self._table)

    def _wait_until(self, read: Callable[[Table], T | None], deadline: float) -> T | None:
        while True:
            changed = Latch()
            try:
                with self._lock:
                    result = read(self._table)
                    if result is not None or time.monotonic() >= deadline:
                        return result
                    self._waiting.add(changed)
                changed.wait(max(0.0, deadline - time.monotonic()))
            finally:
                self._waiting.discard(changed)


def _name(key: str) -> bytes:
    return _PREFIX + as_bytes(key)
