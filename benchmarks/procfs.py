"""Processes from /proc: identity, parents, state and resources; and how to end one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process, uniquely: a pid can be reused, a pid with its start time cannot."""

    pid: int
    started_ticks: int

    def alive(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        fields = stat_fields(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.started_ticks


def stat_fields(pid: int) -> list[str] | None:
    """Return /proc/PID/stat from the state on (the name before it may contain anything); None if it does not exist."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(root: int) -> set[Process]:
    """Return all living descendants of `root`."""
    children: dict[int, list[Process]] = {}
    for pid in pids():
        fields = stat_fields(pid)
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(Process(pid, int(fields[19])))
    found: set[Process] = set()
    parents = [root]
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents.extend(process.pid for process in below)
    return found


def end(processes: Iterable[Process]) -> None:
    """Send SIGKILL to those that still run: by pid, and only if the start time matches."""
    for process in processes:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):  # it has just exited
                os.kill(process.pid, signal.SIGKILL)


def mentioning(text: str) -> set[Process]:
    """Return all living processes whose command line contains `text`."""
    found = set()
    for pid in pids():
        try:
            command = (PROC / str(pid) / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = stat_fields(pid)
        if text.encode() in command and fields is not None:
            found.add(Process(pid, int(fields[19])))
    return {process for process in found if process.alive()}


def listens(pid: int, port: int) -> bool:
    """Return whether a process listens at that port, in the network of this process."""
    for name in ("tcp", "tcp6"):
        for line in (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def pids() -> list[int]:
    """Return all pids."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


@dataclass(frozen=True)
class Memory:
    """Resident memory, and its proportional share (shared pages are divided among their users)."""

    rss_mb: float
    pss_mb: float


def memory(pid: int) -> Memory:
    """Return the memory of one process."""
    kilobytes = {}
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        kilobytes[name] = int(value.split()[0])
    return Memory(kilobytes["Rss"] / 1024, kilobytes["Pss"] / 1024)


def threads(pid: int) -> list[str]:
    """Return the thread ids of one process."""
    return os.listdir(PROC / str(pid) / "task")


def wakeups(pid: int) -> int:
    """Return how often the threads of one process have slept so far (voluntary context switches)."""
    total = 0
    for thread in threads(pid):
        for line in (PROC / str(pid) / "task" / thread / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def busy_s() -> float:
    """Return the CPU seconds of all processes of the machine since boot (with time stolen by other machines)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
