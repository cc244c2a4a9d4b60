"""LogFile: an append-only log of a table's changes, in a file that several processes of a host write to.

    header   "tenax store\\n", version (4 bytes)
    record   length of the payload (4 bytes), its CRC-32 (4 bytes), payload
    payload  entries: kind (1 byte), length of key and of value (4 bytes each), key, value

All integers are little-endian. Nothing in it is executed or unpickled, and every length is checked before use.

1. Only the holder of the lock (``flock``) writes. A record is atomic.
2. A writer may be killed at any byte: the next writer truncates an incomplete record at the end.
3. Reading needs no lock. A reader stops before an incomplete record and retries later.
4. When most of the file is history, a writer compacts it: it renames a new file over it, and the others reopen it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from binascii import crc32
from collections.abc import Iterator
from contextlib import suppress

from tenax.store._api import StoreError
from tenax.store._table import Table

_HEADER = b"tenax store\n" + struct.pack("<I", 1)
_RECORD = struct.Struct("<II")
_ENTRY = struct.Struct("<BII")
_PUT, _DROP, _PUSH, _POP = range(1, 5)
_READ_BYTES = 1 << 20
_MAX_RECORD_BYTES = 256 << 20
_MAX_FILE_BYTES = 4 << 30
_MIN_COMPACT_BYTES = 1 << 20  # a smaller file is not compacted
_HISTORY_FACTOR = 4


class RecordedTable(Table):
    __slots__ = ("entries",)

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[bytes] = []

    def put(self, key: bytes, value: bytes) -> None:
        super().put(key, value)
        self.entries.append(_entry(_PUT, key, value))

    def drop(self, key: bytes) -> bool:
        existed = super().drop(key)
        if existed:
            self.entries.append(_entry(_DROP, key, b""))
        return existed

    def push(self, key: bytes, value: bytes) -> None:
        super().push(key, value)
        self.entries.append(_entry(_PUSH, key, value))

    def pop(self, key: bytes) -> bytes:
        value = super().pop(key)
        self.entries.append(_entry(_POP, key, b""))
        return value

    def replay(self, payload: bytes) -> None:
        at = 0
        while at < len(payload):
            kind, key_bytes, value_bytes = _ENTRY.unpack_from(payload, at)
            middle = at + _ENTRY.size + key_bytes
            key, value = payload[at + _ENTRY.size : middle], payload[middle : middle + value_bytes]
            at = middle + value_bytes
            if kind == _PUT:
                super().put(key, value)
            elif kind == _DROP:
                super().drop(key)
            elif kind == _PUSH:
                super().push(key, value)
            elif kind == _POP:
                super().pop(key)
            else:
                raise ValueError(f"unknown kind {kind}")
        if at != len(payload):
            raise ValueError("the last entry is truncated")

    def snapshot(self) -> Iterator[bytes]:
        """Yield the entries that turn an empty table into this one."""
        for key, value in self.values.items():
            yield _entry(_PUT, key, value)
        for key, queue in self.queues.items():
            for value in queue:
                yield _entry(_PUSH, key, value)


class LogFile:
    """One process's view of the file, and the table that its records describe. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self.path = path
        self._identity = (0, 0)
        self._compact_at = 0
        self._open()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._identity = (0, 0)

    __del__ = close

    # --- reading ------------------------------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Return True if the file has grown or was replaced. An incomplete record counts, too."""
        try:
            found = os.stat(self.path)
        except OSError:  # removed: the next read handles it
            return True
        return _identity(found) != self._identity or found.st_size > self._offset

    def refresh(self) -> None:
        """Read the complete records that other processes have written. Needs no lock."""
        self._reopen_if_replaced()
        self._read()

    def _reopen_if_replaced(self) -> bool:
        """Open the file again if it was replaced. Return True if it was."""
        with suppress(FileNotFoundError):
            if _identity(os.stat(self.path)) == self._identity:
                return False
        self.close()
        self._open()
        return True

    def _open(self) -> None:
        self._adopt(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.reset()

    def _adopt(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._descriptor = descriptor
        self._identity = _identity(found)
        self._compact_at = max(_MIN_COMPACT_BYTES, _HISTORY_FACTOR * found.st_size)

    def reset(self) -> None:
        """Read the file anew next time. Discards what the table has and the file lacks, also an incomplete change."""
        self.table = RecordedTable()
        self._offset = 0  # the table includes the file up to here

    def _read(self) -> None:
        try:
            while self._read_chunk():
                pass
        except BaseException:  # a signal handler's, too: a part of a record may be in the table
            self.reset()
            raise

    def _read_chunk(self) -> bool:
        """Apply one chunk of the file to the table. Return False if there was no complete record."""
        if self._offset == 0:
            header = os.pread(self._descriptor, len(_HEADER), 0)
            if header != _HEADER:
                if not _HEADER.startswith(header):
                    raise StoreError(
                        f"{self.path!r} is not a store file of this version of tenax; choose another file."
                    )
                return False
            self._offset = len(_HEADER)
        data = os.pread(self._descriptor, _READ_BYTES, self._offset)
        taken = self._take(data)
        if not taken and len(data) >= _RECORD.size:
            size = _RECORD.size + _RECORD.unpack_from(data)[0]
            if len(data) < size <= _RECORD.size + _MAX_RECORD_BYTES:  # longer than a chunk
                taken = self._take(os.pread(self._descriptor, size, self._offset))
        return taken

    def _take(self, data: bytes) -> bool:
        at = 0
        while at + _RECORD.size <= len(data):
            size, check = _RECORD.unpack_from(data, at)
            end = at + _RECORD.size + size
            payload = data[at + _RECORD.size : end]
            if not size or end > len(data) or crc32(payload) != check:
                break
            try:
                self.table.replay(payload)
            except (ValueError, KeyError, struct.error) as error:
                raise self._damaged() from error
            at = end
            self._offset += _RECORD.size + size
        return at > 0

    def _damaged(self) -> StoreError:
        return StoreError(f"the store {self.path!r} is damaged at byte {self._offset}; choose another file.")

    # --- writing, with the lock ---------------------------------------------------------------------------------------

    def try_lock(self) -> bool:
        """Lock the current file and bring the table up to date. Return False if another process holds the lock."""
        self._reopen_if_replaced()
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self._reopen_if_replaced():
                break
        try:
            self._read()
            self._truncate_incomplete()
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self) -> None:
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def commit(self) -> None:
        """Write the changes of the table to the file. After an error, call ``reset``."""
        if not self.table.entries:
            return
        try:
            self._offset += self._write(self._descriptor, self.table.entries, self._offset)
        except OSError as error:
            raise StoreError(f"could not write to the store {self.path!r}: {error.strerror}.") from error
        self.table.entries.clear()
        if self._offset > self._compact_at:
            self._compact()

    def _truncate_incomplete(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if self._offset == 0:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _HEADER, 0)
            self._offset = len(_HEADER)
        elif size > self._offset:
            start = os.pread(self._descriptor, _RECORD.size, self._offset)
            if len(start) == _RECORD.size and self._offset + _RECORD.size + _RECORD.unpack(start)[0] < size:
                raise self._damaged()  # data follows the bad record, so it is not the trace of a killed writer
            os.ftruncate(self._descriptor, self._offset)

    def _write(self, descriptor: int, entries: list[bytes], offset: int) -> int:
        payload = b"".join(entries)
        if len(payload) > _MAX_RECORD_BYTES or offset + len(payload) > _MAX_FILE_BYTES:
            raise StoreError(f"{len(payload)} more bytes are too many for the store {self.path!r}.")
        record = memoryview(_RECORD.pack(len(payload), crc32(payload)) + payload)
        written = 0
        while written < len(record):
            written += os.pwrite(descriptor, record[written:], offset + written)
        return written

    def _compact(self) -> None:
        """Replace the locked file by a new one that has only the current state."""
        name = f"{self.path}.fresh"  # only the lock holder uses it; a killed writer's file is overwritten
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._compact_at = _HISTORY_FACTOR * self._offset
        with suppress(OSError):  # keep the long file, and try later
            fresh = os.open(name, flags, os.fstat(self._descriptor).st_mode & 0o777)
            try:
                fcntl.flock(fresh, fcntl.LOCK_EX)
                os.pwrite(fresh, _HEADER, 0)
                offset = len(_HEADER)
                for entries in _batches(self.table.snapshot()):
                    offset += self._write(fresh, entries, offset)
                os.rename(name, self.path)
            except BaseException:
                os.close(fresh)
                raise
            os.close(self._descriptor)
            self._adopt(fresh)
            self._offset = offset


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _entry(kind: int, key: bytes, value: bytes) -> bytes:
    return _ENTRY.pack(kind, len(key), len(value)) + key + value


def _batches(entries: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry)
        if size > _READ_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
