"""Replay: a real run's journal gives the same decisions again, and a changed one is found out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tenax.agent.server import LocalElasticAgent, WorkerSpec, WorkerState
from tenax.core import events as fact
from tenax.core.model import Failure, Outcome
from tenax.core.policy import AnyDecision, GiveUp, History, Restart
from tenax.logs.specs import DefaultLogsSpecs
from tenax.runtime.journal import Footer, read_journal
from tenax.runtime.replay import Replayed, replay
from watching import on_linux

pytestmark = on_linux

# Rank 1 fails twice and then succeeds; rank 0 waits to be ended.
FLAKY = """
[ "$TORCHELASTIC_RESTART_COUNT" -ge 2 ] && exit 0
[ "$RANK" = 1 ] && { echo "ValueError: boom" >&2; exit 3; }
exec sleep 60
"""


class BudgetPolicy:
    """A policy of the user's own that happens to have the name of ours, and decides otherwise."""

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
    for part in ("generation 3: starting 2 workers", "exited with code 3", "asking the workers", "the run succeeded"):
        assert any(part in text for text in story), story
    times = [told.after_s for told in result.story]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_custom_policys_run_replays_without_its_code(tmp_path: Path) -> None:
    """Its decisions are in the journal, also when its class is called like one of ours."""
    path = run(tmp_path, restart_policy=BudgetPolicy())
    header, steps, footer = read_journal(path)
    assert header.policy.endswith(".BudgetPolicy")
    result = replay(header, steps, footer)
    assert result.differences == []
    assert [step.decision.why for step in steps if step.decision] == ["one more", "one more"]


def test_a_step_that_was_left_out_is_noticed(journal: Path) -> None:
    """Without the fact the orders do not follow."""
    header, steps, footer = read_journal(str(journal))
    formed = next(index for index, step in enumerate(steps) if isinstance(step.event, fact.GenerationFormed))
    result = replay(header, steps[:formed] + steps[formed + 1 :], footer)
    assert result.differences
    assert result.verdict is None


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
    poorer = msgspec.structs.replace(header, settings=msgspec.structs.replace(header.settings, max_restarts=0))
    result = replay(poorer, steps, footer)
    assert result.differences
    assert result.verdict is not None
    assert result.verdict.outcome is Outcome.FAILED


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
