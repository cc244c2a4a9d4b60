"""Live steps: reports the workers' progress (``tenax.progress``) while they run.

Workers write their steps to files without a notification, so this polls the files every few seconds. It polls only
once enabled, by a flag or by the first status request: an agent without observers does not wake up.
"""

from __future__ import annotations

from tenax._core.agent import Phase
from tenax._core.events import ProgressSeen
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.agent import AgentState
    from tenax._core.messages import WorkerProgress
    from tenax._io.interfaces import Logs
    from tenax._io.loop import Loop

_FIRST_S, _INTERVAL_S = 1.0, 5.0


class LiveSteps:
    """Of one node, for a whole run. Call ``observe`` with the state after every step of the agent machine."""

    def __init__(self, loop: Loop, logs: Logs, warn: Callable[[str], None], *, is_enabled: bool = False) -> None:
        self._loop = loop
        self._logs = logs
        self._warn = warn
        self._generation = 0
        self._posted: tuple[WorkerProgress, ...] = ()
        self._timer = NO_TIMER
        self._is_running = False
        self._is_enabled = is_enabled
        self._is_broken = False

    def enable(self) -> bool:
        """Start polling. Returns True if this was the first call and it posted progress."""
        if self._is_enabled:
            return False
        self._is_enabled = True
        if self._is_running:
            self._poll()
        return bool(self._posted)

    def observe(self, state: AgentState) -> None:
        was_running, self._is_running = self._is_running, state.phase is Phase.RUNNING
        if not self._is_running:
            self._timer.cancel()
        elif not was_running or state.generation != self._generation:
            self._timer.cancel()
            self._generation, self._posted = state.generation, ()
            if self._is_enabled and not self._is_broken:
                self._timer = self._loop.at(self._loop.now() + _FIRST_S, self._poll)

    def _poll(self) -> None:
        try:
            progress = self._logs.progress()
        except Exception as error:  # training does not depend on this
            self._is_broken = True
            self._warn(f"worker progress is no longer reported: {type(error).__name__}: {error}")
            return
        if progress and progress != self._posted:
            self._posted = progress
            self._loop.post(ProgressSeen(self._generation, progress))
        self._timer = self._loop.at(self._loop.now() + _INTERVAL_S, self._poll)
