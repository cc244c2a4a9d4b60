"""Error files: reports which workers have raised an uncaught exception while they are being stopped.

A worker writes its error file when the exception leaves its main thread, before it exits. inotify reports the file, so
this waits for a descriptor. Without inotify (macOS, no free instance) only the files that exist already are reported.
"""

from __future__ import annotations

import os
import sys

from tenax._core.events import WorkerRaised
from tenax._io.interfaces import Watchable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.loop import Loop

_CREATED = 0x100 | 0x80  # IN_CREATE, IN_MOVED_TO: the file gets its name when it is complete
_MAX_BYTES = 1 << 16


class ErrorFiles(Watchable):
    """The error files of one generation's workers, from the stop of the workers on."""

    def __init__(self, loop: Loop, post: Callable[[WorkerRaised], None]) -> None:
        self._loop = loop
        self._post = post
        self._descriptor = -1
        self._generation = 0
        self._files: dict[int, str] = {}  # by local rank, without those that were reported

    def watch(self, generation: int, files: dict[int, str]) -> None:
        """Report each of these files that exists or is created."""
        self.close()
        self._generation, self._files = generation, files
        self._descriptor = _open_inotify({os.path.dirname(path) for path in files.values()})
        if self._descriptor >= 0:
            self._loop.watch(self)
        self._report()

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


def _open_inotify(folders: set[str]) -> int:
    """Return a descriptor that becomes readable when a file appears in a folder, or -1."""
    if sys.platform != "linux":
        return -1
    import ctypes

    library = ctypes.CDLL(None)
    descriptor = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor >= 0:
        for folder in folders:
            library.inotify_add_watch(descriptor, os.fsencode(folder), _CREATED)
    return descriptor
