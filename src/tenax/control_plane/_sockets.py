"""Worker sockets: the agent gives every worker its own path.

``TORCH_WORKER_SERVER_SOCKET`` of the agent names a folder; the same variable of a worker has its path,
``<folder>/rank<global rank>``, so that several agents of a run can share a folder. Only its user may write to the
folder; one that cannot be used is rejected. Sockets are removed at the end of the run, and so is the folder if it was
created here and is empty.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress

from tenax._io.interfaces import RequestRefused

VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
_MAX_BYTES = 107 if sys.platform.startswith("linux") else 103
_LONGEST_NAME = "/rank1234567"


def check_length(path: str) -> None:
    """Raise ValueError with a message if the path is too long for a socket."""
    length = len(os.fsencode(path))
    if length > _MAX_BYTES:
        raise ValueError(
            f"the socket path {path!r} has {length} bytes, the maximum is {_MAX_BYTES}; "
            f"set {VARIABLE} to a shorter path, for example under /tmp"
        )


def socket_folder(environ: Mapping[str, str]) -> str:
    """Return the folder for the workers' sockets; empty: there are none. Raises ValueError with a message."""
    folder = environ.get(VARIABLE, "")
    if not folder:
        return ""
    folder = os.path.abspath(folder)
    if is_socket(folder):  # this process is itself a worker, and this is its own socket
        folder += ".d"
    if len(os.fsencode(folder + _LONGEST_NAME)) > _MAX_BYTES:
        raise ValueError(
            f"{VARIABLE} is {folder!r}, which is too long; expected at most "
            f"{_MAX_BYTES - len(_LONGEST_NAME)} bytes, for example a folder under /tmp"
        )
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ValueError(f"{VARIABLE} is {folder!r}, which is not a folder; expected a folder for the workers' sockets")
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
        except BlockingIOError:  # its backlog is full
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def open_sockets(environ: Mapping[str, str]) -> WorkerSockets | None:
    """Create the folder of the sockets, if the environment names one. Raises RequestRefused."""
    try:
        folder = socket_folder(environ)
        if not folder:
            return None
        sockets = WorkerSockets(folder)
        sockets.open()
    except OSError as error:
        raise RequestRefused(
            f"{VARIABLE} is {environ[VARIABLE]!r}, which could not be created: {error.strerror}; "
            "choose another folder, or unset it"
        ) from error
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    return sockets


class WorkerSockets:
    """The sockets of one run on this node."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._has_created_folder = False
        self._paths: set[str] = set()

    def open(self) -> None:
        """Create the folder. Raises OSError or ValueError if it cannot be used."""
        try:
            os.makedirs(os.path.dirname(self.folder), exist_ok=True)
            os.mkdir(self.folder, 0o700)
            self._has_created_folder = True
        except FileExistsError:
            found = os.lstat(self.folder)
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ValueError(
                    f"other users can write to {self.folder!r}; expected a folder that only you can write to, "
                    "or one that does not exist yet"
                ) from None

    def env(self, global_rank: int) -> dict[str, str]:
        """Return the environment variables for a worker, and remove an old socket at its path."""
        path = os.path.join(self.folder, f"rank{global_rank}")
        self._paths.add(path)
        _remove(path)  # of an earlier generation; not every server replaces it
        return {VARIABLE: path}

    def close(self) -> None:
        """Remove the sockets that killed workers left, and the folder. Call this when the workers are gone."""
        for path in self._paths:
            _remove(path)
        self._paths.clear()
        if self._has_created_folder:
            with suppress(OSError):  # another agent of the run still uses it
                os.rmdir(self.folder)
            self._has_created_folder = False


def _remove(path: str) -> None:
    with suppress(OSError):  # it never existed, or the worker removed it
        if is_socket(path) and not is_served(path):  # a worker of another agent may have this rank now
            os.unlink(path)
