"""The history of one node, from the events and commands in its agent's journal. Pure.

The agent machine is not replayed: the journal contains its commands.
"""

from __future__ import annotations

import msgspec

from tenax._core import commands, events
from tenax._core.model import Diagnosis, by_cause
from tenax._view.history import (
    HangSpan,
    NodeHistory,
    NodePart,
    RunHistory,
    Spans,
    WorkerSpan,
    missing_end,
    odd_ranks,
    without_overlaps,
)
from tenax._view.status import failure_statuses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent
    from tenax._core.messages import HangReport
    from tenax._core.model import Failure, Verdict
    from tenax._node.journal import Footer, Header, Step


def history_of_node(header: Header, steps: Sequence[Step], footer: Footer | None, folder: str = "") -> NodePart:
    """Return the spans and workers of one node. ``folder``: of the journal."""
    reader = _AgentReader(header)
    for step in steps:
        reader.add(step.at, step.event, step.commands)
    return reader.part(footer, folder)


class _AgentReader:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._offset = header.wall_time - header.at
        self._at = header.at
        self._generation = 0  # the last one
        self._first_rank, self._count = 0, header.settings.local_world_size
        self._spans = Spans(self._offset)
        self._spans.begin("waiting", 0, header.at)
        self._alive: dict[int, tuple[int, float]] = {}  # local rank -> pid, since
        self._ended = 0
        self._workers: list[WorkerSpan] = []
        self._stopped: set[int] = set()  # generations whose workers received a stop signal
        self._ranks: list[tuple[int, int]] = []
        self._found: dict[tuple[int, int], Failure] = {}
        self._hang: tuple[HangReport, float] | None = None  # the current one, and its start
        self._hangs: list[HangSpan] = []
        self._verdict: Verdict | None = None

    def add(self, at: float, event: AnyEvent, sent: list[AnyCommand]) -> None:
        self._at = at
        match event:
            case events.WorkerStarted(generation, local_rank, pid) if generation == self._generation:
                self._alive[local_rank] = (pid, at)
                if len(self._alive) + self._ended >= self._count and self._spans.what == "starting":
                    self._spans.begin("working", generation, at)
            case events.WorkerStartFailed(generation) if generation == self._generation:
                self._ended += 1
            case events.WorkerExited(generation, local_rank) if generation == self._generation:
                self._worker_ended(local_rank, event)
            case events.NodeCleared():
                self._spans.begin("waiting", 0, at)
            case events.HangFound(generation, report) if generation == self._generation and self._hang is None:
                if self._header.settings.on_hang != "restart":  # otherwise it is a failure
                    self._hang = report, at - report.quiet_s
            case events.HangOver(generation) if generation == self._generation:
                self._end_hang()
        for command in sent:
            self._add_command(command)

    def _add_command(self, command: AnyCommand) -> None:
        match command:
            case commands.StartWorkers(part):
                self._generation, self._first_rank = part.generation, part.first_global_rank
                self._ranks.append((part.generation, part.group_rank))
                self._alive, self._ended = {}, 0
                self._spans.begin("starting", part.generation, self._at)
            case commands.SignalWorkers(generation) | commands.KillNode(generation):
                self._end_hang()
                self._stopped.add(generation)
                self._spans.begin("stopping", generation, self._at)
            case commands.SendMessage(message):
                for failure in getattr(message, "failures", ()):
                    self._found[failure.generation, failure.global_rank] = failure
            case commands.Finish(verdict):
                self._verdict = verdict
                self._spans.end(self._at)

    def _end_hang(self) -> None:
        if self._hang is not None:
            (report, since), self._hang = self._hang, None
            span = (since + self._offset, self._at + self._offset)
            self._hangs.append(HangSpan(report.generation, *span, odd_ranks(report)))

    def _worker_ended(self, local_rank: int, event: events.WorkerExited) -> None:
        self._ended += 1
        pid, since = self._alive.pop(local_rank, (0, self._at))
        is_good = event.exit_code == 0 and not event.fault
        was_stopped = self._generation in self._stopped and not event.before_stop
        until = self._at if event.ended_at is None else min(event.ended_at, self._at)
        ended = "succeeded" if is_good else "stopped" if was_stopped else "failed"
        self._add_worker(local_rank, pid, since, until, event.exit_code, ended)

    def _add_worker(
        self, local_rank: int, pid: int, since: float, until: float, exit_code: int | None, ended: str
    ) -> None:
        rank = self._first_rank + local_rank
        span = (since + self._offset, max(since, until) + self._offset)
        self._workers.append(WorkerSpan(self._generation, local_rank, rank, pid, *span, exit_code, ended))

    def part(self, footer: Footer | None, folder: str) -> NodePart:
        header, offset, verdict = self._header, self._offset, self._verdict
        self._end_hang()
        for local_rank, (pid, since) in self._alive.items():
            self._add_worker(local_rank, pid, since, self._at, None, "")
        self._spans.end(self._at)
        found: dict[int, list[Failure]] = {}
        for each in sorted(self._found.values(), key=lambda each: (each.generation, *by_cause(each))):
            found.setdefault(each.generation, []).append(msgspec.structs.replace(each, host=each.host or header.host))
        diagnoses = {number: Diagnosis(failures=tuple(of)) for number, of in found.items()}
        if verdict is not None and verdict.failures:  # of all nodes
            diagnoses[verdict.generation] = verdict
        node = NodeHistory(
            node_id="",
            name=header.host,
            host=header.host,
            slots=header.settings.local_world_size,
            came_at=header.at + offset,
            spans=tuple(self._spans.found),
            workers=tuple(self._workers),
        )
        history = RunHistory(
            run_id=header.settings.run_id,
            began_at=header.at + offset,
            ended_at=self._at + offset,
            nodes=(node,),
            failures=tuple(each for of in diagnoses.values() for each in failure_statuses(of, offset)),
            missing=missing_end(f"the agent on {header.host}", footer, verdict),
            hangs=without_overlaps(self._hangs),
            entrypoint=header.entrypoint,
            folder=folder,
        )
        return NodePart(history, tuple(self._ranks), verdict)
