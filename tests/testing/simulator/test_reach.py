"""The histories go where it hurts. A simulator that never gets there proves nothing."""

from __future__ import annotations

import pytest

from tenax._core.agent import AgentMachine
from tenax.testing.simulator import Fault, NodePlan, Setup, draw, simulate
from tenax.testing.simulator.draw import KINDS
from tenax.testing.simulator.liveness import DISTURBANCES
from tenax.testing.simulator.setup import Habits

SEEDS = range(1, 251)
PLACES = [
    "Fenced(",
    "its keeper ends the workers",
    "silent for 5 s",
    "its connection was closed",
    "its connection is reset",
    "drops its connection",
    "resumes",
    "was_cut_off=True",
    "[recovering > running]",
    "[recovering > ending]",
    "NodeDraining",
    "LeaveNoticed",
    "LeaveRequested(why=an operator wants it to leave) to",
    "RestartRequested(why=an operator wants a restart) -> GenerationEnded",
    "WorkersRunning(",
    "NodeProgress(",
    "took its place",
    "the other nodes continued without this node",
    "has_succeeded=True",
    "[paused",
    "joins",
    "RunEnded(verdict=succeeded",
    "RunEnded(verdict=failed",
    "RunEnded(verdict=broken",
    "RunEnded(verdict=cancelled",
]


@pytest.fixture(scope="module")
def told() -> str:
    return "".join(simulate(draw(seed), tell=True).history for seed in SEEDS)


@pytest.mark.parametrize("place", PLACES)
def test_the_histories_get_there(told: str, place: str) -> None:
    assert place in told


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_happens(told: str, kind: str) -> None:
    assert f"FAULT         {kind} " in told


@pytest.mark.parametrize("kind", DISTURBANCES)
def test_every_disturbance_happens(told: str, kind: str) -> None:
    assert f"disturbance: {kind}\n" in told


def test_a_coordinator_that_dies_costs_healthy_workers_nothing() -> None:
    """The endpoint's agent takes no part in the generation; it is killed, and started again two seconds later."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0, start_at=0.0), NodePlan(1), NodePlan(2), NodePlan(0, start_at=5.0)),
        min_nodes=3,
        max_nodes=3,
        seconds=60.0,
        habits=Habits(generation_s=1e6, fails=0.0),
        faults=(Fault(20.0, "kill_coordinator", seconds=2.0),),
    )
    outcome = simulate(setup, tell=True)
    assert outcome.broken == ""
    is_member = "rank" in next(line for line in outcome.history.splitlines() if "host0/n1" in line and "Formed" in line)
    assert outcome.counts["generations"] == (2 if is_member else 1)


def test_a_coordinator_that_stands_still_costs_nothing() -> None:
    """Everything that the others said has arrived, so nobody is cut off; it hears them before it judges them."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=3,
        max_nodes=3,
        seconds=200.0,
        habits=Habits(generation_s=1e6, fails=0.0),
        faults=(Fault(20.0, "freeze", seconds=120.0),),
    )
    outcome = simulate(setup, tell=True)
    assert outcome.broken == ""
    assert outcome.counts["generations"] == 1
    assert "Fenced(" not in outcome.history


def test_a_connection_that_is_reset_costs_nothing() -> None:
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=3,
        max_nodes=3,
        seconds=60.0,
        habits=Habits(generation_s=1e6, fails=0.0),
        faults=tuple(Fault(10.0 + number, "break", a=number, b=number) for number in range(12)),
    )
    outcome = simulate(setup)
    assert outcome.broken == ""
    assert outcome.counts["generations"] == 1


def test_the_machines_under_test_are_the_real_ones() -> None:
    from tenax._core.coordinator import CoordinatorMachine
    from tenax.testing.simulator import Parts

    assert (Parts().make_agent, Parts().make_coordinator) == (AgentMachine, CoordinatorMachine)
