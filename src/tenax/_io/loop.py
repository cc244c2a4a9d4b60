"""The loop: waits for a descriptor, a message or a deadline; never for an interval.

The one place that reads the clock. It knows nothing of what it carries.
"""

from __future__ import annotations

import os
import selectors
import time
from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.events import AnyEvent
    from tenax._io.ports import Watchable


class Timer:
    """A call that will be made, unless it is cancelled."""

    def __init__(self, when: float, call: Callable[[], None] | None) -> None:
        self.when = when
        self.call = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """A mailbox and the descriptors that fill it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, selector: selectors.BaseSelector | None = None
    ) -> None:
        self.now = clock
        self._mailbox: deque[AnyEvent] = deque()
        # Not epoll: it would forget a descriptor that was closed and whose number a successor got meanwhile.
        self._selector = selectors.PollSelector() if selector is None else selector
        self._watched: dict[int, Watchable] = {}  # by identity
        self._timers: list[tuple[float, int, Timer]] = []
        self._made = 0
        self._read_for: float | None = None  # the deadline before which pending input was read
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = allocate_lock()
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        _open_loops.add(self)

    def post(self, event: AnyEvent) -> None:
        """Put a fact into the mailbox. Only from the loop's own thread."""
        self._mailbox.append(event)

    def has_posted(self, kinds: tuple[type, ...]) -> bool:
        """Whether an event of one of these types waits in the mailbox."""
        return any(isinstance(event, kinds) for event in self._mailbox)

    def post_from_anywhere(self, event: AnyEvent) -> None:
        """The same from another thread."""
        self._mailbox.append(event)
        self.wake()

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        """Call it then, in the loop. What has arrived by then is read first: lateness of ours is nobody's silence."""
        timer = Timer(when, call)
        self._made += 1
        heappush(self._timers, (when, self._made, timer))
        return timer

    def soon(self, call: Callable[[], None]) -> None:
        """Call it in the loop, from whatever thread this is said. A loop that is closed calls nothing any more."""
        self._calls.append(call)
        with self._closing:
            if self in _open_loops:
                self.wake()

    def run_calls(self) -> None:
        """Make the calls that were asked for until now. The loop does so whenever it waits."""
        while self._calls:
            self._calls.popleft()()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # full: the loop will wake up anyway
            os.write(self._wake_writer, b"\0")

    def watch(self, thing: Watchable) -> None:
        self._watched[id(thing)] = thing

    def unwatch(self, thing: Watchable) -> None:
        """It is not called any more, not even about what was seen of it before."""
        del self._watched[id(thing)]

    def next_event(self, deadline: Callable[[], float | None]) -> AnyEvent | None:
        """The next fact, or None when the deadline has come first.

        What has arrived is read before a deadline is reported: once for each, so that input without end delays none.
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
        registered = self._refresh()
        for key, mask in self._selector.select(timeout):
            thing = registered.get(key.fd)
            if thing is None:
                self._drain_wakeups()
                self.run_calls()
                continue
            if mask & selectors.EVENT_WRITE and id(thing) in self._watched:
                thing.on_writable()
            if mask & selectors.EVENT_READ and id(thing) in self._watched:
                thing.on_readable()

    def _refresh(self) -> dict[int, Watchable]:
        """Watch what is there now: things may close, or be replaced by a successor with another descriptor."""
        wanted: dict[int, tuple[Watchable, int]] = {}
        for thing in self._watched.values():
            descriptor = thing.fileno()
            if descriptor >= 0:
                interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if thing.wants_to_write else 0)
                wanted[descriptor] = (thing, interest)
        known = {key.fd: key.events for key in self._selector.get_map().values() if key.fd != self._wake_reader}
        for descriptor in known.keys() - wanted.keys():
            self._selector.unregister(descriptor)
        for descriptor, (_, interest) in wanted.items():
            if descriptor not in known:
                self._selector.register(descriptor, interest)
            elif known[descriptor] != interest:
                self._selector.modify(descriptor, interest)
        return {descriptor: thing for descriptor, (thing, _) in wanted.items()}

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake_reader, 4096):
                pass

    def close(self) -> None:
        with self._closing:
            if self in _open_loops:
                _open_loops.discard(self)
                self._selector.close()
                os.close(self._wake_reader)
                os.close(self._wake_writer)


_open_loops: set[Loop] = set()


def _close_copies() -> None:
    """A forked worker does not hold on to its agent's pipes."""
    for loop in list(_open_loops):
        loop.close()


os.register_at_fork(after_in_child=_close_copies)
