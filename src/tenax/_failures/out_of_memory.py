"""Finds the kernel's proof that its OOM killer killed a process.

Such a process looks like any other killed by SIGKILL. The proof is in the counter ``oom_kill`` of its control group
(version 2: ``memory.events``, version 1: ``memory.oom_control``), which the kernel increments before it sends the
signal, and in the kernel log, which names the process. Both are compared with their state when this object was created.
A source that cannot be read proves nothing and is not an error: most systems have only some of them.

The log can only be read forwards, so only this module reads it: other errors of workers (``kernel_errors``) are kept
for ``evidence.py``.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # fixed in the kernel's sources
# Patterns are compiled when needed, which is rare.
_COUNTER = rb"(?m)^oom_kill (\d+)$"
# A record of the log: "priority,number,time,flags;text". Priorities below 8 are the kernel's own, not a root process's.
_KILLED = rb"(?m)^[0-7],\d+,\d+,[^;\n]*;((?:[^\n]*[Oo]ut of memory[^\n:]*: )?Killed process (\d+) \([^\n]*?\))[^\n]*"
_ERROR = rb"(?m)^[0-7],\d+,\d+,[^;\n]*;([^\n]*(?:NVRM: Xid|\]:? segfault at|general protection|\] trap )[^\n]*)"
_MAX_ERRORS = 256
_RECORD_SIZE = 8192  # a smaller read fails for a long record
_MAX_RECORDS = 20_000


class OutOfMemoryWatch:
    """Compares counter and log with their initial state. Cheap to create; holds one descriptor."""

    def __init__(
        self,
        *,
        cgroup_file: str = "/proc/self/cgroup",
        cgroup_root: str = "/sys/fs/cgroup",
        kernel_log: str = "/dev/kmsg",
        pid_namespace_file: str = "/proc/self/ns/pid",
    ) -> None:
        """``cgroup_file`` names the control group of the workers; by default this process's own."""
        self._group, self._counter_file = _find_counter(cgroup_file, cgroup_root)
        self._accounted = self._read_counter()
        self._victims: dict[int, str] = {}  # pid -> the line that names it
        self._errors: list[str] = []
        # The log uses pids of the initial namespace, which in a container differ from ours.
        self._log_has_our_pids = link_target(pid_namespace_file) == _INITIAL_PID_NAMESPACE
        self._log = _open_at_end(kernel_log)

    def rebase(self) -> None:
        """Discard what happened so far. Called at the start of a generation."""
        self._read_log()
        self._victims.clear()
        self._errors.clear()
        self._accounted = self._read_counter()

    def proof(self, pid: int, *, child: bool = False) -> str:
        """Return the proof that the OOM killer killed this process, or with ``child`` one of its children; or empty."""
        self._read_log()
        before, now = self._accounted, self._read_counter()
        line = self._victims.pop(pid, "")
        if child and not line and len(self._victims) == 1:
            line = self._victims.pop(next(iter(self._victims)))
        fresh = now - before if before is not None and now is not None else 0
        # The log attributes the other kills to other processes.
        if not line and fresh <= len(self._victims):
            return ""
        proofs = []
        if fresh > 0 and before is not None:
            proofs.append(f"cgroup {self._group}, oom_kill {before} → {now}")
            self._accounted = before + 1
        if line:
            proofs.append(f"kernel log: {line}")
        killed = "child process killed" if child else "killed"
        return f"{killed} by the kernel: out of memory ({'; '.join(proofs)})"

    def kernel_errors(self, pid: int) -> tuple[list[str], int]:
        """Return the log's lines about GPUs and crashes, and this process's pid in them; 0: unknown."""
        self._read_log()
        return self._errors, pid if self._log_has_our_pids else 0

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _read_counter(self) -> int | None:
        match = re.search(_COUNTER, read_file(self._counter_file))
        return int(match.group(1)) if match else None

    def _read_log(self) -> None:
        """Read the new records of the log, without waiting."""
        if self._log is None:
            return
        text = bytearray()
        for _ in range(_MAX_RECORDS):
            try:
                part = os.read(self._log, _RECORD_SIZE)
            except BrokenPipeError:
                continue  # unread records were overwritten; the next read continues after them
            except OSError:
                break  # usually: no more records for now
            if not part:
                break
            text += part
        if not text:
            return
        kernel_errors = (match.group(1).decode("utf-8", "backslashreplace") for match in re.finditer(_ERROR, text))
        self._errors = [*self._errors, *kernel_errors][-_MAX_ERRORS:]
        if not self._log_has_our_pids:
            return
        for match in re.finditer(_KILLED, text):
            self._victims[int(match.group(2))] = match.group(1).decode("utf-8", "backslashreplace")


def _find_counter(cgroup_file: str, root: str) -> tuple[str, str]:
    """Return the control group that counts this process's memory, and its counter file; empty if there is none."""
    version_2 = version_1 = None
    for line in read_file(cgroup_file).decode("utf-8", "surrogateescape").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            version_1 = (controllers, path)
        elif not controllers and path:
            version_2 = path
    candidates: list[tuple[str, str]] = []
    # In a container the path may be the host's, while the mount's root is the container's own group.
    if version_1 is not None:
        controllers, path = version_1
        candidates += [(path, f"{root}/{mount}{path}/memory.oom_control") for mount in (controllers, "memory")]
        candidates += [("/", f"{root}/{mount}/memory.oom_control") for mount in (controllers, "memory")]
    if version_2 is not None:
        names = ("memory.events", "memory.events.local")
        candidates += [(path, f"{root}{path}/{name}") for path in (version_2, "") for name in names]
    for group, file in candidates:
        if re.search(_COUNTER, read_file(file)):
            return group or "/", file
    return "", ""


def read_file(path: str, max_bytes: int = 1 << 16) -> bytes:
    """Return the beginning of a file; empty if it cannot be read."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        return file.read(max_bytes)
    return b""


def link_target(path: str) -> str:
    """Return where a symbolic link points to; empty if it cannot be read."""
    with suppress(OSError):
        return os.readlink(path)
    return ""


def _open_at_end(path: str) -> int | None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.lseek(descriptor, 0, os.SEEK_END)
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return None
