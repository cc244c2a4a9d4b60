"""Times: small files next to the journal that tell when the bytes of log files came.

A log holds the worker's bytes and nothing else, and its folder what TorchElastic's would hold, so the times of
``RUN/attempt_0/1/stdout.log`` are in ``RUN/journal.times/attempt_0.1.stdout``. Records of 16 bytes, little-endian: a
position in the log, and when the bytes from there on came (seconds since the epoch). At most ten records a second, and
only while something is written. A log file anywhere else has no times.

They are only a help: a disk that does not take them costs the times, never the log; damaged ones are read as far as
they make sense; without them lines of one file are still in order.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._logs.tail import Mark

FOLDER = b"journal.times"
_EVERY_S = 0.1
_RECORD = struct.Struct("<Qd")
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_AT_ONCE = 1 << 16  # bytes of records


def times_path(log_path: bytes) -> bytes:
    """Where the times of this log file are; empty: nowhere."""
    worker_folder, name = os.path.split(log_path)
    attempt_folder, local_rank = os.path.split(worker_folder)
    run_folder, attempt = os.path.split(attempt_folder)
    if not (attempt.startswith(b"attempt_") and local_rank.isdigit() and name.endswith(b".log")):
        return b""
    return os.path.join(run_folder, FOLDER, b".".join([attempt, local_rank, name.removesuffix(b".log")]))


class TimesWriter:
    """Used by the one thread that writes files."""

    def __init__(self, log_path: bytes) -> None:
        self._path = times_path(log_path)
        self._descriptor = -1
        self._is_given_up = not self._path
        self._noted_at = 0.0

    def note(self, position: int, at: float) -> None:
        """The bytes from there on came at that time."""
        if self._is_given_up or -_EVERY_S < at - self._noted_at < _EVERY_S:
            return
        self._noted_at = at
        try:
            if self._descriptor < 0:
                with suppress(FileExistsError):
                    os.mkdir(os.path.dirname(self._path))
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
    """Looks records up where they are: the file of a long run is not small. Never raises. It is open only meanwhile."""

    def __init__(self, log_path: bytes) -> None:
        self._path = times_path(log_path)
        self._descriptor = -1
        self._count = 0

    def __enter__(self) -> None:
        with suppress(OSError):  # there are none
            self._descriptor = os.open(self._path, FOR_READING)
            self._count = os.fstat(self._descriptor).st_size // _RECORD.size

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._count = -1, 0

    def between(self, start: int, end: int) -> list[Mark]:
        """The marks that tell of these positions."""
        marks: list[Mark] = []
        with self:
            offset = max(0, self._find(0, start) - 1) * _RECORD.size
            while len(data := self._read(offset, _AT_ONCE)) >= _RECORD.size:
                data = data[: len(data) - len(data) % _RECORD.size]
                offset += len(data)
                for record in _RECORD.iter_unpack(data):
                    position, at = int(record[0]), float(record[1])
                    if position >= end:
                        return marks
                    marks.append((position, at))
        return marks

    def position_at(self, at: float) -> int:
        """Where what came at that time or later begins, or a little before."""
        with self:
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
