"""Store: the interface of all key-value stores. The methods are those of ``torch.distributed.Store``.

Keys are text, values are bytes (text is stored as UTF-8). A method that waits raises ``StoreTimeoutError`` at its
deadline. Every timeout may be a ``timedelta`` or a number of seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tenax._core.text import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import TypeVar

    Timeout = timedelta | float
    AnyStore = TypeVar("AnyStore", bound="Store")

DEFAULT_TIMEOUT_S = 300.0
_MAX_NAMED = 5  # keys in an error message


class StoreError(RuntimeError):
    """The store could not perform the operation."""


class StoreTimeoutError(StoreError, TimeoutError):
    """The operation did not complete in time. It may still take effect."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or the connection was lost before the answer arrived."""


class QueueEmptyError(StoreError):
    """The queue is empty, and the call does not block."""


class Store(ABC):
    """A key-value store that several workers share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = seconds(timeout)

    # --- values, queues, barriers -------------------------------------------------------------------------------------

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait until the key exists."""
        return self.multi_get([key])[0]

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the counter of a key, which starts at 0, and return the sum. The value is the number as text."""

    @abstractmethod
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace the value if it is the expected one. Return the value of the key afterwards.

        A missing key is created if the expected value is empty; otherwise nothing is stored, and the expected value is
        returned.
        """

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key; create it if it is missing."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete a key. Return True if it existed."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys; wait until all exist."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values atomically."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of these keys (or non-empty queues) exist now."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all of these keys have been set."""

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self.list_keys())

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, in arbitrary order."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append a value to a queue."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue. If it is empty, wait, or raise ``QueueEmptyError``."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return the number of values in a queue."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have reached this barrier. A caller that timed out stays counted."""

    # --- the store itself ---------------------------------------------------------------------------------------------

    @abstractmethod
    def clone(self) -> Store:
        """Return another handle to the same store, for concurrent use in another thread."""

    @property
    def timeout(self) -> timedelta:
        """The default timeout of methods that wait."""
        from datetime import timedelta

        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        self._timeout_s = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return True if ``append``, ``multi_get`` and ``multi_set`` exist, as in all stores of tenax."""
        return True

    def close(self) -> None:
        """Release this handle's resources. Other handles keep working."""
        return

    def __enter__(self: AnyStore) -> AnyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _limit_s(self, timeout: Timeout | None) -> float:
        return self._timeout_s if timeout is None else seconds(timeout)

    def _keys_missing(self, keys: Sequence[str], limit_s: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"timed out after {format_seconds(limit_s)} waiting for {format_keys(keys)} in {self}."
        )

    def _item_missing(self, key: str) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"timed out after {format_seconds(self._timeout_s)} waiting for an item in the queue {key!r} of {self}."
        )

    def _callers_missing(self, key: str, world_size: int, limit_s: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"timed out after {format_seconds(limit_s)}: not all {world_size} reached the barrier {key!r} of {self}."
        )


def seconds(timeout: Timeout) -> float:
    value = timeout if isinstance(timeout, int | float) else timeout.total_seconds()
    if not value >= 0:
        raise ValueError(f"timeout must be a non-negative number of seconds or a timedelta, not {timeout!r}")
    return float(value)


def as_bytes(value: str | bytes) -> bytes:
    """Encode a key or value for storage."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return bytes(value)


def as_amount(amount: int) -> int:
    """Check the argument of ``add``."""
    if not -(1 << 63) <= amount < 1 << 63:
        raise ValueError(f"add takes a signed 64-bit integer, not {amount}")
    return amount


def as_text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def pairs(keys: Sequence[str], values: Sequence[str | bytes]) -> list[tuple[str, str | bytes]]:
    """Check and pair the arguments of ``multi_set``."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set takes one value per key, not {len(values)} values for {len(keys)} keys")
    return list(zip(keys, values, strict=True))


def format_keys(keys: Sequence[str]) -> str:
    """Return the first few keys as text, for an error message."""
    named = ", ".join(repr(key) for key in keys[:_MAX_NAMED])
    if len(keys) > _MAX_NAMED:
        named += f" and {len(keys) - _MAX_NAMED} more"
    return f"the key {named}" if len(keys) == 1 else f"the keys {named}"
