"""Replay: a real run's journal gives the same decisions again, and a changed one is found out."""

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

# Rank 1 fails twice and then succeeds; rank 0 waits to be ended.
FLAKY = """
[ "$TORCHELASTIC_RESTART_COUNT" -ge 2 ] && exit 0
[ "$RANK" = 1 ] && { echo "ValueError: boom" >&2; exit 3; }
exec sleep 60
"""


class Stubborn:
    """A policy of the user's own."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Restart("one more") if history.restarts_used < 2 else GiveUp("enough")


def run(folder: Path, **options: object) -> str:
    """Run the flaky job; the path of its journal."""
    spec = WorkerSpec(entrypoint="/bin/sh", args=("-c", FLAKY), local_world_size=2, max_restarts=2)
    specs = DefaultLogsSpecs(log_dir=str(folder))
    assert LocalElasticAgent(spec, specs, **options).run().state is WorkerState.SUCCEEDED  # type: ignore[arg-type]
    return os.path.join(specs.run_log_dir, "journal.jsonl")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The journal of one real run, for all tests here."""
    return run(tmp_path_factory.mktemp("logs"))


@pytest.fixture
def journal(written: str, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copy(written, tmp_path))


def replayed(path: object) -> Replayed:
    return replay(*read_journal(str(path)))


def test_a_real_run_replays_without_a_difference(journal: Path) -> None:
    """Every decision follows from the facts; the verdict and the whole story come out."""
    result = replayed(journal)
    assert result.differences == []
    assert result.is_complete
    assert result.verdict is not None
    assert (result.verdict.outcome, result.verdict.restarts_used) == (Outcome.SUCCEEDED, 2)
    story = [told.text for told in result.story]
    for part in (
        "generation 3 (restart 2 of 2): starting 2 workers",
        "exited with code 3",
        "stopping all workers because",
        "the run succeeded",
    ):
        assert any(part in text for text in story), story
    times = [told.after_s for told in result.story]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_custom_policys_run_replays_without_its_code(tmp_path: Path) -> None:
    """The coordinator asked it, not this node: here its decisions are generations that were formed, with the reason."""
    _, steps, _ = read_journal(path := run(tmp_path, restart_policy=Stubborn()))
    assert replayed(path).differences == []
    formed = [step.event.assignment for step in steps if isinstance(step.event, events.GenerationFormed)]
    assert [part.why for part in formed] == ["first generation", "one more", "one more"]
    assert [part.restarts_used for part in formed] == [0, 1, 2]


def test_a_step_that_was_left_out_is_noticed(journal: Path) -> None:
    """Without the fact the orders do not follow."""
    header, steps, footer = read_journal(str(journal))
    formed = next(index for index, step in enumerate(steps) if isinstance(step.event, events.GenerationFormed))
    result = replay(header, steps[:formed] + steps[formed + 1 :], footer)
    assert result.differences


def test_a_changed_fact_is_named(journal: Path) -> None:
    """An exit code that was polished does not explain the restart that followed."""
    text = journal.read_text()
    assert '"exit_code":3' in text
    journal.write_text(text.replace('"exit_code":3', '"exit_code":0', 1))
    (difference, *_) = replayed(journal).differences
    assert "WorkerExited" in difference
    assert "the journal says" in difference
    assert "this tenax decides" in difference


def test_a_changed_order_is_named(journal: Path) -> None:
    """The step, what the journal says and what follows from the facts."""
    text = journal.read_text()
    assert '"restarts_used":1' in text
    journal.write_text(text.replace('"restarts_used":1', '"restarts_used":0', 1))
    (difference,) = replayed(journal).differences
    number = next(index for index, line in enumerate(text.splitlines()) if '"restarts_used":1' in line)
    assert difference.startswith(f"step {number}, GenerationFormed: the journal says StartWorkers(")


def test_other_settings_lead_to_other_decisions(journal: Path) -> None:
    """A header that was changed does not fit its steps."""
    header, steps, footer = read_journal(str(journal))
    smaller = msgspec.structs.replace(header, settings=msgspec.structs.replace(header.settings, local_world_size=1))
    assert replay(smaller, steps, footer).differences


# --- what the coordinator says ----------------------------------------------------------------------------------------

SETTINGS = AgentSettings(run_id="run", role="trainer", local_world_size=1, max_restarts=3)
VERDICT = Verdict(Outcome.CANCELLED, "an operator ended it", generation=4, restarts_used=1, drains=1)
# One node of several: a node leaves, the next generation is fenced, the third is ended with the run.
SEVERAL: list[events.AnyEvent] = [
    events.RunRequested(),
    events.Waiting("1 of 2 nodes ready (a); waiting up to 600 s for 1 more"),
    events.GenerationFormed(Assignment(1, group_world_size=2, world_size=2)),
    events.WorkerStarted(1, 0, 100),
    events.LeaveNoticed(1, "b", "its agent received SIGTERM", 30.0),
    events.GenerationEnded(1, "b was drained"),
    events.WorkerExited(1, 0, -15),
    events.NodeCleared(1),
    events.GenerationFormed(Assignment(3, group_world_size=2, world_size=2, why="b was drained")),
    events.WorkerStarted(3, 0, 300),
    events.GenerationEnded(1, "a late echo"),
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


def several(path: Path) -> Path:
    """The journal of a node that heard all this."""
    machine = AgentMachine(SETTINGS)
    journal = Journal(str(path))
    journal.begin(SETTINGS, "train.py", 10.0)
    for number, event in enumerate(SEVERAL):
        journal.step(11.0 + number, event, machine.step(event, 11.0 + number))
    journal.close(60.0)
    return path


def test_a_node_among_several_replays_without_a_difference(tmp_path: Path) -> None:
    """Whatever the coordinator said is a fact like any other; the verdict is the run's, the story names the others."""
    result = replayed(several(tmp_path / "journal.jsonl"))
    assert result.differences == []
    assert result.verdict == VERDICT
    story = [told.text for told in result.story]
    for part in (
        "1 of 2 nodes ready (a); waiting up to 600 s for 1 more",
        "b is leaving (up to 30 s): its agent received SIGTERM",
        "stopping all workers because b was drained (SIGTERM, 30 s grace)",
        "generation 3 (b was drained): starting 1 worker, rank 0 of 2, node 0 of 2",
        "killing all remaining processes: no answer from the coordinator",
        "this node is leaving: spot instance",
        "the run was cancelled: an operator ended it",
    ):
        assert part in story, story
    assert not any("a late echo" in text for text in story)


@pytest.mark.parametrize("kind", [events.GenerationEnded, events.Fenced, events.RunEnded])
def test_a_word_of_the_coordinator_that_was_left_out_is_noticed(tmp_path: Path, kind: type) -> None:
    """Workers that were stopped for no reason that can be seen."""
    header, steps, footer = read_journal(str(several(tmp_path / "journal.jsonl")))
    first = next(index for index, step in enumerate(steps) if isinstance(step.event, kind))
    assert replay(header, steps[:first] + steps[first + 1 :], footer).differences


def test_another_verdict_than_the_coordinators_is_named(tmp_path: Path) -> None:
    """A node does not decide how the run ended."""
    path = several(tmp_path / "journal.jsonl")
    head, _, tail = path.read_text().rpartition('"outcome":"cancelled"')
    path.write_text(f'{head}"outcome":"succeeded"{tail}')
    (difference,) = replayed(path).differences
    assert "NodeCleared: the journal says" in difference
    assert "SUCCEEDED" in difference


def test_a_run_that_was_cut_short_is_told_as_far_as_it_goes(journal: Path) -> None:
    """The journal of a killed agent: no verdict, not complete, and no accusation."""
    header, steps, _ = read_journal(str(journal))
    result = replay(header, steps[:5], None)
    assert (result.differences, result.verdict, result.is_complete) == ([], None, False)
    assert result.story


def test_counted_losses_make_it_incomplete(journal: Path) -> None:
    """The last line says that steps are missing."""
    header, steps, _ = read_journal(str(journal))
    assert not replay(header, steps[:5], Footer(1.0, steps_not_written=3)).is_complete


def test_each_run_has_a_journal_of_its_own(tmp_path: Path) -> None:
    """Two runs with the same log specs, and so the same folder, do not write into one file."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    for _ in range(2):
        assert LocalElasticAgent(WorkerSpec(entrypoint="/bin/true"), specs).run().state is WorkerState.SUCCEEDED
    for name in ("journal.jsonl", "journal.1.jsonl"):
        assert replayed(os.path.join(specs.run_log_dir, name)).is_complete
