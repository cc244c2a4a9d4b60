"""The parts of a run's history, each from one journal. Pure.

A coordinator's journal is replayed, and the states of its machine are recorded. An agent's journal is only read: it
contains the commands of its machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tenax._core import commands, events
from tenax._core import coordinator as run
from tenax._core.diagnosis import diagnosis_of
from tenax._core.ledger import GenerationEntry
from tenax._core.messages import HangReport, NodeDraining, NodeJoined, NodeLeft
from tenax._core.model import Diagnosis, Failure, Verdict, by_cause
from tenax._core.policy import RecordedPolicy
from tenax._core.run_state import Generation, Suspicion
from tenax._view.history import (
    HangSpan,
    NodeHistory,
    NodePart,
    RunHistory,
    RunPart,
    Spans,
    WorkerSpan,
    missing_end,
    odd_ranks,
    without_overlaps,
)
from tenax._view.status import failure_statuses, generation_status, state_of_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._node.journal import Footer, Header, RunHeader, RunStep, Step

# --- from a coordinator's journal -------------------------------------------------------------------------------------


def history_of_run(header: RunHeader, steps: Sequence[RunStep], footer: Footer | None, folder: str = "") -> RunPart:
    """Return the history of a run as one coordinator saw it. ``folder``: of the journal."""
    replay = _Replay(header, RecordedPolicy(step.decision for step in steps))
    trouble = replay.take(steps)
    end = missing_end(f"the coordinator on {header.host}", footer, replay.state.verdict)
    history = replay.history((trouble, *end) if trouble else end, folder)
    all_left = bool(history.nodes) and all(node.gone_at is not None for node in history.nodes)
    return RunPart(history, replay.ranks, replay.has_predecessor, footer is not None and all_left)


class _Node(Spans):
    def __init__(self, record: run.NodeRecord, at: float, offset: float) -> None:
        super().__init__(offset)
        self.record = record
        self._came_at = at
        self.gone_at: float | None = None
        self.gone_how = self.gone_why = ""
        self.times_lost = 0

    def history(self, node_id: str) -> NodeHistory:
        info, is_gone = self.record.info, self.gone_at is not None
        return NodeHistory(
            node_id=node_id,
            name=self.record.label,
            host=info.host,
            slots=info.slots,
            came_at=self._came_at + self._offset,
            gone_at=None if self.gone_at is None else self.gone_at + self._offset,
            gone_how=self.gone_how if is_gone else "",
            gone_why=self.gone_why if is_gone else "",
            times_lost=self.times_lost,
            spans=tuple(self.found),
        )


class _Replay:
    """A coordinator machine that receives the events of the journal, and what was observed of its states."""

    def __init__(self, header: RunHeader, policy: RecordedPolicy) -> None:
        self._machine = run.CoordinatorMachine(header.settings, policy)
        self._offset = header.wall_time - header.at
        self._began_at = self._at = header.at
        self._entries: list[GenerationEntry] = []
        self._nodes: dict[str, _Node] = {}
        self._last: tuple[int, Generation] | None = None
        self._diagnoses: dict[int, Diagnosis] = {}  # by generation
        self.ranks: dict[tuple[int, int], str] = {}  # generation and group rank -> node id
        self.has_predecessor = False  # took over the record of an earlier coordinator
        self._hang: tuple[Suspicion, int] | None = None  # the current reported hang, and its generation
        self._hangs: list[HangSpan] = []

    @property
    def state(self) -> run.CoordinatorState:
        return self._machine.state

    def take(self, steps: Sequence[RunStep]) -> str:
        """Replay all steps. Return why the replay stopped early; empty if it did not."""
        for number, step in enumerate(steps, 1):
            before = self._mark()
            try:
                self._machine.step(step.event, step.at)
            except Exception as error:  # events that no coordinator can have received: the journal was modified
                return f"step {number} cannot be replayed ({type(error).__name__}: {error}); what follows is not shown"
            self._at = step.at
            self._observe(step.event, all_nodes=before != self._mark())
        return ""

    def _mark(self) -> tuple[object, ...]:
        """Return a value that changes whenever the state of every node may have changed."""
        state, entry = self.state, self.state.ledger.current
        return state.phase.name, state.generation, entry.running_at if entry is not None else None

    def _observe(self, event: run.AnyCoordinatorEvent, *, all_nodes: bool) -> None:
        state = self.state
        if isinstance(event, run.Opened):
            self.has_predecessor |= event.record is not None
        entry = state.ledger.current
        if entry is not None and (not self._entries or self._entries[-1] is not entry):
            self._entries.append(entry)
        if self._last is None or state.last is not self._last[1]:  # the diagnosis of the previous one is final
            self._add_diagnosis()
        self._last = state.generation, state.last
        self._observe_hang(state.hang)
        if isinstance(event, run.Received | run.NodeLost):
            self._add_node(event.node_id)
            self._observe_leaving(event)
        if all_nodes:
            for node_id, rank in state.members.items():
                self.ranks[state.generation, rank] = node_id
            for node_id in self._nodes.keys() & state.nodes.keys():
                self._observe_node(node_id)
            for node_id in [each for each, node in self._nodes.items() if node.what and each not in state.nodes]:
                self._nodes[node_id].end(self._at)

    def _observe_hang(self, hang: Suspicion | None) -> None:
        if self._hang is not None and hang is not self._hang[0]:
            (over, generation), self._hang = self._hang, None
            who = odd_ranks(over.report) if over.report is not None else ""
            self._hangs.append(HangSpan(generation, over.since + self._offset, self._at + self._offset, who))
        if self._hang is None and hang is not None and hang.report is not None:
            self._hang = hang, self.state.generation

    def _add_diagnosis(self) -> None:
        if self._last is not None:
            number, last = self._last
            is_last = last is self.state.last
            self._diagnoses[number] = diagnosis_of(self.state) if is_last else last.diagnosis or Diagnosis()

    def _add_node(self, node_id: str) -> None:
        record = self.state.nodes.get(node_id)
        if record is None:
            return
        if node_id not in self._nodes:
            self._nodes[node_id] = _Node(record, self._at, self._offset)
        self._observe_node(node_id)

    def _observe_node(self, node_id: str) -> None:
        state, node = self.state, self._nodes[node_id]
        record = state.nodes[node_id]
        if node.record is not record:  # it came back
            node.record, node.gone_at, node.gone_how, node.gone_why = record, None, "", ""
        if isinstance(state.phase, run.Over):
            node.end(self._at)
        else:
            in_generation = state.last.has(node_id) and node_id not in state.ready
            node.begin(state_of_node(state, record), state.generation if in_generation else 0, self._at)

    def _observe_leaving(self, event: run.Received | run.NodeLost) -> None:
        node = self._nodes.get(event.node_id)
        if node is None:
            return
        if isinstance(event, run.Received) and isinstance(event.message, NodeDraining):
            node.gone_how, node.gone_why = "drained", event.message.why
        if event.node_id in self.state.nodes or node.gone_at is not None:
            return
        if isinstance(event, run.Received) and isinstance(event.message, NodeJoined):
            return  # it was refused
        node.end(self._at)
        if not isinstance(self.state.phase, run.Over):
            how, left = ("lost", event) if isinstance(event, run.NodeLost) else ("left", event.message)
            node.gone_at, node.gone_how = self._at, node.gone_how or how
            node.gone_why = node.gone_why or (left.why if isinstance(left, run.NodeLost | NodeLeft) else "")
            node.times_lost += node.gone_how == "lost"

    def history(self, missing: tuple[str, ...], folder: str) -> RunHistory:
        state, offset, at = self.state, self._offset, self._at
        ledger = state.ledger
        over_at = at if ledger.over_at is None else ledger.over_at
        for node in self._nodes.values():
            node.end(at)
        self._observe_hang(None)
        self._add_diagnosis()
        verdict = state.verdict
        return RunHistory(
            run_id=state.settings.run_id,
            began_at=(self._began_at if ledger.began_at is None else ledger.began_at) + offset,
            ended_at=over_at + offset,
            nodes=tuple(node.history(node_id) for node_id, node in self._nodes.items()),
            generations=tuple(generation_status(entry, over_at, offset) for entry in self._entries),
            failures=tuple(each for of in self._diagnoses.values() for each in failure_statuses(of, offset)),
            stopped=sum(len(of.stopped) for of in self._diagnoses.values()),
            goodput=ledger.goodput(at),
            outcome=verdict.outcome.value if verdict is not None else "",
            why=verdict.why if verdict is not None else "",
            restarts_used=state.restarts_used,
            max_restarts=state.settings.max_restarts,
            missing=missing,
            hangs=without_overlaps(self._hangs),
            folder=folder,
        )


# --- from an agent's journal ------------------------------------------------------------------------------------------


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

    def add(self, at: float, event: events.AnyEvent, sent: list[commands.AnyCommand]) -> None:
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

    def _add_command(self, command: commands.AnyCommand) -> None:
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
