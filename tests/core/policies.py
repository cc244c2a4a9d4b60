"""Restart policies for scenarios and property tests, besides the budget policy."""

from __future__ import annotations

from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, BudgetPolicy, Change, Continue, GiveUp, History, Keep, Restart, Wait


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


class ChargesLosses(BudgetPolicy):
    """A lost host costs a restart, a drained one nothing; a joining one waits for the next generation."""

    def decide_change(self, change: Change, history: History) -> AnyDecision:
        if change.kind == "join":
            return Keep("the data is already divided")
        if change.kind == "drain":
            return Continue(change.why)
        if history.restarts_left <= 0:
            return GiveUp(f"all {history.max_restarts} restarts are used")
        return Restart(f"{change.why}, restart {history.restarts_used + 1}")


class DecidesChanges(BudgetPolicy):
    """Uses every decision about changes in turn."""

    def decide_change(self, change: Change, history: History) -> AnyDecision:
        number = history.membership_changes + history.drains + history.restarts_used
        if change.kind == "join":
            return (Continue("admitted"), Keep("full enough"), Restart("admitted at a cost"))[number % 3]
        if number > 8:
            return GiveUp("too many changes")
        return (Continue("goes on"), Restart("at a cost"), Wait("later", seconds=2.0))[number % 3]


POLICIES = {
    "pausing": Pausing(),
    "gives-up-on-3": GivesUpOn(3),
    "gives-up-on-repetition": GivesUpOnRepetition(),
    "raising": Raises(),
    "charges-losses": ChargesLosses(),
}
