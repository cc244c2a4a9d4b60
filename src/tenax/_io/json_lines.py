"""JSON lines: the end of a file to which several threads, and several processes of a host, append whole lines.

Each line is handed to the system in one piece, so that a reader sees no part of a line while space lasts. A line that a
full disk cut in two is followed by a line break: it spoils no other. The file may be read by everybody, as the log
files may (less what the umask takes away).
"""

from __future__ import annotations

import os
from _thread import allocate_lock  # threading would cost an import, and a lock is all that is needed

from tenax._io.named_file import open_named


class JsonLinesFile:
    """Appends to the file at ``path``. Raises OSError if it cannot be opened, and later if it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = open_named(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = allocate_lock()
        self._is_torn = False

    def append(self, text: bytes) -> None:
        """Add one line, of which this is the text."""
        line = text + b"\n"
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"the file {self.path!r} was closed; configure a new handler")
            left = b"\n" + line if self._is_torn else line  # the next line must not be spoilt by half of this one
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            finally:
                self._is_torn = 0 < len(left) < len(line) or (self._is_torn and bool(left))

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
