"""The notice file: informs workers that a node of their generation will leave.

One file per generation, named by ``TENAX_NOTICE_FILE`` in every worker's environment. It is created with the first
notice and replaced atomically. ``tenax.preemption`` reads it, and so can any language. If it cannot be written, the
notice is lost and the run continues.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.commands import ForwardNotice

VARIABLE = "TENAX_NOTICE_FILE"


class NoticeFile:
    """Writes the file. Without a directory it writes nothing and does not set the variable."""

    def __init__(self, directory: str = "") -> None:
        self.directory = directory

    def env(self, generation: int) -> dict[str, str]:
        """Remove a stale file and return the variable for the workers of a new generation."""
        if not self.directory:
            return {}
        path = self._path(generation)
        with suppress(OSError):  # usually missing; an earlier run in the same folder may have left one
            os.unlink(path)
        return {VARIABLE: path}

    def _path(self, generation: int) -> str:
        return os.path.join(self.directory, f"notice-{generation}.json")

    def write(self, notice: ForwardNotice) -> None:
        if not self.directory:
            return
        import msgspec

        content = {
            "version": 1,
            "generation": notice.generation,
            "host": notice.host or os.uname().nodename,
            "is_this_host": not notice.host,
            "why": notice.why,
            # On this host's monotonic clock, which its workers share; null: unknown.
            "leaves_at": None if notice.in_s is None else time.monotonic() + notice.in_s,
        }
        path = self._path(notice.generation)
        try:
            with suppress(FileNotFoundError):
                os.unlink(f"{path}.new")  # left by an agent that was killed while writing
            descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(content))
            os.replace(f"{path}.new", path)
        except OSError:
            return  # disk full: the workers still get the stop signal itself
