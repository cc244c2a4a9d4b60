"""A process that can be suspended: by SIGSTOP, a debugger, or a host without memory.

A suspended process does nothing and loses nothing: input and timers wait. When it resumes it calls ``on_resumed``, then
handles pending input, and fires due timers last. The input of one connection is handled in order; connections are
handled in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
        return self.cluster.schedule.after(seconds, self._fire, call, arguments)

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
        if not self.cluster.setup.engine.reads_before_checking_leases:
            self._fire_all(due)
            due = []
        ends = list(payloads)
        self.cluster.rng.shuffle(ends)
        for end in ends:
            for payload in payloads[end]:
                self.receive(end, payload)
        self._fire_all(due)

    def _fire_all(self, due: list[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
        for call, arguments in due:
            self._fire(call, arguments)

    def on_resumed(self) -> None:
        """Runs before pending input is handled."""

    def die(self) -> None:
        self.is_alive = False
        self.is_paused = False
        self._calls, self._payloads, self._due = [], {}, []
