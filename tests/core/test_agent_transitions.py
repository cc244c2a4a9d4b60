"""The agent machine handles every event in every phase."""

from __future__ import annotations

import itertools

import pytest

from tenax._core import events
from tenax._core.agent import SIGINT, SIGTERM, AgentMachine, Phase, Rung
from tenax._core.commands import AnyCommand, ClearNode
from tenax._core.events import AnyEvent
from tenax._core.messages import HangReport, WorkerProgress
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.testing.agent_invariants import InvariantChecker

RUN = events.RunRequested()
FORMED = events.GenerationFormed(Assignment(1))
STARTED = [events.WorkerStarted(1, 0, 100), events.WorkerStarted(1, 1, 101)]
UP: list[AnyEvent] = [RUN, FORMED, *STARTED]
FAILED = events.WorkerExited(1, 0, 1)
EXAMINED = events.FailureExamined(1, 0, Evidence())
SUCCEEDED = [events.WorkerExited(1, 0, 0), events.WorkerExited(1, 1, 0)]
LATE = events.ScopeExpired(1, 0, 100, "step", 60.0, 1e9, SIGTERM)
ENDED = [events.WorkerExited(1, 1, -15), EXAMINED, events.NodeCleared(1)]

OPTED_IN = [events.WorkerOptedIn(1, 0, 5.0), events.WorkerOptedIn(1, 1, 5.0)]
HOLDING: list[AnyEvent] = [*UP, *OPTED_IN, events.GenerationEnded(1, "b joined")]
ACKNOWLEDGED: list[AnyEvent] = [*HOLDING, events.WorkerHeld(1, 0), events.WorkerHeld(1, 1, 7)]
HELD: list[AnyEvent] = [*ACKNOWLEDGED, events.NodeCleared(1, (0, 1))]
ONE_DIED: list[AnyEvent] = [*HELD, events.WorkerExited(1, 0, -9)]
FORMED_AGAIN = events.GenerationFormed(Assignment(2))

# The events that lead to each situation. A phase has several if the machine waits for different events in it.
SITUATIONS: dict[str, tuple[Phase, list[AnyEvent]]] = {
    "new": (Phase.NEW, []),
    "joining": (Phase.JOINING, [RUN]),
    "joining again": (Phase.JOINING, [*UP, FAILED, *ENDED]),
    "starting": (Phase.RUNNING, [RUN, FORMED]),
    "running": (Phase.RUNNING, UP),
    "running, one worker succeeded": (Phase.RUNNING, [*UP, events.WorkerExited(1, 1, 0)]),
    "running, one scope expired": (Phase.RUNNING, [*UP, LATE]),
    "running, overdue worker signalled": (Phase.RUNNING, [*UP, LATE, events.StacksRefused(1, 0, "no")]),
    "running, quiet": (Phase.RUNNING, [*UP, events.QuietSeen(1, 0.0, "no step", (1,))]),
    "running, stacks requested": (Phase.RUNNING, [*UP, events.StacksRequested(1, 1, "no step")]),
    "running, hang reported": (Phase.RUNNING, [*UP, events.HangFound(1, HangReport(1, 1, 2, 60.0, "no step"))]),
    "stopping, one scope expired": (Phase.STOPPING, [*UP, LATE, events.WorkerExited(1, 1, 1)]),
    "stopping, signalled": (Phase.STOPPING, [*UP, FAILED]),
    "stopping, cancelled": (Phase.STOPPING, [*UP, events.SignalReceived(SIGTERM)]),
    "stopping, clearing": (Phase.STOPPING, [*UP, FAILED, events.WorkerExited(1, 1, -15)]),
    "stopping, killed": (Phase.STOPPING, [*UP, events.SignalReceived(SIGINT), events.SignalReceived(SIGINT)]),
    "stopping, evidence awaited": (
        Phase.STOPPING,
        [*UP, FAILED, events.WorkerExited(1, 1, -15), events.NodeCleared(1)],
    ),
    "stopping, generation ended": (Phase.STOPPING, [*UP, events.GenerationEnded(1, "b joined")]),
    "stopping, fenced": (Phase.STOPPING, [*UP, events.Fenced(1, "cut off")]),
    "stopping, refused": (Phase.STOPPING, [*UP, events.JoinRefused("no")]),
    "stopping, run ended": (Phase.STOPPING, [*UP, events.RunEnded(Verdict(Outcome.CANCELLED, "enough"), 1.0)]),
    "closing": (Phase.CLOSING, [*UP, *SUCCEEDED]),
    "closing, generation ended": (Phase.CLOSING, [*UP, *SUCCEEDED, events.GenerationEnded(1, "b joined")]),
    "closing, killed": (Phase.CLOSING, [*UP, *SUCCEEDED, events.SignalReceived(SIGTERM)]),
    "done": (Phase.DONE, [*UP, *SUCCEEDED, events.NodeCleared(1)]),
    "joining, generation ended": (
        Phase.JOINING,
        [*UP, *SUCCEEDED, events.NodeCleared(1), events.GenerationEnded(1, "no")],
    ),
    "running, opted in": (Phase.RUNNING, [*UP, *OPTED_IN]),
    "running, one opted in": (Phase.RUNNING, [*UP, OPTED_IN[0]]),
    "stopping, holding": (Phase.STOPPING, HOLDING),
    "stopping, holding one, stopping the other": (
        Phase.STOPPING,
        [*UP, OPTED_IN[0], events.GenerationEnded(1, "b joined")],
    ),
    "stopping, holding, one has acknowledged": (Phase.STOPPING, [*HOLDING, events.WorkerHeld(1, 0)]),
    "stopping, clearing, all are held": (Phase.STOPPING, ACKNOWLEDGED),
    "stopping, held, evidence awaited": (
        Phase.STOPPING,
        [*UP, *OPTED_IN, FAILED, events.WorkerHeld(1, 1), events.NodeCleared(1, (1,))],
    ),
    "joining, held": (Phase.JOINING, HELD),
    "joining, one held worker exited": (Phase.JOINING, ONE_DIED),
    "joining, all held workers exited": (Phase.JOINING, [*ONE_DIED, events.WorkerExited(1, 1, -9)]),
    "joining, one held worker opted out": (Phase.JOINING, [*HELD, events.WorkerOptedOut(1, 0, "no")]),
    "joining, formed while not clear": (Phase.JOINING, [*ONE_DIED, FORMED_AGAIN]),
    "stopping, held workers are stopped": (Phase.STOPPING, [*HELD, events.GenerationEnded(1, "no", stops=True)]),
    "stopping, held workers are killed, formed": (Phase.STOPPING, [*HELD, events.Fenced(1, "cut off"), FORMED_AGAIN]),
    "running, survivors": (Phase.RUNNING, [*HELD, FORMED_AGAIN]),
    "ended": (Phase.ENDED, [*UP, events.KeeperLost("gone")]),
}


def versions(kind: type[AnyEvent]) -> list[AnyEvent]:
    """Return events of this type: of current and other generations, and of known and unknown workers."""
    generations, ranks = (0, 1, 2, 7), (-1, 0, 1, 2)
    match kind:
        case events.GenerationFormed:
            return [events.GenerationFormed(Assignment(generation)) for generation in generations]
        case events.JoinRefused | events.KeeperLost | events.Waiting | events.LeaveRequested:
            return [kind("no")]
        case events.GenerationEnded:
            return [
                kind(generation, "no", is_late, stops=stops)
                for generation in generations
                for is_late in (False, True)
                for stops in (False, True)
            ]
        case events.WorkerOptedIn:
            return [kind(*where, 5.0) for where in itertools.product(generations, ranks)]
        case events.WorkerOptedOut:
            return [kind(*where, "no") for where in itertools.product(generations, ranks)]
        case events.WorkerHeld:
            return [kind(*where, 3) for where in itertools.product(generations, ranks)]
        case events.NodeCleared:
            return [kind(generation, held) for generation in generations for held in ((), (0,), (1,), (0, 1))]
        case events.Fenced:
            return [kind(generation, "no") for generation in generations]
        case events.RunEnded:
            verdicts = [Verdict(outcome, "no") for outcome in Outcome if outcome is not Outcome.FAILED]
            verdicts.append(Verdict(Outcome.FAILED, "no", failures=(Failure(1, 0, 9, 900, 1, 5.0),)))
            return [kind(verdict, sent_at) for verdict in verdicts for sent_at in (-1e6, 1e6)]
        case events.LeaveNoticed:
            return [kind(generation, "b", "no", in_s) for generation in generations for in_s in (None, 30.0)]
        case events.NoticeReceived:
            return [kind("no", in_s) for in_s in (None, 30.0)]
        case events.ProgressSeen:
            progress = ((), (WorkerProgress(0, 3, 9, 1.0, 2.0), WorkerProgress(1, -1, -1, 0.0, 0.0, "checkpoint")))
            return [kind(*what) for what in itertools.product(generations, progress)]
        case events.WorkerStarted:
            return [kind(*where, 100) for where in itertools.product(generations, ranks)]
        case events.WorkerStartFailed:
            return [kind(*where, "no such file", 127) for where in itertools.product(generations, ranks)]
        case events.WorkerExited:
            ends = ((0, ""), (0, "its result is lost"), (1, ""), (-9, ""), (-15, ""))
            return [kind(*where, *end) for where in itertools.product(generations, ranks) for end in ends]
        case events.WorkerRaised:
            return [kind(*where) for where in itertools.product(generations, ranks)]
        case events.LastLinesRead:
            return [events.LastLinesRead(1, rank, ("step 1",)) for rank in (0, 1, 7)]
        case events.FailureExamined:
            evidence = (Evidence(), Evidence(message="boom", raised_at=0.5), Evidence(message="boom", raised_at=1e9))
            return [kind(*where) for where in itertools.product(generations, ranks, evidence)]
        case events.ScopeExpired:
            wheres = [(*where, pid) for where in itertools.product(generations, ranks) for pid in (100, 101)]
            return [kind(*where, "step", 60.0, 1e9, signal) for where in wheres for signal in (0, 9, 15)]
        case events.StacksRefused:
            return [kind(*where, "no") for where in itertools.product(generations, ranks)]
        case events.StacksRequested:
            return [kind(generation, 1, "no") for generation in generations]
        case events.StacksRead:
            stacks = (events.WorkerStacks(0, "Stack:"), events.WorkerStacks(9, why="no"))
            return [kind(generation, number, stacks) for generation in generations for number in (1, 2)]
        case events.HangFound:
            return [kind(generation, HangReport(generation, 1, 2, 60.0, "no")) for generation in generations]
        case events.QuietSeen:
            return [kind(generation, 1.0, "no", who) for generation in generations for who in ((), (0, 9))]
        case events.HangOver | events.MovementSeen:
            return [kind(generation) for generation in generations]
        case events.SignalReceived:
            return [kind(signal, grace_s) for signal in (1, 2, 3, 15) for grace_s in (None, 0.0)]
        case _:
            return [kind()]


def reach(name: str) -> AgentMachine:
    phase, history = SITUATIONS[name]
    machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
    for event in history:
        machine.step(event, 1.0)
    assert machine.state.phase is phase
    return machine


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_event_is_handled_in_every_situation(situation: str) -> None:
    """The machine returns commands, keeps its invariants and does not raise."""
    for event in itertools.chain.from_iterable(map(versions, AnyEvent.__args__)):
        for now in (1.0, 1e6):
            machine = reach(situation)
            checker = InvariantChecker(machine.state)
            checker.expect(machine.state, event)
            commands = machine.step(event, now)
            assert all(isinstance(command, AnyCommand) for command in commands)
            checker.check(machine.state, event, commands)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_two_signals_end_the_run_in_every_situation(situation: str) -> None:
    """After two SIGINT the run ends within a limit, so the agent never has to be killed."""
    machine = reach(situation)
    now = 1.0
    for event in (events.SignalReceived(SIGINT), events.SignalReceived(SIGINT)):
        machine.step(event, now)
    for _ in range(3):
        deadline = machine.state.next_deadline()
        if deadline is not None:
            now = deadline
            machine.step(events.Tick(), now)
    assert machine.state.phase is Phase.ENDED
    assert now <= 1.0 + machine.state.settings.abandon_s + machine.state.settings.examine_s


def test_every_phase_and_rung_has_a_situation() -> None:
    assert {phase for phase, _ in SITUATIONS.values()} == set(Phase)
    rungs = {reach(name).state.last.stop.rung for name in SITUATIONS}
    assert rungs == set(Rung) - {Rung.ABANDONED}


def test_a_step_does_not_change_earlier_commands() -> None:
    """The caller may keep the list of commands of a step."""
    machine = reach("running")
    first = machine.step(FAILED, 1.0)
    copy = list(first)
    machine.step(events.WorkerExited(1, 1, 0), 2.0)
    assert first == copy


def test_the_reply_to_an_earlier_clear_does_not_count() -> None:
    """A held worker died before the keeper read the first clear, so both replies have the same held workers."""
    died: list[AnyEvent] = [*ACKNOWLEDGED, events.WorkerExited(1, 1, -9)]
    machine = AgentMachine(AgentSettings("run", "default", 2, 3))
    issued = [command for event in died for command in machine.step(event, 1.0)]
    assert [each for each in issued if isinstance(each, ClearNode)] == [ClearNode(1, (0, 1), 1), ClearNode(1, (0,), 2)]
    assert machine.step(events.NodeCleared(1, (0,), 1), 2.0) == []
    assert not machine.state.cleared
    machine.step(events.NodeCleared(1, (0,), 2), 2.0)
    assert machine.state.cleared
