"""The benchmark of survivors: a run of tenax with two workers, and the rows."""

from __future__ import annotations

import pytest
from benchmarks.harness import Settings, find_launchers
from benchmarks.samples import Samples

from benchmarks import survivors


@pytest.mark.process
@pytest.mark.timeout(240)
def test_the_other_worker_survives_and_no_step_is_lost() -> None:
    """The samples are the time to the next step of all, and the cost of a step."""
    pytest.importorskip("torch")
    samples = Samples()
    survivors.measure(Settings(find_launchers(["tenax"]), quick=True), samples)
    assert samples.failures == []
    assert len(samples.all("tenax", survivors.NEXT_STEP)) == 1
    assert len(samples.all("tenax", survivors.COST)) == 2


def test_a_row_is_shown_if_it_was_measured() -> None:
    samples = Samples()
    samples.add("torchrun", survivors.NEXT_STEP, 10.0)
    samples.add("tenax", survivors.NEXT_STEP, 0.4)
    samples.add("tenax", survivors.COST, 0.000004)
    first, clock, cost = survivors.rows(samples)
    assert (first.measure, first.ratio, first.passed) == (survivors.NEXT_STEP, "25.0×", True)
    assert (clock.passed, cost.passed) == (True, True)
