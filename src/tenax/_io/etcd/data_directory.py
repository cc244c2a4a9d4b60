"""The data directory of one etcd member: its lock, its data and the server's log.

    <root>/tenax_etcd_<user id>/<run>-<member>-<digest>/   data/  served  lock  etcd.log

There is one per run, cluster and name, so that a restarted agent finds its member's data. Only its user can read it.
The agent that uses it holds its lock; so does the server's keeper, so that the lock is free only when the server is
gone, even if the agent died first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from contextlib import suppress

_TAIL_SIZE = 1 << 14
_LINES = 3


class DataDirectoryRefused(Exception):
    """The data directory cannot be used. The message gives the cause and the next step."""


class DataDirectory:
    def __init__(self, root: str, run_id: str, member: str, cluster: tuple[str, ...]) -> None:
        digest = hashlib.sha256("\0".join((run_id, member, *cluster)).encode()).hexdigest()[:12]
        self._parent = os.path.join(os.path.abspath(root), f"tenax_etcd_{os.getuid()}")
        self.path = os.path.join(self._parent, f"{_safe_name(run_id)}-{_safe_name(member)}-{digest}")
        self.data = os.path.join(self.path, "data")
        self.log = os.path.join(self.path, "etcd.log")
        self._served = os.path.join(self.path, "served")
        self.lock = -1

    def acquire(self) -> bool:
        """Create and lock the directory. Return False if another process holds it. Raises ``DataDirectoryRefused``."""
        if self.lock >= 0:
            return True
        try:
            for path in (self._parent, self.path):
                with suppress(FileExistsError):
                    os.makedirs(path, mode=0o700)
                _check_private(path)
            self.lock = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.lock).st_ino != os.stat(os.path.join(self.path, "lock")).st_ino:
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # locked, or its previous holder has just removed it
            self.release()
            return False
        except OSError as error:
            self.release()
            raise DataDirectoryRefused(
                f"cannot use the data directory of etcd, {self.path}: {error.strerror}; "
                "free space there, or set TMPDIR to another directory"
            ) from error
        return True

    def release(self) -> None:
        """Release the lock and keep the files."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def has_data(self) -> bool:
        return os.path.isdir(os.path.join(self.data, "member"))

    def has_served(self) -> bool:
        """Return True if the member has served with this data, so that the cluster relies on it."""
        return os.path.exists(self._served)

    def note_served(self) -> None:
        with suppress(OSError), open(self._served, "wb"):  # a full disk stops etcd itself, which is reported
            pass

    def discard_data(self) -> None:
        """Remove the data, so that the member starts anew. The log stays."""
        with suppress(FileNotFoundError):
            os.remove(self._served)
        shutil.rmtree(self.data, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other runs have directories there
            os.rmdir(self._parent)
        self.release()

    def log_size(self) -> int:
        with suppress(OSError):
            return os.stat(self.log).st_size
        return 0

    def log_since(self, offset: int) -> str:
        try:
            with open(self.log, "rb") as log:
                log.seek(max(offset, os.fstat(log.fileno()).st_size - _TAIL_SIZE))
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def last_messages(text: str) -> str:
    """Return the last messages and errors of an etcd log; its last lines if it is not JSON."""
    import json

    lines = [line for line in text.splitlines() if line.strip()]
    messages = []
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                messages.append(": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key)))
    unique = dict.fromkeys(reversed(messages or [line.strip()[:300] for line in lines]))  # latest first
    return "; ".join(reversed(list(unique)[:_LINES]))


def _safe_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:40] or "_"


def _check_private(path: str) -> None:
    """Check the owner and restrict the mode: in a world-writable directory another user may have created it."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DataDirectoryRefused(
            f"the data directory of etcd, {path}, belongs to another user; "
            "remove it, or set TMPDIR to another directory"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
