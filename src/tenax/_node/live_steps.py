"""Live steps: what workers say of their progress (``tenax.progress``), told while they run, once somebody asks for it.

Nothing tells us when a worker has said a step, so this looks at files every few seconds. Law: not before somebody has
asked, by a flag or at the door of this agent. An agent that nobody looks at does not wake up.
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

    class Said(Protocol):
        """What workers have said of their steps (``tenax._node.worker_logs.WorkerLogs``)."""

        def progress(self) -> tuple[WorkerProgress, ...]: ...


_FIRST_S, _EVERY_S = 1.0, 5.0


class LiveSteps:
    """Of one node, for a whole run. ``observe`` the state after every step of the agent machine."""

    def __init__(self, loop: Loop, said: Said, warn: Callable[[str], None], *, is_enabled: bool = False) -> None:
        self._loop = loop
        self._said = said
        self._warn = warn
        self._generation = 0
        self._told: tuple[WorkerProgress, ...] = ()
        self._timer: Timer | None = None
        self._is_running = False
        self._is_enabled = is_enabled
        self._is_broken = False

    def enable(self) -> bool:
        """From now on. Whether there is something to tell at once, which is posted."""
        if self._is_enabled:
            return False
        self._is_enabled = True
        if self._is_running:
            self._look()
        return bool(self._told)

    def observe(self, state: AgentState) -> None:
        was_running, self._is_running = self._is_running, state.phase is Phase.RUNNING
        if not self._is_running:
            self._rest()
        elif not was_running or state.generation != self._generation:
            self._rest()
            self._generation, self._told = state.generation, ()
            if self._is_enabled and not self._is_broken:
                self._timer = self._loop.at(self._loop.now() + _FIRST_S, self._look)

    def _look(self) -> None:
        try:
            progress = self._said.progress()
        except Exception as error:  # nothing here is needed to train
            self._timer, self._is_broken = None, True
            self._warn(f"the steps of workers are not told any more: {type(error).__name__}: {error}")
            return
        if progress and progress != self._told:
            self._told = progress
            self._loop.post(ProgressSeen(self._generation, progress))
        self._timer = self._loop.at(self._loop.now() + _EVERY_S, self._look)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
