"""``tenax timeline`` and ``tenax report`` as command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.jobs import TIMEOUT_S
from view.recorded_run import WALL, RecordedRun, replaced
from view.test_history import agent_of_two_generations, run_of_two_nodes

pytestmark = pytest.mark.process


def tenax(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tenax", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ})


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    run_of_two_nodes(tmp_path / "logs" / "job_1").close()
    agent_of_two_generations(tmp_path / "logs" / "job_1").close(60.0)
    return tmp_path / "logs"


def test_timeline_writes_a_page_and_a_trace(logs: Path, tmp_path: Path) -> None:
    """Both in the current folder, with the run id in their names; their paths are printed."""
    done = tenax("timeline", logs, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(tmp_path / "job-timeline.html"), str(tmp_path / "job-trace.json")]
    assert (tmp_path / "job-timeline.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "job-trace.json").read_text())["otherData"]["run_id"] == "job"


@pytest.mark.parametrize(
    ("arguments", "name", "begins"),
    [
        (("-o", "mine.html"), "mine.html", "<!doctype"),
        (("--output=mine.json",), "mine.json", "{"),
        (("--format", "perfetto"), "job-trace.json", "{"),
        (("--format=html", "-o", "x"), "x", "<!doctype"),
    ],
)
def test_timeline_writes_only_the_requested_file(
    logs: Path, tmp_path: Path, arguments: tuple[str, ...], name: str, begins: str
) -> None:
    before = set(os.listdir(tmp_path))
    done = tenax("timeline", logs, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(os.listdir(tmp_path)) - before == {name}
    assert (tmp_path / name).read_text().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timeline", "--loud", "x"], "tenax timeline: unknown flag '--loud'"),
        (["timeline", "x", "--format", "gif"], "tenax timeline: --format takes html or perfetto, not 'gif'"),
        (["timeline", "x", "-o"], "tenax timeline: -o needs a value"),
        (["timeline", "nowhere"], "tenax timeline: no file, folder or run 'nowhere'"),
        (["timeline", "empty"], "tenax timeline: no journal (coordinator.jsonl, journal.jsonl) below 'empty'"),
        (["report", "--loud", "x"], "tenax report: unknown flag '--loud'"),
        (["report", "x", "-o"], "tenax report: -o needs a value"),
        (["report", "nowhere"], "tenax report: no file, folder or run 'nowhere'"),
        (
            ["report", "logs", "-o", "no/such/folder.html"],
            "tenax report: could not write 'no/such/folder.html': No such",
        ),
        (["timeline", "logs", "-o", "no/x"], "tenax timeline: could not write 'no/x': No such file or directory"),
    ],
)
def test_an_invalid_command_is_rejected_with_one_message(
    logs: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """With exit code 2."""
    (tmp_path / "empty").mkdir()
    done = tenax(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_timeline_rejects_several_runs(logs: Path, tmp_path: Path) -> None:
    """The message refers to ``tenax report``."""
    run = RecordedRun(logs / "other", "other", wall=WALL + 100)
    run.all_join()
    run.close()
    done = tenax("timeline", logs, cwd=tmp_path)
    assert done.returncode == 2
    assert "found 2 runs (job, other); give the journals of one, or use tenax report" in done.stderr


def test_report_writes_a_page_and_prints_a_summary(logs: Path, tmp_path: Path) -> None:
    done = tenax("report", logs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "job: succeeded (all 2 workers succeeded)"
    assert lines[1] == f"  train.py, began 2023-11-14 22:13:21 UTC, in {logs / 'job_1'}"
    assert lines[2].startswith("  83 % of 59 s was training; ")
    assert "generations ended early: RuntimeError (1), a node was lost (1)" in lines
    assert lines[-1] == f"page: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_report_names_an_invalid_file_and_includes_the_others(logs: Path, tmp_path: Path) -> None:
    """The exit code is 1."""
    (logs / "bad").mkdir()
    (logs / "bad" / "coordinator.jsonl").write_text("hello\n")
    done = tenax("report", logs, cwd=tmp_path)
    assert done.returncode == 1
    assert "coordinator.jsonl' is not a line of a tenax journal" in done.stderr
    assert "job: succeeded" in done.stdout


@pytest.mark.parametrize("command", ["timeline", "report"])
def test_a_missing_path_is_named_with_the_next_step(tmp_path: Path, command: str) -> None:
    done = tenax(command, tmp_path / "nowhere", cwd=tmp_path)
    expected = f"no file or folder '{tmp_path}/nowhere'; 'tenax ps --all' lists the log folders of runs on this host"
    assert (done.returncode, done.stderr) == (2, f"tenax {command}: {expected}\n")


def test_report_json_writes_no_page(logs: Path, tmp_path: Path) -> None:
    """The JSON goes to stdout."""
    done = tenax("report", "--json", logs, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["runs"][0]["run_id"], found["runs"][0]["outcome"]) == ("job", "succeeded")
    assert found["goodput"]["spent"]["training_s"] == 49.0
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["replay", "timeline", "report"])
@pytest.mark.parametrize("name", ["coordinator.jsonl", "journal.jsonl"])
def test_a_time_out_of_range_causes_no_traceback(logs: Path, tmp_path: Path, command: str, name: str) -> None:
    """A damaged header is shown as it is."""
    path = logs / "job_1" / name
    header, _, rest = path.read_text().partition("\n")
    path.write_text(f"{replaced(header, wall_time=1e300)}\n{rest}")
    done = tenax(command, path, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr


@pytest.mark.parametrize("command", ["timeline", "report"])
def test_every_command_has_help(tmp_path: Path, command: str) -> None:
    done = tenax(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: tenax {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 120
