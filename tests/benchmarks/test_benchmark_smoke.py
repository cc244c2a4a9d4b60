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

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux"), pytest.mark.process]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
# These cases have separate code for TorchElastic or torch; in the others torchrun is one more launcher.
BESIDE_TORCHRUN = ("launch", "rendezvous", "store")
CASES = [case for case in MEASUREMENTS if case not in ("torch_workers", "memory")]  # test_benchmark_torch_workers.py
TIMEOUT_S = 110


@needs_torch
@pytest.mark.parametrize("case", CASES)
def test_a_smoke_run_gives_figures(tenax: Launcher, tmp_path: Path, case: str) -> None:
    """Every launch of tenax succeeds. torchrun has figures too, or the report has the reason."""
    command = [sys.executable, "-m", "benchmarks", "--quick", f"--results={tmp_path}", case]
    if case not in BESIDE_TORCHRUN:
        command.append(f"--launcher={OURS}")
    run = subprocess.run(
        command, cwd=HERE.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    report = (tmp_path / "report.md").read_text()
    samples = Samples(**json.loads((tmp_path / f"{case}.json").read_text()))
    assert samples.values[OURS]
    assert all(figures for figures in samples.values[OURS].values())
    assert OURS not in samples.misses, samples.misses
    assert any(row.measure in report for row in MEASUREMENTS[case].rows(samples))
    if case in BESIDE_TORCHRUN:
        has_reason = any(failure.startswith(BASELINE) for failure in samples.failures) or BASELINE in samples.misses
        assert samples.values.get(BASELINE) or has_reason
    if case == "launch":
        assert "| measure | tenax | torchrun | subprocess |" in report


@needs_torch
def test_torchelastics_handlers_join_and_detect_a_failure() -> None:
    """A failure is detected before the next round, and the next round comes; then another run can begin."""
    with Elastic(processes=2) as handlers:
        assert handlers.join("one", 4, bound_s=60) > 0
        failed_at, known_at, joined_at = handlers.fail(bound_s=60)
        assert failed_at <= known_at <= joined_at
        assert handlers.join("two", 3, bound_s=60) > 0
