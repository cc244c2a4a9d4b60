"""Delivery: hands things to somebody else's code, and nothing that code does comes back to us.

A metric handler or an event handler may raise, be slow, or never return. It is called in a thread of its own, one
thing after the other in order; what does not fit into the queue before it is dropped, and everything that was lost is
counted and said: at once what is wrong for the first time, the sum at the end. ``put`` never waits and never raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_WAITING = 10_000
PATIENCE_S = 2.0  # for what is left when a run is over
_LONGEST_CALL_S = 10.0  # from then on a receiver that others wait for hangs


class Delivery:
    """One receiver, and the queue before it. The thread begins with the first thing and is nobody's concern at exit."""

    def __init__(
        self,
        name: str,
        take: Callable[[Any], object],
        end: Callable[[], object] | None = None,
        most_waiting: int = _MAX_WAITING,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``end`` is called after the last thing, in the same thread."""
        self.name = name  # as a person would call the receiver: "the metric handler 'statsd'"
        self.failed = 0
        self.dropped = 0
        self._take = take
        self._end = end
        self._most_waiting = most_waiting
        self._now = now
        self._waiting: deque[Any] = deque()
        self._in_hand_since: float | None = None  # the receiver has had its present thing since then
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_ended = end is None
        self._is_late = False  # to end
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
        """A sentence as soon as something is wrong for the first time, once; empty otherwise. Ask now and then."""
        if self._has_said_first:
            return ""
        trouble = self._trouble() or self._hanging()
        self._has_said_first = bool(trouble)
        return f"{trouble}; the job is not affected" if trouble else ""

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
                missed = len(self._waiting) + (self._in_hand_since is not None)
                self._waiting.clear()
                self._in_hand_since = None  # counted: whether it will still arrive, nobody will hear
                self.dropped += missed
                self._is_late = not self._has_ended and not missed
        return self._trouble()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    break
                thing = self._waiting.popleft()
                self._in_hand_since = self._now()
            self._call(self._take, thing)
            with self._changed:
                self._in_hand_since = None
        if self._end is not None:
            self._call(self._end)
            self._has_ended = True

    def _call(self, receiver: Callable[..., object], *things: Any) -> None:
        try:
            receiver(*things)
        except BaseException as error:  # the code of others: whatever it raises is counted, and told
            self.failed += 1
            self._last_error = _in_words(error)

    def _trouble(self) -> str:
        parts = []
        if self.failed:
            parts.append(f"failed {_times(self.failed)} (last with {self._last_error})")
        if self.dropped:
            parts.append(f"was too slow and missed {self.dropped}")
        if self._is_late:
            parts.append("did not end in time")
        return f"{self.name} {' and '.join(parts)}" if parts else ""

    def _hanging(self) -> str:
        with self._changed:
            since, waiting = self._in_hand_since, len(self._waiting)
        if since is None or not waiting or (took_s := self._now() - since) < _LONGEST_CALL_S:
            return ""
        wait = "waits" if waiting == 1 else "wait"
        return f"{self.name} has not returned from one call for {took_s:.0f} s while {waiting} more {wait}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _in_words(error: BaseException) -> str:
    """On one line. The text of an error is code of others, too."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""  # what it is called must do
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
