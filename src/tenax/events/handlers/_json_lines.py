"""Writes events to a file of JSON lines (``tenax._io.json_lines``)."""

from __future__ import annotations

import os

from tenax._io.json_lines import JsonLinesFile
from tenax.events._handler import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent


class JsonLinesEventHandler(EventHandler):
    """Appends each event to the file as one line. Several processes of a host may share it.

    Raises ``OSError`` if the file cannot be opened, and later if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = JsonLinesFile(self.path)

    def record(self, event: Event | RdzvEvent) -> None:
        self._file.append(event.serialize().encode())

    def close(self) -> None:
        self._file.close()
