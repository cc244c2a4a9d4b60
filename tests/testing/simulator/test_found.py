"""Bugs that were real once: put back, each is found again, where it was found."""

from __future__ import annotations

import msgspec
import pytest

from tenax.testing.simulator import Fault, NodePlan, Setup, draw, simulate
from tenax.testing.simulator.setup import Habits

from . import broken_parts as broken
from .broken_parts import parts_with

QUIET = Habits(generation_s=1e6, fails=0.0, collateral=0.0, ignores_term=0.0, leaves_behind=0.0)


@pytest.mark.parametrize(
    ("seed", "part", "name"),
    [
        (54, broken.ChargesForTheCutOff, "S5"),
        (18, broken.RemembersEveryName, "S12"),
        (251, broken.DoesNotWaitForTheSuperseded, "S1"),
        (3338, broken.LetsTheSupersededBackIn, "L3"),
        (9, broken.ForgetsTheVerdict, "S6"),
        (165, broken.DatesAnEndWhenItHearsOfIt, "S8"),
        (20, broken.RemembersEveryBeat, "S12"),
        (16796, broken.DoesNotWaitForTheStale, "S1"),
        (919260835087, broken.DoesNotWaitForTheRefused, "S1"),
        (482194556936, broken.EndsTheRecoveryEarly, "S1"),
    ],
)
def test_a_known_seed_finds_its_bug_again(seed: int, part: type, name: str) -> None:
    """If a change of the machines has made another history out of the seed, look for another one that finds the bug."""
    assert simulate(draw(seed), parts_with(part)).property == name


def namesakes(seed: int) -> Setup:
    """The endpoint's host loses its power and everything is forgotten, so there will be two generations with the number
    1. Then the coordinator dies, and members of both come to the next one."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2), *(NodePlan(host, start_at=5.0) for host in (3, 4, 5))),
        min_nodes=2,
        max_nodes=2,
        last_call_s=0.2,
        seconds=80.0,
        habits=QUIET,
        faults=(Fault(20.0, "power", a=0, seconds=1.0), Fault(50.0, "kill_coordinator", seconds=0.5)),
    )


def test_two_generations_with_one_number_are_not_confused() -> None:
    assert [simulate(namesakes(seed)).broken for seed in range(60)] == [""] * 60
    confused = [simulate(namesakes(seed), parts_with(broken.ConfusesNamesakes)).property for seed in range(60)]
    assert "S1" in confused


def late_ending(seed: int) -> Setup:
    """A generation ends to let a node in. One member does not hear it, and its worker fails because the other has
    stopped. Then the coordinator dies, and the next one hears of the failure."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=2,
        max_nodes=3,
        last_call_s=0.02,
        seconds=40.0,
        habits=msgspec.structs.replace(QUIET, collateral=1.0, collateral_s=0.05, ends_within_s=0.002, start_s=0.005),
        faults=(
            Fault(0.14, "stall", a=1 + seed % 2, b=1, seconds=2.0),
            Fault(0.3 + seed * 0.002, "kill_coordinator", seconds=0.3),
        ),
    )


def test_what_had_ended_a_generation_is_known_to_the_next_coordinator() -> None:
    assert [simulate(late_ending(seed)).broken for seed in range(60)] == [""] * 60
    charged = [simulate(late_ending(seed), parts_with(broken.ForgetsWhatHadEndedIt)).property for seed in range(60)]
    assert "S5" in charged
