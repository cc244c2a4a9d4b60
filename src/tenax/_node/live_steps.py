"""Live steps: reports the workers' progress (``tenax.progress``) while they run.

Workers write their steps to files without a notification, so this polls the files every few seconds. It polls only
once enabled, by a flag or by the first status request: an agent without observers does not wake up.
"""

from __future__ import annotations

from tenax._core.agent import Phase
from tenax._core.events import ProgressSeen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from tenax._core.agent import AgentState
    from tenax._core.messages import WorkerProgress
    from tenax._io.loop import Loop, Timer

    class ProgressSource(Protocol):
        """Reads the progress of all workers (``tenax._node.worker_logs.WorkerLogs``)."""

        def progress(self) -> tuple[WorkerProgress, ...]: ...


_FIRST_S, _INTERVAL_S = 1.0, 5.0


class LiveSteps:
    """Of one node, for a whole run. Call ``observe`` with the state after every step of the agent machine."""

    def __init__(
        self, loop: Loop, source: ProgressSource, warn: Callable[[str], None], *, is_enabled: bool = False
    ) -> None:
        self._loop = loop
        self._source = source
        self._warn = warn
        self._generation = 0
        self._posted: tuple[WorkerProgress, ...] = ()
        self._timer: Timer | None = None
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
            self._cancel()
        elif not was_running or state.generation != self._generation:
            self._cancel()
            self._generation, self._posted = state.generation, ()
            if self._is_enabled and not self._is_broken:
                self._timer = self._loop.at(self._loop.now() + _FIRST_S, self._poll)

    def _poll(self) -> None:
        try:
            progress = self._source.progress()
        except Exception as error:  # training does not depend on this
            self._timer, self._is_broken = None, True
            self._warn(f"worker progress is no longer reported: {type(error).__name__}: {error}")
            return
        if progress and progress != self._posted:
            self._posted = progress
            self._loop.post(ProgressSeen(self._generation, progress))
        self._timer = self._loop.at(self._loop.now() + _INTERVAL_S, self._poll)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
