"""The vitals of a worker and of everything that it started: what the kernel counts of them. Reads ``/proc``.

What there is, per process: bytes and calls of ``read`` and ``write`` (files, pipes, lines of logs), bytes that
go to a disk, page faults, and for each thread the time in which it ran or wanted to run, and how often it was put on a
processor. What there is not: bytes on sockets. The kernel counts those per network namespace and per socket, not per
process, and ``send`` and ``recv`` are not among the calls that it counts. But nobody can send or receive without being
woken: that is seen in the threads.

Laws: it never waits, never raises for a process that is gone, and is cheap: threads are looked at only when nothing
else has moved, and the family tree only now and then.
"""

from __future__ import annotations

import os
import time

from tenax._core.hang import ProcessCounters, Thread
from tenax._processes.descendants import descendants

_TREE_EVERY = 4  # looks
_MAX_THREADS = 2000  # of one worker and what it started; with more, only their sum is looked at
_MAX_BYTES = 4096
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_NS = 1e-9
_MUCH = 0.2  # of the time


class CounterReader:
    """Of one worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._below: list[int] = []
        self._looks = 0
        self._last: tuple[int, ...] = ()
        self._threads: dict[int, Thread] = {}  # as they were when they were last looked at
        self._threads_at = 0.0

    def read(self, *, closely: bool = False) -> ProcessCounters | None:
        """None: it is gone, or not ours to look at. ``closely``: look at its threads, whatever else has moved."""
        if self._looks % _TREE_EVERY == 0:
            self._below = descendants(self.pid)
        self._looks += 1
        first = _counters(self.pid)
        if first is None:
            return None
        is_stopped, counters = first
        alive = [self.pid]
        for pid in self._below:
            found = _counters(pid)
            if found is not None:
                alive.append(pid)
                counters = [a + b for a, b in zip(counters, found[1], strict=True)]
        if len(alive) <= len(self._below):
            self._looks = 0  # one has ended: look again who is there
        read_bytes, written_bytes, calls, disk_bytes, faults, ticks, count = counters
        seen = (read_bytes, written_bytes, calls, disk_bytes, len(alive))
        is_still, self._last = seen == self._last, seen
        has_threads = count <= _MAX_THREADS
        threads = self._look_at_threads(alive) if (is_still or closely) and has_threads else None
        return ProcessCounters(
            read_bytes,
            written_bytes,
            calls,
            disk_bytes,
            faults,
            len(alive),
            is_stopped,
            threads,
            ticks * _TICK_S,
            has_threads and (threads is None or not _is_untold(threads, ticks)),
        )

    def _look_at_threads(self, pids: list[int]) -> dict[int, Thread] | None:
        """None: this system does not tell. How often a thread has waited is asked only of those that hardly do."""
        found: dict[int, Thread] = {}
        now = time.monotonic()
        much_s = _MUCH * (now - self._threads_at)
        for pid in pids:
            for name in _names_of_threads(pid):
                told = _read(f"/proc/{pid}/task/{name}/schedstat").split()
                if len(told) != 3:
                    continue
                number, wanted_s = int(name), (int(told[0]) + int(told[1])) * _NS
                before = self._threads.get(number)
                is_busy = before is not None and wanted_s - before.wanted_s > much_s
                waits = _waits(f"/proc/{pid}/task/{name}/status") if is_busy else None
                found[number] = Thread(wanted_s, int(told[2]), waits)
        self._threads, self._threads_at = found, now
        return found or None


def state_of(pid: int) -> str:
    """The letter that the kernel has for what it does; empty: it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    return chr(stat.rpartition(b") ")[2][0]) if stat else ""


def _counters(pid: int) -> tuple[bool, list[int]] | None:
    """Whether it is stopped, and: read, written, calls, to disk, faults, ticks of a processor, threads."""
    stat, io = _read(f"/proc/{pid}/stat"), _read(f"/proc/{pid}/io")
    if not stat or not io:
        return None
    # The name in brackets may hold anything, also brackets.
    state, *fields = stat.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        return None
    faults, ticks = int(fields[6]) + int(fields[8]), int(fields[10]) + int(fields[11])
    told = [int(line.rpartition(b" ")[2]) for line in io.splitlines()]
    return state in (b"T", b"t"), [told[0], told[1], told[2] + told[3], told[5], faults, ticks, int(fields[16])]


def _names_of_threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []  # it is gone; the next look will tell


def _waits(path: str) -> int | None:
    """How often a thread gave up its processor because it waited for something."""
    for line in _read(path).splitlines():
        if line.startswith(b"voluntary_ctxt_switches:"):
            return int(line.rpartition(b"\t")[2])
    return None


def _is_untold(threads: dict[int, Thread], ticks: int) -> bool:
    """A kernel that does not keep these statistics says that nobody ever ran."""
    return ticks > 0 and not any(thread.runs for thread in threads.values())


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MAX_BYTES)
    except OSError:  # it ended between the two, or is another user's now
        return b""
    finally:
        os.close(descriptor)
