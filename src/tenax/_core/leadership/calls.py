"""Calls to etcd and timers as values, for a machine that has neither a client nor a clock.

The parts of the machine call ``call`` and ``loop.at`` with functions, as they would with a real client. The shell gets
a ``Request`` for each call, and reports its answer by number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenax._core.etcd.operations import Operation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from tenax._core.etcd.errors import EtcdError

    A = TypeVar("A")

PATIENCE_S = 5.0


class Request(msgspec.Struct, frozen=True):
    """Call etcd: retry for at most ``patience_s``, then report ``answered`` or ``failed`` with the number."""

    number: int
    operation: Operation[Any]
    patience_s: float = PATIENCE_S


class Cancel(msgspec.Struct, frozen=True):
    """Do not wait for the answer to a request. It may be executed nevertheless."""

    number: int


class Timer:
    """One planned call."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Timers:
    """The time, as the machine was told, and what is planned."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._timers: list[Timer] = []

    def now(self) -> float:
        return self._now

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer(when, call)
        self._timers.append(timer)
        return timer

    def set(self, now: float) -> None:
        self._now = max(self._now, now)

    def next_deadline(self) -> float | None:
        return min([timer.when for timer in self._timers if timer.call is not None], default=None)

    def due(self, now: float) -> int:
        return sum(timer.call is not None and timer.when <= now for timer in self._timers)

    def fire(self) -> None:
        """Make the calls that are due, in order."""
        due = sorted((timer for timer in self._timers if timer.when <= self._now), key=lambda timer: timer.when)
        self._timers = [timer for timer in self._timers if timer.when > self._now and timer.call is not None]
        for timer in due:
            if timer.call is not None:
                timer.call()


class Call:
    """A call that is not answered yet."""

    def __init__(self, calls: Calls, number: int, done: Callable[[Any], None], failed: Callable[[EtcdError], None]):
        self.begun_at = self.sent_at = calls.loop.now()  # sent_at: of the attempt that was answered
        self.number = number
        self.done = done
        self.failed = failed
        self._calls = calls

    def cancel(self) -> None:
        self._calls.cancel(self.number)


class Calls:
    """All calls of one machine."""

    def __init__(self, now: float, output: Callable[[Request | Cancel], None]) -> None:
        self.loop = Timers(now)
        self._output = output
        self._count = 0
        self._pending: dict[int, Call] = {}

    def call(
        self,
        operation: Operation[A],
        done: Callable[[A], None],
        failed: Callable[[EtcdError], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> Call:
        """Request something. ``done`` or ``failed`` is called once; neither after ``cancel``."""
        self._count += 1
        call = self._pending[self._count] = Call(self, self._count, done, failed)
        self._output(Request(self._count, operation, patience_s))
        return call

    def answered(self, number: int, answer: Any, sent_at: float) -> None:
        call = self._pending.pop(number, None)
        if call is not None:
            call.sent_at = sent_at
            call.done(answer)

    def failed(self, number: int, error: EtcdError) -> None:
        call = self._pending.pop(number, None)
        if call is not None:
            call.failed(error)

    def cancel(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self._output(Cancel(number))

    def quiet_state(self) -> tuple[float, int]:
        return self.loop.now(), self._count

    def set_quiet_state(self, now: float, count: int) -> None:
        self.loop.set(now)
        self._count = count

    def replace(
        self, call: Call | None, number: int, done: Callable[[Any], None], failed: Callable[[EtcdError], None]
    ) -> Call | None:
        """Wait for the call with that number instead (0: for none), as after calls that were not recorded."""
        if call is not None:
            self._pending.pop(call.number, None)
        if not number:
            return None
        self._pending[number] = Call(self, number, done, failed)
        return self._pending[number]
