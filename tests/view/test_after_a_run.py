"""What is told after real runs: of those that somebody stopped, that failed, and whose agent was killed."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Bench, until
from tenax.cli.journals import read_histories
from view.test_commands import tenax

pytestmark = pytest.mark.process

STAYS = "from worker_kit import *; ready(); stay()"


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, f"after-{request.node.name}")
    yield made
    made.close()


def test_a_run_that_was_stopped_with_ctrl_c(bench: Bench) -> None:
    """The report says that it was cancelled and by what, as the run itself did."""
    job = bench.start("--nproc-per-node", "2", "--log-dir", "logs", bench.script(STAYS))
    for rank in range(2):
        bench.note("ready", rank)
    job.send(signal.SIGINT)
    done = job.wait()
    assert "was cancelled by SIGINT" in done.report, done
    told = tenax("report", "logs", cwd=bench.home)
    first, second, *_ = told.stdout.splitlines()
    assert first.endswith(": cancelled (the agent received SIGINT)"), told.stdout
    (folder,) = (bench.home / "logs").iterdir()
    assert re.fullmatch(rf"  train.py, began \d+-\d\d-\d\d \d\d:\d\d:\d\d UTC, in {folder}", second), told.stdout
    assert "generations ended early" not in told.stdout


def test_workers_whose_agent_was_killed(bench: Bench) -> None:
    """They have bars, as long as anything is known of the run."""
    job = bench.start("--nproc-per-node", "2", "--log-dir", "logs", bench.script(STAYS))
    for rank in range(2):
        bench.note("ready", rank)
    (folder,) = (bench.home / "logs").iterdir()
    until(lambda: "WorkersRunning" in (folder / "coordinator.jsonl").read_text(), "that they run is in the journal")
    job.process.kill()
    job.wait()
    (history,) = read_histories([str(folder)]).histories
    (node,) = history.nodes
    assert [(each.rank, each.until, each.ended) for each in node.workers] == [
        (0, history.ended_at, ""),
        (1, history.ended_at, ""),
    ]


def test_a_report_has_the_time_of_day(bench: Bench) -> None:
    """When the run began, and when its first failure was, by the clock of its host and of its zone."""
    bench.environ["TZ"] = "UTC-5:45"
    before = time.time()
    script = bench.script("raise ValueError('loss is nan')")
    done = bench.run("--nproc-per-node", "1", "--log-dir", "logs", "--report", "r.json", script)
    moment = r"\d\d:\d\d:\d\d \(\d{4}-\d\d-\d\d, \+05:45\)"
    assert re.fullmatch(rf"{moment}, .+ after the start", done.fact("when")), done
    assert re.fullmatch(rf".*, role default, began {moment}", done.fact("run")), done
    report = json.loads((bench.home / "r.json").read_bytes())
    assert before - 0.001 <= report["began_at"] <= report["failed_at"] <= time.time() + 0.001
