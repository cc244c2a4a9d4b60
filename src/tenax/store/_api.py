"""Store: what every key-value store of ours can do. The methods are those of ``torch.distributed.Store``.

Keys are text, values are bytes (text is taken and stored as UTF-8). A method that waits does so until its deadline and
then raises ``StoreTimeoutError``. Every timeout may be given as a ``timedelta`` or as a number of seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from types import TracebackType
    from typing import TypeVar

    Timeout = timedelta | float
    AnyStore = TypeVar("AnyStore", bound="Store")

DEFAULT_TIMEOUT_S = 300.0
_MAX_NAMED = 5  # keys in an error message


class StoreError(RuntimeError):
    """The store could not do what was asked."""


class StoreTimeoutError(StoreError, TimeoutError):
    """It did not happen in time. What was asked may still happen."""


class StoreConnectionError(StoreError, ConnectionError):
    """There is no connection to the store, or it was lost while we waited for the answer."""


class QueueEmptyError(StoreError):
    """There is nothing in the queue, and the caller did not want to wait."""


class Store(ABC):
    """A key-value store that several workers share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = seconds(timeout)

    # --- values -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store a value, over an older one if there is any."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Count a key up, from 0 if it is new; returns the sum. The value is the number as text."""

    @abstractmethod
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace a value if it is the expected one; returns the value that the key has then.

        A key that does not exist is created if the expected value is empty; if it is not, nothing is stored and the
        answer is the expected value.
        """

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Put more at the end of a value, or create it."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Forget a key; was there one?"""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of these keys; waits until all are there."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values together: whoever sees one of them sees all."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys (or queues with something in them) exist now."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until every one of these keys has been set."""

    @abstractmethod
    def num_keys(self) -> int:
        """How many keys there are."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """All keys, in no order."""

    # --- queues -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value out of a queue. An empty one is waited for, or raises ``QueueEmptyError``."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """How many values there are in a queue."""

    # --- together -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until so many have come to the barrier of this name. Who gave up waiting stays counted."""

    # --- the store itself ---------------------------------------------------------------------------------------------

    @abstractmethod
    def clone(self) -> Store:
        """Another handle to the same store, to be used at the same time by another thread."""

    @property
    def timeout(self) -> timedelta:
        """How long a method waits that is given no timeout."""
        from datetime import timedelta

        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: Timeout) -> None:
        self._timeout_s = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Whether there are ``append``, ``multi_get`` and ``multi_set``. (Ours all have them.)"""
        return True

    def close(self) -> None:
        """Let go of what this handle holds. The store stays for the others."""
        return

    def __enter__(self: AnyStore) -> AnyStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def seconds(timeout: Timeout) -> float:
    """A timeout as a number."""
    value = timeout if isinstance(timeout, int | float) else timeout.total_seconds()
    if not value >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0 on, or a timedelta, not {timeout!r}")
    return float(value)


def as_bytes(value: str | bytes) -> bytes:
    """A key or value as it is stored."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return bytes(value)


def as_amount(amount: int) -> int:
    """What ``add`` was given."""
    if not -(1 << 63) <= amount < 1 << 63:
        raise ValueError(f"add takes a number that fits into eight bytes, not {amount}")
    return amount


def as_text(key: bytes) -> str:
    """A key as users see it."""
    return key.decode("utf-8", "surrogateescape")


def pairs(keys: Sequence[str], values: Sequence[str | bytes]) -> list[tuple[str, str | bytes]]:
    """What ``multi_set`` was given."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set takes one value for each key, not {len(values)} values for {len(keys)} keys")
    return list(zip(keys, values, strict=True))


def in_words(keys: Sequence[str]) -> str:
    """Keys for an error message, few of them."""
    named = ", ".join(repr(key) for key in keys[:_MAX_NAMED])
    if len(keys) > _MAX_NAMED:
        named += f" and {len(keys) - _MAX_NAMED} more"
    return f"the key {named}" if len(keys) == 1 else f"the keys {named}"
