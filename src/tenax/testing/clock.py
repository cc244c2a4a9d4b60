"""A fake clock, and a selector that lets a loop run on it: hours pass at once.

    clock = FakeClock()
    loop = Loop(clock, selector=clock.selector())

Descriptors are served when they are ready. If none is, the clock jumps to the loop's next deadline. Use it only where
all events come through descriptors that are ready at once, such as those of ``FakeProcesses``: a real process would
appear to take very long.
"""

from __future__ import annotations

from tenax._io.loop import Selector

__all__ = ["FakeClock"]


class FakeClock:
    """Returns the time when called. It changes only with ``advance`` and the selector."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"cannot advance by {seconds:g} s: time does not go back")
        self._now += seconds

    def selector(self) -> Selector:
        """Return a selector for a loop on this clock."""
        return _JumpingSelector(self)


class _JumpingSelector(Selector):
    """Polls the descriptors; if none is ready, advances the clock by the timeout."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None) -> list[tuple[int, int]]:
        if timeout is None:
            return super().select(None)  # no deadline: wait for a descriptor
        ready = super().select(0)
        if not ready:
            self._clock.advance(max(0.0, timeout))
        return ready
