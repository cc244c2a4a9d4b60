"""Tail: the last bytes of one stream, and roughly when they came. What a report and ``tenax logs`` can see of it.

1. Positions count bytes from the beginning of the stream; ``end`` is the next one, ``first`` the oldest that is held.
2. Its size is bounded, and so is the number of its time marks. A mark says when the bytes from some position on came.
3. Adding is cheap: it is done for every read of every stream.
"""

from __future__ import annotations

from array import array

TAIL_BYTES = 1 << 16
MAX_MARKS = 2048
_FINEST_S = 0.001
_MARK_BYTES = 16

TYPE_CHECKING = False
if TYPE_CHECKING:
    Mark = tuple[int, float]  # from this position on, seconds since the epoch


class Tail:
    def __init__(self, began_at: int = 0) -> None:
        self.data = bytearray()
        self.end = began_at
        self._places = array("q")  # of the marks
        self._times = array("d")
        self._marked_at = 0.0

    @property
    def first(self) -> int:
        return self.end - len(self.data)

    @property
    def size(self) -> int:
        """What it costs in memory."""
        return len(self.data) + _MARK_BYTES * len(self._places)

    @property
    def marks(self) -> list[Mark]:
        return list(zip(self._places, self._times, strict=True))

    def add(self, data: bytes, at: float) -> None:
        if not -_FINEST_S < at - self._marked_at < _FINEST_S:
            self._places.append(self.end)
            self._times.append(at)
            self._marked_at = at
            if len(self._places) > MAX_MARKS:  # then they are coarser
                del self._places[1:-1:2]
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
        """Keep only what is promised."""
        del self.data[:-TAIL_BYTES]
        self._forget_marks()

    def last_bytes(self) -> bytes:
        return bytes(self.data[-TAIL_BYTES:])

    def since(self, position: int) -> bytes:
        """What it holds from there on."""
        return bytes(self.data[max(0, position - self.first) :])

    def _forget_marks(self) -> None:
        """All that tell only of what is gone."""
        from bisect import bisect_right  # of no use to a worker that prints little

        gone = max(0, bisect_right(self._places, self.first) - 1)
        del self._places[:gone]
        del self._times[:gone]
