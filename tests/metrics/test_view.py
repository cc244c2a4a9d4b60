"""The view: the metrics of the real agent machine, as tables and in random histories."""

from __future__ import annotations

import random
import re

import pytest

from core.random_node import RandomNode
from core.test_agent_transitions import SITUATIONS, versions
from tenax._core import events
from tenax._core.agent import SIGTERM, AgentMachine
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax._view.cause import KINDS
from tenax.metrics._reading import CALLS, DURATION, MEASURED, STATES, read
from tenax.metrics._view import MetricView
from tenax.metrics.api import MetricData

WALL = 1_700_000_000.0


def watch(history: list[tuple[float, AnyEvent]], workers: int = 2, max_restarts: int = 3) -> dict[float, list[str]]:
    """Return the metrics of each step that has some, by time."""
    settings = AgentSettings("run", "trainer", workers, max_restarts)
    machine, view = AgentMachine(settings), MetricView(settings, WALL)
    emitted: dict[float, list[str]] = {}
    for at, event in history:
        for data in view.take(at, event, machine.step(event, at), machine.state):
            assert data.timestamp == WALL + at
            emitted.setdefault(at, []).append(f"{data.group_name}: {data.name}={data.value}")
    return emitted


def table(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def formed(generation: int, restarts_used: int = 0) -> events.GenerationFormed:
    return events.GenerationFormed(
        Assignment(generation, group_world_size=3, world_size=6, restarts_used=restarts_used)
    )


def up(generation: int, at: float, restarts_used: int = 0) -> list[tuple[float, AnyEvent]]:
    """Form a generation; two workers run a quarter of a second later."""
    return [
        (at, formed(generation, restarts_used)),
        (at + 0.125, events.WorkerStarted(generation, 0, 100)),
        (at + 0.25, events.WorkerStarted(generation, 1, 101)),
    ]


def succeeded(generation: int, at: float) -> list[tuple[float, AnyEvent]]:
    return [
        (at, events.WorkerExited(generation, 0, 0)),
        (at, events.WorkerExited(generation, 1, 0)),
        (at + 0.5, events.NodeCleared(generation)),
    ]


def failed(generation: int, at: float) -> list[tuple[float, AnyEvent]]:
    """Worker 1 raises, worker 0 is stopped, half a second later the node is cleared."""
    return [
        (at, events.WorkerExited(generation, 1, 1)),
        (at + 0.25, events.FailureExamined(generation, 1, Evidence("RuntimeError", "RuntimeError: boom"))),
        (at + 0.25, events.WorkerExited(generation, 0, -SIGTERM)),
        (at + 0.5, events.NodeCleared(generation)),
    ]


RUN: list[tuple[float, AnyEvent]] = [(0.0, events.RunRequested())]


def test_the_metrics_of_a_run_that_succeeds() -> None:
    """One generation, and every worker succeeds."""
    over = events.RunEnded(Verdict(Outcome.SUCCEEDED, "all succeeded"), 0.0)
    emitted = watch([*RUN, *up(1, 2.0), *succeeded(1, 12.0), (13.0, over)])
    assert list(emitted) == [0.0, 2.0, 2.25, 12.0, 13.0]
    assert emitted[0.0] == ["tenax: running=0"]  # an average over time must count the time before the first generation
    assert emitted[2.0] == table("""
        tenax: forming_ms=2000
        torchelastic: SimpleElasticAgent._rendezvous.success=1
        torchelastic: SimpleElasticAgent._rendezvous.duration.ms=2000
        torchelastic: SimpleElasticAgent._assign_worker_ranks.success=1
        torchelastic: SimpleElasticAgent._assign_worker_ranks.duration.ms=0
        tenax: generation=1
        tenax: world_size=6
        tenax: nodes=3
        tenax: restarts_used=0
        torchelastic: workers.trainer.remaining_restarts=3
        torchelastic: workers.trainer.healthy=1
    """)
    assert emitted[2.25] == table("""
        torchelastic: LocalElasticAgent._start_workers.success=1
        torchelastic: LocalElasticAgent._start_workers.duration.ms=250
        torchelastic: SimpleElasticAgent._initialize_workers.success=1
        torchelastic: SimpleElasticAgent._initialize_workers.duration.ms=2250
        tenax: running=1
    """)
    assert emitted[12.0] == table("""
        torchelastic: LocalElasticAgent._monitor_workers.success=1
        torchelastic: LocalElasticAgent._monitor_workers.duration.ms=10000
        tenax: running_s=10.0
        tenax: running=0
        torchelastic: workers.trainer.healthy=0
        torchelastic: workers.trainer.succeeded=1
    """)
    assert emitted[13.0] == table("""
        torchelastic: workers.trainer.flakiness=0
        torchelastic: workers.trainer.run_total=1
        torchelastic: workers.trainer.run_success_with_retries=0
        torchelastic: workers.trainer.run_success_no_retries=1
        torchelastic: workers.trainer.run_failed_with_retries=0
        torchelastic: workers.trainer.run_failed_no_retries=0
        torchelastic: SimpleElasticAgent.run.success=1
        torchelastic: SimpleElasticAgent.run.duration.ms=13000
        tenax: run_ended.succeeded=1
    """)


def test_the_metrics_of_a_failure_and_a_restart() -> None:
    """How long the recovery took, what it cost, how the worker failed."""
    emitted = watch([*RUN, *up(1, 2.0), *failed(1, 12.0), *up(2, 13.0, restarts_used=1)])
    assert emitted[12.0] == table("""
        torchelastic: LocalElasticAgent._monitor_workers.success=1
        torchelastic: LocalElasticAgent._monitor_workers.duration.ms=10000
        tenax: running_s=10.0
        tenax: running=0
        torchelastic: workers.trainer.healthy=0
        torchelastic: workers.trainer.failed=1
    """)
    assert emitted[12.5] == table("""
        torchelastic: LocalElasticAgent._stop_workers.success=1
        torchelastic: LocalElasticAgent._stop_workers.duration.ms=500
    """)
    assert emitted[13.0][:2] == ["tenax: worker_failures.exception=1", "tenax: forming_ms=500"]
    assert emitted[13.0][-4:] == table("""
        tenax: restarts_used=1
        torchelastic: workers.trainer.remaining_restarts=2
        torchelastic: workers.trainer.failed=0
        torchelastic: workers.trainer.healthy=1
    """)
    assert emitted[13.25] == table("""
        torchelastic: LocalElasticAgent._start_workers.success=1
        torchelastic: LocalElasticAgent._start_workers.duration.ms=250
        torchelastic: SimpleElasticAgent._initialize_workers.success=1
        torchelastic: SimpleElasticAgent._initialize_workers.duration.ms=750
        torchelastic: SimpleElasticAgent._restart_workers.success=1
        torchelastic: SimpleElasticAgent._restart_workers.duration.ms=1250
        tenax: running=1
        tenax: recovery_ms=1250
    """)


@pytest.mark.parametrize(("used", "flakiness"), [(0, 0), (1, 25), (2, 50), (3, 75)])
def test_flakiness_is_the_share_of_the_budget_that_was_used(used: int, flakiness: int) -> None:
    """As in torch: for a success with 3 restarts allowed, never 100."""
    over = events.RunEnded(Verdict(Outcome.SUCCEEDED, "all succeeded", restarts_used=used), 0.0)
    emitted = watch([*RUN, *up(1, 2.0, used), *succeeded(1, 12.0), (13.0, over)], max_restarts=3)
    assert f"torchelastic: workers.trainer.flakiness={flakiness}" in emitted[13.0]
    retried = int(used > 0)
    assert f"torchelastic: workers.trainer.run_success_with_retries={retried}" in emitted[13.0]
    assert f"torchelastic: workers.trainer.run_success_no_retries={1 - retried}" in emitted[13.0]


def test_the_metrics_of_a_run_that_fails() -> None:
    """The flakiness is 100, and SimpleElasticAgent.run is a success all the same, as in torch."""
    verdict = Verdict(Outcome.FAILED, "no restart is left", failures=(Failure(1, 1, 1, 101, 1, 12.0),), restarts_used=1)
    emitted = watch([*RUN, *up(1, 2.0), *failed(1, 12.0), (13.0, events.RunEnded(verdict, 13.0))], max_restarts=1)
    assert emitted[13.0] == table("""
        tenax: worker_failures.exception=1
        tenax: restarts_used=1
        torchelastic: workers.trainer.remaining_restarts=0
        torchelastic: workers.trainer.flakiness=100
        torchelastic: workers.trainer.run_total=1
        torchelastic: workers.trainer.run_success_with_retries=0
        torchelastic: workers.trainer.run_success_no_retries=0
        torchelastic: workers.trainer.run_failed_with_retries=1
        torchelastic: workers.trainer.run_failed_no_retries=0
        torchelastic: SimpleElasticAgent._initialize_workers.failure=1
        torchelastic: SimpleElasticAgent._initialize_workers.duration.ms=500
        torchelastic: SimpleElasticAgent._rendezvous.failure=1
        torchelastic: SimpleElasticAgent._rendezvous.duration.ms=500
        torchelastic: SimpleElasticAgent._restart_workers.failure=1
        torchelastic: SimpleElasticAgent._restart_workers.duration.ms=1000
        torchelastic: SimpleElasticAgent.run.success=1
        torchelastic: SimpleElasticAgent.run.duration.ms=13000
        tenax: run_ended.failed=1
    """)


def test_a_membership_change_is_no_recovery() -> None:
    """Its time without workers has its own metric."""
    ended = events.GenerationEnded(1, "c joined", is_uncharged=True)
    history = [*RUN, *up(1, 2.0), (12.0, ended), *((at, event) for at, event in failed(1, 12.0) if at > 12.0)]
    history.insert(-1, (12.25, events.WorkerExited(1, 1, -SIGTERM)))
    emitted = watch([*history, *up(2, 13.0)])
    assert "torchelastic: workers.trainer.stopped=1" in emitted[12.0]
    assert "tenax: membership_change_ms=1250" in emitted[13.25]
    assert not [line for lines in emitted.values() for line in lines if "recovery" in line or "worker_failures" in line]


def test_a_recovery_lasts_until_workers_run() -> None:
    """An attempt that could not start does not end it."""
    attempt: list[tuple[float, AnyEvent]] = [
        (13.0, formed(2, 1)),
        (13.0, events.WorkerStartFailed(2, 0, "no more processes")),
        (13.0, events.WorkerStartFailed(2, 1, "no more processes")),
        (13.25, events.FailureExamined(2, 0, Evidence())),
        (13.25, events.FailureExamined(2, 1, Evidence())),
        (13.5, events.NodeCleared(2)),
    ]
    emitted = watch([*RUN, *up(1, 2.0), *failed(1, 12.0), *attempt, *up(3, 14.0, restarts_used=2)])
    assert "torchelastic: LocalElasticAgent._start_workers.failure=1" in emitted[13.0]
    assert "torchelastic: SimpleElasticAgent._restart_workers.failure=1" in emitted[13.0]
    assert "tenax: running=1" not in emitted[13.0]
    assert emitted[14.0].count("tenax: worker_failures.not_started=1") == 2
    assert "tenax: recovery_ms=2250" in emitted[14.25]


def test_a_cancelled_run_has_no_result() -> None:
    """As in torch, where it is an exception: SimpleElasticAgent.run failed, without metrics of the result."""
    emitted = watch([*RUN, (1.0, events.SignalReceived(SIGTERM))])
    assert emitted[1.0] == table("""
        torchelastic: SimpleElasticAgent._initialize_workers.failure=1
        torchelastic: SimpleElasticAgent._initialize_workers.duration.ms=1000
        torchelastic: SimpleElasticAgent._rendezvous.failure=1
        torchelastic: SimpleElasticAgent._rendezvous.duration.ms=1000
        torchelastic: SimpleElasticAgent.run.failure=1
        torchelastic: SimpleElasticAgent.run.duration.ms=1000
        tenax: run_ended.cancelled=1
    """)


def test_the_metrics_of_a_lost_keeper() -> None:
    """The state of the workers is unknown, and monitoring them failed."""
    emitted = watch([*RUN, *up(1, 2.0), (12.0, events.KeeperLost("it was killed"))])
    assert emitted[12.0] == table("""
        torchelastic: LocalElasticAgent._monitor_workers.failure=1
        torchelastic: LocalElasticAgent._monitor_workers.duration.ms=10000
        tenax: running_s=10.0
        tenax: running=0
        torchelastic: workers.trainer.healthy=0
        torchelastic: workers.trainer.unknown=1
        torchelastic: SimpleElasticAgent.run.failure=1
        torchelastic: SimpleElasticAgent.run.duration.ms=12000
        tenax: run_ended.broken=1
    """)


def test_failures_of_the_last_generation_are_counted_as_diagnosed() -> None:
    """The verdict's first cause is a worker that was stopped; the failed one on this node only followed."""
    waited = Failure(1, 1, 1, 9, -15, 12.0, "stopped responding", Evidence(cause="stopped_responding"), host="a")
    victim = Failure(1, 0, 0, 9, 1, 12.0, evidence=Evidence(cause="collective_timeout", is_consequence=True), host="a")
    other = Failure(1, 0, 7, 9, 1, 12.0, evidence=Evidence(cause="disk_full"), host="b")
    verdict = Verdict(outcome=Outcome.FAILED, why="failed", generation=1, failures=(waited, victim, other))
    emitted = watch([*RUN, *up(1, 2.0), *failed(1, 12.0), (13.0, events.RunEnded(verdict, 13.0))])
    counted = [line for lines in emitted.values() for line in lines if "worker_failures" in line]
    assert counted == ["tenax: worker_failures.stopped_responding=1"]


# --- any history ------------------------------------------------------------------------------------------------------

_PARTS = {
    "{role}": ("trainer",),
    "{state}": STATES,
    "{kind}": [*KINDS],
    "{outcome}": [it.value for it in Outcome],
}


def rows_of(group: str, name: str) -> list[str]:
    """Return the names in the table that this name is an instance of."""
    found = []
    for row in MEASURED:
        pattern = re.escape(row.name)
        for part, values in _PARTS.items():
            pattern = pattern.replace(re.escape(part), f"(?:{'|'.join(values)})")
        if row.group == group and re.fullmatch(pattern, name):
            found.append(row.name)
    return found


def play(seed: int, *, invalid_events: bool) -> list[tuple[str, str, float]]:
    """Return all metrics of one random history, checked on the way."""
    node = RandomNode(random.Random(seed), invalid_events=invalid_events)
    node.run()
    machine, view = AgentMachine(node.settings), MetricView(node.settings, WALL)
    emitted = []
    for event, now, commands in node.steps:
        assert machine.step(event, now) == commands
        for data in view.take(now, event, commands, machine.state):
            assert data.timestamp == WALL + now
            emitted.append((data.group_name, data.name, data.value))
    return emitted


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_the_invariants_hold_in_any_history(invalid_events: bool) -> None:
    """V1-V3: no exception, no negative number, one end for each span, nothing twice at the end; all names are known."""
    seen = set()
    for seed in range(300):
        emitted = play(seed, invalid_events=invalid_events)
        names = [name for _, name, _ in emitted]
        assert all(value >= 0 for _, _, value in emitted), f"seed {seed}"
        assert names.count("SimpleElasticAgent.run.duration.ms") == 1, f"seed {seed}"
        assert names[-1].startswith("run_ended."), f"seed {seed}"
        for call in CALLS:
            ends = names.count(f"{call}.success") + names.count(f"{call}.failure")
            assert ends == names.count(f"{call}.duration.ms"), f"seed {seed}: {call}"
        generations = names.count("generation")
        for call in ("LocalElasticAgent._start_workers", "LocalElasticAgent._monitor_workers"):
            assert names.count(f"{call}.duration.ms") == generations, f"seed {seed}: {call}"
        assert names.count("running_s") == generations, f"seed {seed}"
        seen |= {(group, name) for group, name, _ in emitted}
    rows = {name: rows_of(*name) for name in seen}
    assert [name for name, found in rows.items() if len(found) != 1] == []
    if not invalid_events:
        never = {
            "SimpleElasticAgent._assign_worker_ranks.failure",  # it begins and ends in the same step
            "membership_change_ms",  # these histories have no membership changes
        }
        assert {row.name for row in MEASURED} - {found[0] for found in rows.values()} == never


def test_any_sequence_of_events_is_accepted() -> None:
    """However absurd the events and their order, the view does not raise, and no number is negative."""
    kinds = AnyEvent.__args__
    inputs = {kind: versions(kind) for kind in kinds}
    for seed in range(250):
        dice = random.Random(seed)
        situation = dice.choice(list(SITUATIONS))
        machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
        view = MetricView(machine.state.settings, WALL)
        at = 0.0
        for event in [*SITUATIONS[situation][1], *(dice.choice(inputs[dice.choice(kinds)]) for _ in range(30))]:
            at += dice.choice((0.0, 0.1, 50.0))
            for data in view.take(at, event, machine.step(event, at), machine.state):
                assert data.value >= 0, (seed, situation, event, data)


def test_there_are_no_metrics_after_the_verdict() -> None:
    """V3."""
    emitted = watch(
        [*RUN, (1.0, events.SignalReceived(SIGTERM)), (2.0, events.SignalReceived(SIGTERM)), (3.0, formed(1))]
    )
    assert list(emitted) == [0.0, 1.0]


def test_the_table_has_the_right_kinds() -> None:
    """Handlers read each name as the kind in the table."""
    for row in MEASURED:
        reading = read(MetricData(0.0, row.group, row.name, 1000))
        assert reading.kind == row.kind, row
        assert (reading.value == 1.0) is (row.kind == DURATION), row
