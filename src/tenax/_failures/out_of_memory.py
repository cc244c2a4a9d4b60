"""Out of memory: the kernel's own proof that it killed a process for lack of memory.

A process that the kernel's OOM killer ends looks like any other that got SIGKILL. The proof lies elsewhere: in the
counter ``oom_kill`` of its control group (version 2: ``memory.events``, version 1: ``memory.oom_control``), which the
kernel raises before it sends the signal, and in the kernel's log, which names the process. Both are compared with how
they stood when this object was made. Whatever cannot be read proves nothing and is no error: most systems show only a
part.

The log is read here only, because it can be read only forwards: what else it says of workers (``troubles``) is kept for
``kernel_log.py``.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # fixed in the kernel's sources
# Patterns are compiled when they are needed, which most starts never do.
_COUNTER = rb"(?m)^oom_kill (\d+)$"
# A record of the log: "priority,number,time,flags;text". Below 8: the kernel itself wrote it, not a process with root's
# rights that likes to write there too.
_KILLED = rb"(?m)^[0-7],\d+,\d+,[^;\n]*;((?:[^\n]*[Oo]ut of memory[^\n:]*: )?Killed process (\d+) \([^\n]*?\))[^\n]*"
_TROUBLE = rb"(?m)^[0-7],\d+,\d+,[^;\n]*;([^\n]*(?:NVRM: Xid|\]:? segfault at|general protection|\] trap )[^\n]*)"
_MAX_TROUBLES = 256
_RECORD_SIZE = 8192  # a read with less fails for a long record
_MAX_RECORDS = 20_000


class OutOfMemoryWatch:
    """Remembers how counters and log stood, and says what they prove now. Cheap to make; holds one descriptor."""

    def __init__(
        self,
        *,
        cgroup_file: str = "/proc/self/cgroup",
        cgroup_root: str = "/sys/fs/cgroup",
        kernel_log: str = "/dev/kmsg",
        pid_namespace_file: str = "/proc/self/ns/pid",
    ) -> None:
        """Workers are expected in the control group that ``cgroup_file`` names, which is the maker's own by default."""
        self._group, self._counter_file = _find_counter(cgroup_file, cgroup_root)
        self._accounted = self._read_counter()
        self._victims: dict[int, str] = {}  # pid -> the line that names it
        self._troubles: list[str] = []
        # The log speaks of processes by their numbers in the initial namespace. In a container ours mean others.
        self._pids_are_ours = _link(pid_namespace_file) == _INITIAL_PID_NAMESPACE
        self._log = _open_at_end(kernel_log)

    def rebase(self) -> None:
        """Forget what happened so far. For the start of a generation: an earlier one's losses prove nothing."""
        self._read_log()
        self._victims.clear()
        self._troubles.clear()
        self._accounted = self._read_counter()

    def sentence(self, pid: int, *, child: bool = False) -> str:
        """What proves that the kernel killed this process, or (``child``) a child of it, out of memory; or nothing."""
        self._read_log()
        before, now = self._accounted, self._read_counter()
        line = self._victims.pop(pid, "")
        if child and not line and len(self._victims) == 1:
            line = self._victims.pop(next(iter(self._victims)))
        fresh = now - before if before is not None and now is not None else 0
        # Kills that the log ascribes to other processes are not ours.
        if not line and fresh <= len(self._victims):
            return ""
        proofs = []
        if fresh > 0 and before is not None:
            proofs.append(f"cgroup {self._group}, oom_kill {before} → {now}")
            self._accounted = before + 1
        if line:
            proofs.append(f"kernel log: {line}")
        who = "a child of it was killed" if child else "killed"
        return f"{who} by the kernel: out of memory ({'; '.join(proofs)})"

    def troubles(self, pid: int) -> tuple[list[str], int]:
        """What the kernel said of GPUs and crashes, and the number that this process has there; 0: not known."""
        self._read_log()
        return self._troubles, pid if self._pids_are_ours else 0

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def __enter__(self) -> OutOfMemoryWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _read_counter(self) -> int | None:
        match = re.search(_COUNTER, _read(self._counter_file))
        return int(match.group(1)) if match else None

    def _read_log(self) -> None:
        """Take in what the log says since the last look, as far as it can be had without waiting."""
        if self._log is None:
            return
        text = bytearray()
        for _ in range(_MAX_RECORDS):
            try:
                part = os.read(self._log, _RECORD_SIZE)
            except BrokenPipeError:
                continue  # records that we had not read were overwritten; the next ones are there
            except OSError:
                break  # most often: nothing more for now
            if not part:
                break
            text += part
        if not text:
            return
        troubles = (match.group(1).decode("utf-8", "backslashreplace") for match in re.finditer(_TROUBLE, text))
        self._troubles = [*self._troubles, *troubles][-_MAX_TROUBLES:]
        if not self._pids_are_ours:
            return
        for match in re.finditer(_KILLED, text):
            self._victims[int(match.group(2))] = match.group(1).decode("utf-8", "backslashreplace")


def _find_counter(cgroup_file: str, root: str) -> tuple[str, str]:
    """The control group that counts our memory, and the file with its counter. Empty if there is none."""
    version_2 = version_1 = None
    for line in _read(cgroup_file).decode("utf-8", "surrogateescape").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            version_1 = (controllers, path)
        elif not controllers and path:
            version_2 = path
    candidates: list[tuple[str, str]] = []
    # Inside a container the path may be the host's, while the mount shows the container's own group as its root.
    if version_1 is not None:
        controllers, path = version_1
        candidates += [(path, f"{root}/{mount}{path}/memory.oom_control") for mount in (controllers, "memory")]
        candidates += [("/", f"{root}/{mount}/memory.oom_control") for mount in (controllers, "memory")]
    if version_2 is not None:
        names = ("memory.events", "memory.events.local")
        candidates += [(path, f"{root}{path}/{name}") for path in (version_2, "") for name in names]
    for group, file in candidates:
        if re.search(_COUNTER, _read(file)):
            return group or "/", file
    return "", ""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16)
    except (OSError, ValueError):
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _open_at_end(path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
