"""A node: all parts together, down to the exit code, also when the system fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import leaving_nothing, on_linux
from tenax._core.model import AgentSettings, Outcome
from tenax._engines.local import LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax._failures.exit_codes import exit_code_for
from tenax._logs.specs import DefaultLogsSpecs
from tenax._node.journal import read_journal
from tenax._node.node import Node, NodePlan
from tenax._processes.entrypoint import CommandEntrypoint
from tenax.testing.processes import FakeProcesses
from tenax.testing.replay import replay

pytestmark = [on_linux, pytest.mark.process]


class FakeEntrypoint(CommandEntrypoint):
    """A command whose processes are fake."""

    def __init__(self, processes: FakeProcesses, workers: int) -> None:
        super().__init__({rank: ["train"] for rank in range(workers)}, "train")
        self._processes = processes

    def keeper(self) -> Any:
        return self._processes


def plan(folder: Path, entrypoint: CommandEntrypoint, workers: int = 1, **settings: Any) -> NodePlan:
    chosen = {"max_restarts": 0, **settings}
    return NodePlan(
        settings=AgentSettings(run_id="run", role="trainer", local_world_size=workers, **chosen),
        entrypoint=entrypoint,
        control=LocalEngine("run", StoreAddress("127.0.0.1")),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with leaving_nothing():
        yield


def test_a_process_that_cannot_be_killed_ends_in_72(tmp_path: Path) -> None:
    """It is stuck in the kernel: stopped, killed, abandoned and reported; the journal replays."""
    processes = FakeProcesses()
    processes.will_be_stuck(0)
    node = Node(plan(tmp_path, FakeEntrypoint(processes, 2), workers=2, grace_s=0.0, abandon_s=0.0))

    def fail_one(*_: Any) -> None:
        if len([worker for worker in processes.workers.values() if worker.is_alive]) == 2:
            processes.exit(1, 5)

    verdict = node.run(observe=fail_one)
    assert (verdict.outcome, exit_code_for(verdict)) == (Outcome.ABANDONED, 72)
    assert verdict.stuck_pids == (processes[0].pid,)
    assert "check this host" in verdict.why
    assert processes[0].signals == [15, 9]
    assert replay(*read_journal(node.journal_path)).differences == []


def test_the_exit_code_of_a_real_worker(tmp_path: Path) -> None:
    """It becomes the exit code of the node, with log files where the report looks for them."""
    node = Node(plan(tmp_path, CommandEntrypoint({0: ["/bin/sh", "-c", "exit 7"]}, "sh")))
    verdict = node.run()
    assert exit_code_for(verdict) == 7
    assert node.log_dir == os.path.dirname(node.journal_path)
    assert Path(node.journal_path).exists()


def test_the_first_causes_of_earlier_generations_are_kept(tmp_path: Path) -> None:
    """For the report's history."""
    script = "exit $((TORCHELASTIC_RESTART_COUNT + 1))"
    node = Node(plan(tmp_path, CommandEntrypoint({0: ["/bin/sh", "-c", script]}, "sh"), max_restarts=2))
    verdict = node.run()
    assert exit_code_for(verdict) == 3
    assert [(failure.exit_code, failure.generation) for failure in verdict.earlier] == [(1, 1), (2, 2)]
    assert {failure.host for failure in (*verdict.earlier, *verdict.failures)} == {os.uname().nodename}


def test_the_final_text_comes_after_all_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also after the last output of the workers' children."""
    script = "echo one >&2; (trap 'echo two >&2; exit' TERM; sleep 60 & wait) & exit 1"
    node = Node(plan(tmp_path, CommandEntrypoint({0: ["/bin/sh", "-c", script]}, "sh"), grace_s=10.0))
    node.run(final_text=lambda verdict: f"it {verdict.outcome.value}")
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "it failed"
    assert "one" in lines


def test_without_a_log_folder_no_journal_is_written(tmp_path: Path) -> None:
    """The run works without files."""
    made = plan(tmp_path, CommandEntrypoint({0: ["/bin/true"]}, "true"))
    node = Node(NodePlan(made.settings, made.entrypoint, made.control, DefaultLogsSpecs(log_dir=os.devnull)))
    assert node.run().outcome is Outcome.SUCCEEDED
    assert (node.journal_path, node.log_dir) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_wrong_signal_names_start_nothing(tmp_path: Path) -> None:
    """They are rejected before any process starts."""
    made = plan(tmp_path, CommandEntrypoint({0: ["/bin/true"]}, "true"))
    node = Node(NodePlan(made.settings, made.entrypoint, made.control, made.logs_specs, signals="SIGNOPE"))
    with pytest.raises(ValueError, match="SIGNOPE"):
        node.run()
