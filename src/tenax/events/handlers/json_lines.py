"""Events as a file of JSON lines, which several processes of a host may write together."""

from __future__ import annotations

import os
from _thread import allocate_lock

from tenax.events.handler import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent


class JsonLinesEventHandler(EventHandler):
    """Appends each event to the file as one line, with one write: a reader sees no part of a line while space lasts.

    Raises ``OSError`` if the file cannot be opened, and later if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = allocate_lock()
        self._is_torn = False

    def record(self, event: Event | RdzvEvent) -> None:
        line = f"{event.serialize()}\n".encode()
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"the event file {self.path!r} was closed; configure a new handler")
            left = b"\n" + line if self._is_torn else line  # the next line must not be spoilt by half of this one
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            finally:
                self._is_torn = 0 < len(left) < len(line) or (self._is_torn and bool(left))

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
