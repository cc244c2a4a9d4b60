"""The simulator detects broken machines and engines, and reports the property that breaks.

The machines' own invariant checkers are off here, so only the simulator's checks can detect a bug.
"""

from __future__ import annotations

import msgspec
import pytest

from tenax.testing.simulator import Engine, Fault, NodePlan, Outcome, Parts, Setup, draw, shrink, simulate
from tenax.testing.simulator.setup import WorkerBehaviour

from . import broken_parts as broken
from .broken_parts import parts_with

SEEDS = range(1, 61)


def first_broken(parts: Parts, seeds: range | list[int], **changes: object) -> Outcome | None:
    for seed in seeds:
        outcome = simulate(msgspec.structs.replace(draw(seed, survivors=False), **changes), parts)
        if outcome.broken:
            return outcome
    return None


def first_broken_by(engine: dict[str, bool], seeds: range | list[int]) -> Outcome | None:
    for seed in seeds:
        setup = draw(seed, survivors=False)
        setup = msgspec.structs.replace(setup, engine=msgspec.structs.replace(setup.engine, **engine))
        outcome = simulate(setup)
        if outcome.broken:
            return outcome
    return None


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (broken.NeverFences, "S5"),  # the keeper kills its workers, but they look as if they had failed
        (broken.ReportsReadyBeforeClear, "S2"),
        (broken.RestartsWorkersOfEndedGeneration, "S11"),
        (broken.ReportsFailureAsSuccess, "S6"),
        (broken.AssignsARankTwice, "S3"),
        (broken.SendsDifferentRestartCounts, "S3"),
        (broken.ForgetsEarlierGenerations, "S10"),
        (broken.ChargesTwice, "S5"),
        (broken.ChargesNothing, "S5"),
        (broken.NeverGivesUp, "S5"),
        (broken.ContinuesAfterTheVerdict, "S6"),
        (broken.IgnoresLostNodes, "L3"),
        (broken.DoesNotSendGenerationEnded, "L3"),
    ],
)
def test_a_broken_machine_breaks_its_property(part: type, name: str) -> None:
    outcome = first_broken(parts_with(part), SEEDS)
    assert outcome is not None
    assert outcome.property == name


def test_a_generation_that_forms_while_workers_run_is_detected() -> None:
    """It depends on the seed which of two properties breaks first."""
    outcome = first_broken(parts_with(broken.FormsWhileWorkersRun), SEEDS)
    assert outcome is not None
    assert outcome.property in ("S1", "S5")


def test_a_wrong_first_cause_is_detected() -> None:
    outcome = first_broken(parts_with(broken.NamesTheLastCause), range(230, 450))
    assert outcome is not None
    assert outcome.property == "S8"


def test_the_machines_own_checkers_run_in_a_simulation() -> None:
    """They detect the same bug as a violation of the machine's own invariant."""
    outcome = first_broken(Parts(make_agent=broken.ReportsReadyBeforeClear), SEEDS)
    assert outcome is not None
    assert outcome.property in ("A1", "A3")


# --- requirements on the engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "name", "seeds"),
    [
        ({"keeper_holds_socket": False}, "S1", range(150, 201)),
        ({"keeper_enforces_lease": False}, "S1", SEEDS),
        ({"offers_fresh_store": False}, "S4", range(940, 1001)),
        ({"keeps_offers": False}, "S3", range(150, 401)),
        ({"marker_remembers": False}, "S10", range(10, 61)),
    ],
)
def test_an_engine_that_misses_a_requirement_breaks_a_property(
    engine: dict[str, bool], name: str, seeds: range
) -> None:
    outcome = first_broken_by(engine, seeds)
    assert outcome is not None
    assert outcome.property == name


def test_an_agent_that_serves_while_processes_of_a_dead_agent_live_is_detected() -> None:
    """Of two agents at the endpoint, the one that serves is killed; its workers live for up to 2 s longer."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(0, start_at=0.5), NodePlan(1)),
        min_nodes=2,
        max_nodes=3,
        seconds=20.0,
        behaviour=WorkerBehaviour(
            generation_s=1e6, fails=0.0, collateral=0.0, ignores_term=0.0, ends_within_s=0.01, kill_s=2.0
        ),
        faults=(Fault(10.0, "kill_coordinator"),),
    )
    for seed in range(20):
        setup = msgspec.structs.replace(setup, seed=seed)
        assert simulate(setup).broken == ""
    eager = msgspec.structs.replace(setup, engine=Engine(waits_until_predecessor_cleared=False))
    assert any(simulate(msgspec.structs.replace(eager, seed=seed)).property == "S1" for seed in range(20))


# --- shrinking --------------------------------------------------------------------------------------------------------


def test_shrinking_keeps_the_broken_property() -> None:
    parts = parts_with(broken.NeverFences)
    outcome = first_broken(parts, SEEDS)
    assert outcome is not None
    small = shrink(outcome, parts)
    assert small.property == outcome.property
    assert len(small.setup.faults) < len(outcome.setup.faults)
    assert "BROKEN" in simulate(small.setup, parts, record_history=True).history
