"""Fake worker processes for tests: they start, receive signals, leave children behind and ignore SIGTERM, as set up.

``FakeProcesses`` implements ``interfaces.Processes`` and passes the same contract tests as the real keeper. The test
does what the operating system does to a real worker::

    processes = FakeProcesses()
    ...                                      # a supervisor starts workers
    processes.exit(local_rank=1, exit_code=3)

As with the real keeper, events are emitted only when the descriptor is served (``on_readable``), never inside a call.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tenax._core import events
from tenax._io.interfaces import Watchable

if TYPE_CHECKING:
    from tenax._io.interfaces import Emit, Launch

__all__ = ["FakeProcesses", "FakeWorker"]

_FIRST_PID = 1_000_000  # above real pids, in case a test sends a signal to one by mistake


class FakeWorker:
    """One worker: how it was started, how it reacts to signals, and its children."""

    def __init__(self, generation: int, local_rank: int, pid: int, launch: Launch) -> None:
        self.generation = generation
        self.local_rank = local_rank
        self.pid = pid
        self.launch = launch
        self.is_alive = True
        self.exit_code = 0
        self.was_stopped = False  # signalled together with all workers
        self.was_signalled = False  # signalled alone
        self.shows_stacks = True
        self.dumps = 0  # how often it wrote its stacks
        self.signals: list[int] = []  # received, in order
        self.ignores: set[int] = set()
        self.is_stuck = False  # in the kernel: SIGKILL has no effect
        self.children: list[FakeChild] = []


class FakeChild(NamedTuple):
    """A process that a worker started, in the worker's process group or in its own session."""

    in_group: bool
    ignores_term: bool


class FakeProcesses(Watchable):
    """Implements ``interfaces.Processes``. ``workers`` holds every worker ever started, by (generation, local rank)."""

    def __init__(self) -> None:
        self.workers: dict[tuple[int, int], FakeWorker] = {}
        self._next_pid = _FIRST_PID
        self._refusals: dict[int, tuple[str, int]] = {}
        self._ignored: dict[int, set[int]] = {}  # signals, by local rank
        self._stuck: set[int] = set()  # local ranks
        self._pending: deque[events.AnyEvent] = deque()
        self._emit: Emit = lambda _: None
        self._reader = self._writer = -1
        self._clearing = 0
        self._clear_number = 0
        self._killing = False
        self._held: set[int] = set()  # local ranks that stay when the node is cleared
        self.held_s = 0.0  # the last lease passed to ``hold``; 0: no limit
        self._is_lease_over = False

    # --- actions of a test --------------------------------------------------------------------------------------------

    def __getitem__(self, local_rank: int) -> FakeWorker:
        """Return the last worker started with this local rank."""
        for worker in reversed(self.workers.values()):
            if worker.local_rank == local_rank:
                return worker
        raise KeyError(f"no worker was started with local rank {local_rank}")

    def exit(self, local_rank: int, exit_code: int = 0) -> None:
        """Let the worker exit by itself; with a negative code, by that signal."""
        self._end(self[local_rank], exit_code)
        self._settle()

    def leave_behind(self, local_rank: int, *, in_group: bool = True, ignores_term: bool = False) -> None:
        """Let the worker start a process that outlives it."""
        self[local_rank].children.append(FakeChild(in_group=in_group, ignores_term=ignores_term))

    def refuse(self, local_rank: int, reason: str, exit_code: int = 127) -> None:
        """Fail the next start of a worker with this local rank."""
        self._refusals[local_rank] = (reason, exit_code)

    def will_ignore(self, local_rank: int, *signals: int) -> None:
        """Let every later worker with this local rank ignore these signals."""
        self._ignored[local_rank] = set(signals)

    def will_be_stuck(self, local_rank: int) -> None:
        """Let every later worker with this local rank hang in the kernel, where no signal ends it."""
        self._stuck.add(local_rank)

    def lose(self, reason: str = "it was killed by SIGKILL") -> None:
        """Kill the keeper, and with it all workers."""
        for worker in self.workers.values():
            worker.is_alive = False
            worker.children.clear()
        self._queue(events.KeeperLost(reason))

    def end_lease(self) -> None:
        """Let the lease expire, if there is one."""
        if self.held_s > 0:
            self._is_lease_over = True
            self._fence()

    # --- interfaces.Processes -----------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return _FIRST_PID - 1

    def spawn(self) -> None:
        """Open the descriptors. ``open`` does it too."""
        if self._reader < 0:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)

    def open(self, emit: Emit) -> None:
        self._emit = emit
        self.spawn()

    def start(self, generation: int, local_rank: int, launch: Launch) -> None:
        self._next_pid += 1
        refusal = self._refusals.pop(local_rank, None)
        if refusal is not None:
            self._queue(events.WorkerStartFailed(generation, local_rank, *refusal))
            return
        worker = FakeWorker(generation, local_rank, self._next_pid, launch)
        worker.ignores, worker.is_stuck = set(self._ignored.get(local_rank, ())), local_rank in self._stuck
        self.workers[generation, local_rank] = worker
        self._queue(events.WorkerStarted(generation, local_rank, worker.pid))
        if self._is_lease_over:
            self._fence()

    def signal(self, generation: int, number: int) -> None:
        for worker in self._of(generation):
            if worker.is_alive:
                worker.was_stopped = True
                self._deliver(worker, number)

    def dump_stacks(self, generation: int, local_rank: int) -> None:
        worker = self.workers.get((generation, local_rank))
        if worker is None or not worker.is_alive:
            return
        if worker.shows_stacks:
            worker.dumps += 1
        else:
            self._queue(events.StacksRefused(generation, local_rank, "it is not a Python program"))

    def end(self, generation: int, local_rank: int, number: int) -> None:
        worker = self.workers.get((generation, local_rank))
        if worker is not None and worker.is_alive:
            worker.was_signalled = True
            self._deliver(worker, number)

    def adopt(self, generation: int, local_rank: int, following: int) -> None:
        worker = self.workers.pop((generation, local_rank))
        worker.generation = following
        self.workers[following, local_rank] = worker
        if worker.is_alive:
            worker.was_stopped = worker.was_signalled = False
            self._queue(events.WorkerStarted(following, local_rank, worker.pid))
        else:
            by_agent = worker.was_stopped or worker.was_signalled
            code = worker.exit_code
            self._queue(events.WorkerExited(following, local_rank, code, before_stop=not by_agent))

    def clear(self, generation: int, held: tuple[int, ...] = (), number: int = 0) -> None:
        self._clearing, self._held, self._clear_number = generation, set(held), number
        for worker in self._of(generation):
            if worker.was_stopped:
                worker.children = [child for child in worker.children if not child.in_group or child.ignores_term]
        self._settle()

    def kill(self, generation: int) -> None:
        self._clearing, self._killing, self._held, self._clear_number = generation, True, set(), 0
        self._settle()

    def keep(self, name: str, descriptor: int) -> None:
        """Do nothing: no process here outlives the agent."""

    def release(self, name: str) -> None:
        """Do nothing: ``keep`` keeps nothing."""

    def hold(self, seconds: float) -> None:
        self.held_s = seconds
        self._is_lease_over = False

    def close(self) -> None:
        for worker in self.workers.values():
            worker.is_alive = worker.is_stuck
            worker.children.clear()
        self._pending.clear()
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def fileno(self) -> int:
        return self._reader

    def on_readable(self) -> None:
        if self._reader < 0:
            return
        os.read(self._reader, 4096)
        while self._pending:
            event = self._pending.popleft()
            if isinstance(event, events.KeeperLost):
                self.close()
            self._emit(event)

    # --- internals ----------------------------------------------------------------------------------------------------

    def _of(self, generation: int) -> list[FakeWorker]:
        return [worker for worker in self.workers.values() if worker.generation == generation]

    def _queue(self, event: events.AnyEvent) -> None:
        assert self._writer >= 0, "open these processes first"
        self._pending.append(event)
        os.write(self._writer, b"\0")

    def _deliver(self, worker: FakeWorker, number: int) -> None:
        worker.signals.append(number)
        is_deadly = number == signal.SIGKILL or number not in worker.ignores
        if is_deadly and not worker.is_stuck:
            self._end(worker, -number)

    def _end(self, worker: FakeWorker, exit_code: int) -> None:
        assert worker.is_alive, f"the worker with local rank {worker.local_rank} is dead already"
        worker.is_alive, worker.exit_code = False, exit_code
        by_agent = worker.was_stopped or worker.was_signalled
        self._queue(events.WorkerExited(worker.generation, worker.local_rank, exit_code, before_stop=not by_agent))

    def _fence(self) -> None:
        if not any(worker.is_alive or worker.children for worker in self.workers.values()):
            return
        self._queue(events.Fenced(max(generation for generation, _ in self.workers), "the lease was not renewed"))
        self._held = set()
        for worker in self.workers.values():
            worker.children.clear()
            if worker.is_alive:
                worker.was_stopped = True
                self._deliver(worker, signal.SIGKILL)
        self._settle()

    def _settle(self) -> None:
        """While the node is being cleared, end its processes, and report when none is left."""
        if not self._clearing:
            return
        for worker in self.workers.values():
            if self._is_held(worker):
                continue
            is_spared = worker.was_stopped and not self._killing
            worker.children = [child for child in worker.children if is_spared and child.in_group]
            if worker.is_alive and not is_spared:
                self._deliver(worker, signal.SIGKILL)
        held = tuple(sorted(each.local_rank for each in self.workers.values() if self._is_held(each)))
        others = [worker for worker in self.workers.values() if not self._is_held(worker)]
        if not any(worker.is_alive or worker.children for worker in others):
            generation, self._clearing, self._killing = self._clearing, 0, False
            self._held = set()
            self._queue(events.NodeCleared(generation, held, self._clear_number))

    def _is_held(self, worker: FakeWorker) -> bool:
        return worker.is_alive and worker.local_rank in self._held
