"""Events of real runs: from the command line, and in a program with its own handler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes import leaving_nothing
from tenax import events
from tenax.events import Event, EventSource
from tenax.launcher import LaunchConfig, elastic_launch
from tenax.multiprocessing import DefaultLogsSpecs
from tenax.multiprocessing.errors import ChildFailedError

from .kit import Keeping

pytestmark = pytest.mark.process

TIMEOUT_S = 60


def tenax_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tenax", "run", "--log-dir", str(folder / "logs"), *arguments],
        cwd=folder,
        env={**os.environ, "LOGLEVEL": "CRITICAL"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def sources_and_states(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.source.value.lower(), str(event.metadata["state"])) for event in events]


ONE_RESTART = [
    ("agent", "RENDEZVOUS"),
    ("agent", "ASSIGN_WORKER_RANKS"),
    ("worker", "START"),
    ("worker", "FAILED"),
    ("agent", "RENDEZVOUS"),
    ("agent", "ASSIGN_WORKER_RANKS"),
    ("worker", "START"),
    ("worker", "SUCCEEDED"),
    ("agent", "SUCCEEDED"),
]


def test_the_command_line_writes_events_to_a_file_and_the_console(tmp_path: Path) -> None:
    """Both have the same lines, whatever LOGLEVEL is; the failure has the worker's error."""
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('no data')\n")
    names = f"console,jsonl:{tmp_path / 'events.jsonl'}"
    done = tenax_run(tmp_path, "--event-log-handler", names, "--max-restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    found = [Event.deserialize(line) for line in lines]
    assert sources_and_states(found) == ONE_RESTART
    assert [line for line in done.stderr.splitlines() if line.startswith('{"name"')] == lines
    error = json.loads(str(found[3].metadata["raw_error"]))["message"]
    assert error["message"] == "ValueError: no data"
    assert "train.py" in error["extraInfo"]["py_callstack"]
    times = [event.timestamp for event in found]
    assert times == sorted(times)
    assert times[-1] - times[0] < TIMEOUT_S * 1000


def test_an_unknown_handler_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    done = tenax_run(tmp_path, "--event-log-handler", "consle", "--no-python", "touch", "started")
    assert done.returncode == 2
    assert "unknown event handler 'consle'; known: console, " in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(("program", "end"), [("true", "SUCCEEDED"), ("false", "FAILED")])
def test_a_program_receives_events_with_its_own_handler(tmp_path: Path, program: str, end: str) -> None:
    """It has all of them when the launch returns."""
    handler = Keeping()
    config = LaunchConfig(1, 1, 1, run_id="mine", max_restarts=0, logs_specs=DefaultLogsSpecs(str(tmp_path)))
    with leaving_nothing(), events.configure(handler):
        try:
            elastic_launch(config, program)()
        except ChildFailedError:
            assert program == "false"
    found = [event for event in handler.kept if isinstance(event, Event)]
    assert sources_and_states(found) == [*ONE_RESTART[:3], ("worker", end), ("agent", end)]
    assert {event.metadata["run_id"] for event in found} == {"mine"}
    workers = [event for event in found if event.source is EventSource.WORKER]
    assert len({event.metadata["worker_id"] for event in workers}) == 1


def test_a_handler_that_raises_does_not_affect_the_job(tmp_path: Path) -> None:
    config = LaunchConfig(1, 1, 1, run_id="mine", max_restarts=0, logs_specs=DefaultLogsSpecs(str(tmp_path)))
    other = Keeping()
    with leaving_nothing(), events.configure(Keeping(OSError("disk full"))), events.configure(other):
        elastic_launch(config, "true")()
    assert len(other.kept) == 5
