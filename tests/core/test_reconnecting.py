"""The messages of a node on a new connection: all that a coordinator must know, derived from the node's state."""

from __future__ import annotations

import copy
import random

import pytest

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.agent import AgentMachine, Phase, messages_on_connecting
from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax._core.model import AgentSettings, Assignment, WorkerPhase

from .random_node import RandomNode
from .test_agent_transitions import SITUATIONS, reach

NODE = messages.NodeInfo("a", "host-a", slots=2, min_nodes=2, max_nodes=2)
PART = Assignment(1, group_rank=1, group_world_size=2, first_global_rank=2, coordinator_rank=0, restarts_used=3)

# Types of messages by situation; NodeJoined is always the first.
EXPECTED = {
    "new": [],
    "joining": [messages.NodeReady],
    "joining again": [messages.NodeStopped, messages.NodeReady],
    "joining, generation ended": [messages.NodeReady],
    "joining, formed while not clear": [],
    "joining, held": [messages.NodeStopped, messages.NodeReady],
    "joining, one held worker exited": [],
    "joining, all held workers exited": [],
    "joining, one held worker opted out": [],
    "starting": [],
    "running": [messages.WorkersRunning],
    "running, one worker succeeded": [messages.WorkersRunning],
    "running, one scope expired": [messages.WorkersRunning],
    "running, overdue worker signalled": [messages.WorkersRunning],
    "running, quiet": [messages.WorkersRunning, messages.NodeQuiet],
    "running, stacks requested": [messages.WorkersRunning],
    "running, hang reported": [messages.WorkersRunning],
    "running, survivors": [],
    "running, opted in": [messages.WorkersRunning],
    "running, one opted in": [messages.WorkersRunning],
    "stopping, one scope expired": [messages.FailureSeen],
    "stopping, signalled": [messages.FailureSeen],
    "stopping, cancelled": [messages.NodeDraining],
    "stopping, clearing": [messages.FailureSeen],
    "stopping, killed": [messages.NodeDraining],
    "stopping, evidence awaited": [messages.FailureSeen],
    "stopping, generation ended": [],
    "stopping, fenced": [],
    "stopping, refused": [],
    "stopping, run ended": [],
    "stopping, holding": [],
    "stopping, holding one, stopping the other": [],
    "stopping, holding, one has acknowledged": [],
    "stopping, clearing, all are held": [],
    "stopping, held, evidence awaited": [messages.FailureSeen],
    "stopping, held workers are stopped": [],
    "stopping, held workers are killed, formed": [],
    "closing": [],
    "closing, generation ended": [],
    "closing, killed": [],
    "done": [],
    "ended": [],
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_messages_in_every_situation(situation: str) -> None:
    """The identity and state come first, then what happened. No message is queued while there is no connection."""
    machine = reach(situation)
    sent = messages_on_connecting(machine.state, NODE, 9.0)
    assert isinstance(sent[0], messages.NodeJoined)
    assert [type(each) for each in sent[1:]] == EXPECTED[situation]
    assert sent == messages_on_connecting(machine.state, NODE, 9.0), "the call must not change the state"


@pytest.mark.parametrize("situation", [each for each in SITUATIONS if "formed" in each])
def test_a_node_announces_the_generation_that_it_will_start_when_it_is_clear(situation: str) -> None:
    """Otherwise the next coordinator could form another one, and both would run."""
    machine = reach(situation)
    formed = machine.state.formed
    assert formed is not None
    joined = messages_on_connecting(machine.state, NODE, 9.0)[0]
    assert isinstance(joined, messages.NodeJoined)
    assert (joined.generation, joined.is_running) == (formed.assignment.generation, True)


def test_a_node_sends_its_assignment() -> None:
    """A new coordinator learns the decisions of an earlier one from its nodes."""
    machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
    machine.step(events.RunRequested(), 0.0)
    machine.step(events.GenerationFormed(PART), 0.0)
    (joined,) = messages_on_connecting(machine.state, NODE, 1.0)
    assert joined == messages.NodeJoined(
        NODE,
        generation=1,
        is_running=True,
        group_rank=1,
        group_world_size=2,
        coordinator_rank=0,
        restarts_used=3,
        store=PART.store,
    )


def test_a_node_reports_that_it_was_cut_off() -> None:
    """Failures on other nodes may be a consequence, so the coordinator must not charge them."""
    machine = reach("stopping, fenced")
    machine.step(events.NodeCleared(1), 5.0)
    assert machine.state.phase is Phase.JOINING
    _, stopped, ready = messages_on_connecting(machine.state, NODE, 9.0)
    assert isinstance(stopped, messages.NodeStopped)
    assert stopped.was_cut_off
    assert ready == messages.NodeReady(1)
    machine.step(events.GenerationFormed(Assignment(2)), 10.0)
    machine.step(events.GenerationEnded(2, "b joined"), 11.0)
    for rank in range(2):
        machine.step(events.WorkerExited(2, rank, -15), 11.0)
    (stopped,) = [
        command.message
        for command in machine.step(events.NodeCleared(2), 11.0)
        if isinstance(getattr(command, "message", None), messages.NodeStopped)
    ]
    assert not stopped.was_cut_off, "the next generation was not"


def test_the_messages_are_true_whenever_the_link_breaks() -> None:
    """After thousands of random steps: ready and stopped only if clear, running only if processes may be alive.

    A node that was ready is not running any more: only held workers and what they left behind may be alive, until a
    generation is formed. That one counts as running, although it starts when the node is clear.
    """
    moments = set()
    for seed in range(400):
        node = RandomNode(random.Random(seed))
        node.run()
        machine = AgentMachine(node.settings)
        for event, now, _ in node.steps:
            machine.step(event, now)
            state = machine.state
            joined, *others = messages_on_connecting(state, NODE, now)
            assert isinstance(joined, messages.NodeJoined)
            formed, was_ready = state.formed, state.last.is_reported
            assert joined.generation == (formed.assignment.generation if formed is not None else state.generation)
            assert not (joined.is_running and joined.has_succeeded)
            if state.phase is not Phase.ENDED:
                is_at_work = state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING) and not was_ready
                assert joined.is_running == (is_at_work or formed is not None)
                assert joined.is_running or state.cleared or was_ready
            for each in others:
                assert state.cleared or not isinstance(each, messages.NodeReady | messages.NodeStopped)
                if isinstance(each, messages.NodeReady):
                    assert each.held == sum(worker.phase is WorkerPhase.HELD for worker in state.workers.values())
            moments.add((state.phase, tuple(type(each) for each in others)))
    assert {phase for phase, _ in moments} == set(Phase)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name not in ("new", "ended")])
def test_reconnecting_changes_nothing_for_a_coordinator_that_missed_nothing(situation: str) -> None:
    """The link breaks and is back at once, without a lost message."""
    coordinator = CoordinatorMachine(RunSettings("run", min_nodes=2, max_nodes=2, max_restarts=3))
    machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
    coordinator.step(run.Opened(), 0.0)
    coordinator.step(run.Received("a", messages.NodeJoined(NODE)), 0.0)
    other = messages.NodeInfo("b", "host-b", min_nodes=2, max_nodes=2)
    coordinator.step(run.Received("b", messages.NodeJoined(other)), 0.0)
    coordinator.step(run.Received("b", messages.NodeReady(0)), 0.0)
    for event in SITUATIONS[situation][1]:
        for command in machine.step(event, 1.0):
            if hasattr(command, "message"):
                coordinator.step(run.Received("a", command.message), 1.0)
    if isinstance(coordinator.state.phase, run.Over):
        return
    state = coordinator.state
    before = copy.deepcopy((state.phase, state.ready, state.last))
    sent = messages_on_connecting(machine.state, NODE, 1.0)
    if isinstance(sent[0], messages.NodeJoined) and sent[0].generation > state.generation:
        return  # a second generation, which this coordinator has not formed
    for each in sent:
        coordinator.step(run.Received("a", each), 1.0)
    assert (state.phase, state.ready, state.last) == before
