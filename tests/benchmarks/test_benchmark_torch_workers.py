"""Workers that import torch: what they say, what is made of it, and that a smoke run gives its figures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.events import EventPipe
from benchmarks.harness import Launch, Launcher, Settings
from benchmarks.memory import AGENT, WARM, WORKERS, Census
from benchmarks.report import BASELINE, OURS
from benchmarks.samples import Samples

from benchmarks import memory, torch_workers

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux"), pytest.mark.process]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
PATIENCE_S = 30


def taken(what: str, torchrun: float, tenax: float) -> Samples:
    """One sample of each."""
    samples = Samples()
    samples.add(BASELINE, what, torchrun)
    samples.add(OURS, what, tenax)
    return samples


@needs_torch
def test_the_worker_says_when_it_was_in_main_and_who_it_is(tmp_path: Path) -> None:
    """In the form that the instant worker has, so that whoever reads cannot tell the two apart."""
    events = EventPipe(tmp_path)
    variables = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "BENCH_NODE": "1"}
    command = [sys.executable, str(torch_workers.SCRIPT), str(events.path), "exit"]
    worker = subprocess.Popen(command, env=variables)
    try:
        assert worker.wait(PATIENCE_S) == 0
    finally:
        worker.kill()
        worker.wait()
    start, end = events.all()
    events.close()
    assert (start.name, end.name) == ("start", "end")
    assert start.at_ns <= end.at_ns
    assert start.process == end.process
    assert (start.process.pid, start.rank, start.world, start.restarts, start.node) == (worker.pid, 3, 4, 2, 1)


@needs_torch
def test_torch_workers_give_a_figure_for_launch_and_restart(tenax: Launcher, samples: Samples) -> None:
    """Two workers, of which one is killed."""
    torch_workers.measure(Settings((tenax,), quick=True), samples)
    rows = torch_workers.rows(samples)
    assert len(rows) == 3
    assert all(samples.all(OURS, row.measure) for row in rows)
    assert torch_workers.notes(samples)


@needs_torch
def test_the_memory_of_torch_workers_is_told_with_what_it_is_made_of(tenax: Launcher, samples: Samples) -> None:
    """The template is not hidden among the helpers, and the parts are the whole."""
    memory.measure(Settings((tenax,), quick=True), samples)
    (row,) = memory.rows(samples)
    parts = [samples.all(OURS, kind) for kind in (AGENT, WARM, WORKERS)]
    assert samples.all(OURS, row.measure) == [pytest.approx(sum(part for (part,) in parts))]
    assert all(part > 0 for (part,) in parts)
    assert WARM in memory.notes(samples)[0]


def test_a_census_knows_workers_from_helpers(tenax: Launcher) -> None:
    """Instant workers have no torch: there is nothing warm."""
    with Launch(tenax, 2, ["idle"]) as launch:
        launch.wait_for({"start": 2}, PATIENCE_S)
        census = memory.take_census(launch)
    assert (census.numbers[WORKERS], census.numbers[WARM]) == (2, 0)
    assert census.numbers[AGENT] > 1
    assert census.pss_mb[AGENT] > census.pss_mb[WORKERS] > 0


def test_a_job_is_steady_while_nobody_comes_and_little_is_taken() -> None:
    """One process more is a change, however small it is."""
    pss_mb = {AGENT: 20.0, WARM: 180.0}
    before = Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=400.0)
    assert Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=401.0).like(before)
    assert not Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=410.0).like(before)
    assert not Census({AGENT: 1, WARM: 2}, pss_mb, rss_mb=400.0).like(before)


def test_a_stranger_with_torch_does_not_unsettle_a_job() -> None:
    """It takes a share of pages that were the job's alone, and nothing has happened in the job."""
    before = Census({WORKERS: 2}, {WORKERS: 350.0}, rss_mb=400.0)
    assert Census({WORKERS: 2}, {WORKERS: 250.0}, rss_mb=400.0).like(before)


def test_a_stranger_with_torch_is_told_of() -> None:
    """Since the figures are too small then."""
    samples = taken(AGENT, 150.0, 20.0)
    assert "too small" not in memory.notes(samples)[0]
    samples.add(OURS, memory.OUTSIDERS, 2)
    assert "too small" in memory.notes(samples)[0]


def test_a_job_whose_standbys_are_not_there_gives_no_sample() -> None:
    """Nobody shall say that they were hidden: beside the template, one for each worker."""
    pss_mb = {AGENT: 20.0, WARM: 150.0, WORKERS: 120.0}
    assert memory.has_standbys(Census({AGENT: 4, WARM: 9, WORKERS: 8}, pss_mb, 900.0))
    assert not memory.has_standbys(Census({AGENT: 4, WARM: 8, WORKERS: 8}, pss_mb, 900.0))
    assert not memory.has_standbys(Census({AGENT: 4, WARM: 1, WORKERS: 8}, pss_mb, 900.0))


def test_the_bars_are_for_eight_workers() -> None:
    """Four times at the launch, twenty times and 300 ms at the restart, half the memory."""
    (launch,) = torch_workers.rows(taken(torch_workers._all(8), 10.0, 2.6))
    assert (launch.bar, launch.passed) == ("≥ 4×", False)
    ratio, clock = torch_workers.rows(taken(torch_workers._again(8), 10.0, 0.4))
    assert [(row.bar, row.passed) for row in (ratio, clock)] == [("≥ 20×", True), ("< 300 ms", False)]
    (total,) = memory.rows(taken(memory._total(8), 1300.0, 650.0))
    assert (total.bar, total.passed) == ("≥ 2×", True)


def test_a_worker_is_also_killed_when_nobody_has_had_time_to_prepare() -> None:
    """By a full run, of both launchers; and tenax is measured without its preload too."""
    assert all(torch_workers.ways(who, size, quick=False)[0].at_once for who in (BASELINE, OURS) for size in (2, 8))
    assert [way.options for way in torch_workers.ways(OURS, 8, quick=False)] == [
        ("--preload=torch",),
        ("--preload=none",),
    ]


def test_without_preload_tenax_stands_beside_the_same_samples_of_torchrun() -> None:
    """So torchrun's count for both rows."""
    (way,) = torch_workers.ways(BASELINE, 8, quick=False)
    (_, cold) = torch_workers.ways(OURS, 8, quick=False)
    assert set(way.endings) == {"", *cold.endings}
