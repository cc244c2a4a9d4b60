"""Histories from journals: complete or partial, of one node or several."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tenax._core.coordinator import EarlierCoordinatorGone
from tenax._core.events import HangFound, HangOver, RunEnded
from tenax._core.ledger import Goodput, Spent
from tenax._core.messages import HangReport, StackLocation
from tenax._core.model import Outcome, Verdict
from tenax._node.journal import Footer, read_run_journal
from tenax._view.chrome_trace import phases_of
from tenax._view.history import RunHistory
from tenax._view.journal_parts import history_of_run
from tenax._view.summary import format_summary, summary_of
from tenax.cli.journal_commands import find_journals, read_histories
from view.recorded_run import WALL, RecordedAgent, RecordedRun


def the_history(*locations: Path) -> RunHistory:
    found = read_histories([str(each) for each in locations])
    assert found.troubles == []
    (history,) = found.histories
    return history


def run_of_two_nodes(folder: Path) -> RecordedRun:
    """Generation 1 fails at 10, generation 2 loses node1 at 30, generation 3 succeeds at 60."""
    run = RecordedRun(folder, count=2, min_nodes=1)
    run.all_join(1.0)
    run.all_run(3.0)
    run.fail(1, 10.0)
    run.all_run(13.0)
    run.lose(1, 30.0)
    run.stop_the_others(32.0)
    run.all_run(35.0)
    run.succeed(60.0)
    return run


def test_a_complete_run(tmp_path: Path) -> None:
    """Its history has generations, failures with their hosts, the verdict and the goodput."""
    run_of_two_nodes(tmp_path).close()
    history = the_history(tmp_path)
    assert (history.run_id, history.outcome, history.why) == ("job", "succeeded", "all 2 workers succeeded")
    assert (history.began_at - WALL, history.ended_at - WALL) == (1.0, 60.0)
    assert [(each.number, each.ended_by, each.nodes) for each in history.generations] == [
        (1, "failure", 2),
        (2, "loss", 2),
        (3, "succeeded", 1),
    ]
    assert [(each.formed_at - WALL, each.running_at, each.ended_at) for each in history.generations] == [
        (1.0, WALL + 3, WALL + 10),
        (11.0, WALL + 13, WALL + 30),
        (32.0, WALL + 35, WALL + 60),
    ]
    (failure,) = history.failures
    assert (failure.generation, failure.rank, failure.host) == (1, 2, "node1")
    assert failure.what == "raised RuntimeError: boom"
    assert history.goodput is not None
    assert history.goodput.spent == Spent(starting_s=7.0, training_s=49.0, stopping_s=3.0)
    assert history.restarts_used == 1
    assert history.missing == ()


def test_the_goodput_equals_that_of_the_verdict(tmp_path: Path) -> None:
    run = run_of_two_nodes(tmp_path)
    run.close()
    verdict = run.machine.state.verdict
    assert verdict is not None
    assert the_history(tmp_path).goodput == verdict.goodput


def test_spans_of_a_node_do_not_overlap(tmp_path: Path) -> None:
    """A lost node has an end. (H3)"""
    run_of_two_nodes(tmp_path).close()
    first, second = the_history(tmp_path).nodes
    assert (first.name, first.gone_at) == ("node0", None)
    assert (second.gone_at, second.gone_how, second.gone_why) == (WALL + 30, "lost", "connection closed")
    assert (first.times_lost, second.times_lost) == (0, 1)
    for node in (first, second):
        assert all(before.until <= after.since for before, after in pairwise(node.spans))
        assert all(span.until > span.since for span in node.spans)
    assert [(span.what, span.generation) for span in second.spans] == [
        ("starting", 1),
        ("working", 1),
        ("stopping", 1),
        ("starting", 2),
        ("working", 2),
    ]
    assert second.spans[-1].until == WALL + 30


def test_a_drained_node_is_not_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, count=2, min_nodes=1)
    run.all_join()
    run.all_run(1.0)
    run.drain(1, 5.0)
    run.stop_the_others(7.0)
    run.all_run(8.0)
    run.succeed(9.0)
    run.close()
    history = the_history(tmp_path)
    node = history.nodes[1]
    assert (node.gone_how, node.gone_why, node.times_lost) == ("drained", "SIGTERM", 0)
    assert "draining" in {span.what for span in node.spans}


def test_a_history_has_more_generations_than_the_ledger_keeps(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, max_restarts=1000)
    run.all_join()
    for number in range(130):
        run.all_run(10.0 * number + 1)
        # Long enough for the policy to restart it.
        run.fail(0, 10.0 * number + 9, f"RuntimeError: number {number}")
    run.close()
    history = the_history(tmp_path)
    assert [each.number for each in history.generations] == list(range(1, 132))
    assert len(history.failures) == 130


def test_an_unfinished_run_has_no_outcome(tmp_path: Path) -> None:
    """What is known is shown, and the missing end is named. (H1)"""
    run = RecordedRun(tmp_path)
    run.all_join(1.0)
    run.all_run(3.0)
    run.steps(0, 0, 10, 4.0, 20.0)  # written before the next step
    run.all_run(20.0)
    history = the_history(tmp_path)
    assert (history.outcome, history.ended_at) == ("", WALL + 20)
    assert history.missing == (
        "the journal of the coordinator on node0 has no end: the run is still going, or the agent was killed",
    )
    assert history.goodput is not None
    assert history.goodput.spent == Spent(starting_s=3.0, training_s=16.0)
    run.close()


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    """The agent was killed while it wrote."""
    run = run_of_two_nodes(tmp_path)
    with run.path.open("ab") as file:
        file.write(b'{"line":"run step","at":61.0,"ev')
    history = the_history(tmp_path)
    assert history.outcome == "succeeded"
    run.journal.close(0.0)


def test_a_damaged_line_ends_the_history(tmp_path: Path) -> None:
    """The lines before it are shown, and the line is named. (H1)"""
    run_of_two_nodes(tmp_path).close()
    path = tmp_path / "coordinator.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[12] = b"\x00\x00\x00"
    path.write_bytes(b"\n".join(lines))
    found = read_histories([str(tmp_path)])
    (trouble,) = found.troubles
    assert trouble.startswith(f"line 13 of {str(path)!r} is not a line of a tenax journal: ")
    assert trouble.endswith("; only the lines before that are used")
    (history,) = found.histories
    assert [each.number for each in history.generations] == [1]
    assert history.outcome == ""


def test_steps_that_were_not_written_are_named(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.all_join()
    run.close()
    header, steps, _ = read_run_journal(str(run.path))
    history = history_of_run(header, steps, Footer(9.0, 7)).history
    assert history.missing == ("the last 7 steps of the coordinator on node0 were not written",)


def test_events_that_cannot_be_replayed_end_the_history(tmp_path: Path) -> None:
    """The journal was modified; no exception is raised."""
    run = RecordedRun(tmp_path)
    run.all_join()
    run.all_run(1.0)
    run.close()
    header, steps, footer = read_run_journal(str(run.path))
    (bad,) = [step for step in steps[:1]]

    class Nonsense:
        at, decision = 2.0, None

        @property
        def event(self) -> object:
            raise RuntimeError("invalid event")

    history = history_of_run(header, [*steps, Nonsense(), bad], footer).history  # type: ignore[list-item]
    assert [each.number for each in history.generations] == [1]
    assert history.missing == ("step 5 cannot be replayed (RuntimeError: invalid event); what follows is not shown",)


# --- agents -----------------------------------------------------------------------------------------------------------


def agent_of_two_generations(folder: Path, host: str = "node0", group_rank: int = 0) -> RecordedAgent:
    """Generation 1 from 1 to 10 with a failure of its first worker; generation 2 from 11 on, which succeeds at 60."""
    agent = RecordedAgent(folder, host)
    agent.start(1, 1.0, group_rank)
    agent.exit(1, 0, 1, 10.0)
    agent.exit(1, 1, -15, 10.4)
    agent.cleared(1, 10.5)
    agent.start(2, 11.0, group_rank)
    agent.exit(2, 0, 0, 59.0)
    agent.exit(2, 1, 0, 60.0)
    agent.cleared(2, 60.0)
    return agent


def test_an_agents_journal_alone_shows_only_its_node(tmp_path: Path) -> None:
    """The missing journal of the coordinator is named. (H1)"""
    agent = agent_of_two_generations(tmp_path)
    verdict = Verdict(Outcome.SUCCEEDED, "all 4 workers succeeded", restarts_used=1, goodput=Goodput(Spent(1, 2, 3)))
    agent.step(RunEnded(verdict, 61.0), 61.0)
    agent.close(61.0)
    history = the_history(tmp_path)
    assert (history.run_id, history.outcome, history.restarts_used) == ("job", "succeeded", 1)
    assert history.goodput == Goodput(Spent(1, 2, 3))
    assert history.generations == ()
    assert "coordinator.jsonl" in history.missing[-1]
    (node,) = history.nodes
    assert [(each.what, each.since - WALL, each.until - WALL) for each in node.spans] == [
        ("waiting", 0.0, 1.0),
        ("starting", 1.0, pytest.approx(1.2)),
        ("working", pytest.approx(1.2), 10.0),
        ("stopping", 10.0, 10.5),
        ("waiting", 10.5, 11.0),
        ("starting", 11.0, pytest.approx(11.2)),
        ("working", pytest.approx(11.2), 60.0),
        ("waiting", 60.0, 61.0),
    ]
    assert [(each.generation, each.rank, each.ended, each.exit_code) for each in node.workers] == [
        (1, 0, "failed", 1),
        (1, 1, "stopped", -15),
        (2, 0, "succeeded", 0),
        (2, 1, "succeeded", 0),
    ]


def test_workers_of_a_killed_agent_have_no_exit_code(tmp_path: Path) -> None:
    agent = RecordedAgent(tmp_path)
    agent.start(1, 1.0)
    history = the_history(tmp_path)
    assert "has no end" in history.missing[0]
    assert [each.exit_code for each in history.nodes[0].workers] == [None, None]
    agent.close(2.0)


def test_workers_of_a_killed_agent_last_until_their_generation_or_node_ends(tmp_path: Path) -> None:
    """The coordinator knows when that was; their own end is unknown."""
    run = RecordedRun(tmp_path / "c", count=2, min_nodes=1)
    run.all_join(1.0)
    run.all_run(3.0)
    run.lose(1, 30.0)
    run.stop_the_others(32.0)
    run.all_run(35.0)
    run.succeed(60.0)
    run.close()
    killed = [RecordedAgent(tmp_path / "a0", "node0"), RecordedAgent(tmp_path / "a1", "node1")]
    killed[0].start(1, 1.0, 0)
    killed[1].start(1, 1.0, 1)
    first, second = the_history(tmp_path).nodes
    assert [(each.rank, each.until - WALL, each.ended) for each in first.workers] == [(0, 32.0, ""), (1, 32.0, "")]
    assert [(each.rank, each.until - WALL, each.ended) for each in second.workers] == [(2, 30.0, ""), (3, 30.0, "")]
    for agent in killed:
        agent.close(60.0)


def test_a_run_lasts_until_the_last_event_of_any_journal(tmp_path: Path) -> None:
    """What the coordinator did not see is not part of its sums."""
    run = RecordedRun(tmp_path / "c", count=2)
    run.all_join(1.0)
    run.all_run(3.0)  # and its host dies, with the agent that served it
    served = RecordedAgent(tmp_path / "c", "node0")
    served.start(1, 1.0, 0)
    other = RecordedAgent(tmp_path / "a1", "node1")
    other.start(1, 1.0, 1)
    other.exit(1, 0, 1, 40.0)
    other.exit(1, 1, -15, 40.5)
    other.cleared(1, 41.0)
    history = the_history(tmp_path)
    assert (history.outcome, history.ended_at - WALL) == ("", 41.0)
    assert history.goodput is not None
    assert history.goodput.spent == Spent(starting_s=2.0)
    assert phases_of(history)[-1][1] == WALL + 3.0
    assert [each.until - WALL for each in history.nodes[0].workers] == [41.0, 41.0]
    run.close()
    served.close(0.0)
    other.close(41.0)


def test_journals_of_several_hosts_are_one_history(tmp_path: Path) -> None:
    """Workers are assigned to their nodes."""
    run_of_two_nodes(tmp_path / "host0").close()
    agent_of_two_generations(tmp_path / "host0", "node0", 0).close(60.0)
    agent_of_two_generations(tmp_path / "elsewhere", "node1", 1).close(60.0)
    history = the_history(tmp_path)
    assert [(node.name, {each.rank for each in node.workers}) for node in history.nodes] == [
        ("node0", {0, 1}),
        ("node1", {2, 3}),
    ]
    assert len(history.generations) == 3


def test_two_agents_of_one_host_are_distinguished_by_rank(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "c", count=2)
    run.all_join(1.0)
    run.all_run(2.0)
    run.succeed(60.0)
    run.close()
    text = run.path.read_text().replace('"host":"node1"', '"host":"node0"').replace("on node1", "on node0")
    run.path.write_text(text)
    for rank in (1, 0):
        agent = RecordedAgent(tmp_path / f"a{rank}", "node0")
        agent.start(1, 1.0, rank)
        agent.close(60.0)
    history = the_history(tmp_path)
    found = {node.node_id: {each.rank for each in node.workers} for node in history.nodes}
    assert found == {"n0": {0, 1}, "n1": {2, 3}}


# --- outcomes known only to agents ------------------------------------------------------------------------------------


def test_an_interrupted_run_ends_as_its_last_node_did(tmp_path: Path) -> None:
    """That node left before there was a verdict."""
    run = RecordedRun(tmp_path)
    run.all_join(1.0)
    run.all_run(3.0)
    run.interrupt(0, 10.0)
    run.close()
    agent = RecordedAgent(tmp_path)
    agent.start(1, 1.0)
    agent.interrupt(1, 10.0)
    agent.close(10.5)
    history = the_history(tmp_path)
    assert (history.outcome, history.why) == ("cancelled", "the agent received SIGINT")
    assert history.missing == ()
    summary = summary_of([history])
    assert summary.ends == ()
    assert format_summary(summary).startswith("job: cancelled (the agent received SIGINT)\n")


def test_without_the_journals_of_its_nodes_an_interrupted_run_has_no_outcome(tmp_path: Path) -> None:
    """The missing journal is named. (H1)"""
    run = RecordedRun(tmp_path)
    run.all_join(1.0)
    run.all_run(3.0)
    run.interrupt(0, 10.0)
    run.close()
    history = the_history(tmp_path)
    assert history.outcome == ""
    assert history.missing == (
        "every node left before there was a verdict, the last one because its agent received SIGTERM; "
        "for its outcome, see journal.jsonl on node0",
    )


def test_an_interrupted_node_does_not_end_the_run(tmp_path: Path) -> None:
    """The other node continues, with an unknown outcome."""
    run = RecordedRun(tmp_path / "c", count=2, min_nodes=1)
    run.all_join(1.0)
    run.all_run(3.0)
    run.interrupt(1, 10.0)
    agent = RecordedAgent(tmp_path / "a", "node1")
    agent.start(1, 1.0, 1)
    agent.interrupt(1, 10.0)
    agent.close(10.5)
    history = the_history(tmp_path)
    assert history.outcome == ""
    assert history.missing[-1] == "for the agent on node1 the run was cancelled: the agent received SIGINT"
    run.close()


def test_the_outcome_is_taken_from_an_agent_if_the_coordinators_journal_has_none(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "c", count=2)
    run.all_join(1.0)
    run.all_run(3.0)
    verdict = Verdict(Outcome.FAILED, "no restart is left", goodput=Goodput(Spent(1, 2, 3)))
    agent = agent_of_two_generations(tmp_path / "a", "node1", 1)
    agent.step(RunEnded(verdict, 61.0), 61.0)
    agent.close(61.0)
    history = the_history(tmp_path)
    assert (history.outcome, history.why) == ("failed", "no restart is left")
    assert not [each for each in history.missing if "still going" in each]
    run.close()


def test_a_run_after_an_interrupted_one_of_the_same_name_is_another_run(tmp_path: Path) -> None:
    for number in (0, 1):
        run = RecordedRun(tmp_path / str(number), wall=WALL + 1000 * number)
        run.all_join()
        run.all_run(1.0)
        run.interrupt(0, 2.0)
        run.close()
    found = read_histories([str(tmp_path)])
    assert [each.began_at - WALL for each in found.histories] == [0.0, 1000.0]


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_a_reported_hang_lasts_until_activity_or_the_end_of_the_generation(tmp_path: Path) -> None:
    """The summary shows its duration and the location that stands out."""
    run = RecordedRun(tmp_path, count=2, on_hang="report")
    run.all_join(1.0)
    run.all_run(3.0)
    run.hang(10.0, 20.0)
    run.resume(1, 57.0)
    run.hang(70.0, 80.0)
    run.fail(0, 90.0)
    run.close()
    history = the_history(tmp_path)
    assert [(each.generation, each.since - WALL, each.until - WALL) for each in history.hangs] == [
        (1, 10.0, 57.0),
        (1, 70.0, 90.0),
    ]
    text = format_summary(summary_of([history]))
    assert (
        "  no activity for 47 s in generation 1 (no rank stands out; ranks 0, 1 on node0: at train.py:40 in step)\n"
        in text
    )
    assert "  no activity for 20 s in generation 1 (" in text


def test_a_hang_is_read_from_the_journal_of_agent_of_two_generations(tmp_path: Path) -> None:
    """Every node receives the report."""
    agent = RecordedAgent(tmp_path)
    agent.start(1, 1.0)
    report = HangReport(1, 2, 4, 10.0, "no step", (StackLocation((3,), ("train.py:12 in load",), host="node1"),))
    agent.step(HangFound(1, report), 20.0)
    agent.step(HangOver(1), 57.0)
    agent.close(58.0)
    (hang,) = the_history(tmp_path).hangs
    assert (hang.generation, hang.since - WALL, hang.until - WALL) == (1, 10.0, 57.0)
    assert hang.who == "rank 3 on node1: at train.py:12 in load"


# --- several runs, several coordinators -------------------------------------------------------------------------------


def test_two_runs_of_the_same_name_have_two_histories(tmp_path: Path) -> None:
    for number in (0, 1):
        run = RecordedRun(tmp_path / str(number), wall=WALL + 1000 * number)
        run.all_join()
        run.all_run(1.0)
        run.succeed(2.0)
        run.close()
    found = read_histories([str(tmp_path)])
    assert [each.began_at - WALL for each in found.histories] == [0.0, 1000.0]


def test_journals_of_two_coordinators_are_one_history(tmp_path: Path) -> None:
    """The time in between is not counted, which is named."""
    first = RecordedRun(tmp_path / "first", count=2, min_nodes=1)
    first.all_join(1.0)
    first.all_run(3.0)
    first.fail(1, 10.0)
    first.all_run(13.0)  # and its host dies
    second = RecordedRun(tmp_path / "second", count=2, min_nodes=1, wall=WALL + 20)
    second.step(EarlierCoordinatorGone("n9"))
    second.all_join(1.0)
    second.all_run(2.0)
    second.succeed(30.0)
    second.close()
    history = the_history(tmp_path)
    assert (history.outcome, history.began_at, history.ended_at) == ("succeeded", WALL + 1, WALL + 50)
    assert [each.number for each in history.generations] == [1, 2]
    assert {node.name for node in history.nodes} == {"node0", "node1"}
    assert "started again without a record" in history.missing[-1]
    first.close()


def test_an_invalid_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    run_of_two_nodes(tmp_path / "good").close()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "coordinator.jsonl").write_text("hello\n")
    (tmp_path / "bad" / "journal.jsonl").write_bytes(b"\xff\xfe")
    old = (tmp_path / "good" / "coordinator.jsonl").read_text().replace('"format":3', '"format":2', 1)
    (tmp_path / "bad" / "coordinator-1.jsonl").write_text(old)
    found = read_histories([str(tmp_path), str(tmp_path / "nowhere.jsonl")])
    assert len(found.histories) == 1
    assert len(found.troubles) == 4
    assert sum(each.endswith("; the journal is skipped") for each in found.troubles) == 3
    assert any("has format 2" in each for each in found.troubles)
    assert any(f"no file or folder '{tmp_path}/nowhere.jsonl'" in each for each in found.troubles)


def test_a_folder_without_journals_is_named(tmp_path: Path) -> None:
    assert find_journals(str(tmp_path)) == (
        [],
        f"no journal (coordinator.jsonl, journal.jsonl) below {str(tmp_path)!r}",
    )


def test_a_journal_given_twice_is_read_once(tmp_path: Path) -> None:
    run_of_two_nodes(tmp_path).close()
    assert len(the_history(tmp_path, tmp_path / "coordinator.jsonl").generations) == 3
