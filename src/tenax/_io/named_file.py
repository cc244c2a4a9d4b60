"""Open a file that a user named, in a directory that others may write to as well.

A symbolic link there may belong to somebody else and lead to any file of ours. The rule is the kernel's
(``protected_symlinks``), applied whether the kernel does so or not: a link is followed if it belongs to this user or to
root, or if nobody else can write to its directory. A FIFO does not make the caller wait for a reader.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_MAX_LINKS = 8


def open_named(path: str | bytes, flags: int, mode: int = 0o666) -> int:
    """Return a descriptor. Raises OSError; ELOOP for a link that is not followed."""
    flags |= os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    name = os.fsdecode(path)
    for _ in range(_MAX_LINKS):
        # What /dev/stdout leads to is a link that only the kernel can follow.
        is_kernels = os.path.realpath(os.path.dirname(name)).startswith("/proc/")
        try:
            descriptor = os.open(name, flags if is_kernels else flags | os.O_NOFOLLOW, mode)
        except OSError as error:
            # The kernel's own protection answers EACCES.
            if error.errno not in (errno.ELOOP, errno.EACCES) or not os.path.islink(name):
                raise
            name = _followed(name)
        else:
            os.set_blocking(descriptor, True)
            return descriptor
    raise OSError(errno.ELOOP, "there are too many symbolic links", path)


def create_named(path: str | bytes) -> BinaryIO:
    """Open a file to be written from its beginning."""
    return os.fdopen(open_named(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def read_regular(path: str | bytes, max_bytes: int) -> bytes:
    """Return the beginning of a file that another process wrote. Raises OSError, also for a link or a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return file.read(max_bytes)


def _followed(link: str) -> str:
    """Return what the link points to. Raises OSError if it is not to be followed."""
    folder = os.path.dirname(link) or "."
    found, around = os.lstat(link), os.stat(folder)
    us = (os.geteuid(), 0)
    is_private = around.st_uid in us and not around.st_mode & 0o022
    if found.st_uid not in us and not is_private:
        raise OSError(errno.ELOOP, "it is a link of another user in a directory that others may write to", link)
    return os.path.join(folder, os.readlink(link))
