"""LogFile: the changes of a table, one record after the other, in a file that several processes of a host write to.

    header   "tenax store\\n", version (4 bytes)
    record   length of the payload (4 bytes), its CRC-32 (4 bytes), payload
    payload  entries: kind (1 byte), length of key and of value (4 bytes each), key, value

All numbers are little-endian. Nothing is ever executed or unpickled from it, and every length is checked before use.

1. A record is written by whoever holds the lock (``flock``), in one piece, and has its whole effect or none.
2. A writer may be killed at any byte: what it left unfinished at the end is cut off by the next one.
3. Reading needs no lock. A reader that meets half a record stops before it and comes again.
4. When most of the file is history, a writer replaces it by a fresh one under the same name; others notice and follow.
"""

from __future__ import annotations

import fcntl
import os
import struct
from binascii import crc32

from tenax.store._api import StoreError
from tenax.store._table import Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = b"tenax store\n" + struct.pack("<I", 1)
_RECORD = struct.Struct("<II")
_ENTRY = struct.Struct("<BII")
_PUT, _DROP, _PUSH, _POP = range(1, 5)
_READ_BYTES = 1 << 20
_MAX_RECORD_BYTES = 256 << 20
_MAX_FILE_BYTES = 4 << 30
_SMALL_FILE_BYTES = 1 << 20  # not worth the trouble of a fresh one
_HISTORY_FACTOR = 4


class RecordedTable(Table):
    """A table that writes down its changes."""

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
        """Take over changes that somebody wrote down."""
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
                raise ValueError(f"there is no kind {kind}")
        if at != len(payload):
            raise ValueError("the last entry is cut off")

    def snapshot(self) -> Iterator[bytes]:
        """Entries that make an empty table equal to this one."""
        for key, value in self.values.items():
            yield _entry(_PUT, key, value)
        for key, queue in self.queues.items():
            for value in queue:
                yield _entry(_PUSH, key, value)


class LogFile:
    """One process's view of the file, and the table that its records add up to. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self.path = path
        self.table = RecordedTable()
        self._identity = (0, 0)
        self._offset = 0  # up to here the table has it
        self._fresh_file_at = 0
        self._open()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._identity = (0, 0)

    __del__ = close

    # --- reading ------------------------------------------------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether the file has grown or was replaced. Half a record counts, until its writer has finished it."""
        try:
            found = os.stat(self.path)
        except OSError:  # it is gone: who looks again will see what that means
            return True
        return (found.st_dev, found.st_ino) != self._identity or found.st_size > self._offset

    def catch_up(self) -> None:
        """Read what others have written. Without the lock: nothing that is half there is taken."""
        self._follow()
        self._read()

    def _follow(self) -> bool:
        """If the name belongs to another file by now, go there. Did we have to?"""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is not None and (found.st_dev, found.st_ino) == self._identity:
            return False
        self.close()
        self._open()
        return True

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        self._adopt(self._descriptor)
        self._start_over()

    def _adopt(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._descriptor = descriptor
        self._identity = (found.st_dev, found.st_ino)
        self._fresh_file_at = max(_SMALL_FILE_BYTES, _HISTORY_FACTOR * found.st_size)

    def _start_over(self) -> None:
        self.table = RecordedTable()
        self._offset = 0

    def _read(self) -> None:
        while self._read_piece():
            pass

    def _read_piece(self) -> bool:
        """Take a piece of the file into the table. May there be more?"""
        if self._offset == 0:
            header = os.pread(self._descriptor, len(_HEADER), 0)
            if header != _HEADER:
                if not _HEADER.startswith(header):
                    raise StoreError(f"{self.path!r} is not a store of this version of tenax: name another file.")
                return False
            self._offset = len(_HEADER)
        data = os.pread(self._descriptor, _READ_BYTES, self._offset)
        taken = self._take(data)
        if not taken and len(data) >= _RECORD.size:
            size = _RECORD.size + _RECORD.unpack_from(data)[0]
            if len(data) < size <= _RECORD.size + _MAX_RECORD_BYTES:  # longer than a piece
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
        return StoreError(f"the store {self.path!r} is damaged at byte {self._offset}: name another file.")

    # --- writing, with the lock ---------------------------------------------------------------------------------------

    def try_lock(self) -> bool:
        """Become the only writer, of the file that has the name now. Then the table is the newest."""
        self._follow()
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not self._follow():
                break
        try:
            self._read()
            self._cut_off_what_is_unfinished()
        except BaseException:
            self.unlock()
            raise
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def commit(self) -> None:
        """Write down what was changed in the table."""
        entries, self.table.entries = self.table.entries, []
        if not entries:
            return
        try:
            self._offset += self._write(self._descriptor, entries, self._offset)
        except BaseException as error:
            self._start_over()  # the table has what the file has not
            if isinstance(error, OSError):
                raise StoreError(f"the store {self.path!r} cannot be written: {error.strerror}.") from error
            raise
        if self._offset > self._fresh_file_at:
            self._replace()

    def roll_back(self) -> None:
        """Forget what was changed in the table."""
        if self.table.entries:
            self._start_over()

    def remove(self) -> None:
        """Take the file away. Others who still have it open start anew, without its keys."""
        os.unlink(self.path)

    def _cut_off_what_is_unfinished(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if self._offset == 0:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _HEADER, 0)
            self._offset = len(_HEADER)
        elif size > self._offset:
            if self._is_inner_damage(size):
                raise self._damaged()
            os.ftruncate(self._descriptor, self._offset)

    def _is_inner_damage(self, size: int) -> bool:
        """Whether the bad record is followed by others: no writer that was killed leaves that."""
        start = os.pread(self._descriptor, _RECORD.size, self._offset)
        return len(start) == _RECORD.size and self._offset + _RECORD.size + _RECORD.unpack(start)[0] < size

    def _write(self, descriptor: int, entries: list[bytes], offset: int) -> int:
        payload = b"".join(entries)
        if len(payload) > _MAX_RECORD_BYTES or offset + len(payload) > _MAX_FILE_BYTES:
            raise StoreError(f"{len(payload)} bytes more are too much for the store {self.path!r}.")
        record = memoryview(_RECORD.pack(len(payload), crc32(payload)) + payload)
        written = 0
        while written < len(record):
            written += os.pwrite(descriptor, record[written:], offset + written)
        return written

    def _replace(self) -> None:
        """Put a fresh file, with the present state alone, in the place of the one that we hold locked."""
        name = f"{self.path}.fresh"  # whoever has the lock may have it: a killed writer's is overwritten
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fresh = os.open(name, flags, os.fstat(self._descriptor).st_mode & 0o777)
        except OSError:
            self._fresh_file_at = _HISTORY_FACTOR * self._offset  # then it stays long, which harms nobody yet
            return
        try:
            fcntl.flock(fresh, fcntl.LOCK_EX)
            offset = self._write_snapshot(fresh)
            os.rename(name, self.path)
        except BaseException as error:
            os.close(fresh)
            if not isinstance(error, OSError):
                raise
            self._fresh_file_at = _HISTORY_FACTOR * self._offset
            return
        os.close(self._descriptor)
        self._adopt(fresh)
        self._offset = offset

    def _write_snapshot(self, descriptor: int) -> int:
        os.pwrite(descriptor, _HEADER, 0)
        offset = len(_HEADER)
        for entries in _batches(self.table.snapshot()):
            offset += self._write(descriptor, entries, offset)
        return offset


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
