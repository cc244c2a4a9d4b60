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

        from tenax._io.safe_open import replace_file

        content = {
            "version": 1,
            "generation": notice.generation,
            "host": notice.host or os.uname().nodename,
            "is_this_host": not notice.host,
            "why": notice.why,
            # On this host's monotonic clock, which its workers share; null: unknown.
            "leaves_at": None if notice.in_s is None else time.monotonic() + notice.in_s,
        }
        with suppress(OSError):  # disk full: the workers still get the stop signal itself
            replace_file(self._path(notice.generation), msgspec.json.encode(content), 0o644)
