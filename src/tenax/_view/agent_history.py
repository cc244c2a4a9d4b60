"""The history of one node from the journal of its agent: facts are read, nothing has to be decided again. Pure."""

from __future__ import annotations

import msgspec

from tenax._core import commands as order
from tenax._core import events
from tenax._core.model import by_cause
from tenax._view.history import NO_END, HangSpan, NodeHistory, NodePart, Span, WorkerSpan, one_by_one, who_hung
from tenax._view.status import failure_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent
    from tenax._core.messages import HangReport
    from tenax._core.model import AgentSettings, Failure, Verdict

    class NodeHeader(Protocol):
        """The first line of an agent's."""

        @property
        def settings(self) -> AgentSettings: ...
        @property
        def entrypoint(self) -> str: ...
        @property
        def host(self) -> str: ...
        @property
        def wall_time(self) -> float: ...
        @property
        def at(self) -> float: ...

    class NodeStep(Protocol):
        @property
        def at(self) -> float: ...
        @property
        def event(self) -> AnyEvent: ...
        @property
        def commands(self) -> list[AnyCommand]: ...


def history_of_node(
    header: NodeHeader, steps: Sequence[NodeStep], *, is_whole: bool = True, not_written: int = 0, folder: str = ""
) -> NodePart:
    """What one node saw: its own spans and workers. ``folder``: where its journal lies."""
    watch = _AgentWatch(header)
    for step in steps:
        watch.hear(step.at, step.event, step.commands)
    missing = []
    if not_written:
        missing.append(f"the last {not_written} steps of the agent on {header.host} were not written")
    elif not is_whole and watch.verdict is None:
        missing.append(NO_END.format(f"the agent on {header.host}"))
    return watch.part(tuple(missing), folder)


class _AgentWatch:
    """Reads facts; nothing has to be decided again for what is shown."""

    def __init__(self, header: NodeHeader) -> None:
        self._header = header
        self._offset = header.wall_time - header.at
        self._at = header.at
        self._what, self._since = "waiting", header.at
        self._generation = 0  # the last one
        self._span_generation = 0  # of the present span
        self._first_rank, self._count = 0, header.settings.local_world_size
        self._spans: list[Span] = []
        self._alive: dict[int, tuple[int, float]] = {}  # local rank -> pid, since
        self._ended = 0
        self._workers: list[WorkerSpan] = []
        self._asked: set[int] = set()  # generations whose workers were asked to end
        self._ranks: list[tuple[int, int]] = []
        self._found: dict[tuple[int, int], Failure] = {}
        self._hang: tuple[HangReport, float] | None = None  # and since when
        self._hangs: list[HangSpan] = []
        self.verdict: Verdict | None = None

    def hear(self, at: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        self._at = at
        match event:
            case events.WorkerStarted(generation, local_rank, pid) if generation == self._generation:
                self._alive[local_rank] = (pid, at)
                if len(self._alive) + self._ended >= self._count and self._what == "starting":
                    self._be("working")
            case events.WorkerStartFailed(generation) if generation == self._generation:
                self._ended += 1
            case events.WorkerExited(generation, local_rank) if generation == self._generation:
                self._worker_ended(local_rank, event)
            case events.NodeCleared():
                self._be("waiting", 0)
            case events.HangFound(generation, report) if generation == self._generation and self._hang is None:
                if self._header.settings.on_hang != "restart":  # else it is among the failures
                    self._hang = report, at - report.quiet_s
            case events.HangOver(generation) if generation == self._generation:
                self._end_hang()
        for command in commands:
            self._obey(command)

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case order.StartWorkers(part):
                self._generation, self._first_rank = part.generation, part.first_global_rank
                self._ranks.append((part.generation, part.group_rank))
                self._alive, self._ended = {}, 0
                self._be("starting", part.generation)
            case order.SignalWorkers(generation) | order.KillNode(generation):
                self._end_hang()
                self._asked.add(generation)
                self._be("stopping", generation)
            case order.SendMessage(message):
                for failure in getattr(message, "failures", ()):
                    self._found[failure.generation, failure.global_rank] = failure
            case order.Finish(verdict):
                self.verdict = verdict
                self._be("")

    def _end_hang(self) -> None:
        if self._hang is not None:
            (report, since), self._hang = self._hang, None
            span = (since + self._offset, self._at + self._offset)
            self._hangs.append(HangSpan(report.generation, *span, who_hung(report)))

    def _be(self, what: str, generation: int | None = None) -> None:
        if self._what and self._at > self._since:
            spent = Span(self._what, self._since + self._offset, self._at + self._offset, self._span_generation)
            self._spans.append(spent)
        self._what, self._since = what, self._at
        self._span_generation = self._generation if generation is None else generation

    def _worker_ended(self, local_rank: int, event: events.WorkerExited) -> None:
        self._ended += 1
        pid, since = self._alive.pop(local_rank, (0, self._at))
        is_good = event.exit_code == 0 and not event.fault
        was_asked = self._generation in self._asked and not event.unasked
        until = self._at if event.ended_at is None else min(event.ended_at, self._at)
        self._keep_worker(
            local_rank,
            pid,
            since,
            until,
            event.exit_code,
            "succeeded" if is_good else "stopped" if was_asked else "failed",
        )

    def _keep_worker(
        self, local_rank: int, pid: int, since: float, until: float, exit_code: int | None, ended: str
    ) -> None:
        rank = self._first_rank + local_rank
        span = (since + self._offset, max(since, until) + self._offset)
        self._workers.append(WorkerSpan(self._generation, local_rank, rank, pid, *span, exit_code, ended))

    def part(self, missing: tuple[str, ...], folder: str) -> NodePart:
        header, offset = self._header, self._offset
        self._end_hang()
        for local_rank, (pid, since) in self._alive.items():
            self._keep_worker(local_rank, pid, since, self._at, None, "")
        self._alive = {}
        self._be("")
        failures = sorted(self._found.values(), key=lambda each: (each.generation, *by_cause(each)))
        named = [msgspec.structs.replace(each, host=each.host or header.host) for each in failures]
        node = NodeHistory(
            node_id="",
            name=header.host,
            host=header.host,
            slots=header.settings.local_world_size,
            came_at=header.at + offset,
            spans=tuple(self._spans),
            workers=tuple(self._workers),
        )
        return NodePart(
            run_id=header.settings.run_id,
            node=node,
            began_at=header.at + offset,
            ended_at=self._at + offset,
            ranks=tuple(self._ranks),
            failures=tuple(failure_status(each, offset) for each in named),
            verdict=self.verdict,
            missing=missing,
            hangs=one_by_one(self._hangs),
            entrypoint=header.entrypoint,
            folder=folder,
        )
