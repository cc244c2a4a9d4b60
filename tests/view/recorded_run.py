"""A run that a test plays with real machines, which writes real journals."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tenax._core.agent import AgentMachine
from tenax._core.commands import ExamineFailure
from tenax._core.coordinator import CoordinatorMachine, NodeLost, Opened, Received, RunSettings, Tick
from tenax._core.events import (
    FailureExamined,
    GenerationFormed,
    NodeCleared,
    RunRequested,
    SignalReceived,
    WorkerExited,
    WorkerStarted,
)
from tenax._core.messages import (
    FailureSeen,
    FromNode,
    NodeBusy,
    NodeDraining,
    NodeInfo,
    NodeJoined,
    NodeLeft,
    NodeProgress,
    NodeQuiet,
    NodeReady,
    NodeStopped,
    NodeSucceeded,
    StackLocation,
    StacksTaken,
    WorkerProgress,
    WorkersRunning,
)
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Stopped
from tenax._node.journal import FORMAT, Header, Journal, RunHeader, RunJournal

WALL = 1_700_000_000.0


class RecordedRun:
    """A coordinator of ``count`` nodes with ``slots`` workers each, and its journal. The test sets the time."""

    def __init__(
        self,
        folder: Path,
        run_id: str = "job",
        count: int = 1,
        slots: int = 2,
        max_restarts: int = 3,
        min_nodes: int = 0,
        wall: float = WALL,
        name: str = "coordinator.jsonl",
        on_hang: str = "off",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name
        self.count, self.slots = count, slots
        self.settings = RunSettings(
            run_id, min_nodes or count, count, max_restarts, last_call_s=0.0, on_hang=on_hang, hang_after_s=1.0
        )
        self.machine = CoordinatorMachine(self.settings)
        self.journal = RunJournal(str(self.path))
        self.journal.write(RunHeader(FORMAT, "0", self.settings, "node0", wall, 0.0))
        self.at = 0.0
        self.step(Opened())

    @property
    def generation(self) -> int:
        return self.machine.state.generation

    def step(self, event: object, at: float | None = None) -> None:
        self.at = self.at if at is None else at
        sent = self.machine.step(event, self.at)  # type: ignore[arg-type]
        self.journal.run_step(self.at, event, sent, self.machine.state)  # type: ignore[arg-type]

    def receive(self, node: int, message: FromNode, at: float | None = None) -> None:
        self.step(Received(f"n{node}", message), at)

    def join(self, node: int, at: float | None = None) -> None:
        info = NodeInfo(f"n{node}", f"node{node}", self.slots, min_nodes=self.settings.min_nodes, max_nodes=self.count)
        self.receive(node, NodeJoined(info), at)

    def ready(self, node: int, at: float | None = None) -> None:
        generation = self.machine.state.nodes[f"n{node}"].generation
        self.receive(node, NodeReady(generation, f"node{node}", 1000 + node), at)

    def all_join(self, at: float = 0.0) -> None:
        for node in range(self.count):
            self.join(node, at)
            self.ready(node)

    def all_run(self, at: float) -> None:
        for node in self._members():
            self.receive(node, WorkersRunning(self.generation, tuple(range(10, 10 + self.slots))), at)

    def steps(self, node: int, first: int, last: int, since: float, at: float) -> None:
        workers = tuple(WorkerProgress(rank, first, last, since, at) for rank in range(self.slots))
        self.receive(node, NodeProgress(self.generation, at, workers), at)

    def fail(
        self,
        node: int,
        at: float,
        message: str = "RuntimeError: boom",
        exit_code: int = 1,
        is_consequence: bool = False,
    ) -> None:
        """A worker fails; all nodes stop within a second and are ready again."""
        generation = self.generation
        part = self.machine.state.nodes[f"n{node}"].part
        assert part is not None
        kind = message.partition(":")[0]
        evidence = Evidence(kind, message, traceback=f"Traceback <b>\n{message}", is_consequence=is_consequence)
        failure = Failure(generation, 0, part.first_global_rank, 10, exit_code, at, evidence=evidence)
        self.receive(node, FailureSeen(generation, failure.brief(), at), at)
        for each in self._members():
            failures = (failure,) if each == node else ()
            first = self.machine.state.nodes[f"n{each}"].part.first_global_rank
            slots = self.machine.state.nodes[f"n{each}"].info.slots
            ranks = range(first + len(failures), first + slots)
            stopped = tuple(Stopped(rank - first, rank, 20 + rank, -15) for rank in ranks)
            self.receive(each, NodeStopped(generation, at + 0.5, failures, stopped), at + 0.5)
            self.ready(each, at + 1.0)

    def lose(self, node: int, at: float, why: str = "connection closed") -> None:
        self.step(NodeLost(f"n{node}", why), at)

    def drain(self, node: int, at: float) -> None:
        self.receive(node, NodeDraining(self.generation, 30.0, "SIGTERM"), at)
        self.receive(node, NodeLeft("SIGTERM"), at + 1)

    def interrupt(self, node: int, at: float) -> None:
        """Ctrl-C: the agent stops its workers and leaves before there is a verdict."""
        why = "its agent received SIGTERM"
        self.receive(node, NodeDraining(self.generation, 30.0, why), at)
        self.receive(node, NodeStopped(self.generation, at + 0.5), at + 0.5)
        self.receive(node, NodeLeft(why))

    def hang(self, since: float, at: float) -> None:
        """No node is active since ``since``; at ``at`` the nodes send the stacks of their workers the second time."""
        confirm_s = 0.25  # a quarter of hang_after_s
        for node in self._members():
            self.receive(node, NodeQuiet(self.generation, at - confirm_s, since, "no step"), at - confirm_s)
        self._send_stacks(at - confirm_s)
        self.step(Tick(), at)
        self._send_stacks(at)

    def _send_stacks(self, at: float) -> None:
        hang = self.machine.state.hang
        assert hang is not None
        for node in self._members():
            ranks = tuple(range(node * self.slots, (node + 1) * self.slots))
            frames = ("train.py:12 in load",) if node else ("train.py:40 in step",)
            locations = (StackLocation(ranks, frames, host=f"node{node}"),)
            self.receive(node, StacksTaken(self.generation, hang.number, locations), at)

    def resume(self, node: int, at: float) -> None:
        self.receive(node, NodeBusy(self.generation), at)

    def stop_the_others(self, at: float) -> None:
        for node in self._members():
            if f"n{node}" in self.machine.state.phase.unstopped:
                self.receive(node, NodeStopped(self.generation, at), at)
                self.ready(node)

    def succeed(self, at: float) -> None:
        generation = self.generation
        for node in self._members():
            self.receive(node, NodeSucceeded(generation), at)

    def close(self) -> None:
        self.journal.close(self.at)

    def _members(self) -> list[int]:
        state = self.machine.state
        return sorted(int(each[1:]) for each in state.members if each in state.nodes and state.last.has(each))


class RecordedAgent:
    """The agent of one node, and its journal."""

    def __init__(
        self, folder: Path, host: str = "node0", run_id: str = "job", slots: int = 2, wall: float = WALL
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "journal.jsonl"
        self.slots = slots
        self.settings = AgentSettings(run_id, "default", slots, 3)
        self.machine = AgentMachine(self.settings)
        self.journal = Journal(str(self.path))
        self.journal.write(Header(FORMAT, "0", self.settings, "train.py", host, wall, 0.0))
        self.step(RunRequested(), 0.0)

    def step(self, event: object, at: float) -> None:
        commands = self.machine.step(event, at)  # type: ignore[arg-type]
        self.journal.step(at, event, commands)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, ExamineFailure):
                evidence = Evidence("RuntimeError", "RuntimeError: boom")
                self.step(FailureExamined(command.generation, command.local_rank, evidence), at)

    def start(self, generation: int, at: float, group_rank: int = 0) -> None:
        """Workers start one after the other, a tenth of a second apart."""
        first = group_rank * self.slots
        part = Assignment(generation, group_rank, 2, first, 2 * self.slots, master_port=generation)
        self.step(GenerationFormed(part), at)
        for rank in range(self.slots):
            self.step(WorkerStarted(generation, rank, 100 * generation + rank), at + (rank + 1) / 10)

    def exit(self, generation: int, local_rank: int, exit_code: int, at: float) -> None:
        self.step(WorkerExited(generation, local_rank, exit_code), at)

    def interrupt(self, generation: int, at: float) -> None:
        """Ctrl-C: the agent stops its workers and exits."""
        self.step(SignalReceived(2), at)
        for rank in range(self.slots):
            self.exit(generation, rank, -2, at + 0.5)
        self.cleared(generation, at + 0.5)

    def cleared(self, generation: int, at: float) -> None:
        self.step(NodeCleared(generation), at)

    def close(self, at: float) -> None:
        self.journal.close(at)


def replaced(text: str, **fields: object) -> str:
    """Return a line of a journal with other values."""
    return msgspec.json.encode({**msgspec.json.decode(text), **fields}).decode()
