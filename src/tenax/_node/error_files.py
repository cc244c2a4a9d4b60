"""Error files: reports which workers have raised an uncaught exception while they are being stopped.

A worker writes its error file when the exception leaves its main thread, before it exits. inotify reports the file, so
this waits for a descriptor. Without inotify (macOS, no free instance) only the files that exist already are reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tenax._core.events import WorkerRaised
from tenax._io.interfaces import Watchable
from tenax._io.loop import Loop

_CREATED = 0x100 | 0x80  # IN_CREATE, IN_MOVED_TO: the file gets its name when it is complete
_MAX_BYTES = 1 << 16


class ErrorFiles(Watchable):
    """The error files of one generation's workers, from the stop of the workers on."""

    def __init__(self, loop: Loop, post: Callable[[WorkerRaised], None]) -> None:
        self._loop = loop
        self._post = post
        self._descriptor = -1
        self._watches: list[int] = []  # one per folder
        self._generation = 0
        self._files: dict[int, str] = {}  # by local rank, without those that were reported
        if sys.platform == "linux":
            import ctypes

            self._inotify: Any = ctypes.CDLL(None)  # the C library
            self._descriptor = self._inotify.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor >= 0:
            loop.watch(self)

    def watch(self, generation: int, files: dict[int, str]) -> None:
        """Report each of these files that exists or is created."""
        self.end()
        self._generation, self._files = generation, files
        if self._descriptor >= 0:
            folders = {os.fsencode(os.path.dirname(path)) for path in files.values()}
            add = self._inotify.inotify_add_watch
            self._watches = [add(self._descriptor, folder, _CREATED) for folder in folders]
        self._report()

    def end(self) -> None:
        """Report no more files of this generation. Closing the descriptor would take up to 20 ms, before a restart."""
        self._files = {}
        while self._watches:
            self._inotify.inotify_rm_watch(self._descriptor, self._watches.pop())

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.unwatch(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def fileno(self) -> int:
        return self._descriptor

    def on_readable(self) -> None:
        os.read(self._descriptor, _MAX_BYTES)  # which file it was does not matter: there are few
        self._report()

    def _report(self) -> None:
        for local_rank in [rank for rank, path in self._files.items() if os.path.exists(path)]:
            del self._files[local_rank]
            self._post(WorkerRaised(self._generation, local_rank))
