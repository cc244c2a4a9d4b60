"""The marker: a coordinator's note to its successor on the same host, should it die without a word.

It says how far the run had come: the last generation and its store, the restarts that were used, and the verdict if
there was one. It is written before anybody is told. Who finds one gives the members of that generation time to show up
before it forms another. An orderly end removes it, and a living coordinator touches it; one that nobody has touched for
a while is not believed, for it may be of another run of that name.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.model import Verdict

_BELIEVED_S = 60.0
_VERDICT_BELIEVED_S = 10.0  # the same command may be meant to run again
_MAX_BYTES = 64 << 10
_MOST = 1 << 40  # of generations, and of restarts


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a successor must know."""

    generation: int = 0
    restarts_used: int = 0
    store: str = ""
    verdict: Verdict | None = None


class Marker:
    """One file per run and endpoint. What cannot be written or read is as if it were not there."""

    def __init__(self, run_id: str, endpoint: str, directory: str | None = None) -> None:
        import hashlib

        name = hashlib.sha256(f"{run_id}\0{endpoint}".encode()).hexdigest()[:16]
        folder = directory or os.environ.get("TMPDIR") or "/tmp"
        self._path = os.path.join(folder, f"tenax-coordinator-{os.geteuid()}-{name}.json")

    def read(self) -> Note | None:
        """What an earlier coordinator left; None: there was none that died lately."""
        try:
            # Not to wait: others may write into this folder too, and a pipe of theirs would hold us for ever.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            about = os.fstat(descriptor)
            age_s = time.time() - about.st_mtime
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or age_s >= _BELIEVED_S:
                return None
            note = msgspec.json.decode(os.read(descriptor, _MAX_BYTES), type=Note)
            if not 0 <= note.generation <= _MOST or not 0 <= note.restarts_used <= _MOST:
                return None
            if note.verdict is not None and age_s >= _VERDICT_BELIEVED_S:
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
        """Its coordinator lives."""
        with suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
