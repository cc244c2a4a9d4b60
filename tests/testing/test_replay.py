"""Replay: the journal of a real run gives the same decisions, and changes to a journal are detected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from kit.processes import on_linux
from tenax._core import events
from tenax._core.agent import AgentMachine
from tenax._core.model import AgentSettings, Assignment, Failure, Outcome, Verdict
from tenax._core.policy import AnyDecision, GiveUp, History, Restart
from tenax._logs.specs import DefaultLogsSpecs
from tenax._node.journal import Footer, Journal, read_journal
from tenax.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from tenax.testing.replay import Replayed, replay

pytestmark = [on_linux, pytest.mark.process]

# Rank 1 fails twice and then succeeds; rank 0 sleeps until it is stopped.
FLAKY = """
[ "$TORCHELASTIC_RESTART_COUNT" -ge 2 ] && exit 0
[ "$RANK" = 1 ] && { echo "ValueError: boom" >&2; exit 3; }
exec sleep 60
"""


class TwoRestarts:
    """A user's policy: two restarts."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Restart("one more") if history.restarts_used < 2 else GiveUp("enough")


def run(folder: Path, **options: object) -> str:
    """Run the flaky job; return the path of its journal."""
    spec = WorkerSpec(entrypoint="/bin/sh", args=("-c", FLAKY), local_world_size=2, max_restarts=2)
    specs = DefaultLogsSpecs(log_dir=str(folder))
    assert LocalElasticAgent(spec, specs, **options).run().state is WorkerState.SUCCEEDED  # type: ignore[arg-type]
    return os.path.join(specs.run_log_dir, "journal.jsonl")


@pytest.fixture(scope="module")
def real_journal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The journal of one real run, shared by all tests."""
    return run(tmp_path_factory.mktemp("logs"))


@pytest.fixture
def journal(real_journal: str, tmp_path: Path) -> Path:
    """A copy of the journal, which a test may change."""
    return Path(shutil.copy(real_journal, tmp_path))


def replayed(path: object) -> Replayed:
    return replay(*read_journal(str(path)))


def test_a_real_run_replays_without_a_difference(journal: Path) -> None:
    """Every decision follows from the events; the verdict and the lines of the run are returned."""
    result = replayed(journal)
    assert result.differences == []
    assert result.is_complete
    assert result.verdict is not None
    assert (result.verdict.outcome, result.verdict.restarts_used) == (Outcome.SUCCEEDED, 2)
    texts = [line.text for line in result.lines]
    for part in (
        "generation 3 (restart 2 of 2): starting 2 workers",
        "exited with code 3",
        "stopping all workers",
        "the run succeeded",
    ):
        assert any(part in text for text in texts), texts
    times = [line.after_s for line in result.lines]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_run_with_a_custom_policy_replays_without_its_code(tmp_path: Path) -> None:
    """The coordinator called the policy. In the node's journal its decisions are formed generations with a reason."""
    _, steps, _ = read_journal(path := run(tmp_path, restart_policy=TwoRestarts()))
    assert replayed(path).differences == []
    formed = [step.event.assignment for step in steps if isinstance(step.event, events.GenerationFormed)]
    assert [part.why for part in formed] == ["first generation", "one more", "one more"]
    assert [part.restarts_used for part in formed] == [0, 1, 2]


def test_a_removed_step_is_a_difference(journal: Path) -> None:
    """Without the event the commands do not follow."""
    header, steps, footer = read_journal(str(journal))
    formed = next(index for index, step in enumerate(steps) if isinstance(step.event, events.GenerationFormed))
    result = replay(header, steps[:formed] + steps[formed + 1 :], footer)
    assert result.differences


def test_a_changed_event_is_a_difference(journal: Path) -> None:
    """With exit code 0 the restart that followed is not explained."""
    text = journal.read_text()
    assert '"exit_code":3' in text
    journal.write_text(text.replace('"exit_code":3', '"exit_code":0', 1))
    (difference, *_) = replayed(journal).differences
    assert "WorkerExited" in difference
    assert "the journal has" in difference
    assert "this version of tenax decides" in difference


def test_a_changed_command_is_a_difference(journal: Path) -> None:
    """It has the step, the journal's commands and those that follow from the events."""
    text = journal.read_text()
    assert '"restarts_used":1' in text
    journal.write_text(text.replace('"restarts_used":1', '"restarts_used":0', 1))
    (difference,) = replayed(journal).differences
    number = next(index for index, line in enumerate(text.splitlines()) if '"restarts_used":1' in line)
    assert difference.startswith(f"step {number}, GenerationFormed: the journal has StartWorkers(")


def test_changed_settings_are_a_difference(journal: Path) -> None:
    """The header does not fit the steps."""
    header, steps, footer = read_journal(str(journal))
    smaller = msgspec.structs.replace(header, settings=msgspec.structs.replace(header.settings, local_world_size=1))
    assert replay(smaller, steps, footer).differences


# --- events of the coordinator ----------------------------------------------------------------------------------------

SETTINGS = AgentSettings(run_id="run", role="trainer", local_world_size=1, max_restarts=3)
VERDICT = Verdict(Outcome.CANCELLED, "an operator ended it", generation=4, restarts_used=1, drains=1)
# One of several nodes: a node leaves, the next generation is fenced, the third ends with the run.
SEVERAL: list[events.AnyEvent] = [
    events.RunRequested(),
    events.Waiting("1 of 2 nodes ready (a); waiting up to 10 min for 1 more"),
    events.GenerationFormed(Assignment(1, group_world_size=2, world_size=2)),
    events.WorkerStarted(1, 0, 100),
    events.LeaveNoticed(1, "b", "its agent received SIGTERM", 30.0),
    events.GenerationEnded(1, "b was drained"),
    events.WorkerExited(1, 0, -15),
    events.NodeCleared(1),
    events.GenerationFormed(Assignment(3, group_world_size=2, world_size=2, why="b was drained")),
    events.WorkerStarted(3, 0, 300),
    events.GenerationEnded(1, "a stale event"),
    events.Fenced(3, "no answer from the coordinator"),
    events.WorkerExited(3, 0, -9),
    events.NodeCleared(3),
    events.GenerationFormed(Assignment(4, group_world_size=2, world_size=2, restarts_used=1, why="restart 1 of 3")),
    events.WorkerStarted(4, 0, 400),
    events.NoticeReceived("spot instance", None),
    events.RunEnded(VERDICT, 5000.0),
    events.WorkerExited(4, 0, -15),
    events.NodeCleared(4),
]


def write_several(path: Path) -> Path:
    """Write the journal of a node with these events."""
    machine = AgentMachine(SETTINGS)
    journal = Journal(str(path))
    journal.begin(SETTINGS, "train.py", 10.0)
    for number, event in enumerate(SEVERAL):
        journal.step(11.0 + number, event, machine.step(event, 11.0 + number))
    journal.close(60.0)
    return path


def test_a_node_among_several_replays_without_a_difference(tmp_path: Path) -> None:
    """Messages of the coordinator are events too. The verdict is that of the run."""
    result = replayed(write_several(tmp_path / "journal.jsonl"))
    assert result.differences == []
    assert result.verdict == VERDICT
    texts = [line.text for line in result.lines]
    for part in (
        "1 of 2 nodes ready (a); waiting up to 10 min for 1 more",
        "b is leaving (up to 30 s): its agent received SIGTERM",
        "stopping all workers because b was drained (SIGTERM, 30 s grace)",
        "generation 3 (b was drained): starting 1 worker, rank 0 of 2, node 0 of 2",
        "killing all remaining processes: no answer from the coordinator",
        "this node is leaving: spot instance",
        "the run was cancelled: an operator ended it",
    ):
        assert part in texts, texts
    assert not any("a stale event" in text for text in texts)


@pytest.mark.parametrize("kind", [events.GenerationEnded, events.Fenced, events.RunEnded])
def test_a_removed_event_of_the_coordinator_is_a_difference(tmp_path: Path, kind: type) -> None:
    """Otherwise workers were stopped without a reason."""
    header, steps, footer = read_journal(str(write_several(tmp_path / "journal.jsonl")))
    first = next(index for index, step in enumerate(steps) if isinstance(step.event, kind))
    assert replay(header, steps[:first] + steps[first + 1 :], footer).differences


def test_a_verdict_that_is_not_the_coordinators_is_a_difference(tmp_path: Path) -> None:
    """A node does not decide the outcome of the run."""
    path = write_several(tmp_path / "journal.jsonl")
    head, _, tail = path.read_text().rpartition('"outcome":"cancelled"')
    path.write_text(f'{head}"outcome":"succeeded"{tail}')
    (difference,) = replayed(path).differences
    assert "NodeCleared: the journal has" in difference
    assert "SUCCEEDED" in difference


def test_a_truncated_journal_is_replayed_as_far_as_it_goes(journal: Path) -> None:
    """The journal of a killed agent has no verdict and is incomplete, but shows no difference."""
    header, steps, _ = read_journal(str(journal))
    result = replay(header, steps[:5], None)
    assert (result.differences, result.verdict, result.is_complete) == ([], None, False)
    assert result.lines


def test_a_journal_with_missing_steps_is_incomplete(journal: Path) -> None:
    """Its footer counts the steps that could not be written."""
    header, steps, _ = read_journal(str(journal))
    assert not replay(header, steps[:5], Footer(1.0, steps_not_written=3)).is_complete


def test_each_run_has_its_own_journal(tmp_path: Path) -> None:
    """Two runs with the same log folder write two files."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    for _ in range(2):
        assert LocalElasticAgent(WorkerSpec(entrypoint="/bin/true"), specs).run().state is WorkerState.SUCCEEDED
    for name in ("journal.jsonl", "journal.1.jsonl"):
        assert replayed(os.path.join(specs.run_log_dir, name)).is_complete
