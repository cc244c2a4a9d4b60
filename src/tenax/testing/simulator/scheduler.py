"""The scheduler: what happens next, and what time it is then.

The law: time never goes back; what was planned for the same moment happens in the order it was planned. So a
history is a function of the plans alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# (when, order, call, arguments); a list, so that a plan can be given up in its node.
Plan = list[Any]


class Scheduler:
    """One heap of plans and one clock, which stands still between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0  # plans that were carried out
        self._heap: list[Plan] = []
        self._order = 0

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> Plan:
        """Plan a call. What should have been in the past is now."""
        self._order += 1
        plan: Plan = [when if when > self.now else self.now, self._order, call, arguments]
        heapq.heappush(self._heap, plan)
        return plan

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> Plan:
        return self.at(self.now + seconds, call, *arguments)

    def run(self, until: float) -> None:
        """Carry out everything that is planned up to that time."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, call, arguments = heapq.heappop(heap)
            if call is not None:
                self.now = when
                self.count += 1
                call(*arguments)
        self.now = max(self.now, until)

    @property
    def is_empty(self) -> bool:
        return not self._heap


def cancel(plan: Plan | None) -> None:
    """A plan that is given up is not carried out."""
    if plan is not None:
        plan[2] = None


def is_due(deadline: float, now: float) -> bool:
    """Sums of seconds differ in their last digits. A process that stood still may look at its clock too early."""
    return deadline <= now + 1e-6
