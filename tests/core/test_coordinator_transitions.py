"""The coordinator machine handles every event in every phase."""

from __future__ import annotations

import itertools
from copy import deepcopy

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import messages
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorMachine,
    CoordinatorState,
    RunSettings,
    Send,
)
from tenax._core.model import Failure, Outcome, Stopped, Verdict
from tenax._core.run_state import AnyRunPhase
from tenax.testing.run_invariants import RunChecker

from .policies import Pausing

SETTINGS = RunSettings(
    "run", min_nodes=2, max_nodes=2, max_restarts=3, last_call_s=5.0, on_hang="report", hang_after_s=0.0
)
FAILURE = Failure(1, 0, 1, 101, 1, 8.0)


def node(node_id: str, **more) -> messages.NodeInfo:
    return messages.NodeInfo(node_id, f"host-{node_id}", min_nodes=2, max_nodes=2, **more)


def joined(node_id: str, **more) -> run.Received:
    return run.Received(node_id, messages.NodeJoined(node(node_id), **more))


def ready(node_id: str, generation: int = 0) -> run.Received:
    return run.Received(node_id, messages.NodeReady(generation))


def of(node_id: str, rank: int, **how: bool) -> run.Received:
    return joined(node_id, generation=1, group_rank=rank, group_world_size=2, **how)


def quiet(node_id: str) -> run.Received:
    return run.Received(node_id, messages.NodeQuiet(1, 8.0, 1.0, "no step"))


def stacks(node_id: str, rank: int) -> run.Received:
    return run.Received(
        node_id, messages.StacksTaken(1, 1, (messages.StackLocation((rank,), (f"train.py:{rank} in load",)),))
    )


OPENED = run.Opened()
UP: list[AnyCoordinatorEvent] = [OPENED, joined("a"), ready("a"), joined("b"), ready("b")]
SPARE = [joined("c"), ready("c")]
FAILED = run.Received("b", messages.FailureSeen(1, FAILURE, 8.0))
STOPPED = [run.Received("b", messages.NodeStopped(1, 8.0, (FAILURE,))), ready("b", 1)]
RECOVERING = run.Opened(recover_s=30.0)

# The events that lead to each situation. A phase has several if the machine waits for different nodes in it.
SITUATIONS: dict[str, tuple[type[run.RunPhase], list[AnyCoordinatorEvent]]] = {
    "no node": (run.Gathering, [OPENED]),
    "one node joined": (run.Gathering, [OPENED, joined("a")]),
    "one node ready": (run.Gathering, [OPENED, joined("a"), ready("a")]),
    "running": (run.Running, UP),
    "running, with a spare": (run.Running, [*UP, *SPARE]),
    "running, one node started": (run.Running, [*UP, run.Received("a", messages.WorkersRunning(1, (9,)))]),
    "running, one node done": (run.Running, [*UP, run.Received("a", messages.NodeSucceeded(1))]),
    "running, one node drains": (run.Running, [*UP, run.Received("a", messages.NodeDraining(1, 30.0, "SIGTERM"))]),
    "running, one node quiet": (run.Running, [*UP, quiet("a")]),
    "running, all nodes quiet": (run.Running, [*UP, quiet("a"), quiet("b")]),
    "running, one node sent its stacks": (run.Running, [*UP, quiet("a"), quiet("b"), stacks("a", 0)]),
    "running, hang found": (run.Running, [*UP, quiet("a"), quiet("b"), stacks("a", 0), stacks("b", 1)]),
    "ending, failure": (run.Ending, [*UP, FAILED]),
    "ending, one node stopped": (run.Ending, [*UP, FAILED, *STOPPED]),
    "ending, loss": (run.Ending, [*UP, run.NodeLost("a", "gone")]),
    "ending, request": (run.Ending, [*UP, run.RestartRequested("new data")]),
    "ending, drain": (run.Ending, [*UP, run.Received("a", messages.NodeLeft("SIGTERM"))]),
    "gathering again": (run.Gathering, [*UP, run.NodeLost("a", "gone"), ready("b", 1)]),
    "paused": (run.Paused, [*UP, FAILED, *STOPPED, ready("a", 1)]),
    "recovering, no node back": (run.Recovering, [RECOVERING]),
    "recovering, one node back": (run.Recovering, [RECOVERING, of("a", 0, is_running=True)]),
    "recovering, one node done": (run.Recovering, [RECOVERING, of("a", 0, has_succeeded=True)]),
    "recovering, one node stopped": (run.Recovering, [RECOVERING, of("a", 0), ready("a", 1)]),
    "recovered": (run.Running, [RECOVERING, of("a", 0, is_running=True), of("b", 1, is_running=True)]),
    "ending, incomplete": (run.Ending, [RECOVERING, of("a", 0, is_running=True), of("b", 1)]),
    "ending, a latecomer": (run.Ending, [OPENED, of("b", 1, is_running=True)]),
    "over": (run.Over, [*UP, run.CancelRequested("enough")]),
    "over before": (run.Over, [run.Opened(verdict=Verdict(Outcome.SUCCEEDED, "all succeeded"))]),
}


def versions(kind: type) -> list[AnyCoordinatorEvent]:
    """Return events of this type: of a member, a spare and an unknown node; of current and other generations."""
    nodes, generations = ("a", "b", "c", "x"), (0, 1, 2)
    cells = list(itertools.product(nodes, generations))
    match kind:
        case messages.NodeJoined:
            fresh = [joined(node_id) for node_id in nodes]
            returning = [joined("x", generation=each, group_rank=1, group_world_size=2) for each in generations]
            unusual = [
                run.Received("x", messages.NodeJoined(node("x", rank=0))),
                run.Received("x", messages.NodeJoined(node("x", rank=7))),
                run.Received("x", messages.NodeJoined(messages.NodeInfo("x", "host-a", min_nodes=1, max_nodes=9))),
                joined("x", generation=3, is_running=True, group_world_size=1, group_rank=0, restarts_used=2),
                joined("x", generation=1, has_succeeded=True, group_world_size=2, group_rank=1),
            ]
            return [*fresh, *returning, *unusual]
        case messages.NodeReady:
            return [ready(*cell) for cell in cells]
        case messages.WorkersRunning:
            return [run.Received(node_id, kind(generation, (100,))) for node_id, generation in cells]
        case messages.NodeProgress:
            steps = messages.WorkerProgress(0, 3, 9, 1.0, 2.0)
            reports: tuple[tuple[messages.WorkerProgress, ...], ...]
            reports = ((), (steps,), (messages.WorkerProgress(0, -1, -1, 0.0, 0.0, "checkpoint"),))
            return [
                run.Received(node_id, kind(generation, sent_at, workers))
                for (node_id, generation), sent_at, workers in itertools.product(cells, (-1e6, 9.0, 1e6), reports)
            ]
        case messages.FailureSeen:
            return [run.Received(node_id, kind(generation, FAILURE, 1e6)) for node_id, generation in cells]
        case messages.NodeStopped:
            ends = (((), ()), ((FAILURE,), (Stopped(0, 0, 9, -15),)))
            return [
                run.Received(node_id, kind(generation, -1e6, *end, cut_off))
                for (node_id, generation), end, cut_off in itertools.product(cells, ends, (False, True))
            ]
        case messages.NodeQuiet:
            return [run.Received(node_id, kind(generation, 1e6, 1e3, "no step")) for node_id, generation in cells]
        case messages.StacksTaken:
            locations = (
                (),
                (messages.StackLocation((0,), why="no"), messages.StackLocation((1,), ("train.py:1 in load",))),
            )
            numbers = (1, 2)
            return [
                run.Received(node_id, kind(generation, number, taken))
                for (node_id, generation), number, taken in itertools.product(cells, numbers, locations)
            ]
        case messages.NodeSucceeded | messages.NodeBusy:
            return [run.Received(node_id, kind(generation)) for node_id, generation in cells]
        case messages.NodeDraining:
            return [run.Received(node_id, kind(generation, 30.0, "SIGTERM")) for node_id, generation in cells]
        case messages.NodeWillLeave:
            return [run.Received(node_id, kind(generation, "soon")) for node_id, generation in cells]
        case messages.NodeLeft:
            return [run.Received(node_id, kind("SIGTERM", is_clear)) for node_id in nodes for is_clear in (False, True)]
        case run.NodeLost:
            return [kind(node_id, "gone") for node_id in nodes]
        case run.DrainRequested:
            return [kind(node_id, "SIGTERM") for node_id in nodes]
        case run.CancelRequested | run.RestartRequested:
            return [kind("enough")]
        case run.Resumed:
            return [run.Resumed(30.0)]
        case _:
            return [run.Tick()]


OPERATOR = [run.CancelRequested, run.RestartRequested, run.DrainRequested]
KINDS = [*messages.FromNode.__args__, *OPERATOR, run.NodeLost, run.Tick, run.Resumed]


def machine_for(name: str, state: CoordinatorState | None = None) -> CoordinatorMachine:
    return CoordinatorMachine(SETTINGS, Pausing() if name == "paused" else None, state)


def reach(name: str) -> tuple[CoordinatorMachine, RunChecker]:
    phase, history = SITUATIONS[name]
    machine = machine_for(name)
    checker = RunChecker(SETTINGS)
    for event in history:
        checker.expect(machine.state, event)
        checker.check(machine.state, event, machine.step(event, 8.0), 8.0)
    assert type(machine.state.phase) is phase
    return machine, checker


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_event_is_handled_in_every_situation(situation: str) -> None:
    """The machine returns messages, keeps its invariants, and its state survives JSON."""
    reached, before = reach(situation)
    state = msgspec.json.encode(reached.state)
    for event in itertools.chain.from_iterable(map(versions, KINDS)):
        for now in (8.0, 1e6):
            machine = machine_for(situation, msgspec.json.decode(state, type=CoordinatorState))
            checker = deepcopy(before)
            checker.expect(machine.state, event)
            step = machine.step(event, now)
            assert all(isinstance(send, Send) for send in step.sends)
            checker.check(machine.state, event, step, now)
            assert msgspec.json.decode(msgspec.json.encode(machine.state), type=CoordinatorState) == machine.state


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_requested_restart_is_uncharged_in_every_situation(situation: str) -> None:
    """C9: it ends a running generation or a pause, and has no effect in other phases."""
    machine, _ = reach(situation)
    before = type(machine.state.phase)
    used = machine.state.restarts_used
    machine.step(run.RestartRequested("new data"), 9.0)
    after = {run.Running: run.Ending, run.Paused: run.Running}
    assert type(machine.state.phase) is after.get(before, before)
    assert machine.state.restarts_used == used


@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_operator_can_end_the_run_in_every_situation(situation: str) -> None:
    """One request ends the run, and every connected node is sent the end."""
    machine, _ = reach(situation)
    connected = set(machine.state.nodes)
    was_over = isinstance(machine.state.phase, run.Over)
    sends = machine.step(run.CancelRequested("enough"), 9.0).sends
    assert isinstance(machine.state.phase, run.Over)
    assert {node_id for send in sends for node_id in send.to} == (set() if was_over else connected)


def test_every_phase_has_a_situation() -> None:
    assert {phase for phase, _ in SITUATIONS.values()} == set(AnyRunPhase.__args__)
