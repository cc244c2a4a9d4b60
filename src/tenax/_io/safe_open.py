"""Open a file by a path that the user gave, safely in a directory that other users can write to.

A symbolic link there may belong to another user and point to any of this user's files. The kernel's rule
(``protected_symlinks``) applies even where the kernel does not enforce it: a link is followed if it belongs to this
user or to root, or if no other user can write to its directory. Opening a FIFO does not wait for a reader.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

_MAX_LINKS = 8


def open_safely(path: str | bytes, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor. Raises OSError; ELOOP for a link that is not followed."""
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    name = os.fsdecode(path)
    for _ in range(_MAX_LINKS):
        # /dev/stdout points to a link in /proc that only the kernel can follow.
        is_in_proc = os.path.realpath(os.path.dirname(name)).startswith("/proc/")
        try:
            descriptor = os.open(name, flags if is_in_proc else flags | os.O_NOFOLLOW, mode)
        except OSError as error:
            # The kernel's own protection fails with EACCES.
            if error.errno not in (errno.ELOOP, errno.EACCES) or not os.path.islink(name):
                raise
            name = _follow(name)
        else:
            os.set_blocking(descriptor, True)
            return descriptor
    raise OSError(errno.ELOOP, "too many symbolic links", path)


def create_safely(path: str | bytes) -> BinaryIO:
    """Open a file for writing; truncate it if it exists."""
    return os.fdopen(open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def read_regular(path: str | bytes, max_bytes: int) -> bytes:
    """Return up to ``max_bytes`` of a file that another process wrote. Raises OSError, also for a link or a FIFO."""
    return read_with_status(path, max_bytes)[0]


def read_with_status(path: str | bytes, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Do the same, and return the file's status, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(max_bytes), status


def replace_file(path: str, data: bytes, mode: int = 0o600, *, put: Callable[[str, str], None] = os.replace) -> None:
    """Write a file, so that readers see the old or the new content. Raises OSError.

    With ``put=os.link`` only a file that does not exist yet is written.
    """
    new = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        put(new, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new)


def _follow(link: str) -> str:
    """Return what the link points to. Raises OSError if it must not be followed."""
    folder = os.path.dirname(link) or "."
    link_stat, folder_stat = os.lstat(link), os.stat(folder)
    trusted = (os.geteuid(), 0)
    is_private = folder_stat.st_uid in trusted and not folder_stat.st_mode & 0o022
    if link_stat.st_uid not in trusted and not is_private:
        raise OSError(
            errno.ELOOP, "the link belongs to another user, in a directory that other users can write to", link
        )
    return os.path.join(folder, os.readlink(link))
