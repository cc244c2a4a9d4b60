"""Orders: what a process of the crew is told, as something that tenax's loop can watch."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Orders:
    """Calls `obey` with the words of each order. The process ends when there will be no more."""

    def __init__(self, pipe: Connection, obey: Callable[..., None]) -> None:
        self._pipe = pipe
        self._obey = obey
        self.wants_to_write = False

    def fileno(self) -> int:
        """Of the pipe."""
        return self._pipe.fileno()

    def on_readable(self) -> None:
        """One order at a time."""
        try:
            words: tuple[Any, ...] = self._pipe.recv()
        except EOFError:
            os._exit(0)
        self._obey(*words)

    def on_writable(self) -> None:
        """Nothing is written here."""
