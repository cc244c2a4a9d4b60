"""The event loop: waits for a descriptor, an event or a deadline, and never polls.

The loop owns the clock: everything else takes the time as an argument. Events are opaque to it.
"""

from __future__ import annotations

import os
import select
import time
from _heapq import heappop, heappush  # `heapq` itself is a slow import
from _thread import allocate_lock
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.events import AnyEvent
    from tenax._io.interfaces import Watchable


class Timer:
    """A scheduled call, which ``cancel`` revokes."""

    def __init__(self, when: float, call: Callable[[], None] | None) -> None:
        self.when = when
        self.call = call

    def cancel(self) -> None:
        self.call = None


NO_TIMER = Timer(0.0, None)  # nothing is scheduled


class DeadlineTimer:
    """The timer of a deadline that moves. ``call`` gets the deadline that has passed."""

    def __init__(self, loop: Loop, call: Callable[[float], None]) -> None:
        self._loop = loop
        self._call = call
        self._when: float | None = None
        self._timer = NO_TIMER

    def set(self, when: float | None) -> None:
        """Set the deadline. None: there is none."""
        if when != self._when:
            self._timer.cancel()
            self._when = when
            if when is not None:
                self._timer = self._loop.at(when, lambda: self._fire(when))

    def _fire(self, when: float) -> None:
        self._when = None
        self._call(when)

    def cancel(self) -> None:
        self._timer.cancel()


class Selector:
    """Waits for descriptors. Not with epoll: it drops a closed descriptor, even if a new file has reused the number."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register, self.unregister = self._poll.register, self._poll.unregister

    def select(self, timeout: float | None) -> list[tuple[int, int]]:
        """Return the ready descriptors and their events; None: wait without a timeout."""
        return self._poll.poll(None if timeout is None else timeout * 1000)


class Loop:
    """A mailbox of events, and the descriptors and timers that fill it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, selector: Selector | None = None) -> None:
        self.now = clock
        self._mailbox: deque[AnyEvent] = deque()
        self._selector = Selector() if selector is None else selector
        self._registered: dict[int, int] = {}  # events by descriptor, without the wake-up pipe
        self._watched: dict[int, Watchable] = {}  # by identity
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_count = 0  # orders timers with the same deadline
        self._read_for: float | None = None  # the last deadline for which pending input was read
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = allocate_lock()
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_reader, select.POLLIN)
        _open_loops.add(self)

    def post(self, event: AnyEvent) -> None:
        """Put an event into the mailbox. Call it in the loop's thread only."""
        self._mailbox.append(event)

    def has_posted(self, kinds: tuple[type, ...]) -> bool:
        """Return True if an event of one of these types is in the mailbox."""
        return any(isinstance(event, kinds) for event in self._mailbox)

    def take_posted(self, kinds: tuple[type, ...]) -> list[AnyEvent]:
        """Remove the events of these types from the mailbox, and return them."""
        taken = [event for event in self._mailbox if isinstance(event, kinds)]
        for event in taken:
            self._mailbox.remove(event)
        return taken

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Schedule a call in the loop.

        Pending input is read before timers fire, so that this process's own lag is not taken for a peer's silence.
        """
        timer = Timer(when, call)
        self._timer_count += 1
        heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the loop as soon as possible, from any thread. A closed loop drops it."""
        self._calls.append(call)
        with self._closing:
            if self in _open_loops:
                self.wake()

    def run_calls(self) -> None:
        """Make the calls that ``soon`` scheduled. The loop does so whenever it waits."""
        while self._calls:
            self._calls.popleft()()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the loop wakes up anyway
            os.write(self._wake_writer, b"\0")

    def watch(self, thing: Watchable) -> None:
        self._watched[id(thing)] = thing

    def unwatch(self, thing: Watchable) -> None:
        """Stop calling ``thing``, also for readiness that was already reported."""
        del self._watched[id(thing)]

    def next_event(self, deadline: Callable[[], float | None]) -> AnyEvent | None:
        """Wait for the next event. Return None if the deadline passes first.

        Pending input is read before a deadline is reported, but only once for each deadline: endless input cannot
        delay it.
        """
        has_read = False
        while not self._mailbox:
            until = deadline()
            if until is not None and until <= self.now():
                if has_read or until == self._read_for:
                    return None
                has_read, self._read_for = True, until
                self._wait(0)
                continue
            timer_at = self._next_timer()
            if timer_at is not None and timer_at <= self.now():
                self._wait(0)
                self._run_due_timers()
                continue
            moments = [moment for moment in (until, timer_at) if moment is not None]
            self._wait(max(0.0, min(moments) - self.now()) if moments else None)
        return self._mailbox.popleft()

    def _next_timer(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _run_due_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heappop(self._timers)[2]
            if timer.call is not None:
                call, timer.call = timer.call, None
                call()

    def _wait(self, timeout: float | None) -> None:
        things, registered = self._refresh(), self._registered
        for descriptor, ready in self._selector.select(timeout):
            thing = things.get(descriptor)
            if thing is None:
                self._drain_wakeups()
                self.run_calls()
                continue
            # An error or a closed connection is both readable and writable: reading or writing reports it.
            wants_to_write = registered[descriptor] & select.POLLOUT
            if wants_to_write and ready & ~select.POLLIN and id(thing) in self._watched:
                thing.on_writable()
            if ready & ~select.POLLOUT and id(thing) in self._watched:
                thing.on_readable()

    def _refresh(self) -> dict[int, Watchable]:
        """Register what is watched now. Descriptors change when a thing closes or reconnects."""
        things: dict[int, Watchable] = {}
        wanted: dict[int, int] = {}
        for thing in self._watched.values():
            descriptor = thing.fileno()
            events = select.POLLOUT if thing.wants_to_write else 0
            if getattr(thing, "wants_to_read", True):
                events |= select.POLLIN
            if descriptor >= 0 and events:
                things[descriptor] = thing
                wanted[descriptor] = events
        if wanted != self._registered:
            for descriptor in self._registered.keys() - wanted.keys():
                self._selector.unregister(descriptor)
            for descriptor, events in wanted.items():
                self._selector.register(descriptor, events)  # again: changes its events
            self._registered = wanted
        return things

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_reader, 4096):
                pass

    def close(self) -> None:
        with self._closing:
            if self in _open_loops:
                _open_loops.discard(self)
                os.close(self._wake_reader)
                os.close(self._wake_writer)


_open_loops: set[Loop] = set()


def _close_copies() -> None:
    """Close the agent's pipes in a forked worker."""
    for loop in list(_open_loops):
        loop._closing = allocate_lock()  # a thread that exists only in the parent may hold the old one
        loop.close()


os.register_at_fork(after_in_child=_close_copies)
