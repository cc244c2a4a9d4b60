"""The loop: facts in order, waiting for descriptors and deadlines only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kit.processes import descriptors, leaving_nothing
from tenax._core import events
from tenax._io.loop import Loop
from tenax.testing.clock import FakeClock


@pytest.fixture
def loop() -> Iterator[Loop]:
    with leaving_nothing():
        made = Loop()
        yield made
        made.close()


def never() -> None:
    return None


class Ear:
    """Something to watch: a socket pair; what arrives is posted as a fact."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.wants_to_write = False
        self.written = 0
        self.ours, self.theirs = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def on_readable(self) -> None:
        data = self.ours.recv(100)
        if data:
            self._loop.post(events.JoinRefused(data.decode()))
        else:
            self.close()

    def on_writable(self) -> None:
        self.written += 1
        self.wants_to_write = False
        self._loop.post(events.Tick())

    def replace(self) -> None:
        """Close the descriptor and take another one, which gets the same number."""
        before = self.fileno()
        self.close()
        self.ours, self.theirs = socket.socketpair()
        assert self.fileno() == before

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def ear(loop: Loop) -> Iterator[Ear]:
    made = Ear(loop)
    loop.watch(made)
    yield made
    made.close()


def test_facts_come_out_in_order(loop: Loop) -> None:
    """First in, first out, and nobody waits while there is one."""
    loop.post(events.JoinRefused("1"))
    loop.post(events.JoinRefused("2"))
    assert [loop.next_event(lambda: 0.0) for _ in range(3)] == [events.JoinRefused("1"), events.JoinRefused("2"), None]


def test_a_readable_descriptor_wakes_it(loop: Loop, ear: Ear) -> None:
    """What arrives on something watched comes out as a fact; no deadline is needed for that."""
    ear.theirs.send(b"hello")
    assert loop.next_event(never) == events.JoinRefused("hello")


def test_interest_in_writing_is_asked_every_time(loop: Loop, ear: Ear) -> None:
    """Only who wants to write is told that it can."""
    ear.theirs.send(b"first")
    loop.next_event(never)
    assert ear.written == 0
    ear.wants_to_write = True
    assert loop.next_event(never) == events.Tick()
    assert ear.written == 1


def test_a_deadline_ends_the_waiting(loop: Loop, ear: Ear) -> None:
    """None means that the time has come; it is asked anew after every wake-up."""
    began = loop.now()
    assert loop.next_event(lambda: began + 0.02) is None
    assert loop.now() - began >= 0.02


def test_another_thread_can_post(loop: Loop) -> None:
    """The loop wakes up although it waits for ever."""
    thread = threading.Thread(target=lambda: loop.post_from_anywhere(events.RunRequested()))
    thread.start()
    assert loop.next_event(never) == events.RunRequested()
    thread.join()


def test_many_wake_ups_are_not_too_many(loop: Loop) -> None:
    """A full pipe of wake-ups neither blocks who posts nor is felt later."""
    for _ in range(100_000):
        loop.wake()
    loop.post_from_anywhere(events.RunRequested())
    assert loop.next_event(never) == events.RunRequested()
    assert loop.next_event(loop.now) is None


def test_something_closed_is_not_watched_any_more(loop: Loop, ear: Ear) -> None:
    """Its descriptor is gone, and that disturbs nobody."""
    ear.theirs.close()
    assert loop.next_event(lambda: loop.now() if ear.fileno() < 0 else None) is None
    assert loop.next_event(loop.now) is None


def test_a_successor_with_the_same_number_is_watched(loop: Loop, ear: Ear) -> None:
    """A helper that was started again has a new descriptor, often with the old one's number."""
    ear.theirs.send(b"old")
    assert loop.next_event(never) == events.JoinRefused("old")
    ear.replace()
    ear.theirs.send(b"new")
    assert loop.next_event(lambda: loop.now() + 10) == events.JoinRefused("new")
    ear.replace()
    ear.wants_to_write = True
    assert loop.next_event(lambda: loop.now() + 10) == events.Tick()


def test_who_is_not_watched_any_more_is_not_called(loop: Loop, ear: Ear) -> None:
    """What arrives for it stays unread; the others are served, and watching it again brings it back."""
    other = Ear(loop)
    loop.watch(other)
    loop.unwatch(ear)
    ear.theirs.send(b"unheard")
    other.theirs.send(b"heard")
    assert loop.next_event(never) == events.JoinRefused("heard")
    assert loop.next_event(loop.now) is None
    loop.watch(ear)
    assert loop.next_event(never) == events.JoinRefused("unheard")
    other.close()


class Jealous(Ear):
    """Its first word makes the loop forget another one."""

    def __init__(self, loop: Loop, other: Ear) -> None:
        super().__init__(loop)
        self._other = other

    def on_readable(self) -> None:
        super().on_readable()
        self._loop.unwatch(self._other)
        self._other.close()


def test_who_is_let_go_while_both_are_ready_is_not_called(loop: Loop) -> None:
    """A link that another one's words close, in the same round: nobody reads from what is closed."""
    victim = Ear(loop)
    jealous = Jealous(loop, victim)
    loop.watch(jealous)
    loop.watch(victim)
    victim.theirs.send(b"too late")
    jealous.theirs.send(b"first")
    assert loop.next_event(never) == events.JoinRefused("first")
    assert loop.next_event(loop.now) is None
    jealous.close()


def test_only_who_is_watched_can_be_let_go(loop: Loop, ear: Ear) -> None:
    """Letting go twice is a mistake of ours, and is not hidden."""
    loop.unwatch(ear)
    with pytest.raises(KeyError):
        loop.unwatch(ear)


# --- timers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def timed(clock: FakeClock) -> Iterator[Loop]:
    with leaving_nothing():
        made = Loop(clock, selector=clock.selector())
        yield made
        made.close()


def test_timers_run_at_their_time_and_in_order(timed: Loop, clock: FakeClock) -> None:
    """By time, however they were set; those of the same time in the order in which they were set."""
    ran: list[tuple[str, float]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, clock()))

    for name, when in (("late", 130.0), ("early", 110.0), ("same", 130.0), ("past", 90.0)):
        timed.at(when, note(name))
    assert timed.next_event(lambda: 200.0) is None
    assert ran == [("past", 100.0), ("early", 110.0), ("late", 130.0), ("same", 130.0)]
    assert clock() == 200.0


def test_a_timer_that_was_cancelled_neither_runs_nor_wakes(timed: Loop, clock: FakeClock) -> None:
    """Nobody waits for it; cancelling it again, or after it ran, changes nothing."""
    ran: list[str] = []
    cancelled = timed.at(110.0, lambda: ran.append("cancelled"))
    kept = timed.at(120.0, lambda: timed.post(events.RunRequested()))
    cancelled.cancel()
    cancelled.cancel()
    assert timed.next_event(never) == events.RunRequested()
    assert (ran, clock()) == ([], 120.0)
    kept.cancel()


def test_a_timer_may_cancel_one_of_the_same_moment_and_set_another(timed: Loop, clock: FakeClock) -> None:
    """What one does counts for those behind it."""
    ran: list[tuple[str, float]] = []

    def first() -> None:
        second.cancel()
        timed.at(clock() + 5, lambda: ran.append(("third", clock())))

    timed.at(110.0, first)
    second = timed.at(110.0, lambda: ran.append(("second", clock())))
    assert timed.next_event(lambda: 300.0) is None
    assert ran == [("third", 115.0)]


def test_what_has_arrived_is_read_before_a_due_timer_runs(timed: Loop, clock: FakeClock) -> None:
    """A loop that was late itself does not take for silence what was said in time."""
    ear = Ear(timed)
    timed.watch(ear)
    timed.at(105.0, lambda: timed.post(events.Tick()))
    ear.theirs.send(b"in time")
    clock.advance(1000.0)  # stopped for a while
    assert [timed.next_event(never) for _ in range(2)] == [events.JoinRefused("in time"), events.Tick()]
    ear.close()


def test_facts_that_wait_come_before_timers(timed: Loop) -> None:
    """A timer runs when the mailbox is empty: what was said first is heard first."""
    ran: list[str] = []
    timed.at(90.0, lambda: ran.append("timer"))
    timed.post(events.RunRequested())
    assert timed.next_event(never) == events.RunRequested()
    assert ran == []
    assert timed.next_event(lambda: 101.0) is None
    assert ran == ["timer"]


def test_a_timer_on_the_real_clock(loop: Loop) -> None:
    """The loop sleeps exactly until then, for want of anything else."""
    when = loop.now() + 0.02
    loop.at(when, lambda: loop.post(events.JoinRefused(repr(loop.now() >= when))))
    assert loop.next_event(never) == events.JoinRefused("True")


def test_close_may_be_repeated(loop: Loop) -> None:
    """Its descriptors are closed once."""
    loop.close()
    reader, writer = os.pipe()
    loop.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.process
def test_a_forked_process_holds_nothing_of_it() -> None:
    """A worker that was forked from the agent does not hold the agent's pipes."""
    before = set(descriptors())
    loop = Loop()
    its_own = set(descriptors()) - before
    assert its_own
    pid = os.fork()
    if pid == 0:
        os._exit(len(its_own & set(descriptors())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    loop.post_from_anywhere(events.RunRequested())
    assert loop.next_event(never) == events.RunRequested()
    loop.close()


def test_a_loop_on_a_fake_clock_waits_no_time() -> None:
    """Hours pass at once; what is ready is served first."""
    clock = FakeClock(100.0)
    loop = Loop(clock, selector=clock.selector())
    ear = Ear(loop)
    loop.watch(ear)
    ear.theirs.send(b"ready")
    assert loop.next_event(lambda: 5000.0) == events.JoinRefused("ready")
    assert clock() == 100.0
    assert loop.next_event(lambda: 5000.0) is None
    assert clock() == 5000.0
    ear.close()
    loop.close()


def test_a_fake_clock_does_not_go_back() -> None:
    """Time is monotonic, also in tests."""
    clock = FakeClock()
    clock.advance(2.5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    assert clock() == 2.5


def test_a_call_from_another_thread_is_made_in_the_loop() -> None:
    """Soon, also while the loop waits; and a loop that was closed calls nothing any more, without complaint."""
    loop = Loop()
    made_in: list[int] = []

    def call() -> None:
        made_in.append(threading.get_ident())
        loop.post(events.RunRequested())

    thread = threading.Thread(target=loop.soon, args=(call,))
    thread.start()
    assert loop.next_event(lambda: None) == events.RunRequested()
    assert made_in == [threading.get_ident()]
    thread.join()
    loop.close()
    loop.soon(call)
    assert len(made_in) == 1


def test_what_has_arrived_comes_before_a_deadline_that_has_passed(loop: Loop, ear: Ear) -> None:
    """A process that was stopped reads what waits for it before it acts on the time that went by."""
    ear.theirs.send(b"in time")
    assert loop.next_event(lambda: 0.0) == events.JoinRefused("in time")
    assert loop.next_event(lambda: 0.0) is None


def test_input_without_end_does_not_delay_a_deadline(loop: Loop, ear: Ear) -> None:
    """Pending input is read once for each deadline."""
    ear.theirs.send(b"first")
    assert loop.next_event(lambda: 0.0) == events.JoinRefused("first")
    ear.theirs.send(b"second")
    assert loop.next_event(lambda: 0.0) is None
