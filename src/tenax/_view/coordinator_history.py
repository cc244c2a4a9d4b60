"""The history of a run from the journal of its coordinator: the machine is told everything again, and watched. Pure."""

from __future__ import annotations

from tenax._core.coordinator import CoordinatorMachine, NodeLost, Opened, Received, RunPhase
from tenax._core.messages import NodeDraining, NodeJoined, NodeLeft
from tenax._core.model import by_cause
from tenax._core.policy import GiveUp
from tenax._view.history import NO_END, HangSpan, NodeHistory, RunHistory, RunPart, Span, one_by_one, who_hung
from tenax._view.status import failure_status, generation_status, state_of_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, NodeRecord, RunSettings
    from tenax._core.ledger import GenerationEntry
    from tenax._core.model import Failure
    from tenax._core.policy import AnyDecision, History
    from tenax._core.run_state import Suspicion

    class RunHeader(Protocol):
        """The first line of a coordinator's journal, as far as it is needed here."""

        @property
        def settings(self) -> RunSettings: ...
        @property
        def host(self) -> str: ...
        @property
        def wall_time(self) -> float: ...
        @property
        def at(self) -> float: ...

    class RunStep(Protocol):
        @property
        def at(self) -> float: ...
        @property
        def event(self) -> AnyCoordinatorEvent: ...
        @property
        def decision(self) -> AnyDecision | None: ...


def history_of_run(
    header: RunHeader, steps: Sequence[RunStep], *, is_whole: bool = True, not_written: int = 0, folder: str = ""
) -> RunPart:
    """``is_whole``: the journal has its last line. ``not_written``: steps that it only counts. ``folder``: of it."""
    watch = _RunWatch(header)
    trouble = watch.hear(steps)
    missing = [trouble] if trouble else []
    if not_written:
        missing.append(f"the last {not_written} steps of the coordinator on {header.host} were not written")
    elif not is_whole and watch.state.verdict is None:
        missing.append(NO_END.format(f"the coordinator on {header.host}"))
    history = watch.history(tuple(missing), folder)
    is_left = is_whole and bool(history.nodes) and all(node.gone_at is not None for node in history.nodes)
    return RunPart(history, watch.ranks, watch.is_heir, is_left)


class _AsDecided:
    """Stands for the policy: it answers what it answered then."""

    def __init__(self, steps: Sequence[RunStep]) -> None:
        self._decisions = [step.decision for step in steps if step.decision is not None]
        self._next = 0

    def decide(self, failure: Failure, history: History) -> AnyDecision:  # noqa: ARG002 - the seam's signature
        self._next += 1
        if self._next > len(self._decisions):
            return GiveUp("the journal holds no further decision")
        return self._decisions[self._next - 1]


class _NodeWatch:
    """One node while its spans are being collected."""

    def __init__(self, record: NodeRecord, at: float) -> None:
        self.record = record
        self.came_at = at
        self.what, self.generation, self.since = "", 0, at
        self.spans: list[Span] = []
        self.gone_at: float | None = None
        self.gone_how = self.gone_why = ""
        self.times_lost = 0

    def be(self, what: str, generation: int, at: float) -> None:
        if (what, generation) != (self.what, self.generation):
            self.end(at)
            self.what, self.generation, self.since = what, generation, at

    def end(self, at: float) -> None:
        if self.what and at > self.since:
            self.spans.append(Span(self.what, self.since, at, self.generation))
        self.what = ""


class _RunWatch:
    """A machine that is told everything again, and what is seen of it."""

    def __init__(self, header: RunHeader) -> None:
        self._settings = header.settings
        self._offset = header.wall_time - header.at
        self._machine: CoordinatorMachine
        self._began_at = self._at = header.at
        self._entries: list[GenerationEntry] = []
        self._nodes: dict[str, _NodeWatch] = {}
        self._failures: list[Failure] = []
        self._found: dict[tuple[int, int], Failure] = {}  # by generation and rank
        self.ranks: dict[tuple[int, int], str] = {}  # generation and group rank -> node id
        self.is_heir = False  # an earlier coordinator has left a record
        self._hang: tuple[Suspicion, int] | None = None  # that was reported, and its generation
        self._hangs: list[HangSpan] = []

    @property
    def state(self) -> CoordinatorState:
        return self._machine.state

    def hear(self, steps: Sequence[RunStep]) -> str:
        """Returns why it could not go on to the end; empty: it could."""
        self._machine = CoordinatorMachine(self._settings, _AsDecided(steps))
        for number, step in enumerate(steps, 1):
            before = self._mark()
            try:
                self._machine.step(step.event, step.at)
            except Exception as error:  # facts that no coordinator of ours can have heard: a journal that was changed
                return f"step {number} cannot be replayed ({type(error).__name__}: {error}); what follows is not shown"
            self._at = step.at
            self._look(step.event, is_everybody=before != self._mark())
        self._keep_failures()
        return ""

    def _mark(self) -> tuple[object, ...]:
        """When this changes, every node may be in another state."""
        state = self._machine.state
        entry = state.ledger.current
        return state.phase, state.generation, entry.running_at if entry is not None else None

    def _look(self, event: AnyCoordinatorEvent, *, is_everybody: bool) -> None:
        state = self.state
        if isinstance(event, Opened):
            self.is_heir |= event.record is not None
        entry = state.ledger.current
        if entry is not None and (not self._entries or self._entries[-1] is not entry):
            self._entries.append(entry)
        if state.failures is not self._failures:  # the list of the one before, which nobody touches any more
            self._keep_failures()
            self._failures = state.failures
        self._look_for_a_hang()
        if isinstance(event, Received | NodeLost):
            self._meet(event.node_id)
            self._see_off(event)
        if is_everybody:
            for node_id, rank in state.members.items():
                self.ranks[state.generation, rank] = node_id
            for node_id in self._nodes.keys() & state.nodes.keys():
                self._look_at(node_id)
            for node_id in [each for each, node in self._nodes.items() if node.what and each not in state.nodes]:
                self._nodes[node_id].end(self._at)

    def _look_for_a_hang(self) -> None:
        hang = self.state.hang
        if self._hang is not None and hang is not self._hang[0]:
            self._end_hang()
        if self._hang is None and hang is not None and hang.report is not None:
            self._hang = hang, self.state.generation

    def _end_hang(self) -> None:
        if self._hang is None:
            return
        (hang, generation), self._hang = self._hang, None
        who = who_hung(hang.report) if hang.report is not None else ""
        self._hangs.append(HangSpan(generation, hang.since + self._offset, self._at + self._offset, who))

    def _keep_failures(self) -> None:
        self._found.update({(each.generation, each.global_rank): each for each in self._failures})

    def _meet(self, node_id: str) -> None:
        record = self.state.nodes.get(node_id)
        if record is None:
            return
        if node_id not in self._nodes:
            self._nodes[node_id] = _NodeWatch(record, self._at)
        self._look_at(node_id)

    def _look_at(self, node_id: str) -> None:
        state, node = self.state, self._nodes[node_id]
        record = state.nodes[node_id]
        if node.record is not record:  # it came back
            node.record, node.gone_at, node.gone_how, node.gone_why = record, None, "", ""
        if state.phase is RunPhase.OVER:
            node.end(self._at)
        else:
            in_generation = node_id in state.members and node_id not in state.gone and node_id not in state.ready
            node.be(state_of_node(state, record), state.generation if in_generation else 0, self._at)

    def _see_off(self, event: Received | NodeLost) -> None:
        node = self._nodes.get(event.node_id)
        if node is None:
            return
        if isinstance(event, Received) and isinstance(event.message, NodeDraining):
            node.gone_how, node.gone_why = "drained", event.message.why
        if event.node_id in self.state.nodes or node.gone_at is not None:
            return
        is_lost, why = isinstance(event, NodeLost), ""
        if isinstance(event, NodeLost):
            why = event.why
        elif isinstance(event.message, NodeLeft):
            why = event.message.why
        elif isinstance(event.message, NodeJoined):
            return  # it was refused
        node.end(self._at)
        if self.state.phase is not RunPhase.OVER:
            node.gone_at, node.gone_how = self._at, node.gone_how or ("lost" if is_lost else "left")
            node.gone_why = node.gone_why or why
            node.times_lost += node.gone_how == "lost"

    def history(self, missing: tuple[str, ...], folder: str) -> RunHistory:
        state, offset, at = self.state, self._offset, self._at
        ledger = state.ledger
        over_at = at if ledger.over_at is None else ledger.over_at
        for node in self._nodes.values():
            node.end(at)
        self._end_hang()
        failures = sorted(self._found.values(), key=lambda each: (each.generation, *by_cause(each)))
        verdict = state.verdict
        return RunHistory(
            run_id=state.settings.run_id,
            began_at=(self._began_at if ledger.began_at is None else ledger.began_at) + offset,
            ended_at=over_at + offset,
            nodes=tuple(_node_history(node_id, node, offset) for node_id, node in self._nodes.items()),
            generations=tuple(generation_status(entry, over_at, offset) for entry in self._entries),
            failures=tuple(failure_status(each, offset) for each in failures),
            goodput=ledger.goodput(at),
            outcome=verdict.outcome.value if verdict is not None else "",
            why=verdict.why if verdict is not None else "",
            min_nodes=state.settings.min_nodes,
            max_nodes=state.settings.max_nodes,
            restarts_used=state.restarts_used,
            max_restarts=state.settings.max_restarts,
            membership_changes=state.membership_changes,
            drains=state.drains,
            requests=state.requests,
            missing=missing,
            hangs=one_by_one(self._hangs),
            folder=folder,
        )


def _node_history(node_id: str, node: _NodeWatch, offset: float) -> NodeHistory:
    info = node.record.info
    return NodeHistory(
        node_id=node_id,
        name=node.record.label,
        host=info.host,
        slots=info.slots,
        came_at=node.came_at + offset,
        gone_at=None if node.gone_at is None else node.gone_at + offset,
        gone_how=node.gone_how if node.gone_at is not None else "",
        gone_why=node.gone_why if node.gone_at is not None else "",
        times_lost=node.times_lost,
        spans=tuple(Span(each.what, each.since + offset, each.until + offset, each.generation) for each in node.spans),
    )
