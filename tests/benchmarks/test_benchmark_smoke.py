"""The smoke run: every case gives its figures, which are not judged."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import MEASUREMENTS
from benchmarks.elastic import Elastic
from benchmarks.harness import Launcher
from benchmarks.report import BASELINE, OURS
from benchmarks.running import HERE
from benchmarks.samples import Samples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux")
ALONE = ("etcd",)  # in a smoke run torchrun has no part in these
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
@pytest.mark.timeout(900)
def test_a_smoke_run_gives_a_figure_for_every_case(tenax: Launcher, tmp_path: Path) -> None:
    """Every launch of tenax does its work and nothing of it is missing. torchrun is beside it, or what became of it."""
    command = [sys.executable, "-m", "benchmarks", "--quick", f"--results={tmp_path}"]
    run = subprocess.run(
        command, cwd=HERE.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=880, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    report = (tmp_path / "report.md").read_text()
    for case in MEASUREMENTS:
        samples = Samples(**json.loads((tmp_path / f"{case}.json").read_text()))
        assert samples.values[OURS], case
        assert all(figures for figures in samples.values[OURS].values()), case
        assert OURS not in samples.misses, samples.misses
        said = any(failure.startswith(BASELINE) for failure in samples.failures) or BASELINE in samples.misses
        assert case in ALONE or samples.values.get(BASELINE) or said, case
        assert any(row.measure in report for row in MEASUREMENTS[case].rows(samples)), case
    assert "| measure | tenax | torchrun | subprocess |" in report


@needs_torch
def test_torchelastics_handlers_join_and_hear_of_a_failure() -> None:
    """A failure is known before the next round, and the next round comes; then another run can be made."""
    with Elastic(processes=2) as handlers:
        assert handlers.join("one", 4, bound_s=60) > 0
        failed_at, known_at, joined_at = handlers.fail(bound_s=60)
        assert failed_at <= known_at <= joined_at
        assert handlers.join("two", 3, bound_s=60) > 0
