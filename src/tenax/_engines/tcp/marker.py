"""The marker file: what a coordinator leaves for its successor on the same host in case it dies.

It holds the last generation and its store, the restarts used, and the verdict if there is one, and is written before
any node receives them. A successor that finds it waits for the members of that generation before it forms another. A
running coordinator touches the file, and an orderly end removes it; a stale file is ignored, because it may belong to
an earlier run with the same name.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.link.client import Note
from tenax._io.safe_open import read_with_status, replace_file

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
            data, about = read_with_status(self._path, _MAX_BYTES)
            note = msgspec.json.decode(data, type=Note)
        except (OSError, *DECODE_ERRORS):
            return None
        age_s = time.time() - about.st_mtime
        if about.st_uid != os.geteuid() or age_s >= (_VALID_S if note.verdict is None else _VERDICT_VALID_S):
            return None
        is_in_bounds = 0 <= note.generation <= _MAX_COUNT and 0 <= note.restarts_used <= _MAX_COUNT
        return note if is_in_bounds else None

    def write(self, note: Note) -> None:
        with suppress(OSError, UnicodeEncodeError):
            replace_file(self._path, msgspec.json.encode(note))

    def touch(self) -> None:
        """Mark the file as current: the coordinator is running."""
        with suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
