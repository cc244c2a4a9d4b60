"""Bugs that the simulator has found: with the bug put back, its seed finds it again."""

from __future__ import annotations

import msgspec
import pytest

from tenax.testing.simulator import Fault, NodePlan, Setup, draw, simulate
from tenax.testing.simulator.setup import WorkerBehaviour

from . import broken_parts as broken
from .broken_parts import parts_with

NO_FAILURES = WorkerBehaviour(generation_s=1e6, fails=0.0, collateral=0.0, ignores_term=0.0, leaves_behind=0.0)


@pytest.mark.parametrize(
    ("seed", "part", "name"),
    [
        (54, broken.ChargesForFencedNodes, "S5"),
        (18, broken.KeepsEveryName, "S12"),
        (251, broken.DoesNotWaitForSupersededNodes, "S1"),
        (3338, broken.ReadmitsSupersededNodes, "L3"),
        (9, broken.ForgetsTheVerdict, "S6"),
        (165, broken.DatesExitsOnReceipt, "S8"),
        (20, broken.KeepsEveryBeat, "S12"),
        (16796, broken.DoesNotWaitForStaleNodes, "S1"),
        (919260835087, broken.DoesNotWaitForRefusedNodes, "S1"),
        (482194556936, broken.EndsRecoveryEarly, "S1"),
    ],
)
def test_a_known_seed_finds_its_bug_again(seed: int, part: type, name: str) -> None:
    """If a change of the machines changes the history of a seed, replace the seed by another that finds the bug."""
    assert simulate(draw(seed), parts_with(part)).property == name


def generations_of_one_number(seed: int) -> Setup:
    """The endpoint's host loses power and its marker, so two generations get the number 1. Then the coordinator dies,
    and members of both join the next coordinator."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2), *(NodePlan(host, start_at=5.0) for host in (3, 4, 5))),
        min_nodes=2,
        max_nodes=2,
        last_call_s=0.2,
        seconds=80.0,
        behaviour=NO_FAILURES,
        faults=(Fault(20.0, "power", a=0, seconds=1.0), Fault(50.0, "kill_coordinator", seconds=0.5)),
    )


def test_two_generations_with_one_number_are_not_confused() -> None:
    assert [simulate(generations_of_one_number(seed)).broken for seed in range(60)] == [""] * 60
    confused = [
        simulate(generations_of_one_number(seed), parts_with(broken.ConfusesGenerationsOfOneNumber)).property
        for seed in range(60)
    ]
    assert "S1" in confused


def late_ending(seed: int) -> Setup:
    """A generation ends to admit a node. One member does not receive this, and its worker fails because the other has
    stopped. Then the coordinator dies, and the failure is reported to the next one."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=2,
        max_nodes=3,
        last_call_s=0.02,
        seconds=40.0,
        behaviour=msgspec.structs.replace(
            NO_FAILURES, collateral=1.0, collateral_s=0.05, ends_within_s=0.002, start_s=0.005
        ),
        faults=(
            Fault(0.14, "stall", a=1 + seed % 2, b=1, seconds=2.0),
            Fault(0.3 + seed * 0.002, "kill_coordinator", seconds=0.3),
        ),
    )


def test_the_next_coordinator_knows_why_a_generation_ended() -> None:
    assert [simulate(late_ending(seed)).broken for seed in range(60)] == [""] * 60
    charged = [
        simulate(late_ending(seed), parts_with(broken.ForgetsWhyAGenerationEnded)).property for seed in range(60)
    ]
    assert "S5" in charged
