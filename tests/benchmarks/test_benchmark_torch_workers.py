"""Workers that import torch: their events, the derived figures, and a smoke run."""

from __future__ import annotations

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
from kit.processes import TIMEOUT_S, needs_torch

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux"), pytest.mark.process]


def samples_of(what: str, torchrun: float, tenax: float) -> Samples:
    """Return one sample of each launcher."""
    samples = Samples()
    samples.add(BASELINE, what, torchrun)
    samples.add(OURS, what, tenax)
    return samples


def test_the_worker_reports_its_start_and_identity(tmp_path: Path) -> None:
    """In the format of the instant worker. A small module stands for torch, whose import is not the point."""
    events = EventPipe(tmp_path)
    (tmp_path / "torch.py").write_text(
        "import types\ndef arange(count): return types.SimpleNamespace(sum=lambda: sum(range(count)))\n"
    )
    variables = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2", "BENCH_NODE": "1"}
    variables["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, str(torch_workers.SCRIPT), str(events.path), "exit"]
    worker = subprocess.Popen(command, env=variables)
    try:
        assert worker.wait(TIMEOUT_S) == 0
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
def test_torch_workers_give_figures_for_launch_and_restart(tenax: Launcher, samples: Samples) -> None:
    """Two workers, one of which is killed."""
    torch_workers.measure(Settings((tenax,), quick=True), samples)
    rows = torch_workers.rows(samples)
    assert len(rows) == 3
    assert all(samples.all(OURS, row.measure) for row in rows)
    assert torch_workers.notes(samples)


@needs_torch
def test_the_memory_of_torch_workers_is_reported_by_kind_of_process(tenax: Launcher, samples: Samples) -> None:
    """The template is not hidden among the helpers, and the parts add up to the total."""
    memory.measure(Settings((tenax,), quick=True), samples)
    (row,) = memory.rows(samples)
    parts = [samples.all(OURS, kind) for kind in (AGENT, WARM, WORKERS)]
    assert samples.all(OURS, row.measure) == [pytest.approx(sum(part for (part,) in parts))]
    assert all(part > 0 for (part,) in parts)
    assert WARM in memory.notes(samples)[0]


def test_a_census_distinguishes_workers_and_helpers(tenax: Launcher) -> None:
    """Instant workers have no torch: there is nothing warm."""
    with Launch(tenax, 2, ["idle"]) as launch:
        launch.wait_for({"start": 2}, TIMEOUT_S)
        census = memory.take_census(launch)
    assert (census.numbers[WORKERS], census.numbers[WARM]) == (2, 0)
    assert census.numbers[AGENT] > 1
    assert census.pss_mb[AGENT] > census.pss_mb[WORKERS] > 0


def test_a_job_is_steady_without_new_processes_and_with_little_new_memory() -> None:
    """One process more is a change, however small it is."""
    pss_mb = {AGENT: 20.0, WARM: 180.0}
    before = Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=400.0)
    assert Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=401.0).like(before)
    assert not Census({AGENT: 1, WARM: 1}, pss_mb, rss_mb=410.0).like(before)
    assert not Census({AGENT: 1, WARM: 2}, pss_mb, rss_mb=400.0).like(before)


def test_a_foreign_process_with_torch_does_not_make_a_job_unsteady() -> None:
    """It takes a share of the job's pages, but the job did not change."""
    before = Census({WORKERS: 2}, {WORKERS: 350.0}, rss_mb=400.0)
    assert Census({WORKERS: 2}, {WORKERS: 250.0}, rss_mb=400.0).like(before)


def test_a_foreign_process_with_torch_is_reported() -> None:
    """Because the figures are too small then."""
    samples = samples_of(AGENT, 150.0, 20.0)
    assert "too small" not in memory.notes(samples)[0]
    samples.add(OURS, memory.OUTSIDERS, 2)
    assert "too small" in memory.notes(samples)[0]


def test_a_job_without_its_standbys_gives_no_sample() -> None:
    """Besides the template, there is one standby for each worker."""
    pss_mb = {AGENT: 20.0, WARM: 150.0, WORKERS: 120.0}
    assert memory.has_standbys(Census({AGENT: 4, WARM: 9, WORKERS: 8}, pss_mb, 900.0))
    assert not memory.has_standbys(Census({AGENT: 4, WARM: 8, WORKERS: 8}, pss_mb, 900.0))
    assert not memory.has_standbys(Census({AGENT: 4, WARM: 1, WORKERS: 8}, pss_mb, 900.0))


def test_the_bars_are_for_eight_workers() -> None:
    """Four times at the launch, twenty times and 300 ms at the restart, half the memory."""
    (launch,) = torch_workers.rows(samples_of(torch_workers._all(8), 10.0, 2.6))
    assert (launch.bar, launch.passed) == ("≥ 4×", False)
    ratio, clock = torch_workers.rows(samples_of(torch_workers._again(8), 10.0, 0.4))
    assert [(row.bar, row.passed) for row in (ratio, clock)] == [("≥ 20×", True), ("< 300 ms", False)]
    (total,) = memory.rows(samples_of(memory._total(8), 1300.0, 650.0))
    assert (total.bar, total.passed) == ("≥ 2×", True)


def test_a_worker_is_also_killed_immediately_after_the_start() -> None:
    """In a full run, with both launchers; and tenax is also measured without preload."""
    assert all(torch_workers.ways(who, size, quick=False)[0].at_once for who in (BASELINE, OURS) for size in (2, 8))
    assert [way.options for way in torch_workers.ways(OURS, 8, quick=False)] == [
        ("--preload=torch",),
        ("--preload=none",),
    ]


def test_without_preload_tenax_is_compared_with_the_same_samples_of_torchrun() -> None:
    """torchrun's samples count for both rows."""
    (way,) = torch_workers.ways(BASELINE, 8, quick=False)
    (_, cold) = torch_workers.ways(OURS, 8, quick=False)
    assert set(way.endings) == {"", *cold.endings}
