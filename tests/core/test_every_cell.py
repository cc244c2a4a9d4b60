"""The machine is a table of phases and events: point at a cell, and there is an answer."""

from __future__ import annotations

import itertools

import pytest

from tenax._core import events as fact
from tenax._core.agent import SIGINT, SIGTERM, AgentMachine, Phase, Rung
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.messages import HangReport, WorkerProgress
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.testing.agent_invariants import InvariantChecker

RUN = fact.RunRequested()
FORMED = fact.GenerationFormed(Assignment(1))
STARTED = [fact.WorkerStarted(1, 0, 100), fact.WorkerStarted(1, 1, 101)]
UP: list[AnyEvent] = [RUN, FORMED, *STARTED]
FAILED = fact.WorkerExited(1, 0, 1)
EXAMINED = fact.FailureExamined(1, 0, Evidence())
SUCCEEDED = [fact.WorkerExited(1, 0, 0), fact.WorkerExited(1, 1, 0)]
LATE = fact.ScopeExpired(1, 0, 100, "step", 60.0, 1e9, SIGTERM)
ENDED = [fact.WorkerExited(1, 1, -15), EXAMINED, fact.NodeCleared(1)]

# How each situation is reached. Some phases have several: what the machine waits for is a part of the cell.
SITUATIONS: dict[str, tuple[Phase, list[AnyEvent]]] = {
    "new": (Phase.NEW, []),
    "joining": (Phase.JOINING, [RUN]),
    "joining again": (Phase.JOINING, [*UP, FAILED, *ENDED]),
    "starting": (Phase.RUNNING, [RUN, FORMED]),
    "running": (Phase.RUNNING, UP),
    "running, one has succeeded": (Phase.RUNNING, [*UP, fact.WorkerExited(1, 1, 0)]),
    "running, one is late": (Phase.RUNNING, [*UP, LATE]),
    "running, one that is late was asked": (Phase.RUNNING, [*UP, LATE, fact.StacksRefused(1, 0, "no")]),
    "running, quiet": (Phase.RUNNING, [*UP, fact.QuietSeen(1, 0.0, "no step", (1,))]),
    "running, stacks are wanted": (Phase.RUNNING, [*UP, fact.StacksWanted(1, 1, "no step")]),
    "running, a hang is told": (Phase.RUNNING, [*UP, fact.HangFound(1, HangReport(1, 1, 2, 60.0, "no step"))]),
    "stopping, one is late": (Phase.STOPPING, [*UP, LATE, fact.WorkerExited(1, 1, 1)]),
    "stopping, asked": (Phase.STOPPING, [*UP, FAILED]),
    "stopping, cancelled": (Phase.STOPPING, [*UP, fact.SignalReceived(SIGTERM)]),
    "stopping, clearing": (Phase.STOPPING, [*UP, FAILED, fact.WorkerExited(1, 1, -15)]),
    "stopping, killed": (Phase.STOPPING, [*UP, fact.SignalReceived(SIGINT), fact.SignalReceived(SIGINT)]),
    "stopping, evidence awaited": (Phase.STOPPING, [*UP, FAILED, fact.WorkerExited(1, 1, -15), fact.NodeCleared(1)]),
    "stopping, ended elsewhere": (Phase.STOPPING, [*UP, fact.GenerationEnded(1, "b joins")]),
    "stopping, fenced": (Phase.STOPPING, [*UP, fact.Fenced(1, "cut off")]),
    "stopping, refused": (Phase.STOPPING, [*UP, fact.JoinRefused("no")]),
    "stopping, the run is over": (Phase.STOPPING, [*UP, fact.RunEnded(Verdict(Outcome.CANCELLED, "enough"), 1.0)]),
    "closing": (Phase.CLOSING, [*UP, *SUCCEEDED]),
    "closing, ended elsewhere": (Phase.CLOSING, [*UP, *SUCCEEDED, fact.GenerationEnded(1, "b joins")]),
    "closing, killed": (Phase.CLOSING, [*UP, *SUCCEEDED, fact.SignalReceived(SIGTERM)]),
    "done": (Phase.DONE, [*UP, *SUCCEEDED, fact.NodeCleared(1)]),
    "joining, called back": (Phase.JOINING, [*UP, *SUCCEEDED, fact.NodeCleared(1), fact.GenerationEnded(1, "no")]),
    "ended": (Phase.ENDED, [*UP, fact.KeeperLost("gone")]),
}


def versions(kind: type[AnyEvent]) -> list[AnyEvent]:
    """An event of this kind in all the ways that could matter: of now, of then, of nobody."""
    generations, ranks = (0, 1, 2, 7), (-1, 0, 1, 2)
    match kind:
        case fact.GenerationFormed:
            return [fact.GenerationFormed(Assignment(generation)) for generation in generations]
        case fact.JoinRefused | fact.KeeperLost | fact.Waiting | fact.LeaveRequested:
            return [kind("no")]
        case fact.GenerationEnded:
            return [kind(generation, "no", is_late) for generation in generations for is_late in (False, True)]
        case fact.Fenced:
            return [kind(generation, "no") for generation in generations]
        case fact.RunEnded:
            verdicts = [Verdict(outcome, "no") for outcome in Outcome if outcome is not Outcome.FAILED]
            verdicts.append(Verdict(Outcome.FAILED, "no", (Failure(1, 0, 9, 900, 1, 5.0),)))
            return [kind(verdict, sent_at) for verdict in verdicts for sent_at in (-1e6, 1e6)]
        case fact.LeaveNoticed:
            return [kind(generation, "b", "no", in_s) for generation in generations for in_s in (None, 30.0)]
        case fact.NoticeReceived:
            return [kind("no", in_s) for in_s in (None, 30.0)]
        case fact.ProgressSeen:
            progress = ((), (WorkerProgress(0, 3, 9, 1.0, 2.0), WorkerProgress(1, -1, -1, 0.0, 0.0, "checkpoint")))
            return [kind(*what) for what in itertools.product(generations, progress)]
        case fact.WorkerStarted:
            return [kind(*where, 100) for where in itertools.product(generations, ranks)]
        case fact.WorkerStartFailed:
            return [kind(*where, "no such file", 127) for where in itertools.product(generations, ranks)]
        case fact.WorkerExited:
            ends = ((0, ""), (0, "its result is lost"), (1, ""), (-9, ""), (-15, ""))
            return [kind(*where, *end) for where in itertools.product(generations, ranks) for end in ends]
        case fact.FailureExamined:
            proofs = (Evidence(), Evidence(message="boom", raised_at=0.5), Evidence(message="boom", raised_at=1e9))
            return [kind(*where) for where in itertools.product(generations, ranks, proofs)]
        case fact.ScopeExpired:
            wheres = [(*where, pid) for where in itertools.product(generations, ranks) for pid in (100, 101)]
            return [kind(*where, "step", 60.0, 1e9, signal) for where in wheres for signal in (0, 9, 15)]
        case fact.StacksRefused:
            return [kind(*where, "no") for where in itertools.product(generations, ranks)]
        case fact.StacksWanted:
            return [kind(generation, 1, "no") for generation in generations]
        case fact.StacksRead:
            wrote = (fact.WorkerStacks(0, "Stack:"), fact.WorkerStacks(9, why="no"))
            return [kind(generation, number, wrote) for generation in generations for number in (1, 2)]
        case fact.HangFound:
            return [kind(generation, HangReport(generation, 1, 2, 60.0, "no")) for generation in generations]
        case fact.QuietSeen:
            return [kind(generation, 1.0, "no", who) for generation in generations for who in ((), (0, 9))]
        case fact.NodeCleared | fact.HangOver | fact.MovementSeen:
            return [kind(generation) for generation in generations]
        case fact.SignalReceived:
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


@pytest.mark.parametrize("kind", AnyEvent.__args__, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_cell_has_an_answer(situation: str, kind: type[AnyEvent]) -> None:
    """Whatever happens in whatever phase, the machine answers with orders and keeps its promises; it never raises."""
    for event in versions(kind):
        for now in (1.0, 1e6):
            machine = reach(situation)
            checker = InvariantChecker(machine.state)
            commands = machine.step(event, now)
            assert all(isinstance(command, AnyCommand) for command in commands)
            checker.check(machine.state, event, commands)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_from_every_cell_the_run_can_end(situation: str) -> None:
    """Ctrl-C, Ctrl-C, and time: no situation survives that, so nobody ever needs to kill the agent."""
    machine = reach(situation)
    now = 1.0
    for event in (fact.SignalReceived(SIGINT), fact.SignalReceived(SIGINT)):
        machine.step(event, now)
    for _ in range(3):
        deadline = machine.state.next_deadline()
        if deadline is not None:
            now = deadline
            machine.step(fact.TimePassed(), now)
    assert machine.state.phase is Phase.ENDED
    assert now <= 1.0 + machine.state.settings.abandon_s + machine.state.settings.examine_s


def test_the_table_is_complete() -> None:
    """Every phase, and every rung of the ladder on the way down, has its rows."""
    assert {phase for phase, _ in SITUATIONS.values()} == set(Phase)
    rungs = {reach(name).state.rung for name in SITUATIONS}
    assert rungs == {Rung.NONE, Rung.ASKED, Rung.CLEARING, Rung.KILLED}


def test_a_step_does_not_touch_what_it_was_given() -> None:
    """Orders of one step stay as they were when the next is taken: an edge may keep them."""
    machine = reach("running")
    first = machine.step(FAILED, 1.0)
    copy = list(first)
    machine.step(fact.WorkerExited(1, 1, 0), 2.0)
    assert first == copy
