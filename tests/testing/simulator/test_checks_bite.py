"""The simulator sees what is wrong, and names it: broken machines and broken engines.

The machines' own checkers are turned off here: it is the outside that must see it.
"""

from __future__ import annotations

import msgspec
import pytest

from tenax.testing.simulator import Engine, Fault, NodePlan, Outcome, Parts, Setup, draw, shrink, simulate
from tenax.testing.simulator.setup import Habits

from . import broken_parts as broken
from .broken_parts import parts_with

SEEDS = range(1, 61)


def first_broken(parts: Parts, seeds: range | list[int], **changes: object) -> Outcome | None:
    for seed in seeds:
        outcome = simulate(msgspec.structs.replace(draw(seed), **changes), parts)
        if outcome.broken:
            return outcome
    return None


def first_broken_by(engine: dict[str, bool], seeds: range | list[int]) -> Outcome | None:
    for seed in seeds:
        setup = draw(seed)
        setup = msgspec.structs.replace(setup, engine=msgspec.structs.replace(setup.engine, **engine))
        outcome = simulate(setup)
        if outcome.broken:
            return outcome
    return None


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (broken.NeverFences, "S1"),
        (broken.IsReadyBeforeItIsClear, "S2"),
        (broken.StartsAgain, "S11"),
        (broken.CallsFailureSuccess, "S6"),
        (broken.GivesARankTwice, "S3"),
        (broken.TellsEverybodyAnotherCount, "S3"),
        (broken.CountsFromOne, "S10"),
        (broken.ChargesTwice, "S5"),
        (broken.ChargesNothing, "S5"),
        (broken.NeverGivesUp, "S5"),
        (broken.GoesOnAfterTheEnd, "S6"),
        (broken.IsDeafToLosses, "L3"),
        (broken.TellsNobodyOfTheEnd, "L3"),
        (broken.RemembersEveryBeat, "S12"),
    ],
)
def test_a_broken_machine_is_caught(part: type, name: str) -> None:
    outcome = first_broken(parts_with(part), SEEDS)
    assert outcome is not None
    assert outcome.property == name


def test_a_coordinator_that_waits_for_nobody_is_caught() -> None:
    """Which of its consequences shows first is luck."""
    outcome = first_broken(parts_with(broken.WaitsForNobody), SEEDS)
    assert outcome is not None
    assert outcome.property in ("S1", "S5")


def test_a_wrong_first_cause_is_caught() -> None:
    outcome = first_broken(parts_with(broken.NamesTheLastCause), range(100, 450))
    assert outcome is not None
    assert outcome.property == "S8"


def test_a_fence_that_is_longer_than_the_lease_is_caught() -> None:
    outcome = first_broken(Parts(), SEEDS, terms=broken.FencesTooLate())
    assert outcome is not None
    assert outcome.property == "S1"


def test_the_machines_own_checkers_watch_too() -> None:
    """With them, the same mistake has the number of the machine's own promise."""
    outcome = first_broken(Parts(make_agent=broken.IsReadyBeforeItIsClear), SEEDS)
    assert outcome is not None
    assert outcome.property in ("A1", "A3")


# --- duties of the engine: without any one of them a property breaks -------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "name", "seeds"),
    [
        ({"keeper_holds_socket": False}, "S1", range(1, 101)),
        ({"reset_means_death": True}, "S1", SEEDS),
        ({"reads_before_judging": False}, "S1", SEEDS),
        ({"judges_before_reading": False}, "S1", range(1, 101)),
        ({"keeper_enforces_lease": False}, "S1", SEEDS),
        ({"offers_fresh_store": False}, "S4", range(420, 1001)),
        ({"keeps_offers": False}, "S3", range(100, 401)),
        ({"marker_remembers": False}, "S10", range(10, 61)),
        ({"dates_messages": False}, "S8", range(380, 1001)),
    ],
)
def test_an_engine_that_neglects_a_duty_is_caught(engine: dict[str, bool], name: str, seeds: range) -> None:
    outcome = first_broken_by(engine, seeds)
    assert outcome is not None
    assert outcome.property == name


def test_an_agent_that_serves_before_the_dead_one_is_buried_is_caught() -> None:
    """Two agents at the endpoint. The one that serves is killed, and its workers outlive it for two seconds."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(0, start_at=0.5), NodePlan(1)),
        min_nodes=2,
        max_nodes=3,
        seconds=20.0,
        habits=Habits(generation_s=1e6, fails=0.0, collateral=0.0, ignores_term=0.0, ends_within_s=0.01, kill_s=2.0),
        faults=(Fault(10.0, "kill_coordinator"),),
    )
    for seed in range(20):
        setup = msgspec.structs.replace(setup, seed=seed)
        assert simulate(setup).broken == ""
    hasty = msgspec.structs.replace(setup, engine=Engine(waits_for_earlier_self=False))
    broken_by_haste = [simulate(msgspec.structs.replace(hasty, seed=seed)).property for seed in range(20)]
    assert "S1" in broken_by_haste


# --- shrinking --------------------------------------------------------------------------------------------------------


def test_a_broken_history_shrinks_to_one_with_the_same_property() -> None:
    parts = parts_with(broken.NeverFences)
    outcome = first_broken(parts, SEEDS)
    assert outcome is not None
    small = shrink(outcome, parts)
    assert small.property == outcome.property
    assert len(small.setup.faults) < len(outcome.setup.faults)
    assert "BROKEN" in simulate(small.setup, parts, tell=True).history
