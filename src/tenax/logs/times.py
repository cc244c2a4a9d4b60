"""Times: a small file beside a log file that tells when its bytes came: ``stdout.log.times``.

The log holds the worker's bytes and nothing else, so the times stand beside it. Records of 16 bytes, little-endian: a
position in the log, and when the bytes from there on came (seconds since the epoch). At most ten records a second, and
only while something is written.

It is only a help: a disk that does not take it costs the times, never the log; a damaged one is read as far as it makes
sense; without it lines of one file are still in order.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.logs.tail import Mark

SUFFIX = b".times"
_EVERY_S = 0.1
_RECORD = struct.Struct("<Qd")
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_MOST_AT_ONCE = 1 << 16  # bytes of records


class TimesWriter:
    """Used by the one thread that writes files."""

    def __init__(self, log_path: bytes) -> None:
        self._path = log_path + SUFFIX
        self._descriptor = -1
        self._is_given_up = False
        self._noted_at = 0.0

    def note(self, position: int, at: float) -> None:
        """The bytes from there on came at that time."""
        if self._is_given_up or -_EVERY_S < at - self._noted_at < _EVERY_S:
            return
        self._noted_at = at
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, _FLAGS, 0o666)
                size = os.fstat(self._descriptor).st_size
                if size % _RECORD.size:  # half a record, of a writer that was killed
                    os.ftruncate(self._descriptor, size - size % _RECORD.size)
            if os.write(self._descriptor, _RECORD.pack(position, at)) < _RECORD.size:
                self._give_up()
        except OSError:  # the log itself tells of a disk in trouble
            self._give_up()

    def _give_up(self) -> None:
        self._is_given_up = True
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


class TimesReader:
    """Looks records up where they are: the file of a long run is not small. Never raises."""

    def __init__(self, log_path: bytes) -> None:
        self._descriptor = -1
        self._count = 0
        with suppress(OSError):
            self._descriptor = os.open(log_path + SUFFIX, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._count = os.fstat(self._descriptor).st_size // _RECORD.size

    def between(self, start: int, end: int) -> list[Mark]:
        """The marks that tell of these positions; at most as many as are worth reading."""
        index = max(0, self._find(0, start) - 1)
        data = self._read(index * _RECORD.size, _MOST_AT_ONCE)
        marks: list[Mark] = []
        for record in _RECORD.iter_unpack(data[: len(data) - len(data) % _RECORD.size]):
            position, at = int(record[0]), float(record[1])
            if position >= end:
                break
            marks.append((position, at))
        return marks

    def position_at(self, at: float) -> int:
        """Where what came at that time or later begins, or a little before."""
        index = max(0, self._find(1, at) - 1)
        data = self._read(index * _RECORD.size, _RECORD.size)
        return int(_RECORD.unpack(data)[0]) if len(data) == _RECORD.size else 0

    def _find(self, field: int, value: float) -> int:
        """The first record that is greater than this."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            data = self._read(middle * _RECORD.size, _RECORD.size)
            if len(data) < _RECORD.size or _RECORD.unpack(data)[field] > value:
                high = middle
            else:
                low = middle + 1
        return low

    def _read(self, offset: int, size: int) -> bytes:
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:
            return b""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
