"""The sampler: looks at the workers of this node every few seconds while a generation runs, and posts what it sees.

    stillness  that nothing moves any more, or again                          (``events.QuietSeen``, ``MovementSeen``)
    stacks     what workers have written down about their threads, as ordered (``events.StacksRead``)

It decides nothing: whether a node is quiet is ``core.hang``'s opinion, whether a run hangs the coordinator's. It is in
nobody's way: should it break, that is said once, and the run goes on without it.
"""

from __future__ import annotations

import os
from typing import Protocol

from tenax._core import commands, events
from tenax._core.agent import Phase
from tenax._core.hang import HangDetector, Sample, Scopes
from tenax._core.model import WorkerPhase
from tenax._observe.hangs.counters import CounterReader, state_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tenax._core.agent import AgentState
    from tenax._core.commands import AnyCommand
    from tenax._core.messages import WorkerProgress
    from tenax._core.model import AgentSettings
    from tenax._io.loop import Loop, Timer

_EVERY_S = 5.0
_AT_LEAST_S = 0.05
_SAMPLES_PER_HANG = 4  # for tests and the impatient: a hang of two seconds is seen in two seconds
_MAX_BYTES = 256 << 10  # of the stacks of one worker
_MAX_STACKS = 32_000  # characters


class Destination(Protocol):
    """Where the files of workers are (``tenax._logs.specs.LogsDest``)."""

    @property
    def error_files(self) -> Mapping[int, str]: ...


class Logs(Protocol):
    """What the sampler needs of ``tenax._node.worker_logs.WorkerLogs``."""

    @property
    def destination(self) -> Destination: ...

    def progress(self) -> tuple[WorkerProgress, ...]: ...

    def say(self, text: str) -> None: ...


class Step(Protocol):
    """One step of the agent machine (``tenax._node.journal.Step``)."""

    @property
    def commands(self) -> Sequence[AnyCommand]: ...


class Sampler:
    """Of one node, for a whole run. ``observe`` every step of its agent machine."""

    def __init__(
        self,
        settings: AgentSettings,
        loop: Loop,
        logs: Logs,
        scopes: Callable[[], Mapping[int, Scopes]] = dict,
    ) -> None:
        """``scopes``: what the watchdog has heard, by local rank, if there is one."""
        self._loop = loop
        self._logs = logs
        self._scopes = scopes
        self._interval_s = max(_AT_LEAST_S, min(_EVERY_S, settings.hang_after_s / _SAMPLES_PER_HANG))
        self._judge = HangDetector(settings.hang_after_s, self._interval_s)
        self._state: AgentState | None = None
        self._generation = 0
        self._timer: Timer | None = None
        self._readers: dict[int, CounterReader] = {}
        self._is_quiet = False  # as posted
        self._is_broken = False
        self._read_until: dict[int, int] = {}  # how much of a worker's stacks is old

    def observe(self, step: Step, state: AgentState) -> None:
        """What the agent machine did last."""
        self._state = state
        for command in step.commands:
            match command:
                case commands.DumpStacks():
                    self._judge.rebase()  # writing them down is our doing
                case commands.ReadStacks():
                    self._judge.rebase()
                    self._read_stacks(command)
        if state.phase is not Phase.RUNNING:
            self._rest()
        elif not self._is_broken and (self._timer is None or state.generation != self._generation):
            self._begin(state)

    def close(self) -> None:
        self._rest()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, state: AgentState) -> None:
        self._rest()
        now = self._loop.now()
        self._generation = state.generation
        self._readers, self._read_until = {}, {}
        self._is_quiet = False
        world_size = state.assignment.world_size if state.assignment is not None else 1
        self._judge.begin(world_size, now)
        self._timer = self._loop.at(now + self._interval_s, self._on_time)

    def _on_time(self) -> None:
        now = self._loop.now()
        try:
            self._look(now)
        except Exception as error:  # a /proc that is not as we know it: nobody needs us to train
            self._timer = None
            if self._is_quiet:
                self._loop.post(events.MovementSeen(self._generation))
            self._is_quiet, self._is_broken = False, True
            self._logs.say(f"tenax: workers are not looked at any more: {type(error).__name__}: {error}")
            return
        self._timer = self._loop.at(now + self._interval_s, self._on_time)

    # --- one look -----------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if self._state is None:
            return
        said, scopes = {each.local_rank: each for each in self._logs.progress()}, self._scopes()
        samples = [
            self._sample(rank, worker.pid, said.get(rank), scopes.get(rank))
            for rank, worker in self._state.workers.items()
            if worker.phase is WorkerPhase.RUNNING and worker.pid
        ]
        opinion = self._judge.look(samples, now)
        if opinion.is_quiet == self._is_quiet:
            return
        self._is_quiet = opinion.is_quiet
        if not opinion.is_quiet:
            self._loop.post(events.MovementSeen(self._generation))
            return
        for sample in samples:
            self._read_until.setdefault(sample.local_rank, _size(self._stacks_file(sample.local_rank)))
        self._loop.post(events.QuietSeen(self._generation, opinion.since, opinion.why, opinion.stopped))

    def _sample(self, rank: int, pid: int, said: WorkerProgress | None, scopes: Scopes | None) -> Sample:
        reader = self._readers.get(rank)
        if reader is None or reader.pid != pid:
            reader = self._readers[rank] = CounterReader(pid)
        vitals = reader.read(closely=self._judge.is_disturbed)
        if said is None:
            return Sample(rank, vitals, scopes=scopes)
        has_stepped = said.last_step >= 0 or said.last_at > 0
        step = said.last_step if has_stepped else None
        return Sample(rank, vitals, step, said.last_at, said.first_step, said.first_at, said.phase, scopes)

    # --- stacks -------------------------------------------------------------------------------------------------------

    def _stacks_file(self, rank: int) -> str:
        from tenax._processes.stacks import stacks_file

        error_file = self._logs.destination.error_files.get(rank, "")
        return stacks_file(error_file) if error_file else ""

    def _read_stacks(self, command: commands.ReadStacks) -> None:
        workers = tuple(self._stacks_of(rank) for rank in command.local_ranks)
        self._loop.post(events.StacksRead(command.generation, command.number, workers))

    def _stacks_of(self, rank: int) -> events.WorkerStacks:
        from tenax._core.hang_report import last_dump

        path = self._stacks_file(rank)
        if not path:
            return events.WorkerStacks(rank, why="no files are kept of it, so its stacks are on its stderr")
        begin = self._read_until.get(rank, 0)
        self._read_until[rank] = end = _size(path)
        begin = max(begin, end - _MAX_BYTES)
        stacks = last_dump(_text(path, begin, end)) if end > begin else ""
        if not stacks:
            return events.WorkerStacks(rank, why=self._why_no_stacks(rank))
        if len(stacks) > _MAX_STACKS:
            head = _MAX_STACKS // 4
            stacks = f"{stacks[:head]}\n[...]\n{stacks[head - _MAX_STACKS :]}"
        return events.WorkerStacks(rank, stacks)

    def _why_no_stacks(self, rank: int) -> str:
        worker = self._state.workers.get(rank) if self._state is not None else None
        match state_of(worker.pid) if worker is not None else "":
            case "T" | "t":
                return "it is stopped, by SIGSTOP or a debugger"
            case "D":
                return "it waits in the kernel, for a disk or a device, and answers nobody"
            case "":
                return "it is gone"
        return "it was asked and wrote nothing"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def _text(path: str, begin: int, end: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        return os.pread(descriptor, end - begin, begin).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
