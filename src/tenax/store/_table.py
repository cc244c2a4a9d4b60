"""Table: keys with values and queues, with the semantics of torch's store. No waiting, no limits, no I/O.

Every change goes through four primitives (``put``, ``drop``, ``push``, ``pop``); subclasses that count or record
changes override them. Keys and values are bytes. A queue and a key may have the same name; they are independent.
"""

from __future__ import annotations

from collections import deque

_MIN, _MAX = -(1 << 63), (1 << 63) - 1
_SPACES = b" \t\n\v\f\r"
_MAX_DIGITS = 19  # of a 64-bit integer


class NotANumber(ValueError):
    """The value of a key is not a number, so ``add`` fails."""


class Table:
    __slots__ = ("queues", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    # --- the primitives -----------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value

    def drop(self, key: bytes) -> bool:
        """Delete a key. Return True if it existed."""
        return self.values.pop(key, None) is not None

    def push(self, key: bytes, value: bytes) -> None:
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes:
        """Remove and return the oldest value of a queue, which must not be empty."""
        queue = self.queues[key]
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    # --- derived operations -------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Return True if the key or a queue of that name exists; either ends a wait for it."""
        return key in self.values or key in self.queues

    def queue_length(self, key: bytes) -> int:
        return len(self.queues.get(key, ()))

    def add(self, key: bytes, amount: int) -> int:
        value = added(self.values.get(key), amount)
        self.put(key, b"%d" % value)
        return value

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Return the value afterwards; for a missing key and a non-empty expected value, the expected value."""
        old = self.values.get(key)
        if old is None and expected:
            return expected
        if old is None or old == expected:
            self.put(key, desired)
            return desired
        return old

    def append(self, key: bytes, value: bytes) -> None:
        old = self.values.get(key)
        self.put(key, value if old is None else old + value)


def added(old: bytes | None, amount: int) -> int:
    """Return the number of a key, which starts at 0, plus ``amount``, wrapped to 64 bits."""
    if old is not None:
        amount += int(old) if old.isdigit() and len(old) < _MAX_DIGITS else as_number(old)
    if not _MIN <= amount <= _MAX:
        amount = (amount - _MIN) % (1 << 64) + _MIN
    return amount


def as_number(value: bytes) -> int:
    """Parse a number as C++'s ``stoll`` does: spaces, a sign, digits, and anything after them."""
    body = value.lstrip(_SPACES)
    sign = -1 if body[:1] == b"-" else 1
    if body[:1] in (b"-", b"+"):
        body = body[1:]
    digits = body[: len(body) - len(body.lstrip(b"0123456789"))]
    significant = digits.lstrip(b"0")
    if not digits or len(significant) > _MAX_DIGITS:
        raise NotANumber(f"{value[:40]!r} is not a number")
    number = sign * int(significant or b"0")
    if not _MIN <= number <= _MAX:
        raise NotANumber(f"{value[:40]!r} is not a 64-bit number")
    return number
