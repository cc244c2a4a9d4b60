"""The restart policy: given this failure and this history, what now?

A seam of its own. The agent machine asks once per failed generation, after the node is clear and the evidence is in;
the answer is a value with its reason in words. A policy is pure: the same failure and history give the same answer.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tenax.core.model import Failure


class Decision(msgspec.Struct, frozen=True, tag=True, tag_field="decision", omit_defaults=True):
    """Base of the three answers."""

    why: str


class Restart(Decision, frozen=True):
    """Form the next generation now. Costs one restart of the budget."""


class Wait(Decision, frozen=True, kw_only=True):
    """Form the next generation after a pause. Costs one restart of the budget."""

    seconds: float


class GiveUp(Decision, frozen=True):
    """End the run as failed."""


AnyDecision = Restart | Wait | GiveUp


class History(msgspec.Struct, frozen=True):
    """What happened before this failure."""

    restarts_used: int
    max_restarts: int
    # The first cause of every generation that failed before this one, oldest first; bounded by the machine.
    earlier: tuple[Failure, ...] = ()

    @property
    def restarts_left(self) -> int:
        return self.max_restarts - self.restarts_used


class RestartPolicy(Protocol):
    """What a policy must offer."""

    def decide(self, failure: Failure, history: History) -> AnyDecision: ...


class BudgetPolicy:
    """Restart at once until ``max_restarts`` are used. What TorchElastic does, and the default."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:  # noqa: ARG002 - the seam offers it
        if history.restarts_left > 0:
            return Restart(f"restart {history.restarts_used + 1} of {history.max_restarts}")
        if history.max_restarts == 0:
            return GiveUp("no restarts are allowed (--max-restarts 0)")
        return GiveUp(
            "the one restart is used" if history.max_restarts == 1 else f"all {history.max_restarts} restarts are used"
        )
