"""The coordinator machine against tens of thousands of random runs.

A failing history is a function of its seed: ``RandomRun(random.Random(seed), invalid_events=...).run()``.
"""

from __future__ import annotations

import functools
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
    RunSettings,
    Send,
)
from tenax._core.model import Evidence, Failure, Stopped
from tenax._core.run_state import AnyRunPhase

from .policies import POLICIES, DecidesChanges
from .random_run import MAX_STEPS, OUTCOMES, RandomRun, format_steps

CORE = settings.get_profile("core")
# Their runs had every event in every phase when they were chosen. The search continues where they no longer do.
COVERING_SEEDS = (54, 93, 291, 384, 419, 492, 775, 858, 912, 1160, 1188, 1466, 1572, 1633, 1965)


@functools.cache  # several tests look at the same runs
def simulate(seed: int, *, invalid_events: bool) -> RandomRun:
    random_run = RandomRun(random.Random(seed), invalid_events=invalid_events)
    try:
        random_run.run()
    except Exception as error:
        settings = f"seed {seed}, invalid_events={invalid_events}"
        pytest.fail(f"{settings}: {type(error).__name__}: {error}\n{format_steps(random_run.steps)}")
    return random_run


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
@pytest.mark.parametrize("block", range(3))
def test_invariants_hold_in_random_runs(block: int, invalid_events: bool) -> None:
    """C1-C10 and L1 hold after every step, every run ends, and every live node receives the verdict.

    Nodes join, fail, drain, are cut off, die and restart; links break and lose messages; the coordinator is lost and
    replaced, or rebuilt from its state. Without invalid events, every generation is also compared with the live
    workers. Invalid events are duplicates, and messages of unknown nodes.
    """
    size = 100
    outcomes = set()
    for seed in range(block * size, (block + 1) * size):
        verdict = simulate(seed, invalid_events=invalid_events).machine.state.verdict
        assert verdict is not None
        outcomes.add(verdict.outcome)
    assert outcomes == OUTCOMES, "the runs do not reach every outcome"


@pytest.mark.parametrize(
    ("seed", "invalid_events"),
    [(4706, True), (9471, True), (10458, False), (13589, False), (15176, True), (19477, True), (30335, True)],
)
def test_a_bug_that_was_found_stays_fixed(seed: int, invalid_events: bool) -> None:
    """In these runs the machine and its checker disagreed: a hang without a known rank, a recorded generation without
    members, a member of a generation older than one that a node had claimed."""
    assert simulate(seed, invalid_events=invalid_events).machine.state.verdict is not None


@given(rng=st.randoms(use_true_random=False), invalid_events=st.booleans())
@settings(CORE, max_examples=40)
def test_invariants_hold_in_runs_that_hypothesis_shrinks(rng: random.Random, invalid_events: bool) -> None:
    """As above, with random numbers from hypothesis, which shortens a failing run."""
    RandomRun(rng, invalid_events=invalid_events).run()


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_invariants_hold_with_a_policy_that_decides_changes(invalid_events: bool) -> None:
    """Also when a change of the nodes is charged, is followed by a pause, or ends the run."""
    outcomes = set()
    for seed in range(100):
        random_run = RandomRun(random.Random(seed), invalid_events=invalid_events, policy=DecidesChanges())
        random_run.run()
        verdict = random_run.machine.state.verdict
        assert verdict is not None
        outcomes.add(verdict.outcome)
    assert outcomes == OUTCOMES


def test_all_nodes_receive_the_same_verdict() -> None:
    """C6: all nodes that received a verdict have the coordinator's."""
    for seed in range(100):
        random_run = simulate(seed, invalid_events=False)
        received = [node.verdict for node in random_run.nodes.values() if node.verdict is not None]
        assert all(verdict == random_run.machine.state.verdict for verdict in received)


def test_random_runs_have_every_event_in_every_phase() -> None:
    others = {run.NodeLost, run.Tick, run.Resumed, run.CancelRequested, run.RestartRequested, run.DrainRequested}
    missing = {(phase, kind) for phase in AnyRunPhase.__args__ for kind in {*messages.FromNode.__args__, *others}}

    class Recording(CoordinatorMachine):
        def step(self, event: AnyCoordinatorEvent, now: float) -> run.Step:
            missing.discard((type(self.state.phase), type(event.message if isinstance(event, run.Received) else event)))
            return super().step(event, now)

    for seed in (*COVERING_SEEDS, *range(4_000)):
        if not missing:
            break
        RandomRun(random.Random(seed), invalid_events=True, make_machine=Recording).run()
    assert not missing


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_the_coordinator_is_deterministic(invalid_events: bool) -> None:
    """The same events at the same times give the same messages, independent of the order of sets."""
    for seed in range(100):
        random_run = simulate(seed, invalid_events=invalid_events)
        again = CoordinatorMachine(random_run.settings, random_run.policy)
        for event, now, sends in random_run.steps:
            if isinstance(event, run.Opened):
                again = CoordinatorMachine(random_run.settings, random_run.policy)
            assert again.step(event, now).sends == sends
        assert again.state == random_run.machine.state


def test_a_coordinator_continues_from_a_decoded_state() -> None:
    """It has no data besides its state: one rebuilt from JSON at every step sends the same messages."""
    for seed in range(100):
        random_run = simulate(seed, invalid_events=True)
        state: CoordinatorState | None = None
        for event, now, sends in random_run.steps:
            if isinstance(event, run.Opened):
                state = None
            machine = CoordinatorMachine(random_run.settings, random_run.policy, state)
            assert machine.step(event, now).sends == sends
            state = msgspec.json.decode(msgspec.json.encode(machine.state), type=CoordinatorState)


def test_events_and_messages_survive_json() -> None:
    """They are decoded with the union types that a reader uses."""
    encode = msgspec.json.encode
    read_event = msgspec.json.Decoder(AnyCoordinatorEvent).decode
    read_send = msgspec.json.Decoder(Send).decode
    kinds = set()
    for seed in range(100):
        for event, _, sends in simulate(seed, invalid_events=True).steps:
            assert read_event(encode(event)) == event
            kinds.add(type(event))
            for send in sends:
                assert read_send(encode(send)) == send
                kinds.add(type(send.event))
    assert kinds == {*AnyCoordinatorEvent.__args__, *run.events.FromCoordinator.__args__}


def test_runs_end_far_below_the_maximum_number_of_steps() -> None:
    """A run that reaches the maximum is endless."""
    assert max(len(simulate(seed, invalid_events=True).steps) for seed in range(100)) < MAX_STEPS / 4


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
any_message = st.one_of(
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
    *[st.builds(run.Received, node_ids, any_message)] * 6,
    st.builds(run.NodeLost, node_ids, st.just("why")),
    st.builds(run.DrainRequested, node_ids, st.just("why")),
    st.builds(run.RestartRequested, st.just("why")),
    st.just(run.Tick()),
    st.builds(run.Resumed, st.floats(0, 100)),
)


@given(
    events_and_delays=st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=60),
    opened=st.builds(run.Opened, st.sampled_from([0.0, 20.0]), ranks, generations, st.integers(0, 2)),
    policy=st.sampled_from([None, *POLICIES.values()]),
)
@settings(CORE, max_examples=200)
def test_any_events_in_any_order_are_handled(events_and_delays, opened, policy) -> None:
    """It does not raise, its state survives JSON, the end is final, and an operator can always end the run."""
    machine = CoordinatorMachine(RunSettings("run", min_nodes=1, max_nodes=3, max_restarts=2), policy)
    now = 0.0
    for event, later in [(opened, 0.0), *events_and_delays, (run.CancelRequested("enough"), 1.0)]:
        now += later
        was_over = isinstance(machine.state.phase, run.Over)
        sends = machine.step(event, now).sends
        assert all(isinstance(send, Send) for send in sends)
        assert msgspec.json.decode(msgspec.json.encode(machine.state), type=CoordinatorState) == machine.state
        if was_over:
            assert isinstance(machine.state.phase, run.Over)
            assert not any(isinstance(send.event, run.events.GenerationFormed) for send in sends)
    assert isinstance(machine.state.phase, run.Over)
