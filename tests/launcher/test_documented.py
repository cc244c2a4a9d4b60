"""The programs of TorchElastic's documentation run unchanged, except for their placeholders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing

_FOLDER = Path(__file__).parent / "documented"


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


def run(program: str, *args: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(_FOLDER / program), *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_launcher_gets_the_return_value_of_its_worker(tmp_path: Path) -> None:
    output = run("my_launcher.py", "--nproc_per_node", "2", "0", "hello", folder=tmp_path)
    assert output == "worker 0 return value is: hello\n"


def test_a_launcher_gets_the_failure_of_its_worker(tmp_path: Path) -> None:
    output = run("my_launcher.py", "--max_restarts", "1", "7", folder=tmp_path)
    assert output.startswith("worker 0 failed with: ")
    assert "exitcode=7" in output


@pytest.mark.parametrize("backend", ["c10d", "static", "etcd"])
def test_every_documented_backend_works_for_one_node(tmp_path: Path, backend: str) -> None:
    assert "hi" in run("my_launcher.py", "--backend", backend, "0", "hi", folder=tmp_path)


def test_the_older_api_with_a_handler_that_returns_a_tuple(tmp_path: Path) -> None:
    """``metrics.initialize_metrics()``, ``LocalElasticAgent(spec, start_method=…)``, ``run(spec.role)``."""
    trained, measured = tmp_path / "trained", tmp_path / "measured"
    assert run("mylauncher.py", str(trained), str(measured), folder=tmp_path) == ""
    assert trained.read_text() == "trained\ntrained\n"
    lines = [line.split() for line in measured.read_text().splitlines()]
    assert {group for group, _, _ in lines} == {"torchelastic"}
    values = {name: value for _, name, value in lines}
    assert values["SimpleElasticAgent.run.success"] == "1"
    assert values["LocalElasticAgent._start_workers.success"] == "1"
    assert values["workers.default.run_success_no_retries"] == "1"
    assert int(values["SimpleElasticAgent.run.duration.ms"]) >= int(
        values["SimpleElasticAgent._rendezvous.duration.ms"]
    )


def test_handlers_get_metrics_and_events(tmp_path: Path) -> None:
    output = Counter(run("my_event_launcher.py", folder=tmp_path).splitlines())
    for line in (
        "event torchelastic.worker.status.RENDEZVOUS AGENT",
        "event torchelastic.worker.status.START WORKER",
        "event torchelastic.worker.status.SUCCEEDED WORKER",
        "metric SimpleElasticAgent.run.success",
        "metric workers.trainer.run_success_no_retries",
    ):
        assert output[line] == 1, line
