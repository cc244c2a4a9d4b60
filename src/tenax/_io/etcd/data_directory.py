"""The data directory of one member: who holds it, whether there is data in it, and what the server wrote down.

    <root>/tenax_etcd_<user id>/<run>-<member>-<digest>/   data/  served  lock  etcd.log

One per run, cluster and name, so that an agent that is started again finds its member's data. Nobody else can read
it. Whoever wants to use it holds its lock; the server's guard holds it too, so that it is free only when the server is
gone, even if the agent died before.
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
    """It cannot be used. The sentence says why and what to do."""


class DataDirectory:
    """See the module."""

    def __init__(self, root: str, run_id: str, member: str, cluster: tuple[str, ...]) -> None:
        digest = hashlib.sha256("\0".join((run_id, member, *cluster)).encode()).hexdigest()[:12]
        self._parent = os.path.join(os.path.abspath(root), f"tenax_etcd_{os.getuid()}")
        self.path = os.path.join(self._parent, f"{_plain(run_id)}-{_plain(member)}-{digest}")
        self.data = os.path.join(self.path, "data")
        self.log = os.path.join(self.path, "etcd.log")
        self._served = os.path.join(self.path, "served")
        self.lock = -1

    def acquire(self) -> bool:
        """Make it and lock it; False while another holds it. Raises ``DataDirectoryRefused``."""
        if self.lock >= 0:
            return True
        try:
            for path in (self._parent, self.path):
                with suppress(FileExistsError):
                    os.makedirs(path, mode=0o700)
                _check_ours(path)
            self.lock = os.open(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.lock).st_ino != os.stat(os.path.join(self.path, "lock")).st_ino:
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # held; or the holder before us has just removed everything
            self.release()
            return False
        except OSError as error:
            self.release()
            raise DataDirectoryRefused(
                f"the data directory of etcd, {self.path}, cannot be used: {error.strerror}; "
                "make room there, or choose another place with TMPDIR"
            ) from error
        return True

    def release(self) -> None:
        """Let go of the lock. What is there stays."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def has_data(self) -> bool:
        return os.path.isdir(os.path.join(self.data, "member"))

    def has_served(self) -> bool:
        """With this data the member was up once, so the cluster counts on it."""
        return os.path.exists(self._served)

    def note_served(self) -> None:
        with suppress(OSError), open(self._served, "wb"):  # a full disk stops etcd itself, which is told
            pass

    def discard_data(self) -> None:
        """The member begins anew. What the server wrote down stays, for people."""
        with suppress(FileNotFoundError):
            os.remove(self._served)
        shutil.rmtree(self.data, ignore_errors=True)

    def remove(self) -> None:
        """Everything, and the lock with it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other runs have theirs there
            os.rmdir(self._parent)
        self.release()

    def log_size(self) -> int:
        with suppress(OSError):
            return os.stat(self.log).st_size
        return 0

    def log_since(self, offset: int) -> str:
        """The end of what the server wrote down after that."""
        try:
            with open(self.log, "rb") as log:
                log.seek(max(offset, os.fstat(log.fileno()).st_size - _TAIL_SIZE))
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def last_words(text: str) -> str:
    """The last messages in a log of etcd, without what only its authors need; else the last lines as they are."""
    import json

    lines = [line for line in text.splitlines() if line.strip()]
    messages = []
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                messages.append(": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key)))
    told = dict.fromkeys(reversed(messages or [line.strip()[:300] for line in lines]))  # each once, the last first
    return "; ".join(reversed(list(told)[:_LINES]))


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:40] or "_"


def _check_ours(path: str) -> None:
    """In a directory that all may write to, another may have made it before us."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DataDirectoryRefused(
            f"the data directory of etcd, {path}, belongs to somebody else; "
            "remove it, or choose another place with TMPDIR"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
