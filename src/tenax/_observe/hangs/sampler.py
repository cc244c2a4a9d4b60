"""The sampler: reads the counters of this node's workers every few seconds while a generation runs, and posts events.

    ``events.QuietSeen``, ``MovementSeen``  no worker makes progress any more, or one does again
    ``events.StacksRead``                   the stacks that workers have dumped, after ``commands.ReadStacks``

It decides nothing: ``_core.hang`` judges whether a node is quiet, the coordinator whether the run hangs. If the sampler
fails, it reports that once, and the run continues without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from tenax._core import commands, events
from tenax._core.agent import AgentState
from tenax._core.agent_state import Phase, global_rank
from tenax._core.hang import HangDetector, Sample, Scopes
from tenax._core.messages import WorkerProgress
from tenax._core.model import AgentSettings, WorkerPhase, truncate_stacks
from tenax._core.requests import StacksRequest, WorkerStacks
from tenax._io.loop import NO_TIMER, Loop
from tenax._observe.hangs.counters import CounterReader, state_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.interfaces import Reply
    from tenax._node.journal import Step
    from tenax._node.worker_logs import WorkerLogs

_MAX_INTERVAL_S = 5.0
_MIN_INTERVAL_S = 0.05
_SAMPLES_PER_HANG = 4  # so that a hang_after of a few seconds is detected in time
_MAX_BYTES = 256 << 10  # of the stacks of one worker
_MAX_STACKS = 32_000  # characters


class Sampler:
    """Samples one node for a whole run. Call ``observe`` after every step of the agent machine."""

    def __init__(
        self, settings: AgentSettings, loop: Loop, logs: WorkerLogs, scopes: Callable[[], Mapping[int, Scopes]] = dict
    ) -> None:
        """``scopes``: returns the watchdog's timer scopes by local rank."""
        self._loop = loop
        self._logs = logs
        self._scopes = scopes
        self._interval_s = max(_MIN_INTERVAL_S, min(_MAX_INTERVAL_S, settings.hang_after_s / _SAMPLES_PER_HANG))
        self._detector = HangDetector(settings.hang_after_s, self._interval_s)
        self._state: AgentState | None = None
        self._generation = 0
        self._timer = NO_TIMER
        self._readers: dict[int, CounterReader] = {}
        self._is_quiet = False  # as last posted
        self._is_broken = False
        self._read_until: dict[int, int] = {}  # by local rank: the end of stacks that were already read

    def observe(self, step: Step, state: AgentState) -> None:
        self._state = state
        for command in step.commands:
            if isinstance(command, commands.DumpStacks | commands.ReadStacks):
                self._detector.rebase()  # dumping and reading the stacks changes the counters
        if state.phase is not Phase.RUNNING:
            self.close()
        elif not self._is_broken and (self._timer is NO_TIMER or state.generation != self._generation):
            self._begin(state)

    def close(self) -> None:
        self._timer.cancel()
        self._timer = NO_TIMER

    def _begin(self, state: AgentState) -> None:
        self.close()
        now = self._loop.now()
        self._generation = state.generation
        self._readers, self._read_until = {}, {}
        self._is_quiet = False
        world_size = state.assignment.world_size if state.assignment is not None else 1
        self._detector.begin(world_size, now)
        self._timer = self._loop.at(now + self._interval_s, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.now()
        try:
            self._take_samples(now)
        except Exception as error:  # an unexpected /proc: training does not depend on sampling
            self._timer = NO_TIMER
            if self._is_quiet:
                self._loop.post(events.MovementSeen(self._generation, what="hang detection stopped on a node"))
            self._is_quiet, self._is_broken = False, True
            self._logs.print_line(f"tenax: hang detection stopped on this node: {type(error).__name__}: {error}")
            return
        self._timer = self._loop.at(now + self._interval_s, self._on_timer)

    def _take_samples(self, now: float) -> None:
        progress, scopes = {each.local_rank: each for each in self._logs.progress()}, self._scopes()
        samples = [
            self._sample(rank, pid, progress.get(rank), scopes.get(rank)) for rank, pid in self._running().items()
        ]
        reading = self._detector.look(samples, now)
        if reading.is_quiet == self._is_quiet:
            return
        self._is_quiet = reading.is_quiet
        if not reading.is_quiet:
            self._loop.post(events.MovementSeen(self._generation, reading.active_rank, reading.activity))
            return
        for sample in samples:
            self._read_until.setdefault(sample.local_rank, _size(self._stacks_file(sample.local_rank)))
        self._loop.post(events.QuietSeen(self._generation, reading.since, reading.why, reading.stopped))

    def _running(self) -> dict[int, int]:
        workers = self._state.workers.values() if self._state is not None else ()
        return {each.local_rank: each.pid for each in workers if each.phase is WorkerPhase.RUNNING and each.pid}

    def _sample(self, rank: int, pid: int, progress: WorkerProgress | None, scopes: Scopes | None) -> Sample:
        reader = self._readers.get(rank)
        if reader is None or reader.pid != pid:
            reader = self._readers[rank] = CounterReader(pid)
        counters = reader.read(closely=self._detector.is_disturbed)
        if progress is None:
            return Sample(rank, counters, scopes=scopes)
        has_stepped = progress.last_step >= 0 or progress.last_at > 0
        step = progress.last_step if has_stepped else None
        first = progress.first_step, progress.first_at
        return Sample(rank, counters, step, progress.last_at, *first, progress.phase, scopes)

    def _stacks_file(self, rank: int) -> str:
        from tenax._processes.stacks import stacks_file

        error_file = self._logs.destination.error_files.get(rank, "")
        return stacks_file(error_file) if error_file else ""

    def read_stacks(self, command: commands.ReadStacks) -> None:
        workers = []
        for rank in command.local_ranks:
            begin, end = self._read_until.get(rank, 0), _size(self._stacks_file(rank))
            self._read_until[rank] = end
            workers.append(self._written_stacks(rank, begin, end))
        self._loop.post(events.StacksRead(command.generation, command.number, tuple(workers)))

    def expect_disturbance(self) -> None:
        """Ignore activity until the next sample."""
        self._detector.rebase()

    def answer_stacks(self, request: StacksRequest, dump: Callable[[int], None], reply: Reply, note: str = "") -> None:
        """Make the workers write their stacks, and answer with them. A stopped worker would be resumed by that."""
        state, wanted = self._state, request.local_rank
        running = {rank: pid for rank, pid in self._running().items() if wanted in (-1, rank)}
        if state is None or not running:
            reply(None, "this worker does not run now" if wanted >= 0 else "no worker runs here now")
            return
        begins = {rank: _size(self._stacks_file(rank)) for rank in running}
        self._detector.rebase()
        for rank, pid in running.items():
            if state_of(pid) not in ("T", "t"):
                dump(rank)

        def answer() -> None:
            found = {rank: self._written_stacks(rank, begins[rank], _size(self._stacks_file(rank))) for rank in running}
            stacks = [
                WorkerStacks(global_rank(state, rank), pid, stacks=found[rank].stacks, why=found[rank].why, note=note)
                for rank, pid in running.items()
            ]
            reply(stacks, "")

        self._loop.at(self._loop.now() + state.settings.stacks_s, answer)

    def _written_stacks(self, rank: int, begin: int, end: int) -> events.WorkerStacks:
        from tenax._core.hang_report import last_dump

        path = self._stacks_file(rank)
        if not path:
            return events.WorkerStacks(rank, why="it has no log files, so its stacks are on its stderr")
        begin = max(begin, end - _MAX_BYTES)
        stacks = last_dump(_text(path, begin, end)) if end > begin else ""
        if not stacks:
            return events.WorkerStacks(rank, why=self._why_no_stacks(rank))
        return events.WorkerStacks(rank, truncate_stacks(stacks, _MAX_STACKS))

    def _why_no_stacks(self, rank: int) -> str:
        worker = self._state.workers.get(rank) if self._state is not None else None
        match state_of(worker.pid) if worker is not None else "":
            case "T" | "t":
                return "it is stopped by SIGSTOP or a debugger"
            case "D":
                return "it is blocked in the kernel, waiting for a disk or a device"
            case "":
                return "it has exited"
        return "it received the signal but wrote nothing"


def _size(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def _text(path: str, begin: int, end: int) -> str:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return os.pread(descriptor, end - begin, begin).decode("utf-8", "replace")
        finally:
            os.close(descriptor)
    return ""
