"""The user's private folder on this host: control sockets, run records, the secret of loopback endpoints.

Only its user can enter it. A folder that belongs to another user, or that other users can enter, is not used.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_VARIABLE = "TENAX_PRIVATE_DIR"


def private_folder(environ: Mapping[str, str] | None = None) -> str:
    """Return its path, by default from the environment of this process.

    Below TMPDIR only if /tmp is read-only, as in a container, because shells may differ in it.
    """
    environ = os.environ if environ is None else environ
    parent = "/tmp" if os.access("/tmp", os.W_OK) else environ.get("TMPDIR") or "/tmp"
    return environ.get(FOLDER_VARIABLE) or os.path.join(parent, f"tenax-{os.getuid()}")


def make_private(folder: str) -> None:
    """Create the folder unless it exists. Raises OSError if it is not private."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_private(folder)


def check_private(folder: str) -> None:
    """Raise OSError unless only this user can enter the folder."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can enter (or set {FOLDER_VARIABLE})")
