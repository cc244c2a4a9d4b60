"""The scheduler: a simulated clock and a queue of planned calls.

Time never goes back, and calls for the same time run in the order they were planned, so a simulation is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# (when, order, call, arguments); a list, so that a plan can be cancelled in the heap.
Plan = list[Any]


class Scheduler:
    """One heap of plans, and a clock that jumps from one to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0  # calls made
        self._heap: list[Plan] = []
        self._order = 0

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> Plan:
        """Plan a call. A time in the past means now."""
        self._order += 1
        plan: Plan = [when if when > self.now else self.now, self._order, call, arguments]
        heapq.heappush(self._heap, plan)
        return plan

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> Plan:
        return self.at(self.now + seconds, call, *arguments)

    def run(self, until: float) -> None:
        """Run all calls planned up to that time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            when, _, call, arguments = pop(heap)
            if call is not None:
                self.now = when
                self.count += 1
                call(*arguments)
        self.now = max(self.now, until)


def cancel(plan: Plan | None) -> None:
    """Cancel a plan."""
    if plan is not None:
        plan[2] = None


def is_due(deadline: float, now: float) -> bool:
    """Whether a deadline is due, tolerating rounding of sums."""
    return deadline <= now + 1e-6
