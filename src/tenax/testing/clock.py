"""A clock that a test holds, and the selector that makes a loop wait on it: hours pass in no time.

    clock = FakeClock()
    loop = Loop(clock, selector=clock.selector())

Real descriptors are served as they become ready. When none is, the time jumps to the loop's next deadline instead of
passing. So use it only where everything that happens, happens through descriptors that are ready at once, such as
those of ``FakeProcesses``: a real process would seem to take for ever.
"""

from __future__ import annotations

import selectors

__all__ = ["FakeClock"]


class FakeClock:
    """Call it for the time. It stands still until somebody moves it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"time does not go back, and {seconds:g} s is negative")
        self._now += seconds

    def selector(self) -> selectors.BaseSelector:
        """What a loop on this clock waits with."""
        return _JumpingSelector(self)


class _JumpingSelector(selectors.PollSelector):
    """Looks at the descriptors; if none is ready, lets the time pass that it should have waited."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)  # no deadline stands: only a descriptor can end this
        ready = super().select(0)
        if not ready:
            self._clock.advance(max(0.0, timeout))
        return ready
