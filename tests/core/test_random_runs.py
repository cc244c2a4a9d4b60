"""The coordinator machine against tens of thousands of random runs.

A failing history is a function of its seed: ``RandomRun(random.Random(seed), invalid_events=...).run()``.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import coordinator as run
from tenax._core import messages
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorMachine,
    CoordinatorState,
    RunPhase,
    RunSettings,
    Send,
)
from tenax._core.model import Evidence, Failure, Stopped
from tenax.testing.run_invariants import RunChecker

from .policies import POLICIES
from .random_run import MAX_STEPS, OUTCOMES, RandomRun, format_steps

CORE = settings.get_profile("core")


def play(seed: int, *, invalid_events: bool) -> RandomRun:
    world = RandomRun(random.Random(seed), invalid_events=invalid_events)
    try:
        world.run()
    except Exception as error:
        pytest.fail(
            f"seed {seed}, invalid_events={invalid_events}: {type(error).__name__}: {error}\n{format_steps(world.steps)}"
        )
    return world


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
@pytest.mark.parametrize("block", range(4))
def test_promises_hold_in_random_runs(block: int, invalid_events: bool) -> None:
    """C1-C9 and L1 hold after every step, every run comes to an end, and everybody who is alive hears of it.

    Nodes come, fail, drain, are cut off, die and are started again; links break and what was on them is lost; the
    coordinator is lost and replaced, or written down and read back. The honest world also compares every generation
    with the truth about all workers. The lying one sends again what was said before, and what strangers might send.
    """
    size = 500
    outcomes = set()
    for seed in range(block * size, (block + 1) * size):
        verdict = play(seed, invalid_events=invalid_events).machine.state.verdict
        assert verdict is not None
        outcomes.add(verdict.outcome)
    assert outcomes == OUTCOMES, "the world has become too tame to reach every outcome"


@pytest.mark.parametrize(
    ("seed", "invalid_events"),
    [(4706, True), (9471, True), (10458, False), (13589, False), (15176, True), (19477, True), (30335, True)],
)
def test_what_was_found_once_stays_mended(seed: int, invalid_events: bool) -> None:
    """Runs in which the machine and its checker once disagreed: a hang without a known rank, a recorded generation
    without members, a member of a generation that is older than one that was claimed."""
    assert play(seed, invalid_events=invalid_events).machine.state.verdict is not None


@given(rng=st.randoms(use_true_random=False), invalid_events=st.booleans())
@settings(CORE, max_examples=80)
def test_promises_hold_in_runs_that_hypothesis_shrinks(rng: random.Random, invalid_events: bool) -> None:
    """As above, with rng that hypothesis loads, so that a failing history comes back as short as it can be."""
    RandomRun(rng, invalid_events=invalid_events).run()


def test_everybody_hears_the_same_verdict() -> None:
    """C6, as the nodes see it: whoever was there at the end and lives has the same verdict as all the others."""
    for seed in range(500):
        world = play(seed, invalid_events=False)
        heard = [node.verdict for node in world.nodes.values() if node.verdict is not None]
        assert all(verdict == world.machine.state.verdict for verdict in heard)


def test_the_random_world_visits_every_phase_and_event() -> None:
    """The histories above mean something: together they format_steps every kind of word, in every phase."""
    seen = set()
    for seed in range(2_500):
        world = play(seed, invalid_events=True)
        machine = CoordinatorMachine(world.settings, world.policy)
        for event, now, _ in world.steps:
            if isinstance(event, run.Opened):
                machine = CoordinatorMachine(world.settings, world.policy)
            seen.add((machine.state.phase, type(event.message if isinstance(event, run.Received) else event)))
            machine.step(event, now)
    others = {run.NodeLost, run.Tick, run.Resumed, run.CancelRequested, run.RestartRequested, run.DrainRequested}
    assert seen >= {(phase, kind) for phase in RunPhase for kind in {*messages.FromNode.__args__, *others}}


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_a_history_has_one_answer(invalid_events: bool) -> None:
    """The same words at the same times are answered with the same words, whatever order a set comes back in."""
    for seed in range(300):
        world = play(seed, invalid_events=invalid_events)
        again = CoordinatorMachine(world.settings, world.policy)
        for event, now, sends in world.steps:
            if isinstance(event, run.Opened):
                again = CoordinatorMachine(world.settings, world.policy)
            assert again.step(event, now) == sends
        assert again.state == world.machine.state


def test_a_coordinator_goes_on_from_a_state_that_was_written_down() -> None:
    """The state is all that it remembers: one rebuilt from JSON at every step goes on as if nothing was."""
    for seed in range(150):
        world = play(seed, invalid_events=True)
        state: CoordinatorState | None = None
        for event, now, sends in world.steps:
            if isinstance(event, run.Opened):
                state = None
            machine = CoordinatorMachine(world.settings, world.policy, state)
            assert machine.step(event, now) == sends
            state = msgspec.json.decode(msgspec.json.encode(machine.state), type=CoordinatorState)


def test_everything_can_be_written_down_and_read_back() -> None:
    """What a coordinator hears and sends survives JSON unchanged, decoded by the union types that a reader has."""
    encode = msgspec.json.encode
    read_event = msgspec.json.Decoder(AnyCoordinatorEvent).decode
    read_say = msgspec.json.Decoder(Send).decode
    kinds = set()
    for seed in range(300):
        for event, _, sends in play(seed, invalid_events=True).steps:
            assert read_event(encode(event)) == event
            kinds.add(type(event))
            for send in sends:
                assert read_say(encode(send)) == send
                kinds.add(type(send.event))
    assert kinds == {*AnyCoordinatorEvent.__args__, *run.FromCoordinator.__args__}


def test_the_bound_on_steps_is_generous() -> None:
    """Histories end far below the bound that stands for 'never', so reaching it means a machine that is lost."""
    assert max(len(play(seed, invalid_events=True).steps) for seed in range(500)) < MAX_STEPS / 4


# --- any events in any order ------------------------------------------------------------------------------------------

node_ids = st.sampled_from(["a", "b", "c", "d"])
generations = st.integers(0, 4)
ranks = st.integers(-1, 4)
times = st.floats(-1e6, 1e6)
infos = st.builds(
    messages.NodeInfo,
    node_ids,
    host=st.sampled_from(["h", "i"]),
    slots=st.integers(1, 3),
    role=st.sampled_from(["default", "reader"]),
    rank=st.integers(-1, 3),
    name=st.sampled_from(["", "", "x", "y"]),
    order=st.sampled_from(["", "", "r1", "r10"]),
    min_nodes=st.just(1),
    max_nodes=st.sampled_from([3, 3, 3, 4]),
)
evidence = st.builds(Evidence, message=st.sampled_from(["", "boom"]), raised_at=st.none() | times)
failures = st.builds(Failure, generations, ranks, ranks, ranks, st.integers(-9, 9), times, evidence=evidence)
stopped = st.builds(Stopped, ranks, ranks, ranks, st.integers(-9, 9))
joined = st.builds(
    messages.NodeJoined,
    infos,
    generation=generations,
    is_running=st.booleans(),
    has_succeeded=st.booleans(),
    group_rank=ranks,
    group_world_size=st.integers(0, 4),
    restarts_used=st.integers(0, 3),
)
progress = st.builds(messages.WorkerProgress, ranks, ranks, ranks, times, times)
words = st.one_of(
    joined,
    joined,
    st.builds(messages.NodeReady, generations),
    st.builds(messages.NodeReady, generations),
    st.builds(messages.FailureSeen, generations, failures, times),
    st.builds(
        messages.NodeStopped,
        generations,
        times,
        st.lists(failures, max_size=2).map(tuple),
        st.lists(stopped).map(tuple),
    ),
    st.builds(messages.NodeSucceeded, generations),
    st.builds(messages.WorkersRunning, generations, st.just((1,))),
    st.builds(messages.NodeProgress, generations, times, st.lists(progress, max_size=2).map(tuple)),
    st.builds(messages.NodeDraining, generations, st.floats(0, 10), st.just("why")),
    st.builds(messages.NodeWillLeave, generations, st.just("why"), st.none() | st.floats(0, 10)),
    st.builds(messages.NodeLeft, st.just("why"), st.booleans()),
)
any_event = st.one_of(
    *[st.builds(run.Received, node_ids, words)] * 6,
    st.builds(run.NodeLost, node_ids, st.just("why")),
    st.builds(run.DrainRequested, node_ids, st.just("why")),
    st.builds(run.RestartRequested, st.just("why")),
    st.just(run.Tick()),
    st.builds(run.Resumed, st.floats(0, 100)),
)


@given(
    soup=st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=60),
    opened=st.builds(run.Opened, st.sampled_from([0.0, 20.0]), ranks, generations, st.integers(0, 2)),
    policy=st.sampled_from([None, *POLICIES.values()]),
)
@settings(CORE, max_examples=400)
def test_no_words_whatsoever_bring_the_coordinator_down(soup, opened, policy) -> None:
    """However absurd or contradictory what it hears: it answers, its state can be written down, its end is the end, and
    an operator can always bring it about."""
    machine = CoordinatorMachine(RunSettings("run", min_nodes=1, max_nodes=3, max_restarts=2), policy)
    now = 0.0
    for event, later in [(opened, 0.0), *soup, (run.CancelRequested("enough"), 1.0)]:
        now += later
        was_over = machine.state.phase is RunPhase.OVER
        sends = machine.step(event, now)
        assert all(isinstance(send, Send) for send in sends)
        assert msgspec.json.decode(msgspec.json.encode(machine.state), type=CoordinatorState) == machine.state
        if was_over:
            assert machine.state.phase is RunPhase.OVER
            assert not any(isinstance(send.event, run.events.GenerationFormed) for send in sends)
    assert machine.state.phase is RunPhase.OVER


def test_a_checker_that_is_not_thorough_sees_the_same() -> None:
    """For thousands of nodes the state is not written down at every step; all other promises are still watched."""
    for seed in range(100):
        world = play(seed, invalid_events=False)
        machine = CoordinatorMachine(world.settings, world.policy)
        checker = RunChecker(world.settings, is_thorough=False)
        for event, now, _ in world.steps:
            if isinstance(event, run.Opened):
                machine = CoordinatorMachine(world.settings, world.policy)
                checker = RunChecker(world.settings, is_thorough=False)
            checker.check(machine.state, event, machine.step(event, now), now)
