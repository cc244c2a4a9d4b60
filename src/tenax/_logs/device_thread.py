"""A thread per device that writes what it is given, so that the loop never waits for a device.

The loop calls ``put``; the thread takes items and writes them, and may block for as long as the device does. Its state
reports to the loop whether to pause:

- **flowing**: less than the limit is pending.
- **holding**: the limit is reached and the device still makes progress: the loop pauses the sources. So a slow console
  slows a worker instead of losing its lines.
- **stuck**: the limit is reached and the device took nothing for ``stuck_after_s``: new data is dropped and counted. So
  a stuck console never blocks a worker. Ends when the device takes something again.

Progress is measured to the byte: by the result of each write, by what the kernel still holds for the reader, and,
because a blocked write reports nothing until it returns, by interrupting that write once before deciding.
"""

from __future__ import annotations

import _thread
import signal
from _queue import Empty, SimpleQueue  # `queue` itself is a slow import
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BATCH_BYTES = 1 << 18
_INTERRUPT_AT = 0.9  # of the window: leaves an interrupted write time to report
_INTERRUPT_SIGNAL = signal.SIGUSR1


def install_interrupt_handler() -> None:
    """Install a no-op handler for the signal that interrupts a blocked write. Call once, in the main thread."""
    signal.signal(_INTERRUPT_SIGNAL, lambda _signal, _frame: None)


class DeviceThread:
    """One thread, one queue. The loop calls all methods but ``on_written``."""

    def __init__(
        self,
        consume: Callable[[list[Any]], None],
        wake_loop: Callable[[], None],
        *,
        limit_bytes: int,
        stuck_after_s: float,
        waiting_in_device: Callable[[], int] = lambda: 0,
    ) -> None:
        self._consume = consume
        self._wake_loop = wake_loop
        self._waiting_in_device = waiting_in_device
        self.limit_bytes = limit_bytes
        self.stuck_after_s = stuck_after_s
        self.holding = False
        self.stuck = False
        self.wake_when_empty = False
        self.written = 0  # bytes that the device took or that were given up
        self.pending = 0  # bytes that were put and not yet processed
        self._items: SimpleQueue[tuple[Any, int]] = SimpleQueue()  # with their sizes
        self._lock = _thread.allocate_lock()  # of ``pending``
        self._seen: tuple[int, int] = (0, 0)
        self._window_end = 0.0
        self._interrupted = False
        self._crash: BaseException | None = None
        self._thread = _thread.start_new_thread(self._work, ())

    # -- the loop's side

    def put(self, item: Any, size: int) -> None:
        with self._lock:
            self.pending += size
        self._items.put((item, size))

    def withdraw(self) -> list[Any]:
        """Remove and return the items that the thread has not taken yet."""
        items = self._take(float("inf"))
        with self._lock:
            self.pending -= sum(size for _, size in items)
        return [item for item, _ in items]

    @property
    def drops(self) -> bool:
        """Whether the caller should drop data instead of calling ``put``."""
        return self.stuck and self.pending > self.limit_bytes

    @property
    def deadline(self) -> float | None:
        """When the loop must call ``update`` at the latest."""
        return self.window_deadline if self.holding else None

    @property
    def window_deadline(self) -> float:
        """When ``is_stalled`` must be called next."""
        return self._window_end if self._interrupted else self._window_end - (1 - _INTERRUPT_AT) * self.stuck_after_s

    def update(self, now: float) -> None:
        """Update ``holding`` and ``stuck``. Raises the exception that ended the thread, if any."""
        if self._crash is not None:
            raise self._crash
        if self.holding:
            if self.pending <= self.limit_bytes // 2:
                self.holding = False
            elif self.is_stalled(now):
                self.holding, self.stuck = False, True
        elif self.stuck and self._seen[0] != self.written:
            self.stuck = False
        if not self.holding and not self.stuck and self.pending > self.limit_bytes:
            self.begin_window(now)
            self.holding = True
            # The thread reads ``holding`` after it lowers ``pending``. If it read too early, this line sees the change.
            self.holding = self.pending > self.limit_bytes // 2

    def begin_window(self, now: float) -> None:
        """Start the window over which ``is_stalled`` measures progress."""
        self._seen = (self.written, self._waiting_in_device())
        self._window_end = now + self.stuck_after_s
        self._interrupted = False

    def is_stalled(self, now: float) -> bool:
        """Return whether the device took nothing for a whole window. Restarts the window if it made progress."""
        if self._crash is not None:
            raise self._crash
        if not self._interrupted and now >= self.window_deadline:
            self._interrupted = True
            signal.pthread_kill(self._thread, _INTERRUPT_SIGNAL)
        if now < self._window_end:
            return False
        if (self.written, self._waiting_in_device()) == self._seen:
            return True
        self.begin_window(now)
        return False

    # -- the thread's side

    def on_written(self, count: int) -> None:
        self.written += count
        if self.stuck:
            self._wake_loop()

    def _work(self) -> None:
        try:
            while True:
                self._write_next()
        except BaseException as error:
            # Without its thread the device would silently lose lines: ``update`` raises this in the loop.
            self._crash = error
            self._wake_loop()

    def _write_next(self) -> None:
        first = self._items.get()
        items = [first, *self._take(_BATCH_BYTES - first[1])]
        self._consume([item for item, _ in items])
        with self._lock:
            self.pending -= sum(size for _, size in items)
        left = self.pending
        if (self.holding and left <= self.limit_bytes // 2) or (self.wake_when_empty and left == 0):
            self._wake_loop()

    def _take(self, limit_bytes: float) -> list[tuple[Any, int]]:
        items: list[tuple[Any, int]] = []
        with suppress(Empty):
            while limit_bytes > 0:
                items.append(self._items.get_nowait())
                limit_bytes -= items[-1][1]
        return items
