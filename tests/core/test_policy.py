"""The restart policy: the budget, to the last restart."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tenax.core import commands as order
from tenax.core import events as fact
from tenax.core.agent import AgentMachine
from tenax.core.model import AgentSettings, Assignment, Evidence, Failure, Outcome
from tenax.core.policy import AnyDecision, BudgetPolicy, GiveUp, History, Restart, Wait

from .policies import Pausing

FAILURE = Failure(generation=1, local_rank=0, global_rank=0, pid=100, exit_code=1, seen_at=1.0)


@pytest.mark.parametrize(("used", "allowed"), [(u, a) for a, u in itertools.product(range(8), range(8)) if u <= a])
def test_the_budget_is_exact(used: int, allowed: int) -> None:
    """A restart is granted while, and only while, fewer than ``max_restarts`` were used; the reason counts along."""
    history = History(restarts_used=used, max_restarts=allowed)
    assert history.restarts_left == allowed - used
    decision = BudgetPolicy().decide(FAILURE, history)
    if used < allowed:
        assert decision == Restart(f"restart {used + 1} of {allowed}")
    elif allowed == 0:
        assert decision == GiveUp("no restarts are allowed (--max-restarts 0)")
    else:
        assert decision == GiveUp("the one restart is used" if allowed == 1 else f"all {allowed} restarts are used")


@pytest.mark.parametrize("allowed", range(6))
def test_a_job_that_always_fails_starts_once_more_than_it_may_restart(allowed: int) -> None:
    """A3: with the budget policy, N restarts mean N + 1 generations, and the workers are told 0, 1 ... N."""
    machine = AgentMachine(AgentSettings("run", "trainer", 1, allowed))
    told = []
    commands = machine.step(fact.RunRequested(), 0.0)
    while isinstance(commands[-1], order.Join):
        generation = commands[-1].generation
        (start,) = machine.step(fact.GenerationFormed(Assignment(generation)), 0.0)
        assert isinstance(start, order.StartWorkers)
        told.append(start.restarts_used)
        machine.step(fact.WorkerExited(generation, 0, 1), 0.0)
        machine.step(fact.FailureExamined(generation, 0, Evidence()), 0.0)
        commands = machine.step(fact.NodeCleared(generation), 0.0)
    (finish,) = commands
    assert isinstance(finish, order.Finish)
    assert finish.verdict.outcome is Outcome.FAILED
    assert finish.verdict.restarts_used == allowed
    assert told == list(range(allowed + 1))


@pytest.mark.parametrize("allowed", range(1, 5))
def test_a_pause_costs_a_restart_too(allowed: int) -> None:
    """``Wait`` is paid for like ``Restart``: a policy that pauses is held to the same count."""
    machine = AgentMachine(AgentSettings("run", "trainer", 1, allowed), Pausing())
    now = 0.0
    machine.step(fact.RunRequested(), now)
    for generation in range(1, allowed + 2):
        machine.step(fact.GenerationFormed(Assignment(generation)), now)
        machine.step(fact.WorkerExited(generation, 0, 1), now)
        machine.step(fact.FailureExamined(generation, 0, Evidence()), now)
        machine.step(fact.NodeCleared(generation), now)
        if generation <= allowed:
            pause = machine.state.next_deadline()
            assert pause == now + 5.0 * 2 ** (generation - 1)
            now = pause
            machine.step(fact.TimePassed(), now)
    assert machine.state.verdict is not None
    assert machine.state.verdict.restarts_used == allowed


def test_the_policy_is_asked_once_per_failed_generation_with_all_that_is_known() -> None:
    """It sees the first cause with its evidence, the count before this failure, and the first causes of old."""
    asked: list[tuple[Failure, History]] = []

    class Curious:
        def decide(self, failure: Failure, history: History) -> AnyDecision:
            asked.append((failure, history))
            return BudgetPolicy().decide(failure, history)

    machine = AgentMachine(AgentSettings("run", "trainer", 2, 1), Curious())
    machine.step(fact.RunRequested(), 0.0)
    for generation in (1, 2):
        machine.step(fact.GenerationFormed(Assignment(generation, first_global_rank=4)), 0.0)
        machine.step(fact.WorkerExited(generation, 0, 1), 1.0)
        machine.step(fact.WorkerExited(generation, 1, generation), 1.0)
        cause = Evidence(message="RuntimeError: boom", raised_at=0.5)
        machine.step(fact.FailureExamined(generation, 0, Evidence()), 1.0)
        machine.step(fact.FailureExamined(generation, 1, cause), 1.0)
        assert len(asked) == generation - 1
        machine.step(fact.NodeCleared(generation), 1.0)
        assert len(asked) == generation
    (first, then), (second, now) = asked
    assert [(failure.generation, failure.global_rank, failure.exit_code) for failure in (first, second)] == [
        (1, 5, 1),
        (2, 5, 2),
    ]
    assert first.evidence.message == "RuntimeError: boom"
    assert (then.restarts_used, then.earlier) == (0, ())
    assert (now.restarts_used, now.earlier) == (1, (first,))


@pytest.mark.parametrize("decision", [Restart("again"), Wait("later", seconds=2.5), GiveUp("enough")])
def test_a_decision_can_be_written_down(decision: AnyDecision) -> None:
    """The three answers survive JSON, and each says why."""
    assert msgspec.json.decode(msgspec.json.encode(decision), type=AnyDecision) == decision
    assert decision.why
