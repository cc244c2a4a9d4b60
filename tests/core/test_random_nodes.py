"""The agent machine against tens of thousands of random histories.

A failing history is a function of its seed: ``RandomNode(random.Random(seed), invalid_events=...).run()``.
"""

from __future__ import annotations

import functools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import events
from tenax._core.agent import AgentMachine, AgentState, Phase
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.messages import HangReport, WorkerProgress
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.testing.agent_invariants import InvariantChecker

from .random_node import MAX_STEPS, RandomNode, format_steps

CORE = settings.get_profile("core")
# Their histories had every event in every phase when they were chosen. The search continues where they no longer do.
COVERING_SEEDS = (
    *(14, 41, 128, 199, 347, 417, 444, 476, 489, 581, 784, 809, 865, 1073, 1868, 1884, 1910, 2703, 3178, 3866, 4116),
    *(4207, 4216, 5659, 6178, 7654, 7894, 7901, 8893, 8956, 9263, 9686, 10209, 11223, 11517, 11641, 12987),
)


@functools.cache  # several tests look at the same histories
def run(seed: int, *, invalid_events: bool) -> RandomNode:
    node = RandomNode(random.Random(seed), invalid_events=invalid_events)
    try:
        node.run()
    except AssertionError as error:
        pytest.fail(f"seed {seed}, invalid_events={invalid_events}: {error}\n{format_steps(node.steps)}")
    return node


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
@pytest.mark.parametrize("block", range(3))
def test_invariants_hold_in_random_histories(block: int, invalid_events: bool) -> None:
    """A1-A11 hold after every step, and every history ends with a verdict in a bounded number of steps.

    Without invalid events, each command is also compared with the state of the processes. Invalid events are
    duplicates, events of other generations or of workers that do not exist, and wrong ones.
    """
    size = 300
    outcomes = set()
    for seed in range(block * size, (block + 1) * size):
        verdict = run(seed, invalid_events=invalid_events).machine.state.verdict
        assert verdict is not None
        outcomes.add(verdict.outcome)
    assert outcomes == set(Outcome), "the histories do not reach every outcome"


def test_random_histories_have_every_event_in_every_phase() -> None:
    missing = {(phase, kind) for phase in Phase for kind in AnyEvent.__args__}
    for seed in (*COVERING_SEEDS, *range(2_500)):
        if not missing:
            break
        node = RandomNode(random.Random(seed), invalid_events=True)
        machine = AgentMachine(node.settings)
        node.run()
        for event, now, _ in node.steps:
            missing.discard((machine.state.phase, type(event)))
            machine.step(event, now)
    assert not missing


@given(rng=st.randoms(use_true_random=False), invalid_events=st.booleans())
@settings(CORE, max_examples=80)
def test_invariants_hold_in_histories_that_hypothesis_shrinks(rng: random.Random, invalid_events: bool) -> None:
    """As above, with random numbers from hypothesis, which shortens a failing history."""
    RandomNode(rng, invalid_events=invalid_events).run()


ranks = st.integers(-1, 2)
generations = st.integers(0, 3)
evidence = st.builds(Evidence, message=st.sampled_from(["", "boom"]), raised_at=st.none() | st.floats(0, 50))
verdicts = st.sampled_from(
    [
        Verdict(Outcome.SUCCEEDED, "all succeeded"),
        Verdict(Outcome.CANCELLED, "enough"),
        Verdict(Outcome.FAILED, "no", failures=(Failure(1, 0, 9, 900, 1, 3.0), Failure(1, 0, 8, 900, 1, 4.0))),
    ]
)
progress = st.builds(WorkerProgress, ranks, ranks, ranks, st.floats(0, 50), st.floats(0, 50))
any_event = st.one_of(
    st.just(events.RunRequested()),
    st.builds(events.GenerationFormed, st.builds(Assignment, generations)),
    st.builds(events.JoinRefused, st.just("no")),
    st.builds(events.GenerationEnded, generations, st.just("b joined"), st.booleans(), stops=st.booleans()),
    st.builds(events.RunEnded, verdicts, st.floats(-1e6, 1e6)),
    st.builds(events.Fenced, generations, st.just("cut off")),
    st.builds(events.LeaveNoticed, generations, st.just("b"), st.just("no"), st.none() | st.floats(0, 50)),
    st.builds(events.NoticeReceived, st.just("no"), st.none() | st.floats(0, 50)),
    st.builds(events.Waiting, st.just("no")),
    st.builds(events.LeaveRequested, st.just("no")),
    st.builds(events.ProgressSeen, generations, st.lists(progress, max_size=2).map(tuple)),
    st.builds(events.WorkerStarted, generations, ranks, st.integers(100, 102)),
    st.builds(events.WorkerOptedIn, generations, ranks, st.floats(0.1, 5)),
    st.builds(events.WorkerOptedOut, generations, ranks, st.just("no")),
    st.builds(events.WorkerHeld, generations, ranks, st.integers(-1, 3)),
    st.builds(events.WorkerStartFailed, generations, ranks, st.just("no such file"), st.sampled_from([0, 1, 127])),
    st.builds(
        events.WorkerExited, generations, ranks, st.sampled_from([0, 1, -9, -15]), st.sampled_from(["", "fault"])
    ),
    st.builds(events.FailureExamined, generations, ranks, evidence),
    st.builds(events.WorkerRaised, generations, ranks),
    st.builds(events.LastLinesRead, generations, ranks, st.just(("step 1",))),
    st.builds(
        events.ScopeExpired,
        generations,
        ranks,
        st.integers(100, 102),
        st.just("step"),
        st.just(60.0),
        st.just(1e9),
        st.sampled_from([0, 9, 15]),
    ),
    st.builds(events.StacksRefused, generations, ranks, st.just("no")),
    st.builds(events.QuietSeen, generations, st.floats(0, 50), st.just("no"), st.lists(ranks, max_size=2).map(tuple)),
    st.builds(events.MovementSeen, generations),
    st.builds(events.StacksRequested, generations, st.integers(1, 2), st.just("no")),
    st.builds(
        events.StacksRead,
        generations,
        st.integers(1, 2),
        st.lists(st.builds(events.WorkerStacks, ranks, st.sampled_from(["", "Stack:"])), max_size=2).map(tuple),
    ),
    st.builds(events.HangFound, generations, st.just(HangReport(1, 1, 1, 60.0, "no"))),
    st.builds(events.HangOver, generations),
    st.builds(events.NodeCleared, generations, st.sampled_from([(), (0,), (1,), (0, 1)])),
    st.builds(events.SignalReceived, st.sampled_from([1, 2, 15])),
    st.builds(events.KeeperLost, st.just("gone")),
    st.just(events.Tick()),
)


@given(
    events_and_delays=st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=40),
    workers=st.integers(1, 2),
    running=st.booleans(),
)
@settings(CORE, max_examples=150)
def test_invariants_hold_for_any_events_in_any_order(events_and_delays, workers, running) -> None:
    """No list of events makes the machine raise or break an invariant."""
    machine = AgentMachine(AgentSettings("run", "trainer", workers, 0))
    checker = InvariantChecker(machine.state)
    opening: list[tuple[AnyEvent, float]] = []
    if running:
        opening = [(events.RunRequested(), 0.0), (events.GenerationFormed(Assignment(1)), 0.0)]
    now = 0.0
    for event, later in [*opening, *events_and_delays]:
        now += later
        checker.expect(machine.state, event)
        checker.check(machine.state, event, machine.step(event, now))


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_the_machine_is_deterministic(invalid_events: bool) -> None:
    """The same events at the same times give the same commands and the same final state, so journals replay."""
    for seed in range(300):
        node = run(seed, invalid_events=invalid_events)
        again = AgentMachine(node.settings)
        for event, now, commands in node.steps:
            assert again.step(event, now) == commands
        assert again.state == node.machine.state


def test_a_machine_continues_from_a_decoded_state() -> None:
    """A machine has no data besides its state: one rebuilt from JSON at every step issues the same commands."""
    for seed in range(150):
        node = run(seed, invalid_events=True)
        machine = AgentMachine(node.settings)
        for event, now, commands in node.steps:
            written = msgspec.json.encode(machine.state)
            machine = AgentMachine(node.settings)
            machine.state = msgspec.json.decode(written, type=AgentState)
            assert machine.step(event, now) == commands


def test_events_commands_and_states_survive_json() -> None:
    """They are decoded with the union types that the reader of a journal uses."""
    encode = msgspec.json.encode
    read_event = msgspec.json.Decoder(AnyEvent).decode
    read_command = msgspec.json.Decoder(AnyCommand).decode
    read_state = msgspec.json.Decoder(AgentState).decode
    kinds = set()
    for seed in range(300):
        node = run(seed, invalid_events=True)
        for event, _, commands in node.steps:
            assert read_event(encode(event)) == event
            kinds.add(type(event))
            for command in commands:
                assert read_command(encode(command)) == command
                kinds.add(type(command))
        assert read_state(encode(node.machine.state)) == node.machine.state
    assert kinds == {*AnyEvent.__args__, *AnyCommand.__args__}


def test_histories_end_far_below_the_maximum_number_of_steps() -> None:
    """Histories end far below the maximum number of steps, so one that reaches it is endless."""
    longest = max(len(run(seed, invalid_events=True).steps) for seed in range(300))
    assert longest < MAX_STEPS / 4
