"""PrefixStore: a part of another store, under a prefix. The other store may be tenax's or torch's."""

from __future__ import annotations

from tenax.store._api import Store, seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import Any

    from tenax.store._api import Timeout


class PrefixStore(Store):
    """Maps each key to ``prefix/key``. The timeout and ``num_keys`` are those of the whole store, as in torch."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Any:
        return self._store

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._name(key) for key in keys]

    def __str__(self) -> str:
        return f"{self._store} under {self._prefix!r}"

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._name(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._name(key), amount))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._store.compare_set(self._name(key), expected_value, desired_value))

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._name(key), value)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._name(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(value) for value in self._store.multi_get(self._names(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._names(keys), list(values))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(self._names(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._store.wait(self._names(keys), *_given(timeout))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def list_keys(self) -> list[str]:
        start = self._name("")
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._name(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._store.queue_pop(self._name(key), block))

    def queue_len(self, key: str) -> int:
        return int(self._store.queue_len(self._name(key)))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._store.barrier(self._name(key), world_size, *_given(timeout))

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    @property
    def timeout(self) -> timedelta:
        value: timedelta = self._store.timeout
        return value

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(*_given(timeout))

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def close(self) -> None:
        """Do nothing: the underlying store belongs to its creator."""


def _given(timeout: Timeout | None) -> list[timedelta]:
    """Return the timeout, if there is one, as a timedelta, which torch's stores require."""
    from datetime import timedelta

    return [] if timeout is None else [timedelta(seconds=seconds(timeout))]
