"""The last bytes of one stream and their approximate arrival times, for failure reports and ``tenax logs``.

1. Positions count bytes from the start of the stream; ``end`` is the next one, ``first`` the oldest in memory.
2. Size and number of time marks are bounded. A mark holds the arrival time of the bytes from a position on.
3. Adding is cheap: it happens for every read of every stream.
"""

from __future__ import annotations

from array import array

TAIL_BYTES = 1 << 16
MAX_MARKS = 2048
_MIN_MARK_INTERVAL_S = 0.001
_MARK_BYTES = 16
Mark = tuple[int, float]  # from this position on, seconds since the epoch


class Tail:
    def __init__(self, began_at: int = 0) -> None:
        self.data = bytearray()
        self.end = began_at
        self._positions = array("q")  # of the marks
        self._times = array("d")
        self._marked_at = 0.0
        self.last_at = 0.0  # when bytes were last added; 0: never

    @property
    def first(self) -> int:
        return self.end - len(self.data)

    @property
    def size(self) -> int:
        """Memory use in bytes."""
        return len(self.data) + _MARK_BYTES * len(self._positions)

    @property
    def marks(self) -> list[Mark]:
        return list(zip(self._positions, self._times, strict=True))

    def add(self, data: bytes, at: float) -> None:
        self.last_at = at
        if not -_MIN_MARK_INTERVAL_S < at - self._marked_at < _MIN_MARK_INTERVAL_S:
            self._positions.append(self.end)
            self._times.append(at)
            self._marked_at = at
            if len(self._positions) > MAX_MARKS:  # make them coarser
                del self._positions[1:-1:2]
                del self._times[1:-1:2]
        self.end += len(data)
        if len(data) >= TAIL_BYTES:
            self.data[:] = data[-TAIL_BYTES:]
            self._forget_marks()
        else:
            self.data += data
            if len(self.data) > 2 * TAIL_BYTES:
                self.trim()

    def trim(self) -> None:
        del self.data[:-TAIL_BYTES]
        self._forget_marks()

    def last_bytes(self) -> bytes:
        return bytes(self.data[-TAIL_BYTES:])

    def since(self, position: int) -> bytes:
        """Return the bytes in memory from this position on."""
        return bytes(self.data[max(0, position - self.first) :])

    def _forget_marks(self) -> None:
        from bisect import bisect_right  # here, because short output never needs it

        gone = max(0, bisect_right(self._positions, self.first) - 1)
        del self._positions[:gone]
        del self._times[:gone]
