"""How a run ends under a scheduler: what each node prints, its exit code, and the requeue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tenax._core.agent import AgentMachine
from tenax._core.events import AnyEvent, GenerationFormed, LeaveNoticed, RunRequested, SignalReceived
from tenax._core.model import AgentSettings, Assignment, Outcome, Verdict
from tenax._node.journal import Step
from tenax.cli.arguments import parse
from tenax.cli.scheduled_run import run_scheduled, with_secret
from tenax.scheduler import Allocation, Scheduler

CANCELLED = Verdict(Outcome.CANCELLED, "the agent received SIGTERM", signal=15)
FIRST = Allocation(scheduler="Grid", job="33", is_step=True)
OTHER = msgspec.structs.replace(FIRST, is_first=False)
CONTINUES = "tenax: this node has left the run, which continues without it\n"


class Preempting(Scheduler):
    def requeue(self, job: str) -> str:
        return f"requeued {job}"


class FakeNode:
    """A node that joined a generation of three, received SIGTERM, and heard that these hosts leave too."""

    def __init__(self, rank: int, leaving: list[str], verdict: Verdict) -> None:
        self._verdict = verdict
        assignment = Assignment(2, group_rank=rank, group_world_size=3)
        notices = [LeaveNoticed(2, host, "its agent received SIGTERM") for host in leaving]
        # The notice of an earlier generation does not count.
        self._events: list[AnyEvent] = [RunRequested(), LeaveNoticed(1, "n9", ""), GenerationFormed(assignment)]
        self._events += [*notices, *([SignalReceived(15)] if verdict is CANCELLED else [])]
        self.text = ""

    def run(self, final_text: Any, observe: Any) -> Verdict:
        machine = AgentMachine(AgentSettings("33.0", "default", 1, 0))
        for event in self._events:
            observe(Step(0.0, event, machine.step(event, 0.0)), machine.state)
        self.text = final_text(self._verdict)
        return self._verdict


@pytest.mark.parametrize(
    ("allocation", "rank", "leaving", "scheduler", "text", "code"),
    [
        pytest.param(OTHER, 1, [], "Scheduler", CONTINUES, 0, id="drained"),
        pytest.param(OTHER, 1, ["n1"], "Scheduler", CONTINUES, 0, id="two of three drained"),
        pytest.param(
            OTHER,
            1,
            ["n1", "n3"],
            "Scheduler",
            "tenax: the run was cancelled: the agent received SIGTERM; the first node prints the report\n",
            143,
            id="all leave",
        ),
        pytest.param(FIRST, 0, ["n2", "n3"], "Scheduler", "report\n", 143, id="cancelled"),
        pytest.param(FIRST, 0, ["n2", "n3"], "Preempting", "report\ntenax: requeued 33\n", 143, id="preempted"),
        pytest.param(FIRST, 0, ["n2"], "Preempting", "report\ntenax: requeued 33\n", 143, id="preempted, a node lost"),
    ],
)
def test_a_node_that_leaves(
    allocation: Allocation, rank: int, leaving: list[str], scheduler: str, text: str, code: int
) -> None:
    module = Scheduler.__module__ if scheduler == "Scheduler" else __name__
    node: Any = FakeNode(rank, leaving, CANCELLED)
    found = run_scheduled(node, allocation, {"TENAX_SCHEDULER": f"{module}:{scheduler}"}, lambda _: "report\n")
    assert (found, node.text) == ((CANCELLED, code), text)


@pytest.mark.parametrize(
    ("rank", "is_step", "text"),
    [
        (0, True, "report\n"),
        (1, True, "tenax: the run failed: rank 1 failed; the first node prints the report\n"),
        (1, False, "report\n"),  # with an output of its own, as in a pod
    ],
)
def test_the_report_of_a_step_is_printed_once(rank: int, is_step: bool, text: str) -> None:
    node: Any = FakeNode(rank, [], Verdict(Outcome.FAILED, "rank 1 failed"))
    allocation = msgspec.structs.replace(FIRST, is_step=is_step)
    assert run_scheduled(node, allocation, {}, lambda _: "report\n")[1] == 1
    assert node.text == text


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "0",
}


def test_a_secret_is_created_in_the_home_folder(tmp_path: Path) -> None:
    environ = STEP | {"HOME": str(tmp_path)}
    options = with_secret(parse(["train.py"], environ), environ)
    assert os.listdir(tmp_path / ".config" / "tenax") == ["cluster-secret"]
    assert options.rdzv_configs["token_file"] == str(tmp_path / ".config" / "tenax" / "cluster-secret")


def test_without_a_home_folder_the_run_has_no_secret(tmp_path: Path) -> None:
    """And says so."""
    (tmp_path / "file").touch()
    environ = STEP | {"HOME": str(tmp_path / "file")}
    options = with_secret(parse(["train.py"], environ), environ)
    assert "token_file" not in options.rdzv_configs
    assert options.notes[-1].startswith("the run has no secret, because ")
