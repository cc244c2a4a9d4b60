"""The notice file: how workers learn that a node of their generation is going to leave.

One file per generation, named in every worker's environment (``TENAX_NOTICE_FILE``). It does not exist until there is
a notice, and is replaced as a whole. ``tenax.preemption`` reads it; any language can. A notice that cannot be written
costs the notice, never the run.
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
    """Writes it. Without a directory there is nothing to write, and nothing is promised to the workers."""

    def __init__(self, directory: str = "") -> None:
        self.directory = directory

    def env(self, generation: int) -> dict[str, str]:
        """What is added for the workers of a generation that is about to start: there is no notice for them yet."""
        if not self.directory:
            return {}
        path = self._path(generation)
        with suppress(OSError):  # there is none, unless an earlier run in the same folder has left one
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
            # On this host's monotonic clock, which its workers share; null: nobody knows when.
            "leaves_at": None if notice.in_s is None else time.monotonic() + notice.in_s,
        }
        path = self._path(notice.generation)
        try:
            with suppress(FileNotFoundError):
                os.unlink(f"{path}.new")  # of an agent that was killed while it wrote
            descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(content))
            os.replace(f"{path}.new", path)
        except OSError:
            return  # a full disk: the signal itself will come all the same
