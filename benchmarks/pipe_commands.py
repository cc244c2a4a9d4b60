"""Commands for a process of the crew, as a watchable of tenax's loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class PipeCommands:
    """Calls `execute` with each command. The process exits when the pipe closes."""

    def __init__(self, pipe: Connection, execute: Callable[..., None]) -> None:
        self._pipe = pipe
        self._execute = execute
        self.wants_to_write = False

    def fileno(self) -> int:
        """The descriptor of the pipe."""
        return self._pipe.fileno()

    def on_readable(self) -> None:
        """Read one command."""
        try:
            arguments: tuple[Any, ...] = self._pipe.recv()
        except EOFError:
            os._exit(0)
        self._execute(*arguments)

    def on_writable(self) -> None:
        """Do nothing: the pipe is only read."""
