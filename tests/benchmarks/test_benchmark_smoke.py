"""The measurements of many nodes, as a smoke run takes them: each gives its figures, which are not judged."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator

import pytest
from benchmarks.elastic import Elastic
from benchmarks.harness import Launcher, Settings
from benchmarks.report import OURS
from benchmarks.samples import Samples

from benchmarks import agents, fanout, harness, hosts, rendezvous, store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def tenax() -> Launcher:
    """The launcher beside this interpreter, with the worker that it is to start."""
    try:
        harness.build_worker()
        return harness.find_launchers([OURS])[0]
    except harness.Unusable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def samples() -> Iterator[Samples]:
    """Nothing may fail or be missing, whatever is measured."""
    samples = Samples()
    yield samples
    assert samples.failures == []
    assert samples.misses == {}


@pytest.mark.parametrize(
    ("scenario", "measures"),
    [
        (agents._worker_dies, [agents.WORKER, agents.WORKER_TOLD]),
        (agents._agent_joins, [agents.STARTED, agents.JOINED]),
        (agents._agent_dies, [agents.AGENT]),
        (agents._endpoint_dies, [agents.ENDPOINT]),
        pytest.param(
            agents._host_cut_off,
            [agents.CUT],
            marks=pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not()),
        ),
    ],
)
def test_several_agents_give_a_figure(
    scenario: Callable[[Launcher, Samples], None], measures: list[str], tenax: Launcher, samples: Samples
) -> None:
    """Three real agents, and what happens to them."""
    scenario(tenax, samples)
    assert all(samples.all(OURS, measure) for measure in measures)
    assert any(row.passed is not None or row.ours for row in agents.rows(samples))


def test_the_fan_out_gives_a_figure(tenax: Launcher, samples: Samples) -> None:
    """Until all have decided, and until the next generation."""
    fanout.measure(Settings((tenax,), quick=True), samples)
    assert [bool(samples.all(OURS, row.measure)) for row in fanout.rows(samples)] == [True, True]


def test_the_rendezvous_gives_a_figure_for_each_size_and_its_growth(tenax: Launcher, samples: Samples) -> None:
    """The last row is the growth, which a single size of those that count does not give."""
    rendezvous.measure(Settings((tenax,), quick=True), samples)
    *sizes, growth = rendezvous.rows(samples)
    assert len(sizes) == len(rendezvous.QUICK_SIZES)
    assert all(samples.all(OURS, row.measure) for row in sizes)
    assert growth.passed is None


@needs_torch
def test_the_store_gives_a_figure_for_each_operation_and_the_storm(tenax: Launcher, samples: Samples) -> None:
    """With torch's own clients."""
    store.measure(Settings((tenax,), quick=True), samples)
    assert len(samples.values[OURS]) == len(store.stores.OPERATIONS) + 1
    assert store.rows(samples)


@needs_torch
def test_torchelastics_handlers_join_and_hear_of_a_failure() -> None:
    """A failure is known before the next round, and the next round comes; then another run can be made."""
    with Elastic(processes=2) as handlers:
        assert handlers.join("one", 4, bound_s=60) > 0
        failed_at, known_at, joined_at = handlers.fail(bound_s=60)
        assert failed_at <= known_at <= joined_at
        assert handlers.join("two", 3, bound_s=60) > 0
