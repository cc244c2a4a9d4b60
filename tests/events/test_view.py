"""The event view, driven by the real agent machine: the events of whole histories, and invariants."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from core.random_node import RandomNode
from tenax._core import events as agent_events
from tenax._core.agent import AgentMachine
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.events import Event, EventSource
from tenax.events._view import EventView

SETTINGS = AgentSettings("run-1", "trainer", 2, 3, grace_s=5.0, examine_s=2.0)
WALL_OFFSET = 1_700_000_000.0
SIGTERM = 15
PART = {"group_rank": 1, "group_world_size": 3, "first_global_rank": 2, "world_size": 6}
FIRST = Assignment(1, **PART, first_role_rank=4, role_world_size=8, why="all 3 nodes are here")  # type: ignore[arg-type]
SECOND = Assignment(2, **PART, restarts_used=1, why="rank 2 failed; restart 1 of 3")  # type: ignore[arg-type]
GOOD = Verdict(Outcome.SUCCEEDED, "all workers succeeded")
BAD = Verdict(
    Outcome.FAILED, "rank 2 failed and no restart is left", failures=(Failure(1, 0, 2, 100, 1, 3.0),), restarts_used=3
)


def events_of(steps: Iterable[tuple[float, AnyEvent]]) -> list[Event]:
    """Return the events of a view for a history."""
    machine = AgentMachine(SETTINGS)
    view = EventView(SETTINGS, "train.py", "host-a", "tcp", WALL_OFFSET)
    found = []
    for at, event in steps:
        commands = machine.step(event, at)
        found += view.take(at, event, commands, machine.state)
    return found


def table(events: list[Event]) -> list[tuple[object, ...]]:
    """Return one row each: seconds since the start, source, state, rank, exit code, generation, duration."""
    rows = []
    for event in events:
        nested = json.loads(str(event.metadata["metadata"]))
        assert event.name == f"torchelastic.worker.status.{event.metadata['state']}"
        rows.append(
            (
                event.timestamp / 1000 - WALL_OFFSET,
                event.source.value.lower(),
                event.metadata["state"],
                event.metadata["global_rank"],
                nested.get("exit_code"),
                nested["generation"],
                event.metadata["duration_ms"],
            )
        )
    return rows


JOINED = [(0.0, agent_events.RunRequested()), (1.5, agent_events.GenerationFormed(FIRST))]
STARTED = [*JOINED, (1.625, agent_events.WorkerStarted(1, 0, 100)), (1.75, agent_events.WorkerStarted(1, 1, 101))]
BEGINNING = [
    (1.5, "agent", "RENDEZVOUS", None, None, 1, 1500.0),
    (1.5, "agent", "ASSIGN_WORKER_RANKS", None, None, 1, 0.0),
    (1.625, "worker", "START", 2, None, 1, 125.0),
    (1.75, "worker", "START", 3, None, 1, 250.0),
]
ALL_GOOD = [
    *STARTED,
    (4.0, agent_events.WorkerExited(1, 1, 0)),
    (5.0, agent_events.WorkerExited(1, 0, 0)),
    (5.25, agent_events.NodeCleared(1)),
    (6.0, agent_events.RunEnded(GOOD, 6.0)),
]


def test_a_run_that_succeeds() -> None:
    assert table(events_of(ALL_GOOD)) == [
        *BEGINNING,
        (4.0, "worker", "SUCCEEDED", 3, 0, 1, 2250.0),
        (5.0, "worker", "SUCCEEDED", 2, 0, 1, 3375.0),
        (6.0, "agent", "SUCCEEDED", None, None, 1, 6000.0),
    ]


def test_no_end_is_dated_before_the_start() -> None:
    """A busy agent receives both late: the start has the time of its receipt, the exit that of the kernel."""
    steps = [*STARTED, (4.0, agent_events.WorkerExited(1, 1, 0, ended_at=1.7))]
    assert table(events_of(steps))[-1] == (1.75, "worker", "SUCCEEDED", 3, 0, 1, 0.0)


def test_the_metadata_of_an_agents_event() -> None:
    """TorchElastic's keys in its order."""
    rendezvous, *_, end = events_of(ALL_GOOD)
    assert rendezvous.source is EventSource.AGENT
    assert list(rendezvous.metadata.items()) == [
        ("run_id", "run-1"),
        ("global_rank", None),
        ("group_rank", 1),
        ("worker_id", None),
        ("role", "trainer"),
        ("hostname", "host-a"),
        ("state", "RENDEZVOUS"),
        ("total_run_time", 1),
        ("rdzv_backend", "tcp"),
        ("raw_error", None),
        (
            "metadata",
            '{"group_world_size": 3, "entry_point": "train.py", "generation": 1, "why": "all 3 nodes are here"}',
        ),
        ("agent_restarts", 0),
        ("duration_ms", 1500.0),
    ]
    assert json.loads(str(end.metadata["metadata"])) == {
        "group_world_size": 3,
        "entry_point": "train.py",
        "generation": 1,
        "outcome": "succeeded",
        "why": "all workers succeeded",
        "signal": None,
    }


def test_the_metadata_of_a_workers_event() -> None:
    """The nested values are plain; in TorchElastic five of them are lists of one."""
    event = events_of(ALL_GOOD)[4]
    assert event.source is EventSource.WORKER
    assert (event.metadata["global_rank"], event.metadata["worker_id"]) == (3, "101")
    assert json.loads(str(event.metadata["metadata"])) == {
        "group_world_size": 3,
        "entry_point": "train.py",
        "local_rank": 1,
        "role_rank": 5,
        "role_world_size": 8,
        "exit_code": 0,
        "worker_pid": 101,
        "generation": 1,
    }


FAILED_ONCE = [
    *STARTED,
    (3.0, agent_events.WorkerExited(1, 0, 1)),
    (3.25, agent_events.FailureExamined(1, 0, Evidence("E", "E: boom", "Traceback …", raised_at=2.5))),
    (3.5, agent_events.WorkerExited(1, 1, -SIGTERM)),
    (3.75, agent_events.NodeCleared(1)),
    (4.0, agent_events.GenerationEnded(1, "rank 2 failed")),
    (5.0, agent_events.GenerationFormed(SECOND)),
    (5.5, agent_events.WorkerStarted(2, 0, 200)),
    (5.5, agent_events.WorkerStarted(2, 1, 201)),
]
AFTER_ONE_FAILURE = [
    *BEGINNING,
    (3.0, "worker", "FAILED", 2, 1, 1, 1375.0),
    (3.5, "worker", "TERMINATED", 3, -SIGTERM, 1, 1750.0),
    (5.0, "agent", "RENDEZVOUS", None, None, 2, 1250.0),
    (5.0, "agent", "ASSIGN_WORKER_RANKS", None, None, 2, 0.0),
    (5.5, "worker", "START", 2, None, 2, 500.0),
    (5.5, "worker", "START", 3, None, 2, 500.0),
]


def test_a_failure_that_is_restarted_has_an_event() -> None:
    """TorchElastic has none."""
    assert table(events_of(FAILED_ONCE)) == AFTER_ONE_FAILURE


def test_a_failure_contains_its_error_file() -> None:
    """Its time is that of the worker's exit (V4), although it is sent when the error file was read."""
    events = events_of(FAILED_ONCE)
    failed = events[4]
    assert failed.timestamp == (WALL_OFFSET + 3.0) * 1000
    assert json.loads(str(failed.metadata["raw_error"])) == {
        "message": {"message": "E: boom", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000002"}}
    }
    terminated = events[5]
    assert json.loads(str(terminated.metadata["metadata"]))["why"] == "rank 2 failed"
    assert events[6].metadata["agent_restarts"] == 1


@pytest.mark.parametrize(
    ("exit_code", "evidence", "message"),
    [
        (7, Evidence(), "it exited with code 7"),
        (-9, Evidence(), "it was killed by signal 9"),
        (-9, Evidence(out_of_memory="the kernel ended it: out of memory"), "the kernel ended it: out of memory"),
    ],
)
def test_a_failure_without_an_error_file_has_a_reason(exit_code: int, evidence: Evidence, message: str) -> None:
    steps = [
        *STARTED,
        (3.0, agent_events.WorkerExited(1, 0, exit_code)),
        (3.5, agent_events.FailureExamined(1, 0, evidence)),
    ]
    error = events_of(steps)[-1].metadata["raw_error"]
    assert json.loads(str(error))["message"]["message"] == message


def test_missing_evidence_is_not_waited_for() -> None:
    steps = [
        *STARTED,
        (3.0, agent_events.WorkerExited(1, 0, 1)),
        (3.5, agent_events.WorkerExited(1, 1, -SIGTERM)),
        (3.75, agent_events.NodeCleared(1)),
        (5.0, agent_events.Tick()),
    ]
    assert table(events_of(steps[:-1])) == [*BEGINNING, (3.5, "worker", "TERMINATED", 3, -SIGTERM, 1, 1750.0)]
    assert table(events_of(steps))[-1] == (3.0, "worker", "FAILED", 2, 1, 1, 1375.0)


def test_a_run_that_fails() -> None:
    """The agent's own end is FAILED too; in TorchElastic it is SUCCEEDED if the launcher itself worked."""
    events = events_of([*FAILED_ONCE[:8], (3.875, agent_events.RunEnded(BAD, 3.875))])
    assert table(events) == [
        *AFTER_ONE_FAILURE[:6],
        (3.875, "agent", "FAILED", None, None, 1, 3875.0),
    ]
    assert events[-1].metadata["raw_error"] == BAD.why
    assert events[-1].metadata["agent_restarts"] == 3


def test_a_worker_that_cannot_be_started() -> None:
    steps = [
        *JOINED,
        (1.625, agent_events.WorkerStarted(1, 0, 100)),
        (2.0, agent_events.WorkerStartFailed(1, 1, "no such file", 127)),
        (2.25, agent_events.FailureExamined(1, 1, Evidence())),
        (2.5, agent_events.WorkerExited(1, 0, 0)),
    ]
    events = events_of(steps)
    assert table(events) == [
        *BEGINNING[:3],
        (2.0, "worker", "FAILED", 3, 127, 1, None),
        (2.5, "worker", "TERMINATED", 2, 0, 1, 875.0),
    ]
    assert events[-2].metadata["worker_id"] is None
    assert "could not be started: no such file" in str(events[-2].metadata["raw_error"])


def test_a_membership_change_is_no_failure() -> None:
    steps = [
        *STARTED,
        (3.0, agent_events.GenerationEnded(1, "host-b joined")),
        (3.5, agent_events.WorkerExited(1, 0, 0)),
        (3.5, agent_events.WorkerExited(1, 1, -SIGTERM)),
    ]
    events = events_of(steps)
    assert table(events) == [
        *BEGINNING,
        (3.5, "worker", "TERMINATED", 2, 0, 1, 1875.0),
        (3.5, "worker", "TERMINATED", 3, -SIGTERM, 1, 1750.0),
    ]
    assert {json.loads(str(event.metadata["metadata"]))["why"] for event in events[4:]} == {"host-b joined"}


def test_a_run_that_is_cancelled() -> None:
    steps = [
        *STARTED,
        (3.0, agent_events.SignalReceived(SIGTERM)),
        (3.5, agent_events.WorkerExited(1, 0, -SIGTERM)),
        (3.5, agent_events.WorkerExited(1, 1, -SIGTERM)),
        (4.0, agent_events.NodeCleared(1)),
    ]
    end = events_of(steps)[-1]
    assert table([end]) == [(4.0, "agent", "FAILED", None, None, 1, 4000.0)]
    nested = json.loads(str(end.metadata["metadata"]))
    assert (nested["outcome"], nested["signal"]) == ("cancelled", SIGTERM)


def test_a_node_that_is_rejected() -> None:
    steps = [(0.0, agent_events.RunRequested()), (2.0, agent_events.JoinRefused("the token is wrong"))]
    events = events_of(steps)
    assert table(events) == [
        (2.0, "agent", "RENDEZVOUS", None, None, 0, 2000.0),
        (2.0, "agent", "FAILED", None, None, 0, 2000.0),
    ]
    assert {event.metadata["raw_error"] for event in events} == {"the token is wrong"}
    assert events[0].metadata["group_rank"] is None


def test_a_node_that_is_cancelled_while_it_waits() -> None:
    events = events_of([*FAILED_ONCE[:8], (4.5, agent_events.SignalReceived(SIGTERM))])
    assert table(events)[-2:] == [
        (4.5, "agent", "RENDEZVOUS", None, None, 1, 750.0),
        (4.5, "agent", "FAILED", None, None, 1, 4500.0),
    ]


def test_a_spare_that_was_not_needed() -> None:
    events = events_of([(0.0, agent_events.RunRequested()), (9.0, agent_events.RunEnded(GOOD, 9.0))])
    assert table(events) == [
        (9.0, "agent", "RENDEZVOUS", None, None, 0, 9000.0),
        (9.0, "agent", "SUCCEEDED", None, None, 0, 9000.0),
    ]
    assert events[0].metadata["raw_error"] is None


def test_a_worker_that_survives_sigkill_is_unhealthy() -> None:
    steps = [
        *STARTED,
        (3.0, agent_events.SignalReceived(SIGTERM, 1.0)),
        (3.5, agent_events.WorkerExited(1, 0, -SIGTERM)),
        (4.0, agent_events.Tick()),
        (14.0, agent_events.Tick()),
    ]
    assert table(events_of(steps))[-3:] == [
        (3.5, "worker", "TERMINATED", 2, -SIGTERM, 1, 1875.0),
        (14.0, "worker", "UNHEALTHY", 3, None, 1, 12250.0),
        (14.0, "agent", "FAILED", None, None, 1, 14000.0),
    ]


def test_late_and_duplicate_events_have_no_effect() -> None:
    doubled = [(at, event) for at, event in ALL_GOOD for _ in range(2)]
    late = [
        (9.0, agent_events.WorkerStarted(1, 0, 999)),
        (9.0, agent_events.WorkerExited(0, 1, 1)),
        (9.0, agent_events.RunRequested()),
    ]
    assert events_of([*doubled, *late]) == events_of(ALL_GOOD)


def test_the_watchdog_has_events() -> None:
    """V6, with TorchElastic's names and keys; without a watchdog there are none."""
    late = agent_events.ScopeExpired(1, 1, 101, "step", 5.0, 1_700_000_005.0, signal=9)
    steps = [
        *STARTED,
        (7.0, late),
        (8.0, agent_events.StacksRefused(1, 1, "no stacks")),
        (9.0, agent_events.KeeperLost("it died")),
    ]
    machine = AgentMachine(SETTINGS)
    view = EventView(SETTINGS, "train.py", "host-a", "tcp", WALL_OFFSET, has_watchdog=True)
    found = [each for at, event in steps for each in view.take(at, event, machine.step(event, at), machine.state)]
    of_watchdog = [each for each in found if each.metadata["state"] == "RUNNING"]
    assert [each.name for each in of_watchdog] == [
        "watchdog started",
        "timer expired",
        "kill worker process",
        "watchdog stopped",
    ]
    assert (found[0], found[-2]) == (of_watchdog[0], of_watchdog[-1])
    assert {each.source for each in of_watchdog} == {EventSource.AGENT}
    nested = json.loads(str(of_watchdog[2].metadata["metadata"]))
    keys = ("watchdog_event", "worker_pid", "scope_id", "expiration_time", "signal")
    assert [nested[key] for key in keys] == ["kill worker process", 101, "step", 1_700_000_005.0, 9]


def test_a_failed_hanging_worker_has_its_stacks() -> None:
    """In the field of the traceback of an exception."""
    late = agent_events.ScopeExpired(1, 1, 101, "step", 5.0, 1_700_000_005.0, signal=9)
    found = EventView(SETTINGS, "train.py", "host-a", "tcp", WALL_OFFSET)
    machine = AgentMachine(SETTINGS)
    steps = [
        *STARTED,
        (7.0, late),
        (8.0, agent_events.Tick()),
        (8.1, agent_events.WorkerExited(1, 1, -9)),
        (8.2, agent_events.FailureExamined(1, 1, Evidence(stacks="line 3 in step"))),
    ]
    reported = [each for at, event in steps for each in found.take(at, event, machine.step(event, at), machine.state)]
    (failed,) = [each for each in reported if each.metadata["state"] == "FAILED"]
    error = json.loads(str(failed.metadata["raw_error"]))["message"]
    assert error["extraInfo"]["py_callstack"] == "line 3 in step"
    assert error["message"] == "did not leave the scope 'step' within 5 s"


ENDS = {"SUCCEEDED", "FAILED", "TERMINATED", "UNHEALTHY"}


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_the_invariants_hold_in_random_histories(invalid_events: bool) -> None:
    """V1 to V5, no history raises, and every event can be deserialized."""
    seen = set()
    for seed in range(200):
        node = RandomNode(random.Random(seed), invalid_events=invalid_events)
        node.run()
        machine = AgentMachine(node.settings)
        view = EventView(node.settings, "train.py", "host-a", "tcp", WALL_OFFSET)
        open_workers: dict[object, int] = {}
        ended: set[tuple[int, object]] = set()
        is_over = False
        for event, now, _ in node.steps:
            commands = machine.step(event, now)
            for found in view.take(now, event, commands, machine.state):
                assert Event.deserialize(found.serialize()) == found
                assert not is_over, f"seed {seed}: {found} after the end"
                if found.metadata["state"] == "RUNNING":  # of the watchdog; V6 has its own test
                    continue
                state, rank = found.metadata["state"], found.metadata["global_rank"]
                generation = json.loads(str(found.metadata["metadata"]))["generation"]
                seen.add((found.source, state))
                if found.source is EventSource.AGENT:
                    assert not open_workers, f"seed {seed}: {state} while {open_workers} have no end"
                    is_over = state in ENDS
                elif state == "START":
                    assert rank not in open_workers
                    open_workers[rank] = generation
                else:
                    assert state in ENDS
                    assert (generation, rank) not in ended, f"seed {seed}: rank {rank} ends twice"
                    ended.add((generation, rank))
                    if rank in open_workers:
                        assert open_workers.pop(rank) == generation
                    else:  # V3: its start was not reported
                        assert found.metadata["worker_id"] is None
                duration = found.metadata["duration_ms"]
                assert duration is None or (isinstance(duration, float) and duration >= 0)
        assert is_over
    agent = {(EventSource.AGENT, state) for state in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS", "SUCCEEDED", "FAILED")}
    worker = {(EventSource.WORKER, state) for state in (*ENDS, "START")}
    assert seen == agent | worker
