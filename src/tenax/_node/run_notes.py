"""Notes about runs: what each agent writes about its run into the user's private folder.

``<folder>/<pid>.json`` is written beside the control socket, and again when the agent ends, also if that is before the
control socket opens. The notes of the last 100 agents are kept, so that operators find ended runs by their ids.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._io.private_folder import check_private, make_private, private_folder

SOCKET = ".sock"
_NOTE = ".json"
_MAX_NOTES = 100
_MAX_NOTE_BYTES = 64 << 10


class RunNote(msgspec.Struct, frozen=True):
    run_id: str
    pid: int
    entrypoint: str = ""
    log_dir: str = ""
    coordinator: str = ""  # its address, for people; empty: in that agent only
    generation: int = 0
    workers: int = 0
    since: float = 0.0  # when the agent started, in seconds since the epoch
    ended: float = 0.0  # when it ended; 0: it was killed, or is running
    outcome: str = ""  # of the run, as far as this agent knows

    @property
    def which_run(self) -> tuple[str, str]:
        """A key shared by all agents of one run on this host; run ids alone may repeat."""
        if not self.coordinator:
            return self.run_id, str(self.pid)
        return self.run_id, self.coordinator if " at " in self.coordinator else ""  # an elected one may change


def write_note(info: Mapping[str, object], socket_path: str = "") -> None:
    """Write the note of this agent. The run does not depend on it, so errors are ignored.

    ``socket_path``: the agent's control socket, if it has one.
    """
    with suppress(OSError, UnicodeError, msgspec.ValidationError):
        if not socket_path:
            folder = private_folder()
            make_private(folder)
            socket_path = os.path.join(folder, f"{os.getpid()}{SOCKET}")
            if os.path.lexists(socket_path):  # of an agent in another container that shares this folder
                return
        path = socket_path.removesuffix(SOCKET) + _NOTE
        with open(path, "wb") as file:
            file.write(msgspec.json.encode(msgspec.convert(info, RunNote)))
        for old in _notes()[:-_MAX_NOTES]:
            os.unlink(old)


def last_runs(environ: Mapping[str, str] | None = None) -> list[RunNote]:
    """Return the notes of this user's agents on this host that have ended, the latest first. Raises OSError.

    An agent whose socket still exists may be running, even if it does not answer.
    """
    ended = (path for path in reversed(_notes(environ)) if not os.path.lexists(path.removesuffix(_NOTE) + SOCKET))
    return [note for note in map(_read_note, ended) if note is not None]


def note_for(socket_path: str) -> RunNote | None:
    """Return the note of the agent with this control socket, whether or not it answers."""
    return _read_note(socket_path.removesuffix(SOCKET) + _NOTE)


def _read_note(path: str) -> RunNote | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_MAX_NOTE_BYTES), type=RunNote)
    except (OSError, *DECODE_ERRORS):
        return None


def _notes(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the paths of all notes, the one written first in front."""
    dated = []
    for path in private_paths(_NOTE, environ):
        with suppress(OSError):  # removed meanwhile
            dated.append((os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


def private_paths(suffix: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the paths of these files in the private folder, by name. Raises OSError."""
    folder = private_folder(environ)
    if not os.path.lexists(folder):
        return []
    check_private(folder)
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(suffix)]
