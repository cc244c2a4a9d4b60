"""Reads the kernel's counters of a worker and its descendants from ``/proc``.

Per process: bytes and calls of ``read`` and ``write`` (files, pipes, log lines), calls of its main thread, bytes
written to disk, page faults, and for each thread its run time, its time in the run queue, and how often it was
scheduled. Not available per process: bytes on sockets, which the kernel counts per network namespace and per socket,
and calls of ``send`` and ``recv``. But a thread that sends or receives is scheduled, which its thread counters show.

Never blocks, never raises for a process that has exited, and is cheap: threads are read only if no main thread has read
or written, and the process tree only on every fourth read.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from tenax._core.hang import ProcessCounters, Thread
from tenax._processes.descendants import descendants

_TREE_EVERY = 4  # reads
_MAX_THREADS = 2000  # of one worker and its descendants; with more, only their sum is used
_MAX_BYTES = 4096
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_NS = 1e-9
_BUSY_SHARE = 0.03  # of the time


class CounterReader:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descendants: list[int] = []
        self._reads = 0
        self._last: tuple[int, ...] = ()
        self._threads: dict[int, Thread] = {}  # from the last read of threads
        self._threads_at = 0.0

    def read(self, *, closely: bool = False) -> ProcessCounters | None:
        """Return the counters; None if the worker is gone or not accessible. ``closely``: always read its threads."""
        if self._reads % _TREE_EVERY == 0:
            self._descendants = descendants(self.pid)
        self._reads += 1
        first = _counters(self.pid)
        if first is None:
            return None
        is_stopped, counters = first
        alive = [self.pid]
        for pid in self._descendants:
            found = _counters(pid)
            if found is not None:
                alive.append(pid)
                counters = [a + b for a, b in zip(counters, found[1], strict=True)]
        if len(alive) <= len(self._descendants):
            self._reads = 0  # a descendant has exited: read the tree next time
        read_bytes, written_bytes, calls, disk_bytes, faults, ticks, count = counters
        main_calls = sum(sum(_values(_read(f"/proc/{pid}/task/{pid}/io"))[2:4]) for pid in alive)
        seen = (main_calls, len(alive))
        is_still, self._last = seen == self._last, seen
        has_threads = count <= _MAX_THREADS
        threads = self._read_threads(alive) if (is_still or closely) and has_threads else None
        # Without scheduler statistics of the kernel, all counts are 0 although CPU time was used.
        has_statistics = threads is None or ticks == 0 or any(thread.runs for thread in threads.values())
        sums = (read_bytes, written_bytes, calls, main_calls, disk_bytes, faults)
        is_complete = has_threads and has_statistics
        return ProcessCounters(*sums, len(alive), is_stopped, threads, ticks * _TICK_S, is_complete)

    def _read_threads(self, pids: list[int]) -> dict[int, Thread] | None:
        """Return all threads by id; None if the system has no statistics. Waits are counted for busy threads only."""
        found: dict[int, Thread] = {}
        now = time.monotonic()
        busy_s = _BUSY_SHARE * (now - self._threads_at)
        for pid in pids:
            for name in _thread_ids(pid):
                fields = _read(f"/proc/{pid}/task/{name}/schedstat").split()
                if len(fields) != 3:
                    continue
                number, ran_s = int(name), int(fields[0]) * _NS
                wanted_s = ran_s + int(fields[1]) * _NS
                before = self._threads.get(number)
                is_busy = before is not None and (before.waits is not None or wanted_s - before.wanted_s > busy_s)
                waits = _waits(f"/proc/{pid}/task/{name}/status") if is_busy else None
                found[number] = Thread(ran_s, wanted_s, int(fields[2]), waits, number == pid)
        self._threads, self._threads_at = found, now
        return found or None


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process, without its descendants; None if it is gone."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S if len(fields) > 12 else None


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; empty if it is gone."""
    stat = _read(f"/proc/{pid}/stat")
    return chr(stat.rpartition(b") ")[2][0]) if stat else ""


def _counters(pid: int) -> tuple[bool, list[int]] | None:
    """Return whether the process is stopped, and its counters: bytes read, bytes written, calls, bytes to disk, page
    faults, CPU ticks, threads."""
    stat, io = _read(f"/proc/{pid}/stat"), _read(f"/proc/{pid}/io")
    if not stat or not io:
        return None
    # The name in brackets may itself contain brackets.
    state, *fields = stat.rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        return None
    faults, ticks = int(fields[6]) + int(fields[8]), int(fields[10]) + int(fields[11])
    counts = _values(io)
    io_counts = [counts[0], counts[1], counts[2] + counts[3], counts[5]]
    return state in (b"T", b"t"), [*io_counts, faults, ticks, int(fields[16])]


def _values(io: bytes) -> list[int]:
    """Return the counters of ``/proc/PID/io``: bytes read and written, calls of ``read`` and ``write``, and more."""
    return [int(line.rpartition(b" ")[2]) for line in io.splitlines()]


def _thread_ids(pid: int) -> list[str]:
    with suppress(OSError):  # it is gone; the next read detects that
        return os.listdir(f"/proc/{pid}/task")
    return []


def _waits(path: str) -> int | None:
    """Return how often a thread gave up its CPU to wait."""
    for line in _read(path).splitlines():
        if line.startswith(b"voluntary_ctxt_switches:"):
            return int(line.rpartition(b"\t")[2])
    return None


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MAX_BYTES)
    except OSError:  # it exited meanwhile, or now belongs to another user
        return b""
    finally:
        os.close(descriptor)
