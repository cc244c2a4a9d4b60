"""The simulator detects mistakes about held workers, each by a known seed."""

from __future__ import annotations

import pytest

from tenax.testing.simulator import draw, simulate

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
