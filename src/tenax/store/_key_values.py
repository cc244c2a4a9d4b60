"""KeyValues: the table of a store that serves connections: who waits for which key, and how much memory it all takes.

1. What the table and its waiters take is counted, with what Python needs to keep them, and never passes the limits:
   a change that would is refused (``Refused``) and leaves no trace.
2. A key that appears counts off everybody who waits for it, once; a value that is pushed serves one of them, the first
   that it completes. Whoever is woken is no longer registered.
"""

from __future__ import annotations

from tenax.store._table import Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.store._limits import Limits
    from tenax.store._protocol import Session

# Rounded up from what CPython 3.10 to 3.13 take on 64-bit machines.
_KEY_COST = 200
_QUEUE_COST = 800
_QUEUED_COST = 50
_AWAITED_COST = 400  # the first that waits for a key
_WAITER_COST = 100  # each one more


class Refused(Exception):
    """A request that is malformed or asks for more than the limits allow: its sender loses the connection."""


class Waiter:
    """Somebody who waits for keys."""

    __slots__ = ()

    def seen(self, key: bytes) -> bool:
        """One of the keys is there, and the waiter is no longer registered for it. Was it the last one?"""
        raise NotImplementedError


class KeyValues(Table):
    """The state of one served store."""

    __slots__ = ("held_bytes", "limits", "used_bytes", "waiters", "woken")

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.waiters: dict[bytes, dict[Waiter, None]] = {}  # in the order in which they came
        self.woken: list[Session] = []  # have an answer since the owner of this table last looked
        self.used_bytes = 0
        self.held_bytes = 0  # in buffers of connections; their sessions count it

    # --- changes ------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        old = self.values.get(key)
        if old is not None and len(value) <= len(old):  # by far the most frequent, and as short as can be
            self.used_bytes += len(value) - len(old)
            self.values[key] = value
        else:
            self.store(key, value)
        if self.waiters and key in self.waiters:
            self.wake(key)

    def store(self, key: bytes, value: bytes) -> None:
        """``put`` without waking anybody."""
        old = self.values.get(key)
        if old is None:
            if len(self.values) >= self.limits.total_keys:
                raise Refused(f"there are {len(self.values)} keys already")
            more = len(key) + len(value) + _KEY_COST
        else:
            more = len(value) - len(old)
        self._use(more)
        self.values[key] = value

    def put_all(self, pairs: dict[bytes, bytes]) -> None:
        """All or nothing."""
        values = self.values
        more = 0
        new_keys = 0
        for key, value in pairs.items():
            old = values.get(key)
            if old is None:
                new_keys += 1
                more += len(key) + len(value) + _KEY_COST
            else:
                more += len(value) - len(old)
        if len(values) + new_keys > self.limits.total_keys:
            raise Refused(f"{new_keys} more keys would be too many")
        self._use(more)
        values.update(pairs)
        if self.waiters:
            for key in self.waiters.keys() & pairs.keys():
                self.wake(key)

    def append(self, key: bytes, value: bytes) -> None:
        if len(value) + len(self.values.get(key, b"")) > self.limits.value_bytes:
            raise Refused("the value would grow too long")
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
        """The waiter is not yet registered for this key."""
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
        """Everybody who waits for this key has seen it."""
        waiting = self.waiters.pop(key, None)
        if waiting is not None:
            self.used_bytes -= len(key) + _AWAITED_COST + _WAITER_COST * (len(waiting) - 1)
            for waiter in waiting:
                waiter.seen(key)
