"""A process that can be suspended: by SIGSTOP, a debugger, or a host without memory.

A suspended process does nothing and loses nothing: input and timers wait. When it resumes it calls ``on_resumed``, then
handles pending input, and fires due timers last. The input of one connection is handled in order; connections are
handled in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tenax.testing.simulator.scheduler import cancel, is_due

if TYPE_CHECKING:
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.network import End, Host, Payload
    from tenax.testing.simulator.scheduler import Plan


class Process:
    """Base of processes that run on a host."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster = cluster
        self.host = host
        self.is_alive = True
        self.is_paused = False
        self._calls: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._payloads: dict[End, list[Payload]] = {}
        self._due: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def clock(self) -> float:
        """This host's monotonic clock."""
        return self.cluster.schedule.now + self.host.offset

    def do(self, call: Callable[..., None], *arguments: object) -> None:
        """Call a function in the process, now or when it resumes."""
        if self.is_paused:
            self._calls.append((call, arguments))
        elif self.is_alive:
            call(*arguments)

    def receive(self, end: End, payload: Payload) -> None:
        """Handle input of a connection, now or when the process resumes."""
        if self.is_paused:
            self._payloads.setdefault(end, []).append(payload)
        elif self.is_alive:
            end.on_payload(end, payload)

    def later(self, seconds: float, call: Callable[..., None], *arguments: object) -> Plan:
        schedule = self.cluster.schedule
        return schedule.at(schedule.now + seconds, self._fire, call, arguments)

    def _fire(self, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        if self.is_paused:
            self._due.append((call, arguments))
        elif self.is_alive:
            call(*arguments)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        if not self.is_paused:
            return
        self.is_paused = False
        payloads, self._payloads = self._payloads, {}
        calls, self._calls = self._calls, []
        due, self._due = self._due, []
        self.on_resumed()
        for call, arguments in calls:
            self.do(call, *arguments)
        ends = list(payloads)
        self.cluster.rng.shuffle(ends)
        for end in ends:
            for payload in payloads[end]:
                self.receive(end, payload)
        for call, arguments in due:
            self._fire(call, arguments)

    def on_resumed(self) -> None:
        """Runs before pending input is handled."""

    def die(self) -> None:
        self.is_alive = False
        self.is_paused = False
        self._calls, self._payloads, self._due = [], {}, []


class Alarm:
    """Calls a process at the next deadline of a machine. ``plan`` follows every step of the machine."""

    def __init__(self, process: Process, deadline: Callable[[], float | None], call: Callable[[float], None]) -> None:
        """``call`` gets the time: the deadline, or later if the process was suspended."""
        self._process = process
        self._next = deadline
        self._call = call
        self._at: float | None = None
        self._plan: Plan | None = None

    def plan(self) -> None:
        deadline = self._next()
        if deadline != self._at:
            cancel(self._plan)
            self._at = deadline
            if deadline is not None:
                self._plan = self._process.later(deadline - self._process.clock(), self._ring, deadline)

    def _ring(self, deadline: float) -> None:
        if deadline != self._at:
            return  # it has changed while the process was suspended
        self._at = None
        if deadline == self._next():
            now = self._process.clock()
            if is_due(deadline, now):
                self._call(max(deadline, now))
        self.plan()
