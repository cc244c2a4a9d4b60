"""Reports and histories of real runs that were cancelled, failed, or lost their agent."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner, until
from tenax.cli.journal_commands import read_histories
from view.test_commands import tenax

pytestmark = pytest.mark.process

STAYS = "from worker_kit import *; ready(); stay()"


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(tmp_path, f"after-{request.node.name}")
    yield made
    made.close()


def test_a_run_stopped_by_ctrl_c_is_reported_as_cancelled(runner: Runner) -> None:
    """``tenax report`` shows the same outcome and reason as the run itself."""
    job = runner.start("--nproc-per-node", "2", "--log-dir", "logs", runner.script(STAYS))
    for rank in range(2):
        runner.note("ready", rank)
    job.send(signal.SIGINT)
    done = job.wait()
    assert "was cancelled by SIGINT" in done.report, done
    report = tenax("report", "logs", cwd=runner.home)
    first, second, *_ = report.stdout.splitlines()
    assert first.endswith(": cancelled (the agent received SIGINT)"), report.stdout
    (folder,) = (runner.home / "logs").iterdir()
    assert re.fullmatch(rf"  train.py, began \d+-\d\d-\d\d \d\d:\d\d:\d\d UTC, in {folder}", second), report.stdout
    assert "generations ended early" not in report.stdout


def test_workers_of_a_killed_agent_last_until_the_end_of_the_history(runner: Runner) -> None:
    job = runner.start("--nproc-per-node", "2", "--log-dir", "logs", runner.script(STAYS))
    for rank in range(2):
        runner.note("ready", rank)
    (folder,) = (runner.home / "logs").iterdir()
    until(
        lambda: "WorkersRunning" in (folder / "coordinator.jsonl").read_text(),
        "the workers run",
    )
    job.process.kill()
    job.wait()
    (history,) = read_histories([str(folder)]).histories
    (node,) = history.nodes
    assert [(each.rank, each.until, each.ended) for each in node.workers] == [
        (0, history.ended_at, ""),
        (1, history.ended_at, ""),
    ]


def test_the_failure_report_shows_local_times(runner: Runner) -> None:
    """The start of the run and its first failure, in the time zone of the host."""
    runner.environ["TZ"] = "UTC-5:45"
    before = time.time()
    script = runner.script("raise ValueError('loss is nan')")
    done = runner.run("--nproc-per-node", "1", "--log-dir", "logs", "--report", "r.json", script)
    moment = r"\d\d:\d\d:\d\d \(\d{4}-\d\d-\d\d, \+05:45\)"
    assert re.fullmatch(rf"{moment}, .+ after the start", done.field("when")), done
    assert re.fullmatch(rf".*, role default, began {moment}", done.field("run")), done
    report = json.loads((runner.home / "r.json").read_bytes())
    assert before - 0.001 <= report["began_at"] <= report["failed_at"] <= time.time() + 0.001
