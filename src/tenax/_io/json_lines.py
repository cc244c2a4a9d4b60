"""JSON lines: a file to which several threads and processes of a host append lines.

Each line is one write, so that readers never see part of a line unless the disk is full. A line that a full disk
truncated is followed by a line break, so that it damages no other line. Like the log files, the file is readable by all
users, subject to the umask.
"""

from __future__ import annotations

import os
from _thread import allocate_lock  # threading would cost an import

from tenax._io.safe_open import open_safely


class JsonLinesFile:
    """Appends to the file at ``path``. Raises OSError if it cannot be opened, and later if it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = allocate_lock()
        self._is_torn = False

    def append(self, text: bytes) -> None:
        line = text + b"\n"
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"the file {self.path!r} was closed; configure a new handler")
            left = b"\n" + line if self._is_torn else line  # end a truncated line first
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            finally:
                self._is_torn = 0 < len(left) < len(line) or (self._is_torn and bool(left))

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
