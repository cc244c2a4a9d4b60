"""The loop: events in order; it waits only for descriptors and deadlines."""

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


class Receiver:
    """A watched socket pair; received bytes are posted as an event."""

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
        """Close the descriptor and open another one, which gets the same number."""
        before = self.fileno()
        self.close()
        self.ours, self.theirs = socket.socketpair()
        assert self.fileno() == before

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def receiver(loop: Loop) -> Iterator[Receiver]:
    made = Receiver(loop)
    loop.watch(made)
    yield made
    made.close()


def test_events_are_delivered_in_order(loop: Loop) -> None:
    """First in, first out, without waiting while one is pending."""
    loop.post(events.JoinRefused("1"))
    loop.post(events.JoinRefused("2"))
    assert [loop.next_event(lambda: 0.0) for _ in range(3)] == [events.JoinRefused("1"), events.JoinRefused("2"), None]


def test_a_readable_descriptor_wakes_the_loop(loop: Loop, receiver: Receiver) -> None:
    """Received bytes become an event without any deadline."""
    receiver.theirs.send(b"hello")
    assert loop.next_event(never) == events.JoinRefused("hello")


def test_interest_in_writing_is_checked_in_every_round(loop: Loop, receiver: Receiver) -> None:
    """``on_writable`` is called only if ``wants_to_write`` is set."""
    receiver.theirs.send(b"first")
    loop.next_event(never)
    assert receiver.written == 0
    receiver.wants_to_write = True
    assert loop.next_event(never) == events.Tick()
    assert receiver.written == 1


def test_a_deadline_ends_the_wait(loop: Loop, receiver: Receiver) -> None:
    """``next_event`` then returns None; the deadline is evaluated again after every wakeup."""
    began = loop.now()
    assert loop.next_event(lambda: began + 0.02) is None
    assert loop.now() - began >= 0.02


def test_another_thread_can_post(loop: Loop) -> None:
    """It wakes up a loop that waits without a deadline."""
    thread = threading.Thread(target=lambda: loop.soon(lambda: loop.post(events.RunRequested())))
    thread.start()
    assert loop.next_event(never) == events.RunRequested()
    thread.join()


def test_a_full_wakeup_pipe_does_not_block(loop: Loop) -> None:
    """Posting does not block, and surplus wakeups have no later effect."""
    for _ in range(100_000):
        loop.wake()
    loop.soon(lambda: loop.post(events.RunRequested()))
    assert loop.next_event(never) == events.RunRequested()
    assert loop.next_event(loop.now) is None


def test_a_closed_descriptor_is_no_longer_watched(loop: Loop, receiver: Receiver) -> None:
    receiver.theirs.close()
    assert loop.next_event(lambda: loop.now() if receiver.fileno() < 0 else None) is None
    assert loop.next_event(loop.now) is None


def test_a_new_descriptor_with_the_same_number_is_watched(loop: Loop, receiver: Receiver) -> None:
    """A restarted helper process has a new descriptor, often with the old number."""
    receiver.theirs.send(b"old")
    assert loop.next_event(never) == events.JoinRefused("old")
    receiver.replace()
    receiver.theirs.send(b"new")
    assert loop.next_event(lambda: loop.now() + 10) == events.JoinRefused("new")
    receiver.replace()
    receiver.wants_to_write = True
    assert loop.next_event(lambda: loop.now() + 10) == events.Tick()


def test_an_unwatched_object_is_not_called(loop: Loop, receiver: Receiver) -> None:
    """Its input stays unread; others are served, and watching it again delivers the input."""
    other = Receiver(loop)
    loop.watch(other)
    loop.unwatch(receiver)
    receiver.theirs.send(b"unheard")
    other.theirs.send(b"heard")
    assert loop.next_event(never) == events.JoinRefused("heard")
    assert loop.next_event(loop.now) is None
    loop.watch(receiver)
    assert loop.next_event(never) == events.JoinRefused("unheard")
    other.close()


class Unwatching(Receiver):
    """Unwatches another object when it receives its first byte."""

    def __init__(self, loop: Loop, other: Receiver) -> None:
        super().__init__(loop)
        self._other = other

    def on_readable(self) -> None:
        super().on_readable()
        self._loop.unwatch(self._other)
        self._other.close()


def test_an_object_unwatched_in_the_same_round_is_not_called(loop: Loop) -> None:
    """Both were ready; the first closed the second, which must not be read."""
    victim = Receiver(loop)
    jealous = Unwatching(loop, victim)
    loop.watch(jealous)
    loop.watch(victim)
    victim.theirs.send(b"too late")
    jealous.theirs.send(b"first")
    assert loop.next_event(never) == events.JoinRefused("first")
    assert loop.next_event(loop.now) is None
    jealous.close()


def test_unwatching_twice_raises(loop: Loop, receiver: Receiver) -> None:
    """It is a bug and is not hidden."""
    loop.unwatch(receiver)
    with pytest.raises(KeyError):
        loop.unwatch(receiver)


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
    """In order of time; timers of the same time in the order of creation."""
    ran: list[tuple[str, float]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: ran.append((name, clock()))

    for name, when in (("late", 130.0), ("early", 110.0), ("same", 130.0), ("past", 90.0)):
        timed.at(when, note(name))
    assert timed.next_event(lambda: 200.0) is None
    assert ran == [("past", 100.0), ("early", 110.0), ("late", 130.0), ("same", 130.0)]
    assert clock() == 200.0


def test_a_cancelled_timer_neither_runs_nor_wakes_the_loop(timed: Loop, clock: FakeClock) -> None:
    """Cancelling it again, or after it ran, has no effect."""
    ran: list[str] = []
    cancelled = timed.at(110.0, lambda: ran.append("cancelled"))
    kept = timed.at(120.0, lambda: timed.post(events.RunRequested()))
    cancelled.cancel()
    cancelled.cancel()
    assert timed.next_event(never) == events.RunRequested()
    assert (ran, clock()) == ([], 120.0)
    kept.cancel()


def test_a_timer_may_cancel_and_create_timers_of_the_same_time(timed: Loop, clock: FakeClock) -> None:
    ran: list[tuple[str, float]] = []

    def first() -> None:
        second.cancel()
        timed.at(clock() + 5, lambda: ran.append(("third", clock())))

    timed.at(110.0, first)
    second = timed.at(110.0, lambda: ran.append(("second", clock())))
    assert timed.next_event(lambda: 300.0) is None
    assert ran == [("third", 115.0)]


def test_pending_input_is_read_before_a_due_timer_runs(timed: Loop, clock: FakeClock) -> None:
    """So that the loop's own lag is not taken for a peer's silence."""
    receiver = Receiver(timed)
    timed.watch(receiver)
    timed.at(105.0, lambda: timed.post(events.Tick()))
    receiver.theirs.send(b"in time")
    clock.advance(1000.0)  # stopped for a while
    assert [timed.next_event(never) for _ in range(2)] == [events.JoinRefused("in time"), events.Tick()]
    receiver.close()


def test_posted_events_come_before_due_timers(timed: Loop) -> None:
    """Timers run when the mailbox is empty."""
    ran: list[str] = []
    timed.at(90.0, lambda: ran.append("timer"))
    timed.post(events.RunRequested())
    assert timed.next_event(never) == events.RunRequested()
    assert ran == []
    assert timed.next_event(lambda: 101.0) is None
    assert ran == ["timer"]


def test_a_timer_on_the_real_clock(loop: Loop) -> None:
    """The loop sleeps exactly until its time."""
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
def test_a_forked_process_has_no_descriptor_of_the_loop() -> None:
    """A worker forked from the agent does not keep the agent's pipes open."""
    before = set(descriptors())
    loop = Loop()
    its_own = set(descriptors()) - before
    assert its_own
    pid = os.fork()
    if pid == 0:
        os._exit(len(its_own & set(descriptors())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    loop.soon(lambda: loop.post(events.RunRequested()))
    assert loop.next_event(never) == events.RunRequested()
    loop.close()


def test_a_loop_on_a_fake_clock_does_not_wait() -> None:
    """Hours pass at once; ready descriptors are served first."""
    clock = FakeClock(100.0)
    loop = Loop(clock, selector=clock.selector())
    receiver = Receiver(loop)
    loop.watch(receiver)
    receiver.theirs.send(b"ready")
    assert loop.next_event(lambda: 5000.0) == events.JoinRefused("ready")
    assert clock() == 100.0
    assert loop.next_event(lambda: 5000.0) is None
    assert clock() == 5000.0
    receiver.close()
    loop.close()


def test_a_fake_clock_does_not_go_back() -> None:
    """Time is monotonic, also in tests."""
    clock = FakeClock()
    clock.advance(2.5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    assert clock() == 2.5


def test_a_call_from_another_thread_runs_in_the_loop() -> None:
    """It wakes a waiting loop; a closed loop ignores it."""
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


def test_pending_input_comes_before_a_passed_deadline(loop: Loop, receiver: Receiver) -> None:
    """A process that was stopped reads pending input before it acts on the elapsed time."""
    receiver.theirs.send(b"in time")
    assert loop.next_event(lambda: 0.0) == events.JoinRefused("in time")
    assert loop.next_event(lambda: 0.0) is None


def test_endless_input_does_not_delay_a_deadline(loop: Loop, receiver: Receiver) -> None:
    """Pending input is read once for each deadline."""
    receiver.theirs.send(b"first")
    assert loop.next_event(lambda: 0.0) == events.JoinRefused("first")
    receiver.theirs.send(b"second")
    assert loop.next_event(lambda: 0.0) is None
