"""The status of a run: one value that the terminal, the dashboard and the metrics show. Pure.

Derived from the coordinator's state and its most recent events. Times are seconds since the epoch, so that viewers can
update ages without a new request. Compact: a thousand nodes are a thousand short entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from tenax._core import coordinator as run
from tenax._core.diagnosis import diagnosis_of
from tenax._core.hang_suspicion import describe_hang, describe_places
from tenax._core.ledger import GenerationEntry, Goodput, Spent
from tenax._core.messages import NodeDraining, WorkerProgress
from tenax._core.model import Diagnosis, Failure, assert_never, failure_began_at
from tenax._core.text import format_duration
from tenax._view.cause import cause_of, related, what_happened
from tenax._view.run_messages import RunMessages
from tenax._view.text import fields_of, kind_of

T = TypeVar("T")
RecentStep = tuple[float, run.AnyCoordinatorEvent, list[run.Send]]

_MAX_EVENTS = 100
_MAX_FAILURES = 64
_SLOW = 1.25  # a slow rank takes so many times as long for a step as the median of the others, ...
_SLOW_S = 0.005  # ... and so much longer
_OTHER_CPUS = 0.5  # without steps, a rank stands out if it uses so many CPUs more or less than the median of the others
_MAX_SLOW = 4
_NO_PROGRESS = WorkerProgress(local_rank=0, first_step=-1, last_step=-1, first_at=0.0, last_at=0.0)


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base class of views."""


class NodeStatus(Value, frozen=True):
    """One node and its workers: ``pids[i]``, ``steps[i]`` and the other tuples belong to local rank i.

    A tuple is empty if it is not known for any worker.
    """

    node_id: str
    name: str  # for display
    host: str
    state: str  # joined, waiting, spare, starting, working, stopping, draining, done, leaving; drained, left, lost
    since: float
    slots: int = 1
    rank: int = -1  # of the node in the generation; -1: not in it
    first_rank: int = -1  # of its workers
    pids: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()  # the last reported step of each worker; -1: none
    phases: tuple[str, ...] = ()  # the reported phase of each worker, other than training
    step_at: float | None = None  # time of the last report
    outputs: tuple[float, ...] = ()  # when each worker last wrote to stdout or stderr; 0: never, or not known
    stepped: tuple[float, ...] = ()  # when each worker reported its last step; 0: never
    step_s: tuple[float, ...] = ()  # the duration of the last steps of each worker; 0: not known
    cpus: tuple[float, ...] = ()  # how many CPUs each worker used lately; -1: not known
    gpus: tuple[float, ...] = ()  # how busy the GPU of each worker was lately, 0 to 1; -1: not known
    failed: tuple[int, ...] = ()  # local ranks
    is_coordinator: bool = False  # its agent hosts the coordinator
    why: str = ""  # why it left


class FailureStatus(Value, frozen=True):
    """One failure, as every view of a live or recorded run shows it; the report has more evidence."""

    rank: int
    local_rank: int
    host: str
    generation: int
    exit_code: int
    at: float
    what: str  # "raised RuntimeError: boom"
    role: str = "first"  # first, same, consequence, independent: its relation to the first cause of its generation
    cause: str = ""
    kind: str = ""  # the cause if it is specific, else the class of the exception, else how the process ended
    is_consequence: bool = False
    meaning: str = ""  # of the cause
    next_step: str = ""
    proof: str = ""  # the line that shows the cause
    traceback: str = ""
    last_lines: tuple[str, ...] = ()  # if there is no traceback
    stacks: str = ""
    log_file: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the worker failed by itself, not as a consequence."""
        return self.role != "consequence"

    @property
    def text(self) -> str:
        """Which worker, where, and what it did."""
        return f"rank {self.rank} on {self.host} {self.what}"


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
    hangs: tuple[tuple[float, float | None], ...] = ()  # since and until; None: until now, or until it ended
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
    slow: tuple[str, ...] = ()  # messages about ranks that are slower than their peers
    stopped: tuple[int, ...] = ()  # ranks that tenax stopped in this generation
    left: tuple[NodeStatus, ...] = ()  # nodes that are no longer in the run: drained, left, lost
    mark: str = ""  # changes with every change of the status


def status_of(
    state: run.CoordinatorState, recent: Iterable[RecentStep], doing: str, now: float, wall_offset: float
) -> RunStatus:
    """Return the status. ``wall_offset``: seconds since the epoch minus the coordinator's clock."""
    settings, verdict = state.settings, state.verdict
    diagnosis = diagnosis_of(state)
    failures = failure_statuses(diagnosis, wall_offset)
    failed = {each.rank: each.local_rank for each in failures if each.is_own}
    recent = list(recent)
    draining = _draining_since(recent)
    nodes = tuple(_node(state, record, failed, draining, wall_offset) for record in state.nodes.values())
    return RunStatus(
        **fields_of(settings, "run_id", "min_nodes", "max_nodes", "max_restarts"),
        **fields_of(state, "generation", "restarts_used", "membership_changes", "drains", "requests"),
        now=now + wall_offset,
        phase=state.phase.name,
        doing=doing,
        world_size=state.last.world_size,
        nodes=nodes,
        generations=tuple(generation_status(entry, now, wall_offset) for entry in state.ledger.entries),
        generations_forgotten=state.ledger.forgotten,
        failures=failures[:_MAX_FAILURES],
        stopped=tuple(each.global_rank for each in diagnosis.stopped),
        left=tuple(
            NodeStatus(
                f"left {each.label}", each.label, each.host, each.how, each.at + wall_offset, each.slots, why=each.why
            )
            for each in state.left.values()
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
        slow=slow_ranks(nodes) if isinstance(state.phase, run.Running) and state.hang is None else (),
    )


def _draining_since(recent: Iterable[RecentStep]) -> dict[str, float]:
    """Return when each node first reported that it was draining, if that is among the recent steps."""
    since: dict[str, float] = {}
    for at, event, _ in recent:
        if isinstance(event, run.Received) and isinstance(event.message, NodeDraining):
            since.setdefault(event.node_id, at)  # it is reported again on every new connection
    return since


def _node(
    state: run.CoordinatorState,
    record: run.NodeRecord,
    failed: dict[int, int],
    draining: dict[str, float],
    wall_offset: float,
) -> NodeStatus:
    info = record.info
    since = draining.get(info.node_id, record.since) if record.is_draining else record.since
    is_member = info.node_id in state.members and record.part is not None
    first_rank = record.part.first_global_rank if is_member and record.part is not None else -1
    slots = info.slots if record.progress else 0  # a node may claim any number, so allocate only if needed
    progress = [_NO_PROGRESS] * slots
    for each in record.progress:
        if 0 <= each.local_rank < slots:
            progress[each.local_rank] = each
    stepped = _known((0.0 if each.last_step < 0 else each.last_at + wall_offset for each in progress), 0.0)
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
        steps=tuple(each.last_step for each in progress) if stepped else (),
        phases=_known((each.phase for each in progress), ""),
        step_at=None if last_at is None else last_at + wall_offset,
        outputs=_known((each.output_at and each.output_at + wall_offset for each in progress), 0.0),
        stepped=stepped,
        step_s=_known((round(each.step_s, 6) for each in progress), 0.0),
        cpus=_known((-1.0 if each.cpus is None else round(each.cpus, 2) for each in progress), -1.0),
        gpus=_known((-1.0 if each.gpu is None else each.gpu for each in progress), -1.0),
        failed=tuple(sorted(failed[rank] for rank in ranks if rank in failed)) if failed else (),
        is_coordinator=info.node_id == state.settings.serving_node or len(state.nodes) == state.settings.max_nodes == 1,
    )


def _known(values: Iterable[T], unknown: T) -> tuple[T, ...]:
    """Return the values of all workers; none if they are all unknown."""
    found = tuple(values)
    return found if any(each != unknown for each in found) else ()


def slow_ranks(nodes: Sequence[NodeStatus]) -> tuple[str, ...]:
    """Return messages about ranks that are slower than their peers: by their steps, or else by their GPUs or CPUs.

    A rank is slow if its steps take a quarter longer than the median of the others. Without steps, a rank stands out if
    it uses half a GPU, or if that is not known half a CPU, more or less than the median of the others: it computes
    while they wait, or the other way round.
    """
    choices = (
        (_by_rank(nodes, "step_s", 1e-9), _slow_steps),
        (_by_rank(nodes, "gpus", 0.0), partial(_other_use, "its GPU")),
        (_by_rank(nodes, "cpus", 0.0), partial(_other_use, "a CPU")),
    )
    values, describe = next((choice for choice in choices if len(choice[0]) > 1), ({}, _slow_steps))
    if not values:
        return ()
    ordered = sorted(value for value, _ in values.values())
    middle = (len(ordered) - 1) // 2
    found = []
    for rank, (value, name) in values.items():
        of_others = ordered[middle] if value > ordered[middle] else ordered[middle + 1]  # the median without this one
        if what := describe(value, of_others):
            found.append(f"rank {rank} on {name} {what}")
    # If many stand out, none does: the ranks have different work. Of two, both stand out.
    is_rare = len(found) <= max(1, len(values) // 4) or len(values) == 2
    return tuple(found[:_MAX_SLOW]) if is_rare else ()


def _by_rank(nodes: Sequence[NodeStatus], field: str, least: float) -> dict[int, tuple[float, str]]:
    return {
        node.first_rank + local: (value, node.name)
        for node in nodes
        if node.first_rank >= 0 and node.state == "working"
        for local, value in enumerate(getattr(node, field))
        if value >= least
    }


def _slow_steps(seconds: float, peers_s: float) -> str:
    is_slow = seconds > _SLOW * peers_s and seconds - peers_s > _SLOW_S
    return f"takes {format_duration(seconds)} per step, the others {format_duration(peers_s)}" if is_slow else ""


def _other_use(of_what: str, share: float, of_peers: float) -> str:
    is_other = abs(share - of_peers) >= _OTHER_CPUS
    return f"uses {100 * share:.0f} % of {of_what}, the others {100 * of_peers:.0f} %" if is_other else ""


def state_of_node(state: run.CoordinatorState, record: run.NodeRecord) -> str:
    if record.is_draining:
        return "draining"
    match record.phase:
        case run.NodePhase.JOINED:
            return "joined"
        case run.NodePhase.READY:
            if isinstance(state.phase, run.Over):
                return "leaving"
            return "spare" if isinstance(state.phase, run.Running) else "waiting"
        case run.NodePhase.DONE:
            return "done"
        case run.NodePhase.STALE:
            return "stopping"
        case run.NodePhase.MEMBER if isinstance(state.phase, run.Ending):
            return "stopping"
        case run.NodePhase.MEMBER:
            return "starting" if record.info.node_id in state.last.unstarted else "working"
        case _:
            return assert_never(record.phase)


def generation_status(entry: GenerationEntry, now: float, wall_offset: float) -> GenerationStatus:
    def wall(at: float | None) -> float | None:
        return None if at is None else at + wall_offset

    return GenerationStatus(
        **fields_of(entry, "number", "why", "nodes", "workers", "ended_by", "ended_why"),
        **fields_of(entry, "first_step", "last_step", "lost_steps"),
        formed_at=entry.formed_at + wall_offset,
        running_at=wall(entry.running_at),
        ended_at=wall(entry.ended_at),
        settled_at=wall(entry.settled_at),
        spent=entry.spent(now),
        hangs=tuple((since + wall_offset, wall(until)) for since, until in entry.hangs),
    )


def failure_statuses(diagnosis: Diagnosis, wall_offset: float) -> tuple[FailureStatus, ...]:
    """Return all failures of a generation, first cause first, each with its relation to that."""
    found = related(diagnosis)
    roles = {
        each.global_rank: role
        for role, of in (("same", found.same), ("consequence", found.victims), ("independent", found.others))
        for each in of
    }
    return tuple(failure_status(each, wall_offset, roles.get(each.global_rank, "first")) for each in diagnosis.failures)


def failure_status(failure: Failure, wall_offset: float, role: str = "first") -> FailureStatus:
    evidence, cause = failure.evidence, cause_of(failure)
    return FailureStatus(
        **fields_of(failure, "local_rank", "host", "generation", "exit_code"),
        **fields_of(cause, "is_consequence", "meaning", "next_step", "proof"),
        **fields_of(evidence, "traceback", "stacks", "log_file"),
        rank=failure.global_rank,
        at=failure_began_at(failure) + wall_offset,
        what=what_happened(failure),
        role=role,
        cause=cause.kind,
        kind=kind_of(cause.kind, evidence.error_type, failure.exit_code),
        last_lines=() if evidence.traceback else evidence.last_lines,
    )


def _events(state: run.CoordinatorState, recent: Iterable[RecentStep], wall_offset: float) -> list[EventStatus]:
    messages = RunMessages({node_id: record.label for node_id, record in state.nodes.items()})
    events = [
        EventStatus(at + wall_offset, text.strip(), at)
        for at, event, sent in recent
        for text in messages.lines_for(event, sent)
    ]
    return events[-_MAX_EVENTS:]
