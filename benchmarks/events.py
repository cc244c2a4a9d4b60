"""Events: what the instant workers say of themselves, and the FIFO through which they say it.

A worker writes each event as one whole line (`worker.c`), with the kernel's monotonic clock. Whoever reads never blocks
a worker and never misses a line, because the FIFO is held open here for reading and writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.procfs import Process


@dataclass(frozen=True)
class Event:
    """One line of a worker: when, what, who, and in which attempt of how large a group."""

    at_ns: int
    name: str
    process: Process
    rank: int
    restarts: int
    world: int = 1
    generation: int = 0  # 0 where the launcher does not number them
    node: int = 0  # the agent that started the worker


def parse_event(line: str) -> Event:
    """The event that one line of the worker says."""
    at_ns, name, pid, started_ticks, rank, restarts, world, generation, node = line.split()
    process = Process(int(pid), int(started_ticks))
    return Event(int(at_ns), name, process, int(rank), int(restarts), int(world), int(generation), int(node))


class EventPipe:
    """The FIFO in a folder, and every event that came through it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events"
        os.mkfifo(self.path)
        self._fifo = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._events: list[Event] = []
        self._unread = ""

    def fileno(self) -> int:
        """Readable when there is something new."""
        return self._fifo

    def all(self) -> list[Event]:
        """Everything the workers have said so far, in the order they said it."""
        while True:
            try:
                self._unread += os.read(self._fifo, 1 << 16).decode()
            except BlockingIOError:
                break
        *lines, self._unread = self._unread.split("\n")
        self._events += map(parse_event, lines)
        return list(self._events)

    def named(self, name: str) -> list[Event]:
        """The events of one name so far, earliest first."""
        return sorted((event for event in self.all() if event.name == name), key=lambda event: event.at_ns)

    def close(self) -> None:
        """Nobody writes any more."""
        os.close(self._fifo)


def whole_group(events: Iterable[Event], after_ns: int, workers: int) -> list[Event]:
    """The first instructions of a group of that many workers which started after a moment; empty while it lacks some.

    Where the launcher numbers its generations they must all be of one; otherwise the latest start of each rank counts.
    """
    groups: dict[int, dict[int, Event]] = {}
    for event in events:
        if event.name == "start" and event.at_ns > after_ns and event.world == workers:
            groups.setdefault(event.generation, {})[event.rank] = event
    for group in groups.values():
        if len(group) == workers:
            return sorted(group.values(), key=lambda event: event.at_ns)
    return []
