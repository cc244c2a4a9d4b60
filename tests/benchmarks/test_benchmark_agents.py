"""Agents that start at once, and the death of a worker among a fixed number of them."""

from __future__ import annotations

import sys

import pytest
from benchmarks.report import OURS
from benchmarks.samples import Samples

from benchmarks import agents, harness

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux"), pytest.mark.process]


@pytest.fixture
def tenax() -> harness.Launcher:
    """The launcher beside this interpreter, with the compiled worker."""
    try:
        harness.build_worker()
        return harness.find_launchers([OURS])[0]
    except harness.Unusable as reason:
        pytest.skip(str(reason))


def test_agents_that_start_at_once_give_a_figure(tenax: harness.Launcher) -> None:
    """None waits until the endpoint is served."""
    samples = Samples()
    agents._start(tenax, samples, agents=2)
    assert (len(samples.all(OURS, agents.start(2))), samples.misses) == (1, {})


def test_a_workers_death_among_two_agents_gives_its_figures(tenax: harness.Launcher) -> None:
    """Until the others get SIGTERM, and until all run again."""
    samples = Samples()
    agents._worker_dies(tenax, samples, deaths=1, agents=2)
    (signalled_s,), (again_s,) = samples.all(OURS, agents.worker_signalled(2)), samples.all(OURS, agents.worker(2))
    assert 0 < signalled_s < again_s
    assert (samples.failures, samples.misses) == ([], {})


def test_every_number_of_agents_has_its_rows() -> None:
    """Starts of two and four; deaths among two, three and eight."""
    measures = [row.measure for row in agents.rows(Samples())]
    assert [agents.start(number) in measures for number in (2, 4)] == [True, True]
    assert [agents.worker(number) in measures for number in (2, 3, 8)] == [True, True, True]
