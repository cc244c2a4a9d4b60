"""Ended runs: operator commands name the log directories that show how a run ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kit
from kit.jobs import TENAX, until
from tenax.cli.command import NoSuchJob
from tenax.cli.job import ended_run

from .kit import Operator

WORKER = str(Path(kit.__path__[0]) / "worker_main.py")
MEETING = "the coordinator at host0:29400"


class Notes:
    """Notes of agents that have ended, and their folders."""

    def __init__(self, folder: Path) -> None:
        self.sockets, self.logs = folder / "sockets", folder / "logs"
        self.sockets.mkdir(mode=0o700)
        self.environ = {"TENAX_PRIVATE_DIR": str(self.sockets)}

    def add(
        self, pid: int, since: int, until: int, *, coordinated: int = 0, place: str = MEETING, has_logs: bool = True
    ) -> str:
        """An agent of the run 'duo' whose coordinator's journal, if it has one, was last written at that time."""
        log_dir = str(self.logs / f"duo_{pid}") if has_logs else ""
        note = self.sockets / f"{pid}.json"
        written = {"run_id": "duo", "pid": pid, "log_dir": log_dir, "coordinator": place, "since": since}
        note.write_text(json.dumps(written))
        os.utime(note, (since, since))
        if has_logs:
            os.makedirs(log_dir)
            for name, at in (("journal.jsonl", until), ("coordinator.jsonl", coordinated)):
                if at:
                    Path(log_dir, name).touch()
                    os.utime(Path(log_dir, name), (at, at))
        return log_dir

    def folders(self, name: str = "duo") -> tuple[str, ...]:
        found = ended_run(name, self.environ)
        assert found is not None
        return found.folders


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


def test_the_folder_with_the_latest_coordinator_journal_comes_first(notes: Notes) -> None:
    led_first = notes.add(1, 100, 150, coordinated=150)
    led_last = notes.add(2, 100, 300, coordinated=300)
    left_early, stayed = notes.add(3, 120, 130), notes.add(4, 140, 300)
    assert notes.folders() == (led_last, led_first, stayed, left_early)
    assert notes.folders("3") == notes.folders(), "by the pid of one of its agents"


def test_without_a_coordinator_journal_here_the_last_ended_agent_comes_first(notes: Notes) -> None:
    early, late = notes.add(1, 100, 200), notes.add(2, 90, 300)
    assert notes.folders() == (late, early)


def test_an_earlier_run_with_the_same_id_is_a_different_run(notes: Notes) -> None:
    yesterday = notes.add(1, 100, 200, coordinated=200)
    notes.add(5, 320, 400, coordinated=400, place="the coordinator at host1:29400")
    alone = notes.add(6, 330, 340, coordinated=500, place="")
    today, beside = notes.add(2, 300, 400, coordinated=400), notes.add(3, 350, 360)
    assert notes.folders() == (today, beside)
    assert notes.folders("1") == (yesterday,)
    assert notes.folders("6") == (alone,)


def test_missing_folders_are_not_named(notes: Notes) -> None:
    (Path(notes.add(1, 100, 200)) / "journal.jsonl").unlink()
    (notes.logs / "duo_1").rmdir()
    found = ended_run("duo", notes.environ)
    assert found is not None
    assert (found.folders, found.noted) == ((), (str(notes.logs / "duo_1"),))
    assert ended_run("other", notes.environ) is None


def test_an_agent_whose_control_socket_exists_has_not_ended(notes: Notes) -> None:
    notes.add(1, 100, 200)
    (notes.sockets / "1.sock").touch()
    assert ended_run("duo", notes.environ) is None


def test_a_run_is_found_by_the_beginning_of_its_id(notes: Notes) -> None:
    folder = notes.add(1, 100, 200)
    assert notes.folders("du") == notes.folders("") == (folder,)
    other = notes.sockets / "2.json"
    other.write_text('{"run_id": "dual", "pid": 2}')
    with pytest.raises(NoSuchJob, match="2 ended runs begin with 'du': dual, duo"):
        ended_run("du", notes.environ)
    assert notes.folders("duo") == (folder,)


def test_the_agent_that_served_the_coordinator_is_named_first(operator: Operator) -> None:
    serving, other = operator.cluster.start_in_order(2, nodes=(1, 2), run_id="duo")
    operator.until_found(serving, other)
    operator.cluster.hub.generation(2)
    status = operator.until_status(serving, lambda status: len(status.nodes) == 2 and status.phase == "running")
    leaving = next(node.name for node in status.nodes if not node.is_coordinator)
    assert operator.tenax("drain", leaving, "--yes").code == 0
    assert other.wait() == 130
    operator.cluster.hub.generation(1, 2)
    assert operator.tenax("stop", "duo", "--yes", "--wait").code == 0
    assert serving.wait() == 130
    folders = [agent.report["log_dir"] for agent in (serving, other)]
    found = ended_run("duo", {"TENAX_PRIVATE_DIR": operator.sockets})
    assert found is not None
    assert (list(found.folders), found.outcome) == (folders, "cancelled")
    assert operator.tenax("status", "duo").out.startswith("duo: cancelled")
    logs = operator.tenax("logs", "duo")
    assert "the run 'duo' has ended; reading its 2 folders on this host" in logs.err


def test_printed_folders_are_absolute(operator: Operator, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    runner, hub = operator.runner, operator.cluster.hub
    env = {"CLUSTER_HUB": hub.name, "CLUSTER_AGENT": "node0"}
    running = runner.start("--rdzv-id", "near", "--log-dir", "logs", WORKER, env=env)
    (worker,) = hub.generation(1)
    until(lambda: os.path.exists(f"{operator.sockets}/{running.process.pid}.sock"), "its control socket")
    listed = runner.start("ps", "--json", program=TENAX, cwd=elsewhere).wait()
    folder = str(runner.run_dir())
    assert os.path.isabs(folder)
    assert [run["log_dir"] for run in json.loads(listed.out)] == [folder]
    worker.send("exit 0")
    assert running.wait().code == 0
    ended = runner.start("status", "near", program=TENAX, cwd=elsewhere).wait()
    assert f", in {folder}\n" in ended.out
    assert runner.start("report", "--json", folder, program=TENAX, cwd=elsewhere).wait().code == 0
