"""Restart policies for scenarios and property tests, besides the budget policy."""

from __future__ import annotations

from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, BudgetPolicy, GiveUp, History, Wait


class Pausing:
    """Within the budget, restart after a pause that grows with every restart: 5 s, 10 s, 20 s ..."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if history.restarts_left <= 0:
            return BudgetPolicy().decide(failure, history)
        seconds = 5.0 * 2**history.restarts_used
        return Wait(f"restart {history.restarts_used + 1}, after {seconds:g} s", seconds=seconds)


class GivesUpOn:
    """Within the budget, but never after this exit code."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if failure.exit_code == self._exit_code:
            return GiveUp(f"exit code {self._exit_code} is fatal")
        return BudgetPolicy().decide(failure, history)


class GivesUpOnRepetition:
    """Within the budget, until the same rank fails twice in a row."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if history.earlier and history.earlier[-1].global_rank == failure.global_rank:
            return GiveUp(f"rank {failure.global_rank} failed twice in a row")
        return BudgetPolicy().decide(failure, history)


class Raises:
    """A policy with a bug."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        raise KeyError(failure.global_rank)


POLICIES = {
    "pausing": Pausing(),
    "gives-up-on-3": GivesUpOn(3),
    "gives-up-on-repetition": GivesUpOnRepetition(),
    "raising": Raises(),
}
