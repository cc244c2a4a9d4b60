"""Vital signs: what the agent's thread writes down about itself, and any other thread may read.

Every field is one value that is replaced as a whole, so there is no lock that a stuck agent could hold. Ages are
measured on one monotonic clock; the wall clock may jump as it likes.
"""

from __future__ import annotations

import time

import msgspec

from tenax._observe.health.verdict import Signs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class _Told(msgspec.Struct, frozen=True):
    phase: str = ""
    generation: int = 0
    is_ready: bool = False


class AgentLiveness:
    """The agent calls ``beat`` whenever it gets round to it; what is expected of it is the reader's matter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._told = _Told()
        self._beat_at: float | None = None  # None: nobody expects a beat now
        self._waits_for = ""
        self._watchdog: Callable[[], float | None] | None = None

    def begin(self) -> None:
        """A run begins: nothing is known of it yet."""
        self._told = _Told("starting")
        self._beat_at, self._waits_for, self._watchdog = None, "", None

    def beat(self) -> None:
        """The loop has come round. From now on it is expected to again."""
        self._beat_at = self._now()
        self._waits_for = ""

    def wait_for(self, what: str) -> None:
        """The agent is about to wait in somebody else's code, for as long as that takes; the next beat ends it."""
        self._waits_for = what
        self._beat_at = None

    def note(self, phase: str, generation: int, *, is_ready: bool) -> None:
        """What the agent is doing."""
        self._told = _Told(phase, generation, is_ready)

    def ask_watchdog(self, last_progress: Callable[[], float | None]) -> None:
        """There is a watchdog; this says when it last heard from a worker, in seconds since the epoch, or None."""
        self._watchdog = last_progress

    def last_progress_time(self) -> int:
        """When the loop last came round, in seconds since the epoch, as an ``alive_callback`` says it."""
        beat_at = self._beat_at
        return int(time.time() - (0.0 if beat_at is None else self._now() - beat_at))

    def read(self) -> Signs:
        """Everything, as of now."""
        told, beat_at, watchdog = self._told, self._beat_at, self._watchdog
        watched_at = None if watchdog is None else watchdog()
        return Signs(
            phase=told.phase,
            generation=told.generation,
            is_ready=told.is_ready,
            loop_age_s=None if beat_at is None else max(0.0, self._now() - beat_at),
            waits_for=self._waits_for,
            watchdog_age_s=None if watched_at is None else max(0.0, time.time() - watched_at),
        )
