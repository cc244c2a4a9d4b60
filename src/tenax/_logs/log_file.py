"""Log file: append bytes to one file, and survive a disk that does not take them.

1. What is written is what was given, byte for byte.
2. No error of the disk is anyone else's: the bytes are counted, and tried again with the next ones.
3. Where bytes are missing, a line in the file says how many, as soon as the file takes it.
4. When its bytes came stands elsewhere (``times``), for those who want to see lines of several files.
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
    """One file. Used by the one thread that writes files; the counters may be read by others."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.users = 0  # streams that write here; kept by the loop
        self.not_handed_over = 0  # bytes dropped before they came here, not yet told; kept by the loop
        self.lost_bytes = 0
        self.reason = ""
        self._unmarked = 0  # lost bytes that no line in the file tells of yet
        self._descriptor = -1
        self._at_line_start = True
        self.began_at = 0  # what was in the file before
        self._position = 0
        self._times: TimesWriter | None = None
        self.had_more_users = False  # then its positions are nobody's; kept by the loop

    @property
    def is_in_step(self) -> bool:
        """Whether what was given is found in the file at the position it was given at."""
        is_lossy = self.lost_bytes or self.not_handed_over
        return self._times is not None and not is_lossy and not self.had_more_users

    def open(self) -> bool:
        """Make the file if it is not there. Returns whether it can be written."""
        if self._descriptor < 0:
            try:
                self._descriptor = _opened(self.path)
                self._look_at_file()
            except OSError as error:
                self.reason = error.strerror or "it cannot be opened"
        return self._descriptor >= 0

    def _look_at_file(self) -> None:
        found = os.fstat(self._descriptor)
        if stat.S_ISREG(found.st_mode) and self._times is None:
            self.began_at = self._position = found.st_size
            from tenax._logs.times import TimesWriter

            self._times = TimesWriter(self.path)

    def append(self, data: bytes, at: float = 0.0) -> None:
        """``at``: when they came; 0: that is nobody's interest."""
        if not self.open() or not self._mark_gap():
            self._lose(len(data))
            return
        if at and self._times is not None:
            self._times.note(self._position, at)
        written = self._write(data)
        if written < len(data):
            self._lose(len(data) - written)

    def skip(self, count: int, reason: str) -> None:
        """This much was dropped on the way here."""
        self.reason = reason
        self._lose(count)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._mark_gap()
            try:
                os.close(self._descriptor)
            except OSError as error:  # a network file system may find out only now
                self.reason = error.strerror or "it cannot be closed"
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
                self._take_back(written)
                self._at_line_start = was_at_line_start
                return False
            self._unmarked = 0
        return True

    def _take_back(self, count: int) -> None:
        """Half a mark is none. Where that cannot be taken back (a pipe), it stays."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, max(0, os.fstat(self._descriptor).st_size - count))
            self._position -= count

    def _write(self, data: bytes) -> int:
        """How much of it the disk took."""
        view = memoryview(data)
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, view[done:])
            except OSError as error:
                self.reason = error.strerror or "it cannot be written"
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
    from tenax._io.named_file import open_named  # a link that custom log specs name, such as /dev/stdout

    return open_named(path, _FLAGS)
