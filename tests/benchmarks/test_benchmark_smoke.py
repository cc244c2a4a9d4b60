"""The smoke run: every case gives its figures, which are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benchmarks.__main__ import MEASUREMENTS, found_problems, main
from benchmarks.crew import Crew
from benchmarks.elastic import Elastic
from benchmarks.harness import Launcher
from benchmarks.report import BASELINE, OURS, Row
from benchmarks.running import HERE
from benchmarks.samples import Samples

from kit.processes import needs_torch

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux"), pytest.mark.process]
# These cases have separate code for TorchElastic or torch; in the others torchrun is one more launcher.
BESIDE_TORCHRUN = ("launch", "rendezvous", "store")
# test_benchmark_torch_workers.py, test_benchmark_survivors.py
CASES = [case for case in MEASUREMENTS if case not in ("torch_workers", "memory", "survivors")]
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


class _Dying:
    """A measurement with a process that exits without an answer."""

    def measure(self, _settings: object, _samples: Samples) -> None:
        with Crew(_exit, [()]) as crew:
            crew.receive(60)

    def rows(self, _samples: Samples) -> list[Row]:
        return []

    def notes(self, _samples: Samples) -> list[str]:
        return []


def _exit(_pipe: Connection) -> None:
    """The work of a process that ends at once."""


def test_a_measurement_whose_process_dies_fails_the_run(
    tenax: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines name the measurement, in a smoke run too."""
    arguments = ["--quick", f"--launcher={tenax.name}", f"--results={tmp_path}"]
    assert main(arguments, {"fanout": _Dying()}) == 1
    failed = "fanout: a process of the benchmark failed: member 0 of 1 ended early"
    assert capsys.readouterr().err.splitlines()[-1] == f"benchmarks: failed: {failed}"


def test_what_tenax_did_not_do_is_a_problem() -> None:
    """Of other launchers it is a figure of the report."""
    samples = Samples()
    for who in (OURS, BASELINE):
        samples.fail(who, "exit code 1")
        samples.miss(who, "all join", "not within 20 s")
    assert found_problems("etcd", samples) == ["etcd: tenax: exit code 1", "etcd: all join: not within 20 s"]


@needs_torch
def test_torchelastics_handlers_join_and_detect_a_failure() -> None:
    """A failure is detected before the next round, and the next round comes; then another run can begin."""
    with Elastic(processes=1) as handlers:
        assert handlers.join("one", 4, bound_s=60) > 0
        failed_at, known_at, joined_at = handlers.fail(bound_s=60)
        assert failed_at <= known_at <= joined_at
        assert handlers.join("two", 3, bound_s=60) > 0
