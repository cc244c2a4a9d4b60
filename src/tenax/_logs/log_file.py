"""Appends bytes to one log file, and tolerates a disk that does not accept them.

1. The file gets the bytes as given.
2. A disk error affects nothing else: the bytes are counted as lost, and the next append tries again.
3. Where bytes are missing, a line in the file gives their number, as soon as it can be written.
4. Arrival times are kept elsewhere (``times``), to merge the lines of several files.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._logs.times import TimesWriter

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class LogFile:
    """One file. Used by the file thread; other threads may read the counters."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.users = 0  # streams that write here; set by the loop
        self.not_handed_over = 0  # bytes that the loop dropped and has not reported with ``skip``; set by the loop
        self.lost_bytes = 0
        self.reason = ""
        self._unmarked = 0  # lost bytes that no line in the file reports yet
        self._descriptor = -1
        self._at_line_start = True
        self.began_at = 0  # size of the file when it was opened
        self._position = 0
        self._times: TimesWriter | None = None
        self.had_more_users = False  # then positions belong to no single stream; set by the loop

    @property
    def is_in_step(self) -> bool:
        """Whether positions in the stream are positions in the file."""
        is_lossy = self.lost_bytes or self.not_handed_over
        return self._times is not None and not is_lossy and not self.had_more_users

    def open(self) -> bool:
        """Open the file, creating it if necessary. Return whether it can be written."""
        if self._descriptor < 0:
            try:
                self._descriptor = _opened(self.path)
                found = os.fstat(self._descriptor)
            except OSError as error:
                self.reason = error.strerror or "the file could not be opened"
                return False
            if stat.S_ISREG(found.st_mode) and self._times is None:
                from tenax._logs.times import TimesWriter

                self.began_at = self._position = found.st_size
                self._times = TimesWriter(self.path)
        return True

    def append(self, data: bytes, at: float = 0.0) -> None:
        """Append data that arrived ``at`` that time; 0: do not record the time."""
        if not self.open() or not self._mark_gap():
            self._lose(len(data))
            return
        if at and self._times is not None:
            self._times.record(self._position, at)
        written = self._write(data)
        if written < len(data):
            self._lose(len(data) - written)

    def skip(self, count: int, reason: str) -> None:
        self.reason = reason
        self._lose(count)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._mark_gap()
            try:
                os.close(self._descriptor)
            except OSError as error:  # a network file system may report write errors here
                self.reason = error.strerror or "the file could not be closed"
            self._descriptor = -1
        if self._times is not None:
            self._times.close()

    def _lose(self, count: int) -> None:
        self._unmarked += count
        self.lost_bytes += count

    def _mark_gap(self) -> bool:
        if self._unmarked:
            was_at_line_start = self._at_line_start
            line = f"[tenax: {self._unmarked} bytes are missing here: {self.reason}]\n".encode()
            line = line if was_at_line_start else b"\n" + line
            written = self._write(line)
            if written < len(line):
                with suppress(OSError):  # remove the partial mark; in a pipe it stays
                    os.ftruncate(self._descriptor, max(0, os.fstat(self._descriptor).st_size - written))
                    self._position -= written
                self._at_line_start = was_at_line_start
                return False
            self._unmarked = 0
        return True

    def _write(self, data: bytes) -> int:
        view = memoryview(data)
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, view[done:])
            except OSError as error:
                self.reason = error.strerror or "the write failed"
                break
        self._position += done
        if done:
            self._at_line_start = data[done - 1 : done] == b"\n"
        return done


def _opened(path: bytes) -> int:
    try:
        return os.open(path, _FLAGS, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    from tenax._io.safe_open import open_safely  # a link named by custom log specs, such as /dev/stdout

    return open_safely(path, _FLAGS)
