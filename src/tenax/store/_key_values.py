"""KeyValues: the table of a store server, with the waiters for each key and the memory in use. Limits: its limits.

A client that exceeds a limit is disconnected; nothing else happens. The protocol has no error replies: closing the
connection is the only error. The limits for keys, values and keys per request are those of torch's server, which has
no others.

1. The memory of the table and its waiters is counted, including Python's overhead, and never exceeds the limits: a
   change that would exceed them is refused (``Refused``) and has no effect.
2. A key that appears notifies each of its waiters once. A pushed value notifies waiters only up to the first one whose
   wait it completes. A notified waiter is no longer registered for the key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tenax.store._table import Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.store._protocol import Session

# Python's overhead in bytes: upper bounds for CPython 3.10 to 3.13 on 64-bit machines.
_KEY_COST = 200
_QUEUE_COST = 800
_QUEUED_COST = 50
_AWAITED_COST = 400  # the first waiter of a key
_WAITER_COST = 100  # each further waiter


class Limits:
    """Frozen. The defaults suit several thousand workers; tests and small hosts use less."""

    key_bytes: int
    value_bytes: int  # also after an append
    keys_per_request: int
    request_bytes: int  # one request with many keys, including Python's overhead
    answer_bytes: int  # one answer with many values
    total_keys: int
    total_bytes: int  # keys, values, queues and waiters, including Python's overhead
    connections: int
    unread_bytes: int  # answers that one client has not read; beyond it the server stops reading its requests
    waiting_keys: int  # keys that one client waits for
    held_bytes: int  # unread answers and incomplete requests of all clients; beyond it the largest holder is dropped
    handshake_s: float  # the timeout for the greeting
    silent_per_address: int  # connections without a greeting; beyond it the oldest is closed
    idle_per_address: int  # connections with a greeting but no request; beyond it the median by age is closed

    def __init__(
        self,
        *,
        key_bytes: int = 8 << 10,
        value_bytes: int = 8 << 20,
        keys_per_request: int = 128 << 10,
        request_bytes: int = 64 << 20,
        answer_bytes: int = 256 << 20,
        total_keys: int = 1 << 20,
        total_bytes: int = 1 << 30,
        connections: int = 16 << 10,
        unread_bytes: int = 1 << 20,
        waiting_keys: int = 128 << 10,
        held_bytes: int = 512 << 20,
        handshake_s: float = 5.0,
        silent_per_address: int = 1 << 10,
        idle_per_address: int = 4 << 10,
    ) -> None:
        given = locals()
        for name in type(self).__annotations__:
            if given[name] <= 0:
                raise ValueError(f"the limit {name} must be greater than zero, not {given[name]}")
            object.__setattr__(self, name, given[name])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"limits are frozen: make new ones with {name}={value!r}")

    def __repr__(self) -> str:
        return f"Limits({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Refused(Exception):
    """A request is malformed or exceeds a limit. The server closes the client's connection."""


class Waiter(ABC):
    """Waits for keys."""

    __slots__ = ()

    @abstractmethod
    def seen(self, key: bytes) -> bool:
        """Handle a key that appeared; the waiter is no longer registered for it. Return True if it was the last."""


class KeyValues(Table):
    __slots__ = ("held_bytes", "limits", "used_bytes", "waiters", "woken")

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.waiters: dict[bytes, dict[Waiter, None]] = {}  # in order of registration
        self.woken: list[Session] = []  # sessions with a new answer; the owner of the table clears it
        self.used_bytes = 0
        self.held_bytes = 0  # in the buffers of connections; sessions update it

    def put(self, key: bytes, value: bytes) -> None:
        old = self.values.get(key)
        if old is not None and len(value) <= len(old):  # the most frequent case
            self.used_bytes += len(value) - len(old)
            self.values[key] = value
        else:
            self.store(key, value)
        if self.waiters and key in self.waiters:
            self.wake(key)

    def store(self, key: bytes, value: bytes) -> None:
        """Put without notifying waiters."""
        if len(self.values) >= self.limits.total_keys and key not in self.values:
            raise Refused(f"the store already has the maximum of {len(self.values)} keys")
        self._use(self._growth(key, value))
        self.values[key] = value

    def _growth(self, key: bytes, value: bytes) -> int:
        """Return how many more bytes are used once the key has this value."""
        old = self.values.get(key)
        return len(key) + len(value) + _KEY_COST if old is None else len(value) - len(old)

    def put_all(self, pairs: dict[bytes, bytes]) -> None:
        """Put all pairs, or none."""
        new_keys = sum(key not in self.values for key in pairs)
        if len(self.values) + new_keys > self.limits.total_keys:
            raise Refused(f"{new_keys} more keys would exceed the maximum")
        self._use(sum(self._growth(key, value) for key, value in pairs.items()))
        self.values.update(pairs)
        if self.waiters:
            for key in self.waiters.keys() & pairs.keys():
                self.wake(key)

    def append(self, key: bytes, value: bytes) -> None:
        if len(value) + len(self.values.get(key, b"")) > self.limits.value_bytes:
            raise Refused("the value would become too long")
        super().append(key, value)

    def drop(self, key: bytes) -> bool:
        old = self.values.pop(key, None)
        if old is None:
            return False
        self.used_bytes -= len(key) + len(old) + _KEY_COST
        return True

    def push(self, key: bytes, value: bytes) -> None:
        cost = len(value) + _QUEUED_COST
        if key not in self.queues:
            cost += len(key) + _QUEUE_COST
        self._use(cost)
        super().push(key, value)
        for waiter in list(self.waiters.get(key, ())):
            self.unregister(key, waiter)
            if waiter.seen(key):
                return

    def pop(self, key: bytes) -> bytes:
        value = super().pop(key)
        self.used_bytes -= len(value) + _QUEUED_COST
        if key not in self.queues:
            self.used_bytes -= len(key) + _QUEUE_COST
        return value

    def _use(self, more: int) -> None:
        if more > 0 and self.used_bytes + more > self.limits.total_bytes:
            raise Refused("the store is full")
        self.used_bytes += more

    # --- waiters ------------------------------------------------------------------------------------------------------

    def register(self, key: bytes, waiter: Waiter) -> None:
        """Register a waiter that is not yet registered for this key."""
        waiting = self.waiters.get(key)
        if waiting is None:
            self._use(len(key) + _AWAITED_COST)
            self.waiters[key] = {waiter: None}
        else:
            self._use(_WAITER_COST)
            waiting[waiter] = None

    def unregister(self, key: bytes, waiter: Waiter) -> None:
        waiting = self.waiters.get(key)
        if waiting is None or waiter not in waiting:
            return
        del waiting[waiter]
        if waiting:
            self.used_bytes -= _WAITER_COST
        else:
            del self.waiters[key]
            self.used_bytes -= len(key) + _AWAITED_COST

    def wake(self, key: bytes) -> None:
        waiting = self.waiters.pop(key, None)
        if waiting is not None:
            self.used_bytes -= len(key) + _AWAITED_COST + _WAITER_COST * (len(waiting) - 1)
            for waiter in waiting:
                waiter.seen(key)
