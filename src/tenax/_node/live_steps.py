"""Live steps: reports the workers' progress (``tenax.progress``) and activity while they run and are observed.

Workers write their steps to files without a notification, and use CPUs without one. So this polls every few seconds,
but only with a flag, or for a minute after a request: an agent without observers does not wake up.
"""

from __future__ import annotations

import msgspec

from tenax._core.agent import AgentState, Phase
from tenax._core.bounds import clamped_time
from tenax._core.events import ProgressSeen
from tenax._core.model import WorkerPhase
from tenax._io.loop import NO_TIMER, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.messages import WorkerProgress
    from tenax._io.interfaces import Logs
    from tenax._observe.hangs.gpu_use import GpuUse

_FIRST_S, _INTERVAL_S = 1.0, 5.0
_ENABLED_S = 60.0  # after a request
_MIN_INTERVAL_S = 0.2  # shorter intervals say nothing about the use of a CPU
_MAX_CPUS = 1e5


class LiveSteps:
    """Of one node, for a whole run. Call ``observe`` with the state after every step of the agent machine.

    ``cpu_s``: returns the CPU time of a process; None: it is gone.
    """

    def __init__(
        self,
        loop: Loop,
        logs: Logs,
        warn: Callable[[str], None],
        *,
        is_enabled: bool = False,
        cpu_s: Callable[[int], float | None] | None = None,
    ) -> None:
        self._loop = loop
        self._logs = logs
        self._warn = warn
        self._cpu_s = cpu_s
        self._gpu_use: GpuUse | None = None
        self._generation = 0
        self._began_at = 0.0
        self._pids: dict[int, int] = {}  # of running workers, by local rank
        self._posted: tuple[WorkerProgress, ...] = ()
        self._cpu: dict[int, tuple[float, float]] = {}  # by pid: when, and the CPU time until then
        self._timer = NO_TIMER
        self._is_running = False
        self._enabled_until = float("inf") if is_enabled else 0.0
        self._is_broken = False

    def report(self, done: Callable[[], None]) -> None:
        """Post the progress now, then call ``done``, and continue to poll for a while."""
        self._enabled_until = max(self._enabled_until, self._loop.now() + _ENABLED_S)
        if self._is_running and not self._is_broken:
            self._timer.cancel()
            self._poll(done)
        else:
            done()

    def observe(self, state: AgentState) -> None:
        was_running, self._is_running = self._is_running, state.phase is Phase.RUNNING
        if not self._is_running:
            self._timer.cancel()
            return
        self._pids = running_pids(state)
        if not was_running or state.generation != self._generation:
            self._timer.cancel()
            self._generation, self._posted, self._cpu = state.generation, (), {}
            self._began_at = self._loop.now()
            if self._loop.now() < self._enabled_until and not self._is_broken:
                self._timer = self._loop.at(self._loop.now() + _FIRST_S, self._poll)

    def _poll(self, done: Callable[[], None] = lambda: None) -> None:
        generation = self._generation

        def post(outputs: dict[int, float]) -> None:
            if self._is_running and self._generation == generation and not self._is_broken:
                self._post(outputs)
            done()

        if self._loop.now() + _INTERVAL_S < self._enabled_until:
            self._timer = self._loop.at(self._loop.now() + _INTERVAL_S, self._poll)
        self._logs.output_times(post)

    def _post(self, outputs: dict[int, float]) -> None:
        try:
            progress = self._read(outputs)
        except Exception as error:  # training does not depend on this
            self._is_broken = True
            self._timer.cancel()
            self._warn(f"worker progress is no longer reported: {type(error).__name__}: {error}")
            return
        if progress and progress != self._posted:
            self._posted = progress
            self._loop.post(ProgressSeen(self._generation, progress))

    def _read(self, outputs: dict[int, float]) -> tuple[WorkerProgress, ...]:
        from tenax._core.messages import WorkerProgress

        steps = {each.local_rank: each for each in self._logs.progress()}
        before = {each.local_rank: each for each in self._posted}
        if self._gpu_use is None:
            from tenax._observe.hangs.gpu_use import GpuUse

            self._gpu_use = GpuUse()
        gpus = self._gpu_use.by_pid()  # how busy the GPU of each process is, as far as it is known
        found = []
        for rank in sorted({*steps, *self._pids}):
            each = steps.get(rank, WorkerProgress(rank, -1, -1, 0.0, 0.0))
            known = before.get(rank)
            found.append(
                msgspec.structs.replace(
                    each,
                    output_at=clamped_time(outputs.get(rank, 0.0)),
                    step_s=_step_s(each, known),
                    cpus=self._cpus(rank, known.cpus if known is not None else None),
                    gpu=gpus.get(self._pids.get(rank, 0)),
                )
            )
        return tuple(found)

    def _cpus(self, rank: int, before: float | None) -> float | None:
        """Return how many CPUs a worker has used since the last poll, or at first since it was started."""
        pid = self._pids.get(rank, 0)
        if not pid:
            return None
        from tenax._observe.hangs.counters import cpu_seconds

        now, used_s = self._loop.now(), (self._cpu_s or cpu_seconds)(pid)
        if used_s is None:
            return None
        then, used_then_s = self._cpu.get(pid, (self._began_at, 0.0))
        if now - then < _MIN_INTERVAL_S:
            return before
        self._cpu[pid] = now, used_s
        return min(max(0.0, used_s - used_then_s) / (now - then), _MAX_CPUS)


def running_pids(state: AgentState) -> dict[int, int]:
    """Return the pids of the running workers, by local rank."""
    running = (worker for worker in state.workers.values() if worker.phase is WorkerPhase.RUNNING and worker.pid)
    return {worker.local_rank: worker.pid for worker in running}


def _step_s(each: WorkerProgress, before: WorkerProgress | None) -> float:
    """Return the duration of the last steps: since the last poll, or else of all; 0 if it is not known."""
    steps, seconds = each.last_step - each.first_step, each.last_at - each.first_at
    if before is not None and before.last_at > 0 and each.last_step > before.last_step:
        steps, seconds = each.last_step - before.last_step, each.last_at - before.last_at
    elif before is not None and before.step_s:
        return before.step_s
    return max(0.0, clamped_time(seconds / steps)) if steps > 0 else 0.0
