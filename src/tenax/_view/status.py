"""The status of a run: one value that the terminal, the dashboard and the metrics show. Pure.

Derived from the coordinator's state and its most recent events. Times are seconds since the epoch, so that viewers can
update ages without a new request. Compact: a thousand nodes are a thousand short entries.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorState,
    Ending,
    NodePhase,
    NodeRecord,
    Over,
    Received,
    Running,
    Send,
)
from tenax._core.hang_suspicion import describe_hang, describe_places
from tenax._core.ledger import GenerationEntry, Goodput, Spent
from tenax._core.messages import NodeDraining
from tenax._core.model import Failure, assert_never
from tenax._view.run_messages import RunMessages
from tenax._view.text import exit_summary

RecentStep = tuple[float, AnyCoordinatorEvent, list[Send]]

_MAX_EVENTS = 100
_MAX_FAILURES = 64


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base class of views."""


class NodeStatus(Value, frozen=True):
    """One node and its workers: ``pids[i]``, ``steps[i]`` and ``phases[i]`` belong to local rank i."""

    node_id: str
    name: str  # for display
    host: str
    state: str  # joined, waiting, spare, starting, working, stopping, draining, done, leaving
    since: float
    slots: int = 1
    rank: int = -1  # of the node in the generation; -1: not in it
    first_rank: int = -1  # of its workers
    pids: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()  # the last reported step of each worker; -1: none
    phases: tuple[str, ...] = ()  # the reported phase of each worker, other than training
    step_at: float | None = None  # time of the last report
    failed: tuple[int, ...] = ()  # local ranks
    is_coordinator: bool = False  # its agent hosts the coordinator


class FailureStatus(Value, frozen=True):
    """A summary of one failure; the report has the details."""

    rank: int
    local_rank: int
    host: str
    generation: int
    exit_code: int
    at: float
    what: str  # "exit code 1: RuntimeError: boom"
    cause: str = ""
    is_consequence: bool = False
    proof: str = ""  # the line that shows the cause
    traceback: str = ""
    log_file: str = ""


class GenerationStatus(Value, frozen=True):
    number: int
    why: str
    nodes: int
    workers: int
    formed_at: float
    running_at: float | None = None
    ended_at: float | None = None
    settled_at: float | None = None
    ended_by: str = ""
    ended_why: str = ""
    spent: Spent = Spent()
    first_step: int = -1
    last_step: int = -1
    lost_steps: int = 0


class EventStatus(Value, frozen=True):
    at: float
    text: str
    moment: float = 0.0  # on the coordinator's monotonic clock


class RunStatus(Value, frozen=True, omit_defaults=False):
    run_id: str
    now: float
    phase: str  # gathering, recovering, running, ending, paused, over
    doing: str  # the phase as a message: which nodes the run waits for, and for how long
    generation: int
    world_size: int
    min_nodes: int
    max_nodes: int
    restarts_used: int
    max_restarts: int
    membership_changes: int
    drains: int
    requests: int
    nodes: tuple[NodeStatus, ...]
    generations: tuple[GenerationStatus, ...]
    generations_forgotten: int
    failures: tuple[FailureStatus, ...]  # of this generation, first cause first
    earlier: tuple[FailureStatus, ...]  # the first cause of each earlier generation that failed
    events: tuple[EventStatus, ...]  # the most recent, oldest first
    goodput: Goodput
    outcome: str = ""  # empty while the run is running
    why: str = ""
    hang: str = ""  # message about a suspected or confirmed hang: how long, and which ranks differ
    hang_since: float | None = None  # last progress before the hang, for viewers that update the duration
    hang_where: str = ""  # which ranks differ, and where they are
    mark: str = ""  # changes with every change of the status


def status_of(
    state: CoordinatorState, recent: Iterable[RecentStep], doing: str, now: float, wall_offset: float
) -> RunStatus:
    """Return the status. ``wall_offset``: seconds since the epoch minus the coordinator's clock."""
    settings, verdict = state.settings, state.verdict
    failed = {rank: failure.local_rank for rank, failure in state.last.failures.items()}
    recent = list(recent)
    draining = _draining_since(recent)
    return RunStatus(
        run_id=settings.run_id,
        now=now + wall_offset,
        phase=state.phase.name,
        doing=doing,
        generation=state.generation,
        world_size=state.last.world_size,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        restarts_used=state.restarts_used,
        max_restarts=settings.max_restarts,
        membership_changes=state.membership_changes,
        drains=state.drains,
        requests=state.requests,
        nodes=tuple(_node(state, record, failed, draining, wall_offset) for record in state.nodes.values()),
        generations=tuple(generation_status(entry, now, wall_offset) for entry in state.ledger.entries),
        generations_forgotten=state.ledger.forgotten,
        failures=tuple(
            failure_status(each, wall_offset) for each in list(state.last.failures.values())[:_MAX_FAILURES]
        ),
        earlier=tuple(failure_status(each, wall_offset) for each in state.earlier),
        events=tuple(_events(state, recent, wall_offset)),
        # An earlier coordinator may have ended the run.
        goodput=(verdict.goodput if verdict is not None else None) or state.ledger.goodput(now),
        outcome=verdict.outcome.value if verdict is not None else "",
        why=verdict.why if verdict is not None else "",
        hang=describe_hang(state, now),
        hang_since=state.hang.since + wall_offset if state.hang is not None else None,
        hang_where=describe_places(state.hang) if state.hang is not None else "",
    )


def _draining_since(recent: Iterable[RecentStep]) -> dict[str, float]:
    """Return when each node first reported that it was draining, if that is among the recent steps."""
    since: dict[str, float] = {}
    for at, event, _ in recent:
        if isinstance(event, Received) and isinstance(event.message, NodeDraining):
            since.setdefault(event.node_id, at)  # it is reported again on every new connection
    return since


def _node(
    state: CoordinatorState,
    record: NodeRecord,
    failed: dict[int, int],
    draining: dict[str, float],
    wall_offset: float,
) -> NodeStatus:
    info = record.info
    since = draining.get(info.node_id, record.since) if record.is_draining else record.since
    is_member = info.node_id in state.members and record.part is not None
    first_rank = record.part.first_global_rank if is_member and record.part is not None else -1
    slots = info.slots if record.progress else 0  # a node may claim any number, so allocate only if needed
    steps, phases = [-1] * slots, [""] * slots
    for each in record.progress:
        if 0 <= each.local_rank < slots:
            steps[each.local_rank], phases[each.local_rank] = each.last_step, each.phase
    last_at = max((each.last_at for each in record.progress if each.last_step >= 0), default=None)
    ranks = range(first_rank, first_rank + info.slots) if is_member else range(0)
    return NodeStatus(
        node_id=info.node_id,
        name=record.label,
        host=info.host,
        state=state_of_node(state, record),
        since=since + wall_offset,
        slots=info.slots,
        rank=state.members[info.node_id] if is_member else -1,
        first_rank=first_rank,
        pids=record.pids,
        steps=tuple(steps) if record.progress else (),
        phases=tuple(phases) if any(phases) else (),
        step_at=None if last_at is None else last_at + wall_offset,
        failed=tuple(sorted(failed[rank] for rank in ranks if rank in failed)) if failed else (),
        is_coordinator=info.node_id == state.settings.serving_node or len(state.nodes) == state.settings.max_nodes == 1,
    )


def state_of_node(state: CoordinatorState, record: NodeRecord) -> str:
    if record.is_draining:
        return "draining"
    match record.phase:
        case NodePhase.JOINED:
            return "joined"
        case NodePhase.READY:
            if isinstance(state.phase, Over):
                return "leaving"
            return "spare" if isinstance(state.phase, Running) else "waiting"
        case NodePhase.DONE:
            return "done"
        case NodePhase.STALE:
            return "stopping"
        case NodePhase.MEMBER if isinstance(state.phase, Ending):
            return "stopping"
        case NodePhase.MEMBER:
            return "starting" if record.info.node_id in state.last.unstarted else "working"
        case _:
            return assert_never(record.phase)


def generation_status(entry: GenerationEntry, now: float, wall_offset: float) -> GenerationStatus:
    def wall(at: float | None) -> float | None:
        return None if at is None else at + wall_offset

    return GenerationStatus(
        number=entry.number,
        why=entry.why,
        nodes=entry.nodes,
        workers=entry.workers,
        formed_at=entry.formed_at + wall_offset,
        running_at=wall(entry.running_at),
        ended_at=wall(entry.ended_at),
        settled_at=wall(entry.settled_at),
        ended_by=entry.ended_by,
        ended_why=entry.ended_why,
        spent=entry.spent(now),
        first_step=entry.first_step,
        last_step=entry.last_step,
        lost_steps=entry.lost_steps,
    )


def failure_status(failure: Failure, wall_offset: float) -> FailureStatus:
    evidence = failure.evidence
    code = failure.exit_code
    how = exit_summary(code)
    what = failure.reason or evidence.message or evidence.out_of_memory
    return FailureStatus(
        rank=failure.global_rank,
        local_rank=failure.local_rank,
        host=failure.host,
        generation=failure.generation,
        exit_code=code,
        at=failure.seen_at + wall_offset,
        what=f"{how}: {what}" if what else how,
        cause=evidence.cause,
        is_consequence=evidence.is_consequence,
        proof=evidence.proof,
        traceback=evidence.traceback,
        log_file=evidence.log_file,
    )


def _events(state: CoordinatorState, recent: Iterable[RecentStep], wall_offset: float) -> list[EventStatus]:
    messages = RunMessages({node_id: record.label for node_id, record in state.nodes.items()})
    events = [
        EventStatus(at + wall_offset, text.strip(), at)
        for at, event, sent in recent
        for text in messages.lines_for(event, sent)
    ]
    return events[-_MAX_EVENTS:]
