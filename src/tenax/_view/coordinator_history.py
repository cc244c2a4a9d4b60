"""The history of a run from its coordinator's journal: replays the events and records the machine's states. Pure."""

from __future__ import annotations

from tenax._core.coordinator import CoordinatorMachine, NodeLost, Opened, Over, Received
from tenax._core.diagnosis import diagnosis_of
from tenax._core.messages import NodeDraining, NodeJoined, NodeLeft
from tenax._core.model import Diagnosis
from tenax._core.policy import RecordedPolicy
from tenax._view.history import (
    HangSpan,
    NodeHistory,
    RunHistory,
    RunPart,
    Spans,
    missing_end,
    odd_ranks,
    without_overlaps,
)
from tenax._view.status import failure_statuses, generation_status, state_of_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, NodeRecord
    from tenax._core.ledger import GenerationEntry
    from tenax._core.run_state import Generation, Suspicion
    from tenax._node.journal import Footer
    from tenax._node.run_journal import RunHeader, RunStep


def history_of_run(header: RunHeader, steps: Sequence[RunStep], footer: Footer | None, folder: str = "") -> RunPart:
    """Return the history of a run as one coordinator saw it. ``folder``: of the journal."""
    replay = _Replay(header, RecordedPolicy(step.decision for step in steps))
    trouble = replay.run(steps)
    end = missing_end(f"the coordinator on {header.host}", footer, replay.state.verdict)
    history = replay.history((trouble, *end) if trouble else end, folder)
    all_left = bool(history.nodes) and all(node.gone_at is not None for node in history.nodes)
    return RunPart(history, replay.ranks, replay.has_predecessor, footer is not None and all_left)


class _Node(Spans):
    def __init__(self, record: NodeRecord, at: float, offset: float) -> None:
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
        self._machine = CoordinatorMachine(header.settings, policy)
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
    def state(self) -> CoordinatorState:
        return self._machine.state

    def run(self, steps: Sequence[RunStep]) -> str:
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

    def _observe(self, event: AnyCoordinatorEvent, *, all_nodes: bool) -> None:
        state = self.state
        if isinstance(event, Opened):
            self.has_predecessor |= event.record is not None
        entry = state.ledger.current
        if entry is not None and (not self._entries or self._entries[-1] is not entry):
            self._entries.append(entry)
        if self._last is None or state.last is not self._last[1]:  # the diagnosis of the previous one is final
            self._add_diagnosis()
        self._last = state.generation, state.last
        self._observe_hang(state.hang)
        if isinstance(event, Received | NodeLost):
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
        if isinstance(state.phase, Over):
            node.end(self._at)
        else:
            in_generation = state.last.has(node_id) and node_id not in state.ready
            node.begin(state_of_node(state, record), state.generation if in_generation else 0, self._at)

    def _observe_leaving(self, event: Received | NodeLost) -> None:
        node = self._nodes.get(event.node_id)
        if node is None:
            return
        if isinstance(event, Received) and isinstance(event.message, NodeDraining):
            node.gone_how, node.gone_why = "drained", event.message.why
        if event.node_id in self.state.nodes or node.gone_at is not None:
            return
        if isinstance(event, Received) and isinstance(event.message, NodeJoined):
            return  # it was refused
        node.end(self._at)
        if not isinstance(self.state.phase, Over):
            how, left = ("lost", event) if isinstance(event, NodeLost) else ("left", event.message)
            node.gone_at, node.gone_how = self._at, node.gone_how or how
            node.gone_why = node.gone_why or (left.why if isinstance(left, NodeLost | NodeLeft) else "")
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
