"""Nodes: real agent machines with their real tcp engines, several in one process, without workers.

Commands of a node to its workers are recorded and answered at once, as if the workers had followed them. So the time
between the failure of a worker and the stop command on every other node is tenax's own: both machines, both ends of the
link, the coordinator and its journals.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from benchmarks.pipe_commands import PipeCommands
from tenax._core import commands, events
from tenax._core.agent import AgentMachine, messages_on_connecting
from tenax._core.coordinator import RunSettings
from tenax._core.model import AgentSettings, Evidence
from tenax._engines.tcp.engine import TcpEngine, TcpSettings
from tenax._engines.tcp.linked import LinkedEngine, LinkedSettings
from tenax._io.loop import Loop
from tenax._node import journal as journals
from tenax._node import link_journal

WORKERS = 2


class Node:
    """One agent without its processes."""

    def __init__(
        self, loop: Loop, settings: LinkedSettings, folder: str, engine: Callable[..., LinkedEngine] = TcpEngine
    ) -> None:
        self._loop = loop
        self._folder = folder
        self._links = link_journal.LinkJournal(self._path(link_journal.NAME), loop)
        self.machine = AgentMachine(AgentSettings(settings.run_id, "default", WORKERS, max_restarts=1 << 20))
        self.control = engine(settings)
        self.formed_at: dict[int, float] = {}  # by generation: when its workers got the command to start
        self.stopped_at: dict[int, float] = {}  # ... and to stop

    def open(self) -> None:
        """Join."""
        self.emit(events.RunRequested())
        node: Any = SimpleNamespace(
            settings=self.machine.state.settings,
            policy=None,
            messages_on_connecting=lambda info: messages_on_connecting(self.machine.state, info, self._loop.now()),
            hold=lambda _: None,
            keep=lambda *_: None,
            release=lambda _: None,
            print_line=lambda _: None,
            record_run=self._record_run,
            create=self._links.recorder.create,
            set_operator_api=lambda _: None,
        )
        self.control.open(self._loop, self.emit, node)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, f"{os.getpid()}-{id(self)}-{name}")

    def _record_run(self, run: RunSettings) -> Callable[..., None]:
        journal = journals.RunJournal(self._path(journals.RUN_NAME))
        assert journal.path, "the journal cannot be written"
        journal.begin_run(run, self._loop.now())
        return journal.run_step

    def emit(self, event: Any) -> None:
        """Post to the mailbox that all nodes of this process share."""
        self._loop.post((self, event))  # type: ignore[arg-type]

    def fail(self) -> float:
        """Fail a worker of this node. Return when."""
        self.emit(events.WorkerExited(self.machine.state.generation, 0, 1))
        return self._loop.now()

    def step(self, event: Any) -> None:
        """Execute commands, as the supervisor does."""
        for command in self.machine.step(event, self._loop.now()):
            self._perform(command)

    def _perform(self, command: Any) -> None:
        match command:
            case commands.SendMessage(message):
                self.control.send(message)
            case commands.StartWorkers(assignment):
                self.formed_at[assignment.generation] = self._loop.now()
                for rank in range(WORKERS):
                    self.emit(events.WorkerStarted(assignment.generation, rank, 1 + rank))
            case commands.SignalWorkers(generation, number):
                self.stopped_at[generation] = self._loop.now()
                for rank in range(WORKERS):
                    self.emit(events.WorkerExited(generation, rank, -number))
            case commands.ExamineFailure(generation, local_rank):
                self.emit(events.FailureExamined(generation, local_rank, Evidence()))
            case commands.ClearNode(generation) | commands.KillNode(generation):
                self.emit(events.NodeCleared(generation))


def work(pipe: Connection, settings: TcpSettings, number: int, folder: str) -> None:
    """Run that many nodes.

    On `open` every node joins. On `fail` a worker of the first node fails; replies with when. Sends ("formed",
    generation, time) and ("stopped", generation, time) as soon as that is true of all its nodes.
    """
    os.environ["TMPDIR"] = folder
    loop = Loop()
    nodes = [Node(loop, settings, folder) for _ in range(number)]
    reported: set[tuple[str, int]] = set()

    def execute(what: str) -> None:
        if what == "open":
            for node in nodes:
                node.open()
            pipe.send("opened")
        else:
            pipe.send(("failed", 0, nodes[0].fail()))

    def report(what: str, at: list[dict[int, float]], generation: int) -> None:
        times = [each[generation] for each in at if generation in each]
        if len(times) == number and (what, generation) not in reported:
            reported.add((what, generation))
            pipe.send((what, generation, max(times)))

    loop.watch(PipeCommands(pipe, execute))
    while True:
        posted: Any = loop.next_event(lambda: None)  # no node takes long enough for a deadline
        node, event = posted
        generation = node.machine.state.generation
        node.step(event)
        if isinstance(event, events.GenerationFormed):
            report("formed", [each.formed_at for each in nodes], event.assignment.generation)
        elif node.stopped_at.get(generation):
            report("stopped", [each.stopped_at for each in nodes], generation)
