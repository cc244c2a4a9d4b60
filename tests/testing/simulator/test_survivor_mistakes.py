"""The simulator detects mistakes about held workers, each by a known seed."""

from __future__ import annotations

import re

import msgspec
import pytest

from tenax.testing.simulator import Fault, NodePlan, Setup, draw, simulate
from tenax.testing.simulator.setup import WorkerBehaviour

from .broken_parts import parts_with
from .broken_survivors import MISTAKES


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_about_held_workers_is_found_by_its_seed(part: type) -> None:
    """And not by a fault of the machine without the mistake."""
    seed, name = MISTAKES[part]
    assert simulate(draw(seed, survivors=True)).broken == ""
    assert simulate(draw(seed, survivors=True), parts_with(part)).property == name


def test_workers_are_held_survive_and_are_stopped_alone() -> None:
    outcomes = [simulate(draw(seed, survivors=True), record_history=True) for seed in (2, 4, 8)]
    assert sum(outcome.counts["survivors"] for outcome in outcomes) > 0
    history = "".join(outcome.history for outcome in outcomes)
    assert all(text in history for text in ("WorkerOptedIn(", "WorkerHeld(", "StopWorker("))


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_survivor_that_crashes_before_it_receives_the_begin_ends_the_generation(seed: int) -> None:
    """In some of these histories it has received the begin when it crashes."""
    behaviour = WorkerBehaviour(generation_s=1e6, fails=0.0, leaves_behind=0.0, opts_in=1.0)
    nodes = (NodePlan(0), NodePlan(1), NodePlan(2, start_at=5.0))
    setup = Setup(seed=seed, nodes=nodes, min_nodes=2, max_nodes=3, seconds=20.0, behaviour=behaviour)
    history = simulate(setup, record_history=True).history
    started = re.search(r"^ *(\S+)  host1/n2 +WorkerStarted\(generation=2, .*survivors=1", history, re.MULTILINE)
    assert started is not None
    fails = Fault(float(started[1]) + 0.0001, "fail", a=1)
    outcome = simulate(msgspec.structs.replace(setup, faults=(fails,)), record_history=True)
    assert outcome.broken == ""
    assert re.search(r"GenerationEnded\(generation=2, why=rank 1 ", outcome.history)
    assert outcome.counts["generations"] == 3
