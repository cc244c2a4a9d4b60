"""The coordinator's journal: events and messages are read back, and a replay produces the same messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kit.processes import leaving_nothing
from tenax._core import events, messages
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CancelRequested,
    CoordinatorMachine,
    NodeLost,
    Opened,
    Received,
    RunSettings,
    Tick,
)
from tenax._core.model import AgentSettings, Failure
from tenax._core.policy import AnyDecision, Continue, GiveUp, History, Restart, RestartPolicy, Wait
from tenax._node.journal import (
    Footer,
    Journal,
    JournalUnreadable,
    RunJournal,
    kind_of,
    read_journal,
    read_run_journal,
    replay_run,
)
from tenax._view.run_messages import RunMessages

SETTINGS = RunSettings("run", 2, 2, max_restarts=3, serving_node="a")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with leaving_nothing():
        yield str(tmp_path / "coordinator.jsonl")


class Recorded:
    """A coordinator with a journal."""

    def __init__(self, path: str, policy: RestartPolicy | None = None) -> None:
        self.machine = CoordinatorMachine(SETTINGS, policy)
        self.journal = RunJournal(path)
        self.journal.begin_run(SETTINGS, 100.0)
        self.now = 100.0
        self.step(Opened())

    def step(self, event: AnyCoordinatorEvent) -> None:
        self.now += 1.0
        sent = self.machine.step(event, self.now)
        self.journal.run_step(self.now, event, sent, self.machine.state)

    def receive(self, node_id: str, *received: messages.FromNode) -> None:
        for message in received:
            self.step(Received(node_id, message))

    def gather(self) -> None:
        for node_id in "ab":
            info = messages.NodeInfo(node_id, f"host-{node_id}", min_nodes=2, max_nodes=2)
            self.receive(node_id, messages.NodeJoined(info), messages.NodeReady(0))

    def fail(self, generation: int) -> None:
        failure = Failure(generation, 0, 1, 77, 3, self.now)
        self.receive("b", messages.FailureSeen(generation, failure, self.now))
        self.receive("b", messages.NodeStopped(generation, self.now, (failure,)), messages.NodeReady(generation))
        self.receive("a", messages.NodeStopped(generation, self.now), messages.NodeReady(generation))


def test_what_was_written_is_read_back_and_replays(path: str) -> None:
    """Two nodes, a failure, a lost node that comes back as another, the end."""
    served = Recorded(path)
    served.gather()
    served.fail(1)
    served.step(NodeLost("b", "connection closed"))
    served.receive("a", messages.NodeStopped(2, served.now), messages.NodeReady(2))
    served.step(Tick())
    served.receive(
        "c", messages.NodeJoined(messages.NodeInfo("c", "host-c", min_nodes=2, max_nodes=2)), messages.NodeReady(0)
    )
    for node_id in "ac":
        served.receive(node_id, messages.NodeSucceeded(3))
    served.journal.close(500.0)
    header, steps, footer = read_run_journal(path)
    assert (header.settings, header.host, header.at, header.format) == (SETTINGS, os.uname().nodename, 100.0, 3)
    assert footer == Footer(500.0)
    decisions = [Restart("restart 1 of 3"), Continue("host-b was lost: connection closed")]
    assert [step.decision for step in steps if step.decision] == decisions
    story, differences = replay_run(header, steps)
    assert differences == []
    lines = [line for _, line in story]
    for part in (
        "host-a joined with 1 worker",
        "host-a is ready for a generation",
        "  to host-a: generation 1, node 0 of 2, world size 2 (first generation)",
        "host-b reported that rank 1 failed in generation 1: exit code 3",
        "  to host-a, host-b: generation 1 ended: rank 1 on host-b failed",
        "host-b was lost: connection closed",
        "  to host-a, host-c: the run succeeded: all 2 workers succeeded",
    ):
        assert part in lines, lines
    assert any(line.startswith("  to host-c: generation 3, node 1 of 2, world size 2 (") for line in lines), lines
    assert [at for at, _ in story] == sorted(at for at, _ in story)


def test_messages_distinguish_nodes_of_one_host() -> None:
    story = RunMessages()
    for node_id, host in (("a", "big"), ("b", "big"), ("c", "small")):
        story.lines_for(Received(node_id, messages.NodeJoined(messages.NodeInfo(node_id, host))), [])
    assert [story.name(node_id) for node_id in ("a", "b", "c", "0123456789abc")] == [
        "big #1",
        "big #2",
        "small",
        "node 01234567",
    ]


def test_every_message_of_a_node_has_a_text() -> None:
    """A replay prints no class names."""
    failure = Failure(1, 0, 3, 77, -9, 5.0)
    info = messages.NodeInfo("a", "host-a", slots=8)
    received = [
        messages.NodeJoined(info),
        messages.NodeJoined(info, generation=2, is_running=True),
        messages.NodeJoined(info, generation=2, has_succeeded=True),
        messages.NodeReady(0),
        messages.FailureSeen(1, failure, 5.0),
        messages.NodeStopped(1, 5.0, (failure,)),
        messages.NodeSucceeded(1),
        messages.NodeDraining(1, 30.0, "SIGTERM"),
        messages.NodeWillLeave(1, "SIGUSR1", 120.0),
        messages.NodeLeft("SIGTERM"),
    ]
    story = RunMessages()
    assert [story.lines_for(Received("a", each), []) for each in received] == [
        ["host-a joined with 8 workers"],
        ["host-a joined with 8 workers, running generation 2"],
        ["host-a joined with 8 workers, done with generation 2"],
        ["host-a is ready for a generation"],
        ["host-a reported that rank 3 failed in generation 1: SIGKILL"],
        ["host-a stopped its workers of generation 1 (1 failed)"],
        ["host-a succeeded in generation 1"],
        ["host-a is leaving (up to 30 s): SIGTERM"],
        ["host-a will leave (in 2 min): SIGUSR1"],
        ["host-a left: SIGTERM"],
    ]


class Always:
    """A user's policy that returns the same decision object every time."""

    AGAIN = Restart("as ever")

    def __init__(self, times: int) -> None:
        self._left = times

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self._left -= 1
        return self.AGAIN if self._left >= 0 else GiveUp("enough")


def test_a_policy_without_its_code_is_replayed(path: str) -> None:
    """Its decisions are in the journal, each in its step."""
    served = Recorded(path, Always(3))
    served.gather()
    for generation in range(1, 5):
        served.fail(generation)
    served.journal.close(500.0)
    header, steps, _ = read_run_journal(path)
    decisions = [step.decision for step in steps if step.decision]
    assert decisions == [Restart("as ever")] * 3 + [GiveUp("enough")]
    assert replay_run(header, steps)[1] == []


class Pausing:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("too hot", seconds=50.0)


def test_a_pause_and_an_operators_stop_are_replayed(path: str) -> None:
    served = Recorded(path, Pausing())
    served.gather()
    served.fail(1)
    served.now += 60.0
    served.step(Tick())
    served.step(CancelRequested("enough"))
    served.journal.close(500.0)
    header, steps, _ = read_run_journal(path)
    story, differences = replay_run(header, steps)
    assert differences == []
    lines = [line for _, line in story]
    assert "an operator ended the run: enough" in lines
    assert lines[-1].endswith(": the run was cancelled: enough")


def test_a_changed_message_is_reported(path: str) -> None:
    """With the step, the recorded message and the replayed one."""
    served = Recorded(path)
    served.gather()
    served.journal.close(500.0)
    header, steps, _ = read_run_journal(path)
    number = next(index for index, step in enumerate(steps) if any(_is_formed(send.event) for send in step.sent))
    steps[number] = msgspec.structs.replace(steps[number], sent=steps[number].sent[:1])
    (difference,) = replay_run(header, steps)[1]
    assert difference.startswith(f"step {number + 1}, Received: the journal has ")


def _is_formed(event: object) -> bool:
    return isinstance(event, events.GenerationFormed)


def test_it_is_distinguished_from_an_agents_journal(path: str, tmp_path: Path) -> None:
    """By its first line; each reader rejects the other's file."""
    Recorded(path).journal.close(500.0)
    other = str(tmp_path / "journal.jsonl")
    agents = Journal(other)
    agents.begin(AgentSettings("run", "trainer", 1, 0), "train.py", 1.0)
    agents.close(2.0)
    assert kind_of(path) == "run header"
    assert kind_of(other) == "header"
    assert kind_of(str(tmp_path / "missing")) == ""
    with pytest.raises(JournalUnreadable):
        read_run_journal(other)
    with pytest.raises(JournalUnreadable):
        read_journal(path)


def test_without_a_folder_nothing_is_written() -> None:
    with leaving_nothing():
        served = Recorded("")
        served.gather()
        served.journal.close(500.0)
        assert served.journal.path == ""


def test_only_the_latest_progress_of_each_node_is_written_before_the_next_step(path: str) -> None:
    """Nodes report progress repeatedly; the journal with only the latest replays."""
    served = Recorded(path)
    served.gather()
    size = os.path.getsize(path)
    for step in range(100):
        for node_id in "ab":
            progress = messages.WorkerProgress(0, 0, step, served.now, served.now)
            served.receive(node_id, messages.NodeProgress(1, served.now, (progress,)))
    assert os.path.getsize(path) == size
    served.fail(1)
    served.journal.close(500.0)
    header, steps, _ = read_run_journal(path)
    reports = [
        step.event.message for step in steps if isinstance(getattr(step.event, "message", None), messages.NodeProgress)
    ]
    assert [each.workers[0].last_step for each in reports] == [99, 99]
    assert [step.at for step in steps] == sorted(step.at for step in steps)
    assert replay_run(header, steps)[1] == []
