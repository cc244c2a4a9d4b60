"""Lane: a thread that writes what it is handed, so that whoever hands it over never waits for a device.

The scribe's loop puts; the lane's thread takes and writes, and may block for as long as the device likes. The loop
learns from the lane whether to hold back:

- **flowing**: less waits than the limit.
- **holding**: the limit is reached and the device still takes something: whoever feeds the lane must pause. This is
  how a slow console slows a worker instead of losing its lines.
- **stuck**: the limit is reached and the device took nothing for ``stuck_after_s``: what comes is dropped and counted.
  This is how a stuck console never blocks a worker. It ends when the device takes something again.

Whether a device moves is judged to the byte: by what our writes report, by what the kernel still holds for the reader,
and, because a blocked write reports nothing until it ends, by interrupting that write once before the verdict.
"""

from __future__ import annotations

import _thread
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BATCH_BYTES = 1 << 18
_KICK_AT = 0.9  # of the window: leaves an interrupted write the time to report
_KICK_SIGNAL = signal.SIGUSR1


def allow_kicks() -> None:
    """Once, in the main thread: the signal that ends a blocked write must do nothing else."""
    signal.signal(_KICK_SIGNAL, lambda _signal, _frame: None)


class DeviceThread:
    """One thread, one queue. All methods but ``moved_by`` belong to the loop."""

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
        self.moved = 0  # bytes that the device has taken, or that were given up
        self.pending = 0  # bytes that were put and not yet dealt with
        self._items: list[tuple[Any, int]] = []
        self._lock = _thread.allocate_lock()
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._asleep = False
        self._seen: tuple[int, int] = (0, 0)
        self._window_end = 0.0
        self._kicked = False
        self._crash: BaseException | None = None
        self._thread = _thread.start_new_thread(self._work, ())

    # -- the loop's side

    def put(self, item: Any, size: int) -> None:
        with self._lock:
            self._items.append((item, size))
            self.pending += size
            ring = self._asleep
            self._asleep = False
        if ring:
            self._bell.release()

    def take_back(self) -> list[Any]:
        """What the thread has not taken yet; it will not be written any more."""
        with self._lock:
            items, self._items = self._items, []
            self.pending -= sum(size for _, size in items)
        return [item for item, _ in items]

    @property
    def drops(self) -> bool:
        """Whether something put now should be dropped instead."""
        return self.stuck and self.pending > self.limit_bytes

    @property
    def deadline(self) -> float | None:
        """When the loop should call ``judge`` again although nothing woke it."""
        return self.window_deadline if self.holding else None

    @property
    def window_deadline(self) -> float:
        """When ``stands_still`` has something to do."""
        return self._window_end if self._kicked else self._window_end - (1 - _KICK_AT) * self.stuck_after_s

    def judge(self, now: float) -> None:
        """Bring ``holding`` and ``stuck`` up to date. Raises what ended the lane's thread, if that happened."""
        if self._crash is not None:
            raise self._crash
        if self.holding:
            if self.pending <= self.limit_bytes // 2:
                self.holding = False
            elif self.stands_still(now):
                self.holding, self.stuck = False, True
        elif self.stuck and self._seen[0] != self.moved:
            self.stuck = False
        if not self.holding and not self.stuck and self.pending > self.limit_bytes:
            self.begin_window(now)
            self.holding = True
            # The thread looks at ``holding`` after it lowers ``pending``. If it looked too early, we see what it did.
            self.holding = self.pending > self.limit_bytes // 2

    def begin_window(self, now: float) -> None:
        """From now on, ``stands_still`` compares with this moment."""
        self._seen = (self.moved, self._waiting_in_device())
        self._window_end = now + self.stuck_after_s
        self._kicked = False

    def stands_still(self, now: float) -> bool:
        """Whether a whole window has passed in which the device took nothing. Begins the next window when it moved."""
        if self._crash is not None:
            raise self._crash
        if not self._kicked and now >= self.window_deadline:
            self._kicked = True
            signal.pthread_kill(self._thread, _KICK_SIGNAL)
        if now < self._window_end:
            return False
        if (self.moved, self._waiting_in_device()) == self._seen:
            return True
        self.begin_window(now)
        return False

    # -- the thread's side

    def moved_by(self, count: int) -> None:
        """The device took this much."""
        self.moved += count
        if self.stuck:
            self._wake_loop()

    def _work(self) -> None:
        try:
            while True:
                self._write_next()
        except BaseException as error:
            # A lane without its thread would swallow lines: the loop must end, and say why. See ``judge``.
            self._crash = error
            self._wake_loop()

    def _write_next(self) -> None:
        with self._lock:
            batch, size = self._take()
            self._asleep = not batch
        if not batch:
            self._bell.acquire()
            return
        self._consume(batch)
        with self._lock:
            self.pending -= size
        left = self.pending
        if (self.holding and left <= self.limit_bytes // 2) or (self.wake_when_empty and left == 0):
            self._wake_loop()

    def _take(self) -> tuple[list[Any], int]:
        count = size = 0
        for _, item_size in self._items:
            if count and size + item_size > _BATCH_BYTES:
                break
            count += 1
            size += item_size
        batch = [item for item, _ in self._items[:count]]
        del self._items[:count]
        return batch, size
