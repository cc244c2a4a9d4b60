"""The ledger counts every second once, and what was lost (L1-L3 of ``tenax._core.ledger``)."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax._core.ledger import Goodput, Ledger, Mean, Spent
from tenax._core.record import record_of
from tenax.testing.run_invariants import RunChecker

from .random_run import RandomRun

CORE = settings.get_profile("core")
NAMES = Spent.__struct_fields__
SAME = 1e-6


def same(seconds: float) -> object:
    return pytest.approx(seconds, abs=SAME, rel=1e-12)


# --- random histories of the coordinator ------------------------------------------------------------------------------


class LedgerChecked(CoordinatorMachine):
    """Checks its ledger after every step, and for a time 7 s later without an event."""

    def step(self, event: run.AnyCoordinatorEvent, now: float) -> run.Step:
        ledger = self.state.ledger
        before = ledger.spent(now)
        step = super().step(event, now)
        after = ledger.spent(now)
        is_opened = isinstance(event, run.Opened) and event.record is not None
        is_progress = isinstance(event, run.Received) and isinstance(event.message, messages.NodeProgress)
        is_hang = any(isinstance(send.event, events.HangFound) for send in step.sends)
        if is_progress or is_hang:
            # L2: reports of workers and a hang move seconds, but only between starting, training, lost and hung.
            assert after.total_s == same(before.total_s)
            assert (after.waiting_s, after.stopping_s) == (same(before.waiting_s), same(before.stopping_s))
            assert after.lost_s >= before.lost_s - SAME
            assert after.hung_s >= before.hung_s - SAME
        elif not is_opened:
            # L1: an event takes no time, so it moves no time between sums.
            assert [getattr(after, name) for name in NAMES] == [same(getattr(before, name)) for name in NAMES]
        later = ledger.spent(now + 7.0)
        for name in NAMES:  # L2: sums only grow with time
            assert getattr(later, name) >= getattr(after, name) - SAME
        passed_s = 7.0 if ledger.began_at is not None and ledger.over_at is None else 0.0
        assert later.total_s == same(after.total_s + passed_s)
        assert len(ledger.entries) <= 100
        return step


def check_entries(ledger: Ledger) -> None:
    """Check that the entries of generations are in order and without a gap."""
    stopped_at = ledger.began_at if not ledger.forgotten else None
    for entry in ledger.entries:
        times = [entry.formed_at, entry.running_at, entry.ended_at, entry.settled_at]
        known = [at for at in times if at is not None]
        assert known == sorted(known), entry
        if stopped_at is not None:
            assert entry.formed_at - entry.waited_s == same(stopped_at), entry
        stopped_at = entry.settled_at
    assert all(entry.settled_at is not None for entry in ledger.entries[:-1])
    numbers = [entry.number for entry in ledger.entries]
    assert numbers == sorted(set(numbers))


def run_and_check(random_run: RandomRun) -> None:
    """Run to the end and check the ledger. ``RunChecker`` checks L1 after every step."""
    verdict = random_run.run()
    ledger = random_run.machine.state.ledger
    check_entries(ledger)
    goodput = verdict.goodput
    if goodput is None:
        pytest.fail("the verdict has no goodput")
    assert goodput == ledger.goodput(ledger.over_at or 0.0)
    assert goodput == ledger.goodput(1e9), "time counts after the end"
    assert goodput.lost_steps >= sum(entry.lost_steps for entry in ledger.entries)
    last = ledger.current
    if last is not None:
        assert last.settled_at is not None
        assert last.settled_at <= (ledger.over_at or 0.0)


@pytest.mark.parametrize("invalid_events", [False, True], ids=["valid", "invalid"])
def test_every_second_is_in_one_sum(invalid_events: bool) -> None:
    """L1 and L2 hold in random runs, with joining and leaving nodes, requested restarts and replaced coordinators."""
    seen: set[str] = set()
    for seed in range(50):
        random_run = RandomRun(random.Random(seed), invalid_events=invalid_events, make_machine=LedgerChecked)
        run_and_check(random_run)
        verdict = random_run.machine.state.verdict
        assert verdict is not None
        assert verdict.goodput is not None
        spent = verdict.goodput.spent
        seen |= {name for name in NAMES if getattr(spent, name) > 0}
        seen |= {entry.ended_by for entry in random_run.machine.state.ledger.entries}
    assert seen >= set(NAMES), "the runs do not reach every sum"
    assert seen >= {"failure", "loss", "drain", "join", "request", "succeeded", "cancelled"}


@given(rng=st.randoms(use_true_random=False), invalid_events=st.booleans())
@settings(CORE, max_examples=30)
def test_every_second_is_in_one_sum_in_runs_that_hypothesis_shrinks(rng: random.Random, invalid_events: bool) -> None:
    """As above, with random numbers from hypothesis, which shortens a failing run."""
    run_and_check(RandomRun(rng, invalid_events=invalid_events, make_machine=LedgerChecked))


# --- any calls in any order -------------------------------------------------------------------------------------------

steps = st.integers(0, 60)
moments = st.floats(-100, 100)
calls = st.one_of(
    st.just(("begin",)),
    st.just(("formed",)),
    st.just(("found",)),
    st.just(("running",)),
    st.just(("running",)),
    st.tuples(st.just("stepped"), steps, moments, steps, moments),
    st.tuples(st.just("ended"), st.sampled_from(["failure", "loss", "drain"]), st.none() | moments),
    st.just(("settled",)),
    st.just(("settled",)),
)


@given(calls_and_delays=st.lists(st.tuples(calls, st.floats(0, 20)), max_size=60))
@settings(CORE, max_examples=300)
def test_no_order_of_calls_counts_a_second_twice(calls_and_delays: list[tuple[tuple, float]]) -> None:
    """L1 and L2 hold if a generation is formed only after the last one has ended, which the coordinator ensures (C2);
    other calls may be late, missing, repeated or about the future."""
    ledger, now, number = Ledger(), 0.0, 0
    for (name, *arguments), later in calls_and_delays:
        before = ledger.spent(now)
        now += later
        current = ledger.current
        match name:
            case "begin":
                ledger.begin(now)
            case "formed" | "found":
                if current is not None:
                    ledger.ended("loss", "another", None, now)
                    ledger.settled(now)
                number += 1
                if name == "formed":
                    ledger.formed(number, "why", 1, 1, now)
                else:
                    ledger.found(number, 1, 1, now)
            case "stepped":
                first, first_at, last, last_at = arguments
                ledger.stepped(first, now + first_at, last, now + last_at, now)
            case "ended":
                kind, began_at = arguments
                ledger.ended(kind, "why", began_at, now)
            case _:
                getattr(ledger, name)(now)
        after = ledger.spent(now)
        assert all(getattr(after, each) >= 0 for each in NAMES)
        assert after.total_s == same(now - ledger.began_at if ledger.began_at is not None else 0.0)
        assert after.lost_s >= before.lost_s - SAME
        if name != "stepped":
            assert all(getattr(after, each) >= getattr(before, each) - SAME for each in NAMES)
        assert ledger.lost_steps == sum(entry.lost_steps for entry in ledger.entries)
        assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger
    ledger.over("cancelled", "enough", now)
    assert ledger.spent(now + 50.0) == ledger.spent(now)


# --- single cases -----------------------------------------------------------------------------------------------------


def test_sums_of_dropped_generations_are_kept() -> None:
    """L3: of more than a hundred generations, the oldest entries are dropped."""
    ledger = Ledger()
    ledger.begin(0.0)
    now = 0.0
    for number in range(1, 251):
        ledger.formed(number, "restart", 2, 4, now + 1)
        ledger.running(now + 3)
        ledger.ended("failure", "rank 0 failed", now + 9, now + 10)
        ledger.settled(now + 11)
        now += 11
    assert len(ledger.entries) == 100
    assert ledger.forgotten == 150
    assert [entry.number for entry in ledger.entries] == list(range(151, 251))
    assert ledger.spent(now) == Spent(waiting_s=250.0, starting_s=500.0, training_s=1750.0, stopping_s=250.0)
    assert ledger.spent(now) == ledger.spent_on_settled()
    assert ledger.goodput(now).to_detect == Mean(250, 250.0)
    assert ledger.goodput(now).to_recover.count == 249


def test_the_coordinators_ledger_keeps_at_most_a_hundred_generations() -> None:
    """L3: its state stays small, and ``RunChecker`` still counts every second."""
    chosen = RunSettings("run", max_restarts=1000)
    machine, checker = CoordinatorMachine(chosen), RunChecker(chosen)
    now = 0.0

    def step(event: run.AnyCoordinatorEvent, at: float) -> None:
        checker.expect(machine.state, event)
        checker.check(machine.state, event, machine.step(event, at), at)

    step(run.Opened(), now)
    step(run.Received("a", messages.NodeJoined(messages.NodeInfo("a", "host-a"))), now)
    for generation in range(130):
        step(run.Received("a", messages.NodeReady(generation)), now)
        step(run.Received("a", messages.WorkersRunning(generation + 1, (9,))), now + 1)
        step(run.RestartRequested("again"), now + 4)
        now += 5
    state = machine.state
    assert (state.generation, len(state.ledger.entries), state.ledger.forgotten) == (130, 100, 30)
    step(run.CancelRequested("enough"), now)
    assert state.verdict is not None
    assert state.verdict.goodput == Goodput(
        Spent(waiting_s=0.0, starting_s=130.0, training_s=390.0, stopping_s=130.0)
    ), "a request is not a failure that is detected or recovered from"


def test_the_end_of_a_generation_is_recorded_once() -> None:
    """A later end changes nothing. The end of the run ends and settles the generation."""
    ledger = Ledger()
    ledger.formed(1, "first generation", 1, 1, 0.0)
    ledger.running(1.0)
    ledger.settled(2.0)
    entry = ledger.current
    assert entry is not None
    assert entry.settled_at is None, "it has not ended"
    ledger.ended("failure", "rank 0 failed", 3.0, 5.0)
    ledger.ended("loss", "another reason", None, 6.0)
    assert (entry.ended_at, entry.ended_by, entry.ended_why) == (5.0, "failure", "rank 0 failed")
    ledger.running(6.0)
    assert entry.running_at == 1.0
    ledger.settled(7.0)
    ledger.settled(8.0)
    assert entry.settled_at == 7.0
    ledger.over("failed", "no restarts are left", 9.0)
    ledger.over("cancelled", "again", 10.0)
    assert (ledger.over_at, entry.ended_by) == (9.0, "failure")
    assert ledger.spent(99.0) == Spent(waiting_s=2.0, starting_s=1.0, training_s=4.0, stopping_s=2.0)
    assert ledger.to_detect == Mean(1, 2.0)


def test_the_time_of_a_hang_is_hung_until_there_is_activity_or_the_generation_ends() -> None:
    """Also of a hang that was only reported, and it is not lost in addition."""
    ledger = Ledger()
    ledger.formed(1, "first generation", 1, 1, 0.0)
    ledger.running(1.0)
    ledger.stepped(1, 2.0, 4, 10.0, 10.0)
    ledger.hung(10.0)
    assert ledger.spent(70.0) == Spent(starting_s=2.0, training_s=8.0, hung_s=60.0)
    ledger.resumed(80.0)
    ledger.stepped(1, 2.0, 5, 80.0, 80.0)
    assert ledger.spent(90.0) == Spent(starting_s=2.0, training_s=18.0, hung_s=70.0)
    ledger.hung(75.0)  # the first report of another hang: not before the end of the last one
    ledger.ended("failure", "rank 0 failed", None, 100.0)
    ledger.settled(101.0)
    assert ledger.spent(101.0) == Spent(starting_s=2.0, training_s=8.0, stopping_s=1.0, hung_s=90.0)
    ledger.formed(2, "restart", 1, 1, 101.0)
    ledger.running(101.0)
    ledger.stepped(5, 101.0, 5, 101.0, 101.0)
    assert ledger.spent(101.0) == Spent(training_s=6.0, starting_s=2.0, stopping_s=1.0, lost_s=2.0, hung_s=90.0)


def test_importing_is_starting_even_if_a_hang_was_reported_meanwhile() -> None:
    """With and without steps."""
    ledger = Ledger()
    ledger.formed(1, "first generation", 1, 2, 0.0)
    ledger.running(1.0)
    ledger.imported(8.0, 9.0)
    ledger.imported(5.0, 9.0)  # of another worker
    assert ledger.spent(10.0) == Spent(starting_s=8.0, training_s=2.0)
    ledger.hung(2.0)
    ledger.resumed(6.0)
    assert ledger.spent(10.0) == Spent(starting_s=4.0, training_s=2.0, hung_s=4.0)
    ledger.stepped(1, 9.0, 1, 9.0, 10.0)
    assert ledger.spent(10.0) == Spent(starting_s=5.0, training_s=1.0, hung_s=4.0)


def test_workers_that_never_ran_were_starting_until_the_end() -> None:
    ledger = Ledger()
    ledger.begin(0.0)
    ledger.formed(1, "first generation", 1, 1, 2.0)
    ledger.over("cancelled", "enough", 5.0)
    assert ledger.spent(5.0) == Spent(waiting_s=2.0, starting_s=3.0)
    assert ledger.spent(5.0).ratio == 0.0
    assert Spent().ratio is None


def test_a_run_without_nodes_spent_no_time() -> None:
    """There is no ratio either."""
    ledger = Ledger()
    ledger.over("broken", "only 0 nodes came", 600.0)
    assert ledger.goodput(600.0) == Goodput()
    assert ledger.goodput(600.0).to_recover.seconds is None


def add_trained(ledger: Ledger, number: int, since: float, until: float, first: int, last: int) -> None:
    """Add a generation that forms, runs and begins its first step at once, with one step per second."""
    ledger.formed(number, "why", 1, 1, since)
    ledger.running(since)
    ledger.stepped(first, since, last, since + last - first, until)
    ledger.ended("failure", "rank 0 failed", None, until)
    ledger.settled(until)


def test_repeated_steps_were_lost() -> None:
    """Ten steps of a second each, and two seconds after the last one."""
    ledger = Ledger()
    add_trained(ledger, 1, 0.0, 102.0, 0, 100)
    assert ledger.spent(102.0).lost_s == 0.0, "no step was repeated yet"
    ledger.formed(2, "why", 1, 1, 102.0)
    ledger.running(102.0)
    ledger.stepped(91, 102.0, 91, 102.0, 103.0)
    assert ledger.spent(103.0) == Spent(training_s=91.0, lost_s=12.0)
    assert ledger.lost_steps == 10
    ledger.stepped(91, 102.0, 110, 122.0, 122.0)
    assert ledger.lost_steps == 10, "counted twice"


def test_steps_that_are_not_repeated_were_not_lost() -> None:
    """Every step is in a checkpoint. The time after the last step is lost, because it is not in one."""
    ledger = Ledger()
    add_trained(ledger, 1, 0.0, 102.0, 0, 100)
    add_trained(ledger, 2, 102.0, 112.0, 101, 111)
    assert ledger.lost_steps == 0
    assert ledger.spent(112.0) == Spent(training_s=110.0, lost_s=2.0)


def test_a_worker_that_begins_at_an_earlier_step_increases_the_loss() -> None:
    """Nodes report tsuccessor steps one after the other."""
    ledger = Ledger()
    add_trained(ledger, 1, 0.0, 100.0, 0, 100)
    ledger.formed(2, "why", 1, 1, 100.0)
    ledger.running(100.0)
    ledger.stepped(95, 101.0, 96, 102.0, 103.0)
    ledger.stepped(91, 101.5, 94, 102.0, 103.0)
    assert ledger.lost_steps == 10
    entry = ledger.current
    assert entry is not None
    assert (entry.first_step, entry.first_step_at) == (91, 101.0)
    assert (entry.last_step, entry.last_step_at) == (96, 102.0)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_order_of_step_reports_does_not_matter(is_reversed: bool) -> None:
    reports = [(3, 5.0, 20, 30.0), (4, 4.0, 21, 31.0), (3, 6.0, 21, 29.0)]
    ledger = Ledger()
    ledger.formed(1, "why", 1, 1, 0.0)
    ledger.running(1.0)
    for report in reversed(reports) if is_reversed else reports:
        ledger.stepped(*report, 40.0)
    entry = ledger.current
    assert entry is not None
    assert (entry.first_step, entry.first_step_at, entry.last_step, entry.last_step_at) == (3, 4.0, 21, 29.0)
    assert ledger.spent(40.0) == Spent(starting_s=4.0, training_s=36.0)


def test_no_more_is_lost_than_was_trained() -> None:
    """Times of other hosts are approximate, and a script may report wrong steps."""
    ledger = Ledger()
    ledger.formed(1, "why", 1, 1, 0.0)
    ledger.running(5.0)
    ledger.stepped(0, -1e6, 10, 8.0, 8.0)
    ledger.ended("failure", "rank 0 failed", None, 10.0)
    ledger.settled(11.0)
    add_trained(ledger, 2, 11.0, 12.0, 0, 1)
    assert ledger.spent(12.0) == Spent(starting_s=5.0, training_s=1.0, stopping_s=1.0, lost_s=5.0)


def test_steps_reported_after_a_generation_has_settled_are_ignored() -> None:
    """Its sums are final, except for steps that a later generation repeats: a record may contain them."""
    ledger = Ledger()
    add_trained(ledger, 1, 0.0, 10.0, 0, 10)
    before = msgspec.json.encode(ledger)
    ledger.stepped(0, 0.0, 99, 9.0, 11.0)
    assert msgspec.json.encode(ledger) == before


# --- another coordinator ----------------------------------------------------------------------------------------------

NODE = messages.NodeInfo("a", "host-a")
STORE = "a:1"


def work(generation: int) -> messages.NodeJoined:
    return messages.NodeJoined(NODE, generation, is_running=True, group_rank=0, group_world_size=1, store=STORE)


def first_coordinator() -> CoordinatorMachine:
    """Return a coordinator whose second generation runs since second 25; the first trained for 9 s."""
    machine = CoordinatorMachine(RunSettings("run", max_restarts=3))
    for at, event in [
        (0.0, run.Opened()),
        (10.0, run.Received("a", messages.NodeJoined(NODE))),
        (12.0, run.Received("a", messages.NodeReady(0, "a", 1))),
        (13.0, run.Received("a", messages.WorkersRunning(1, (9,)))),
        (22.0, run.RestartRequested("new data")),
        (24.0, run.Received("a", messages.NodeReady(1, "a", 1))),
        (25.0, run.Received("a", messages.WorkersRunning(2, (9,)))),
    ]:
        machine.step(event, at)
    return machine


def test_a_successor_continues_the_recorded_sums() -> None:
    """The record has the sums up to the last formed generation. The successor has another clock."""
    record = record_of(first_coordinator().state)
    assert record.cost.spent == Spent(waiting_s=2.0, starting_s=1.0, training_s=9.0, stopping_s=2.0)
    successor, checker = CoordinatorMachine(RunSettings("run", max_restarts=3)), RunChecker(RunSettings("run"))
    opened = run.Opened(5.0, generation=2, store=STORE, record=record, return_s=8.0, alone_s=60.0)
    for at, event in [(7000.0, opened), (7003.0, run.Received("a", work(2))), (7003.0, run.Received("a", RUNNING))]:
        checker.expect(successor.state, event)
        checker.check(successor.state, event, successor.step(event, at), at)
    assert isinstance(successor.state.phase, run.Running)
    assert successor.state.requests == 1
    successor.step(run.Received("a", messages.NodeSucceeded(2)), 7013.0)
    verdict = successor.state.verdict
    assert verdict is not None
    assert verdict.goodput is not None
    assert verdict.goodput.spent == Spent(waiting_s=5.0, starting_s=1.0, training_s=19.0, stopping_s=2.0)
    (entry,) = successor.state.ledger.entries
    assert (entry.number, entry.why, entry.running_at) == (2, "formed by an earlier coordinator", 7003.0)


RUNNING = messages.WorkersRunning(2, (9,))


def test_a_successor_without_nodes_counts_its_recovery_as_waiting() -> None:
    """It waits for the members of the last generation."""
    record = record_of(first_coordinator().state)
    successor = CoordinatorMachine(RunSettings("run", max_restarts=3))
    successor.step(run.Opened(5.0, generation=2, store=STORE, record=record, return_s=8.0, alone_s=60.0), 100.0)
    assert isinstance(successor.state.phase, run.Recovering)
    assert successor.state.ledger.spent(130.0) == record.cost.spent + Spent(waiting_s=30.0)
    successor.step(run.EarlierCoordinatorGone("a"), 140.0)
    assert isinstance(successor.state.phase, run.Gathering)
    assert successor.state.ledger.spent(150.0) == record.cost.spent + Spent(waiting_s=50.0)


def test_a_coordinator_without_a_record_counts_from_its_start() -> None:
    """It learns the running generation from the nodes, but not the time before."""
    machine = CoordinatorMachine(RunSettings("run"))
    machine.step(run.Opened(30.0, generation=2, store=STORE), 100.0)
    machine.step(run.Received("a", work(2)), 104.0)
    assert isinstance(machine.state.phase, run.Running)
    assert machine.state.ledger.spent(110.0) == Spent(waiting_s=4.0, training_s=6.0)


def test_steps_before_a_successor_started_do_not_count_as_starting() -> None:
    """A generation of an earlier coordinator made its first steps before, so it was never starting here."""
    ledger = Ledger()
    ledger.begin(100.0)
    ledger.found(2, 1, 1, 100.0)
    ledger.stepped(0, 0.0, 150, 150.0, 150.0)
    ledger.ended("failure", "rank 0 failed", None, 150.0)
    ledger.settled(150.0)
    add_trained(ledger, 3, 150.0, 160.0, 141, 151)
    assert ledger.spent(160.0) == Spent(training_s=50.0, lost_s=10.0)
    assert ledger.lost_steps == 10
