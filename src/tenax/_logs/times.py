"""Times files: small files next to the journal with the arrival times of the bytes in log files.

A log file holds only the worker's bytes, and its folder only what TorchElastic's would hold, so the times of
``RUN/attempt_0/1/stdout.log`` are in ``RUN/journal.times/attempt_0.1.stdout``. Records of 16 bytes, little-endian: a
position in the log, and the arrival time of the bytes from there on (seconds since the epoch). At most ten records a
second, and only while output arrives. Log files outside this layout have no times.

Times are optional: a disk error loses the times, never the log; a damaged file is read as far as it is valid; without
times, the lines of one file are still in order.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from contextlib import suppress

from tenax._logs.tail import Mark

FOLDER = b"journal.times"
_MIN_INTERVAL_S = 0.1
_RECORD = struct.Struct("<Qd")
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
FOR_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_READ_BYTES = 1 << 16
_NO_RECORD: Mark = (1 << 64, float("inf"))  # beyond the end of the file


def times_path(log_path: bytes) -> bytes:
    """Return the times file of this log file; empty if it has none."""
    worker_folder, name = os.path.split(log_path)
    attempt_folder, local_rank = os.path.split(worker_folder)
    run_folder, attempt = os.path.split(attempt_folder)
    if not (attempt.startswith(b"attempt_") and local_rank.isdigit() and name.endswith(b".log")):
        return b""
    return os.path.join(run_folder, FOLDER, b".".join([attempt, local_rank, name.removesuffix(b".log")]))


class TimesWriter:
    """Appends records. Used by the file thread."""

    def __init__(self, log_path: bytes) -> None:
        self._path = times_path(log_path)
        self._descriptor = -1
        self._is_disabled = not self._path
        self._recorded_at = 0.0

    def record(self, position: int, at: float) -> None:
        if self._is_disabled or -_MIN_INTERVAL_S < at - self._recorded_at < _MIN_INTERVAL_S:
            return
        self._recorded_at = at
        try:
            if self._descriptor < 0:
                with suppress(FileExistsError):
                    os.mkdir(os.path.dirname(self._path))
                self._descriptor = os.open(self._path, _FLAGS, 0o666)
                size = os.fstat(self._descriptor).st_size
                if size % _RECORD.size:  # a partial record of a killed writer
                    os.ftruncate(self._descriptor, size - size % _RECORD.size)
            if os.write(self._descriptor, _RECORD.pack(position, at)) < _RECORD.size:
                self._disable()
        except OSError:  # disk errors are reported for the log itself
            self._disable()

    def _disable(self) -> None:
        self._is_disabled = True
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


class TimesReader:
    """Searches records in the file, which may be large, and opens it only for that. Never raises."""

    def __init__(self, log_path: bytes) -> None:
        self._path = times_path(log_path)
        self._descriptor = -1
        self._count = 0

    def __enter__(self) -> None:
        with suppress(OSError):  # no times
            self._descriptor = os.open(self._path, FOR_READING)
            self._count = os.fstat(self._descriptor).st_size // _RECORD.size

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._count = -1, 0

    def between(self, start: int, end: int) -> list[Mark]:
        marks: list[Mark] = []
        with self:
            offset = max(0, self._find(0, start) - 1) * _RECORD.size
            while len(data := self._read(offset, _READ_BYTES)) >= _RECORD.size:
                data = data[: len(data) - len(data) % _RECORD.size]
                offset += len(data)
                for position, at in _RECORD.iter_unpack(data):
                    if position >= end:
                        return marks
                    marks.append((position, at))
        return marks

    def position_at(self, at: float) -> int:
        """Return the position of the first data that arrived at that time or later, or a little before it."""
        with self:
            record = self._record(max(0, self._find(1, at) - 1))
        return 0 if record is _NO_RECORD else record[0]

    def _find(self, field: int, value: float) -> int:
        """Return the index of the first record whose field is greater than the value."""
        return bisect_right(range(self._count), value, key=lambda index: self._record(index)[field])

    def _record(self, index: int) -> Mark:
        data = self._read(index * _RECORD.size, _RECORD.size)
        return _RECORD.unpack(data) if len(data) == _RECORD.size else _NO_RECORD

    def _read(self, offset: int, size: int) -> bytes:
        with suppress(OSError):  # there may be no file
            return os.pread(self._descriptor, size, offset)
        return b""
