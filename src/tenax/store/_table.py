"""Table: keys with values and queues, as torch's store keeps them. No waiting, no limits, no I/O.

Every change goes through four primitives (``put``, ``drop``, ``push``, ``pop``), so that whoever must count changes or
write them down overrides those. Keys and values are bytes. A queue may have the name of a key; they are two things.
"""

from __future__ import annotations

from collections import deque

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_SPACES = b" \t\n\v\f\r"
_MAX_DIGITS = 19  # of a number in eight bytes


class NotANumber(ValueError):
    """The value under a key cannot be counted up."""


class Table:
    """The state of one store."""

    __slots__ = ("queues", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    # --- the primitives -----------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        self.values[key] = value

    def drop(self, key: bytes) -> bool:
        """Forget a key; was there one?"""
        return self.values.pop(key, None) is not None

    def push(self, key: bytes, value: bytes) -> None:
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = deque()
        queue.append(value)

    def pop(self, key: bytes) -> bytes:
        """The oldest of a queue that is not empty."""
        queue = self.queues[key]
        value = queue.popleft()
        if not queue:
            del self.queues[key]
        return value

    # --- what is built from them --------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether somebody who waits for this key may go on."""
        return key in self.values or key in self.queues

    def queue_length(self, key: bytes) -> int:
        queue = self.queues.get(key)
        return len(queue) if queue is not None else 0

    def add(self, key: bytes, amount: int) -> int:
        value = self.sum(key, amount)
        self.put(key, b"%d" % value)
        return value

    def sum(self, key: bytes, amount: int) -> int:
        """What the key's number would be. It wraps around as eight bytes do."""
        old = self.values.get(key)
        if old is not None:
            amount += int(old) if old.isdigit() and len(old) < _MAX_DIGITS else as_number(old)
        if not _LEAST <= amount <= _MOST:
            amount = (amount - _LEAST) % (1 << 64) + _LEAST
        return amount

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards. An absent key counts as empty; if something else was expected, that is the answer."""
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


def as_number(value: bytes) -> int:
    """Read a number as C's ``stoll`` does: spaces, a sign, digits, and anything after them."""
    body = value.lstrip(_SPACES)
    sign = -1 if body[:1] == b"-" else 1
    if body[:1] in (b"-", b"+"):
        body = body[1:]
    digits = body[: len(body) - len(body.lstrip(b"0123456789"))]
    significant = digits.lstrip(b"0")
    if not digits or len(significant) > _MAX_DIGITS:
        raise NotANumber(f"{value[:40]!r} is not a number")
    number = sign * int(significant or b"0")
    if not _LEAST <= number <= _MOST:
        raise NotANumber(f"{value[:40]!r} is not a number of eight bytes")
    return number
