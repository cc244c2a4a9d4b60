"""What a node says on a new connection: all that a coordinator must know of it, from its state alone, and all true."""

from __future__ import annotations

import random

import pytest

from tenax._core import coordinator as run
from tenax._core import events as fact
from tenax._core import messages as word
from tenax._core.agent import AgentMachine, Phase, words_on_connecting
from tenax._core.coordinator import CoordinatorMachine, RunPhase, RunSettings
from tenax._core.model import AgentSettings, Assignment

from .test_every_cell import SITUATIONS, reach
from .world import World

NODE = word.NodeInfo("a", "host-a", slots=2, min_nodes=2, max_nodes=2)
PART = Assignment(1, group_rank=1, group_world_size=2, first_global_rank=2, coordinator_rank=0, restarts_used=3)

# Kinds of words by situation; NodeJoined always comes first.
EXPECTED = {
    "new": [],
    "joining": [word.NodeReady],
    "joining again": [word.NodeStopped, word.NodeReady],
    "joining, called back": [word.NodeReady],
    "starting": [],
    "running": [word.WorkersRunning],
    "running, one has succeeded": [word.WorkersRunning],
    "running, one is late": [word.WorkersRunning],
    "running, one that is late was asked": [word.WorkersRunning],
    "running, quiet": [word.WorkersRunning, word.NodeQuiet],
    "running, stacks are wanted": [word.WorkersRunning],
    "running, a hang is told": [word.WorkersRunning],
    "stopping, one is late": [word.FailureSeen],
    "stopping, asked": [word.FailureSeen],
    "stopping, cancelled": [word.NodeDraining],
    "stopping, clearing": [word.FailureSeen],
    "stopping, killed": [word.NodeDraining],
    "stopping, evidence awaited": [word.FailureSeen],
    "stopping, ended elsewhere": [],
    "stopping, fenced": [],
    "stopping, refused": [],
    "stopping, the run is over": [],
    "closing": [],
    "closing, ended elsewhere": [],
    "closing, killed": [],
    "done": [],
    "ended": [],
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_is_said_in_every_situation(situation: str) -> None:
    """First who we are and what we are doing, then what happened; nothing is kept for the time without a connection."""
    machine = reach(situation)
    words = words_on_connecting(machine.state, NODE, 9.0)
    assert isinstance(words[0], word.NodeJoined)
    assert [type(each) for each in words[1:]] == EXPECTED[situation]
    assert words == words_on_connecting(machine.state, NODE, 9.0), "asking changes nothing"


def test_a_node_says_which_part_it_has() -> None:
    """A new coordinator learns from its nodes what an earlier one had decided."""
    machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
    machine.step(fact.RunRequested(), 0.0)
    machine.step(fact.GenerationFormed(PART), 0.0)
    (joined,) = words_on_connecting(machine.state, NODE, 1.0)
    assert joined == word.NodeJoined(
        NODE,
        generation=1,
        is_running=True,
        group_rank=1,
        group_world_size=2,
        coordinator_rank=0,
        restarts_used=3,
        store=PART.store,
    )


def test_a_node_that_was_cut_off_says_so() -> None:
    """What failed elsewhere may have failed because of us: the coordinator must not charge anybody for it."""
    machine = reach("stopping, fenced")
    machine.step(fact.NodeCleared(1), 5.0)
    assert machine.state.phase is Phase.JOINING
    _, stopped, ready = words_on_connecting(machine.state, NODE, 9.0)
    assert isinstance(stopped, word.NodeStopped)
    assert stopped.was_cut_off
    assert ready == word.NodeReady(1)
    machine.step(fact.GenerationFormed(Assignment(2)), 10.0)
    machine.step(fact.GenerationEnded(2, "b joins"), 11.0)
    for rank in range(2):
        machine.step(fact.WorkerExited(2, rank, -15), 11.0)
    (told,) = [
        command.message
        for command in machine.step(fact.NodeCleared(2), 11.0)
        if isinstance(getattr(command, "message", None), word.NodeStopped)
    ]
    assert not told.was_cut_off, "the next generation was not"


def test_words_are_true_whenever_the_link_breaks() -> None:
    """In thousands of random moments: ready and stopped only when clear, running only when processes may live."""
    moments = set()
    for seed in range(400):
        world = World(random.Random(seed))
        world.play()
        machine = AgentMachine(world.settings)
        for event, now, _ in world.steps:
            machine.step(event, now)
            state = machine.state
            joined, *others = words_on_connecting(state, NODE, now)
            assert isinstance(joined, word.NodeJoined)
            assert joined.generation == state.generation
            assert not (joined.is_running and joined.has_succeeded)
            if state.phase is not Phase.ENDED:
                assert joined.is_running == (state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING))
                assert joined.is_running or state.cleared
            for each in others:
                assert state.cleared or not isinstance(each, word.NodeReady | word.NodeStopped)
            moments.add((state.phase, tuple(type(each) for each in others)))
    assert {phase for phase, _ in moments} == set(Phase)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name not in ("new", "ended")])
def test_a_coordinator_that_is_told_again_knows_no_more_and_no_less(situation: str) -> None:
    """A link that breaks and is back at once changes nothing for a coordinator that has missed nothing."""
    coordinator = CoordinatorMachine(RunSettings("run", min_nodes=2, max_nodes=2, max_restarts=3))
    machine = AgentMachine(AgentSettings("run", "trainer", 2, 3))
    coordinator.step(run.Opened(), 0.0)
    coordinator.step(run.Heard("a", word.NodeJoined(NODE)), 0.0)
    other = word.NodeInfo("b", "host-b", min_nodes=2, max_nodes=2)
    coordinator.step(run.Heard("b", word.NodeJoined(other)), 0.0)
    coordinator.step(run.Heard("b", word.NodeReady(0)), 0.0)
    for event in SITUATIONS[situation][1]:
        for command in machine.step(event, 1.0):
            if hasattr(command, "message"):
                coordinator.step(run.Heard("a", command.message), 1.0)
    if coordinator.state.phase is RunPhase.OVER:
        return
    before = (
        coordinator.state.phase,
        set(coordinator.state.ready),
        set(coordinator.state.unstopped),
        coordinator.state.done,
    )
    failures, stopped = list(coordinator.state.failures), list(coordinator.state.stopped)
    for each in words_on_connecting(machine.state, NODE, 1.0):
        coordinator.step(run.Heard("a", each), 1.0)
    state = coordinator.state
    assert (state.phase, set(state.ready), set(state.unstopped), state.done) == before
    assert (state.failures, state.stopped) == (failures, stopped)
