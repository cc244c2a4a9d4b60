"""A queue whose items are passed to a handler in a background thread, so that the handler cannot affect the agent.

A metric or event handler may raise, be slow, or never return. It is called in its own thread, with one item after the
other in order. Items that do not fit into its queue are dropped. Every loss is counted and reported: the first problem
at once, the total at the end. ``put`` never waits and never raises.

An exception that a signal handler raises at any moment leaves no lock behind. It may do so in a
``threading.Condition``, which acquires its lock in Python code.
"""

from __future__ import annotations

import threading
import time
from _queue import SimpleQueue  # `queue` itself imports more
from collections import deque

import msgspec

from tenax._core.text import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_WAITING = 10_000
CLOSE_TIMEOUT_S = 2.0  # for the rest of the queue when a run is over
_MAX_CALL_S = 10.0  # a longer call, with items in the queue, counts as hanging


class BackgroundQueue(msgspec.Struct, eq=False):
    """One handler and its queue. Its daemon thread starts with the first item and does not delay the exit."""

    name: str  # the handler as messages name it: "the metric handler 'statsd'"
    _take: Callable[[Any], object]
    end: Callable[[], object] | None = None  # called after the last item, in the same thread
    max_waiting: int = _MAX_WAITING
    now: Callable[[], float] = time.monotonic
    failed: int = 0
    dropped: int = 0
    _waiting: deque[Any] = msgspec.field(default_factory=deque)
    _call_began_at: float | None = None  # None: no call is in progress
    _lock: threading.RLock = msgspec.field(default_factory=threading.RLock)
    _wakeups: SimpleQueue[None] = msgspec.field(default_factory=SimpleQueue)  # the thread waits for these
    _thread: threading.Thread | None = None
    _is_closed: bool = False
    _has_ended: bool = False
    _ended_late: bool = False
    _last_error: str = ""
    _has_reported: bool = False

    def put(self, item: object) -> None:
        with self._lock:
            if self._is_closed or len(self._waiting) >= self.max_waiting:
                self.dropped += 1
                return
            self._start_thread()
            if not self._waiting:
                self._wakeups.put(None)
            self._waiting.append(item)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tenax: {self.name}", daemon=True)
            self._thread.start()

    def first_problem(self) -> str:
        """Return a message about the first problem, once; otherwise "". Call it regularly."""
        if self._has_reported:
            return ""
        problem = self._losses() or self._hang()
        self._has_reported = bool(problem)
        return f"{problem}; the job is not affected" if problem else ""

    def finish(self) -> None:
        """Accept no more items. Does not wait."""
        with self._lock:
            self._is_closed = True
            if self.end is not None:
                self._start_thread()
            self._wakeups.put(None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> str:
        """Wait up to ``timeout_s`` for queued items. Return a message about losses, or ""."""
        self.finish()
        if self._thread is not None:
            self._thread.join(timeout_s)
            with self._lock:
                missed = len(self._waiting) + (self._call_began_at is not None)
                self._waiting.clear()
                self._call_began_at = None  # counted as missed even if the call still returns
                self.dropped += missed
                self._ended_late = self.end is not None and not self._has_ended and not missed
        return self._losses()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._lock:
                items = [self._waiting.popleft()] if self._waiting else []
                self._call_began_at = self.now() if items else None
                is_over = self._is_closed and not items
            if items:
                self._call(self._take, *items)
            elif not is_over:
                self._wakeups.get()
        if self.end is not None:
            self._call(self.end)
            self._has_ended = True

    def _call(self, handler: Callable[..., object], *items: Any) -> None:
        try:
            handler(*items)
        except BaseException as error:  # third-party code: whatever it raises is counted and reported
            self.failed += 1
            self._last_error = _format_error(error)

    def _losses(self) -> str:
        parts = []
        if self.failed:
            times = "once" if self.failed == 1 else f"{self.failed} times"
            parts.append(f"failed {times} (last error: {self._last_error})")
        if self.dropped:
            parts.append(f"was too slow ({self.dropped} dropped)")
        if self._ended_late:
            parts.append("did not close in time")
        return f"{self.name} {' and '.join(parts)}" if parts else ""

    def _hang(self) -> str:
        with self._lock:
            since, waiting = self._call_began_at, len(self._waiting)
        if since is None or not waiting or (took_s := self.now() - since) < _MAX_CALL_S:
            return ""
        return f"{self.name} has not returned from a call for {format_duration(took_s)} ({waiting} waiting)"


def _format_error(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # __str__ is third-party code, too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
