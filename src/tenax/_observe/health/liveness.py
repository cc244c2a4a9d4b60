"""The agent's liveness: written by the agent's thread, read by any other.

Every field is replaced as a whole, so there is no lock that a stuck agent could hold. Ages are measured on a monotonic
clock.
"""

from __future__ import annotations

import time

import msgspec

from tenax._observe.health.verdict import Signs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class _State(msgspec.Struct, frozen=True):
    phase: str = ""
    generation: int = 0
    is_ready: bool = False


class AgentLiveness:
    """Records when the agent's loop last ran (``beat``) and what the agent does. The reader judges it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._state = _State()
        self._beat_at: float | None = None  # None: no beat is expected now
        self._waits_for = ""
        self._watchdog: Callable[[], float | None] | None = None

    def begin(self) -> None:
        """Reset for a new run."""
        self._state = _State("starting")
        self._beat_at, self._waits_for, self._watchdog = None, "", None

    def beat(self) -> None:
        """Record that the loop runs. From now on beats are expected."""
        self._beat_at = self._now()
        self._waits_for = ""

    def wait_for(self, what: str) -> None:
        """Expect no beats while the agent waits in third-party code. The next beat ends this."""
        self._waits_for = what
        self._beat_at = None

    def note(self, phase: str, generation: int, *, is_ready: bool) -> None:
        """Record what the agent does."""
        self._state = _State(phase, generation, is_ready)

    def ask_watchdog(self, last_progress: Callable[[], float | None]) -> None:
        """Set a callback for the time, since the epoch, when a worker last contacted the watchdog, or None."""
        self._watchdog = last_progress

    def last_progress_time(self) -> int:
        """Return when the loop last ran, in seconds since the epoch. Serves as an ``alive_callback``."""
        beat_at = self._beat_at
        return int(time.time() - (0.0 if beat_at is None else self._now() - beat_at))

    def read(self) -> Signs:
        """Return a snapshot."""
        state, beat_at, watchdog = self._state, self._beat_at, self._watchdog
        watched_at = None if watchdog is None else watchdog()
        return Signs(
            phase=state.phase,
            generation=state.generation,
            is_ready=state.is_ready,
            loop_age_s=None if beat_at is None else max(0.0, self._now() - beat_at),
            waits_for=self._waits_for,
            watchdog_age_s=None if watched_at is None else max(0.0, time.time() - watched_at),
        )
