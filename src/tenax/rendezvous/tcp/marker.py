"""The marker: a coordinator's note to its successor on the same host, should it die without a word.

It says up to which generation the run had come, and what of its budget was used. Who finds one gives the members of
that generation time to show up before it forms another. An orderly end removes it; one that is old is not believed.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

import msgspec

_BELIEVED_S = 3600.0
_MOST_BYTES = 1024
_MOST = 1 << 40  # of generations, and of restarts


class _Note(msgspec.Struct, frozen=True):
    generation: int
    restarts_used: int = 0


class Marker:
    """One file per run and endpoint. What cannot be written or read is as if it were not there."""

    def __init__(self, run_id: str, endpoint: str, directory: str | None = None) -> None:
        import hashlib

        name = hashlib.sha256(f"{run_id}\0{endpoint}".encode()).hexdigest()[:16]
        folder = directory or os.environ.get("TMPDIR") or "/tmp"
        self.restarts_used = 0  # what the note says that was read
        self._path = os.path.join(folder, f"tenax-coordinator-{os.geteuid()}-{name}.json")

    def read(self) -> int | None:
        """The generation that an earlier coordinator had formed; None: there was none that died."""
        try:
            # Not to wait: others may write into this folder too, and a pipe of theirs would hold us for ever.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            about = os.fstat(descriptor)
            is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            if not is_ours or time.time() - about.st_mtime >= _BELIEVED_S:
                return None
            note = msgspec.json.decode(os.read(descriptor, _MOST_BYTES), type=_Note)
            if not 0 <= note.generation <= _MOST or not 0 <= note.restarts_used <= _MOST:
                return None
            self.restarts_used = note.restarts_used
            return note.generation
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        finally:
            os.close(descriptor)

    def write(self, generation: int, restarts_used: int = 0) -> None:
        new = f"{self._path}.{os.urandom(8).hex()}"
        with suppress(OSError):
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(_Note(generation, restarts_used)))
                os.replace(new, self._path)
            except OSError:
                os.unlink(new)
                raise

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
