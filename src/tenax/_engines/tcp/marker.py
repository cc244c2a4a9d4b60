"""The marker file: what a coordinator leaves for its successor on the same host in case it dies.

It holds the last generation and its store, the restarts used, and the verdict if there is one, and is written before
any node receives them. A successor that finds it waits for the members of that generation before it forms another. A
running coordinator touches the file, and an orderly end removes it; a stale file is ignored, because it may belong to
an earlier run with the same name.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.link.client import Note

_VALID_S = 60.0
_VERDICT_VALID_S = 10.0  # shorter: the user may start the same command again
_MAX_BYTES = 64 << 10
_MAX_COUNT = 1 << 40  # generations, restarts


class Marker:
    """One file per run and endpoint. A file that cannot be read or written counts as absent."""

    def __init__(self, run_id: str, endpoint: str, directory: str | None = None) -> None:
        import hashlib

        name = hashlib.sha256(f"{run_id}\0{endpoint}".encode()).hexdigest()[:16]
        folder = directory or os.environ.get("TMPDIR") or "/tmp"
        self._path = os.path.join(folder, f"tenax-coordinator-{os.geteuid()}-{name}.json")

    def read(self) -> Note | None:
        """Return the note of a coordinator that died recently, or None."""
        try:
            # Nonblocking: the folder is shared, and opening a FIFO of another user would block.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            about = os.fstat(descriptor)
            age_s = time.time() - about.st_mtime
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or age_s >= _VALID_S:
                return None
            note = msgspec.json.decode(os.read(descriptor, _MAX_BYTES), type=Note)
            if not 0 <= note.generation <= _MAX_COUNT or not 0 <= note.restarts_used <= _MAX_COUNT:
                return None
            if note.verdict is not None and age_s >= _VERDICT_VALID_S:
                return None
            return note
        except (OSError, *DECODE_ERRORS):
            return None
        finally:
            os.close(descriptor)

    def write(self, note: Note) -> None:
        new = f"{self._path}.{os.urandom(8).hex()}"
        with suppress(OSError, UnicodeEncodeError):
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(note))
                os.replace(new, self._path)
            except BaseException:
                os.unlink(new)
                raise

    def touch(self) -> None:
        """Mark the file as current: the coordinator is running."""
        with suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
