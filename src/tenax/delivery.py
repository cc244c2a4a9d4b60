"""Delivery: hands things to somebody else's code, and nothing that code does comes back to us.

A metric handler or an event handler may raise, be slow, or never return. It is called in a thread of its own, one
thing after the other in order; what does not fit into the queue before it is dropped, and everything that was lost is
counted and said. ``put`` never waits and never raises.
"""

from __future__ import annotations

import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_WAITING = 10_000
PATIENCE_S = 2.0  # for what is left when a run is over


class Delivery:
    """One receiver, and the queue before it. The thread begins with the first thing and is nobody's concern at exit."""

    def __init__(
        self,
        name: str,
        take: Callable[[Any], object],
        end: Callable[[], object] | None = None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        """``end`` is called after the last thing, in the same thread."""
        self.name = name  # as a person would call the receiver: "the metric handler 'statsd'"
        self.failed = 0
        self.dropped = 0
        self._take = take
        self._end = end
        self._most_waiting = most_waiting
        self._waiting: deque[Any] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._last_error = ""
        self._has_said_first = False

    def put(self, thing: object) -> None:
        """Deliver this, later."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._most_waiting:
                self.dropped += 1
                return
            self._waiting.append(thing)
            self._begin()
            self._changed.notify()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name=f"tenax: {self.name}", daemon=True)
            self._thread.start()

    def first_trouble(self) -> str:
        """A sentence as soon as something is wrong for the first time, once; empty otherwise."""
        if self._has_said_first or not (self.failed or self.dropped):
            return ""
        self._has_said_first = True
        return f"{self._trouble()}; the job is not affected"

    def finish(self) -> None:
        """Nothing more will come. Does not wait."""
        with self._changed:
            self._is_closed = True
            if self._end is not None:
                self._begin()
            self._changed.notify()

    def close(self, patience_s: float = PATIENCE_S) -> str:
        """Wait a little for what is left. Returns a sentence about what was lost; empty when nothing was."""
        self.finish()
        if self._thread is not None:
            self._thread.join(patience_s)
            with self._changed:
                self.dropped += len(self._waiting)
                self._waiting.clear()
        return self._trouble()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    break
                thing = self._waiting.popleft()
            self._call(self._take, thing)
        if self._end is not None:
            self._call(self._end)

    def _call(self, receiver: Callable[..., object], *things: Any) -> None:
        try:
            receiver(*things)
        except BaseException as error:  # the code of others: whatever it raises is counted, and told
            self.failed += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def _trouble(self) -> str:
        parts = []
        if self.failed:
            parts.append(f"failed {_times(self.failed)} (last with {self._last_error})")
        if self.dropped:
            parts.append(f"was too slow and missed {self.dropped}")
        return f"{self.name} {' and '.join(parts)}" if parts else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
