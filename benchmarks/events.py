"""Events of the instant workers, and the FIFO that carries them.

A worker writes each event as one whole line (`worker.c`), with the time of the kernel's monotonic clock. The FIFO is
held open here for reading and writing, so no worker blocks at opening it and no line is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.procfs import Process


@dataclass(frozen=True)
class Event:
    """One line of a worker: time, event, rank, restart count and world size."""

    at_ns: int
    name: str
    process: Process
    rank: int
    restarts: int
    world: int = 1
    generation: int = 0  # 0 where the launcher does not number them
    node: int = 0  # the agent that started the worker


def parse_event(line: str) -> Event:
    """Parse one line of a worker."""
    at_ns, name, pid, started_ticks, rank, restarts, world, generation, node = line.split()
    process = Process(int(pid), int(started_ticks))
    return Event(int(at_ns), name, process, int(rank), int(restarts), int(world), int(generation), int(node))


class EventPipe:
    """The FIFO in a folder, and all events received through it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events"
        os.mkfifo(self.path)
        self._fifo = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._events: list[Event] = []
        self._unread = ""

    def fileno(self) -> int:
        """Readable when there are new events."""
        return self._fifo

    def all(self) -> list[Event]:
        """Return all events so far, in order."""
        while True:
            try:
                self._unread += os.read(self._fifo, 1 << 16).decode()
            except BlockingIOError:
                break
        *lines, self._unread = self._unread.split("\n")
        self._events += map(parse_event, lines)
        return list(self._events)

    def named(self, name: str) -> list[Event]:
        """Return the events of one name so far, earliest first."""
        return sorted((event for event in self.all() if event.name == name), key=lambda event: event.at_ns)

    def close(self) -> None:
        """Close the FIFO. No worker writes any more."""
        os.close(self._fifo)


def whole_group(events: Iterable[Event], after_ns: int, workers: int) -> list[Event]:
    """Return the starts of a group of that many workers after a given time; empty while the group is incomplete.

    If the launcher numbers its generations, all must be of one; else the latest start of each rank counts.
    """
    groups: dict[int, dict[int, Event]] = {}
    for event in events:
        if event.name == "start" and event.at_ns > after_ns and event.world == workers:
            groups.setdefault(event.generation, {})[event.rank] = event
    for group in groups.values():
        if len(group) == workers:
            return sorted(group.values(), key=lambda event: event.at_ns)
    return []
