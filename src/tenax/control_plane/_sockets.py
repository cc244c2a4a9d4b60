"""Worker sockets: the agent gives every worker a path of its own.

``TORCH_WORKER_SERVER_SOCKET``, where it is set for the agent, names a folder. A worker finds its own path in the same
variable: ``<folder>/rank<global rank>``, so that several agents of a run may share a folder. The folder belongs to its
user alone; one that cannot be used is rejected. Sockets are removed when the run is over, and so is the folder if it
was created here and is empty.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from contextlib import suppress

from tenax._io.interfaces import RequestRefused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
_MAX_BYTES = 107 if sys.platform.startswith("linux") else 103
_LONGEST_NAME = "/rank1234567"


def check_length(path: str) -> None:
    """Raises ValueError with a sentence when no socket can have this path."""
    length = len(os.fsencode(path))
    if length > _MAX_BYTES:
        raise ValueError(
            f"the socket's path {path!r} has {length} bytes, and the system allows {_MAX_BYTES}; "
            f"set {VARIABLE} to a shorter one, for example under /tmp"
        )


def socket_folder(environ: Mapping[str, str]) -> str:
    """The folder for the workers' sockets; empty: they cannot be asked. Raises ValueError with a sentence."""
    folder = environ.get(VARIABLE, "")
    if not folder:
        return ""
    folder = os.path.abspath(folder)
    if is_socket(folder):  # we are a worker ourselves, and this is where it is asked
        folder += ".d"
    if len(os.fsencode(folder + _LONGEST_NAME)) > _MAX_BYTES:
        raise ValueError(
            f"{VARIABLE} is {folder!r}, too long for a folder of sockets; expected at most "
            f"{_MAX_BYTES - len(_LONGEST_NAME)} bytes, for example a folder under /tmp"
        )
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{VARIABLE} is {folder!r}, which is not a folder; name one for the workers' sockets")
    return folder


def is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def is_served(path: str) -> bool:
    """Return whether a process listens at this socket. Raises OSError if that cannot be determined."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # many ask already
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def open_sockets(environ: Mapping[str, str]) -> WorkerSockets | None:
    """Create the sockets' folder of a run that begins, if the environment asks for one. Raises RequestRefused."""
    try:
        folder = socket_folder(environ)
        if not folder:
            return None
        sockets = WorkerSockets(folder)
        sockets.open()
    except OSError as error:
        raise RequestRefused(
            f"{VARIABLE} is {environ[VARIABLE]!r}, which cannot be created: {error.strerror}; "
            "name a folder that can be created, or leave it unset"
        ) from error
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    return sockets


class WorkerSockets:
    """The sockets of one run on this node."""

    def __init__(self, folder: str, *, has_made_folder: bool = False) -> None:
        self.folder = folder
        self._has_made_folder = has_made_folder
        self._given: set[str] = set()

    def open(self) -> None:
        """Make the folder. Raises OSError or ValueError when it cannot be used."""
        try:
            os.makedirs(os.path.dirname(self.folder), exist_ok=True)
            os.mkdir(self.folder, 0o700)
            self._has_made_folder = True
        except FileExistsError:
            found = os.lstat(self.folder)
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ValueError(
                    f"others may write to {self.folder!r}; expected a folder of your own, "
                    "or the name of one that does not exist"
                ) from None

    def env(self, global_rank: int) -> dict[str, str]:
        """What is added for one worker that is about to start."""
        path = os.path.join(self.folder, f"rank{global_rank}")
        self._given.add(path)
        _remove(path)  # of an earlier generation; not every worker's server replaces it
        return {VARIABLE: path}

    def close(self) -> None:
        """The workers are gone; what a killed one has left goes too."""
        for path in self._given:
            _remove(path)
        self._given.clear()
        if self._has_made_folder:
            with suppress(OSError):  # another agent of the run still uses it
                os.rmdir(self.folder)
            self._has_made_folder = False


def _remove(path: str) -> None:
    with suppress(OSError):  # it was never there, or the worker has removed it
        if is_socket(path) and not is_served(path):  # by a worker of another agent, to whom the rank went
            os.unlink(path)
