"""A node: all parts together, down to the exit code, also when the system fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import leaving_nothing, on_linux
from tenax._core.model import Outcome
from tenax._core.requests import StacksRequest
from tenax._engines.local import LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax._failures.exit_codes import exit_code_for
from tenax._logs.specs import DefaultLogsSpecs
from tenax._node.job import JobSpec
from tenax._node.journal import read_journal
from tenax._node.node import Node
from tenax.testing.processes import FakeProcesses
from tenax.testing.replay import replay

pytestmark = [on_linux, pytest.mark.process]


def node_of(folder: Path | str, *command: str, processes: FakeProcesses | None = None, **fields: Any) -> Node:
    logs_specs = DefaultLogsSpecs(log_dir=str(folder))
    job = JobSpec(
        **{"entrypoint": command[0], "args": command[1:], "run_id": "run", "logs_specs": logs_specs, **fields}
    )
    return Node(job, LocalEngine("run", StoreAddress("127.0.0.1")), os.environ, processes=processes)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with leaving_nothing():
        yield


def test_a_process_that_cannot_be_killed_ends_in_72(tmp_path: Path) -> None:
    """It is stuck in the kernel: stopped, killed, abandoned and reported; the journal replays."""
    processes = FakeProcesses()
    processes.will_be_stuck(0)
    node = node_of(tmp_path, "train", processes=processes, nproc_per_node=2, shutdown_timeout=0, abandon_s=0.0)

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
    node = node_of(tmp_path, "/bin/sh", "-c", "exit 7")
    verdict = node.run()
    assert exit_code_for(verdict) == 7
    assert node.log_dir == os.path.dirname(node.journal_path)
    assert Path(node.journal_path).exists()


def test_the_first_causes_of_earlier_generations_are_kept(tmp_path: Path) -> None:
    """For the report's history."""
    script = "exit $((TORCHELASTIC_RESTART_COUNT + 1))"
    node = node_of(tmp_path, "/bin/sh", "-c", script, max_restarts=2)
    verdict = node.run()
    assert exit_code_for(verdict) == 3
    assert [(failure.exit_code, failure.generation) for failure in verdict.earlier] == [(1, 1), (2, 2)]
    assert {failure.host for failure in (*verdict.earlier, *verdict.failures)} == {os.uname().nodename}


def test_the_final_text_comes_after_all_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also after the last output of the workers' children."""
    script = "echo one >&2; (trap 'echo two >&2; exit' TERM; sleep 60 & wait) & exit 1"
    node = node_of(tmp_path, "/bin/sh", "-c", script, shutdown_timeout=10)
    node.run(final_text=lambda verdict: f"it {verdict.outcome.value}")
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "it failed"
    assert "one" in lines


def test_without_a_log_folder_no_journal_is_written(tmp_path: Path) -> None:
    """The run works without files."""
    node = node_of(os.devnull, "/bin/true")
    assert node.run().outcome is Outcome.SUCCEEDED
    assert (node.journal_path, node.log_dir) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_request_for_stacks_before_hang_detection_starts_it_once(tmp_path: Path) -> None:
    """The request creates the sampler; the timer, which is due during the run, does not create another one."""
    node = node_of(tmp_path, "/bin/sleep", "0.3", hang_after=0.1)
    created: list[object] = []

    def request(*_: Any) -> None:
        if not created:
            node.answer_stacks(StacksRequest("node"), lambda _: None, lambda *_: None)
            created.append(node._observers)

    assert node.run(observe=request).outcome is Outcome.SUCCEEDED
    assert created == [node._observers]


def test_wrong_signal_names_start_nothing(tmp_path: Path) -> None:
    """They are rejected before any process starts."""
    with pytest.raises(ValueError, match="SIGNOPE"):
        node_of(tmp_path, "/bin/true", signals_to_handle="SIGNOPE")
