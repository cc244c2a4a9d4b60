"""The coordinator machine's settings, events, output and state. ``lifecycle.py`` and ``coordinator.py`` decide.

All of them can be serialised. The state is a value of values: what belongs to a phase is in the value of that phase
(``RunPhase``), what belongs to a generation in ``Generation``, and each ends by being replaced.

    Gathering -> Running -> Ending -> Gathering ...     nodes join, run a generation, and re-form after a change
                    |          '----> Paused -> Gathering   ... after a pause that the restart policy requested
                    '-----> Over                        succeeded, given up, cancelled, or too few nodes for too long
    Recovering -> Running | Gathering                   a new coordinator waits for nodes that run a generation already

The invariants C1 to C10 stand at the values that they concern. Tests cite the numbers, and
``tenax.testing.run_invariants`` checks them after every step.
"""

from __future__ import annotations

import enum

import msgspec

from tenax._core import messages
from tenax._core.bounds import (
    Address,
    LongText,
    NodeCount,
    NodeId,
    NodeLimit,
    NodeRank,
    Number,
    OldGeneration,
    OptionalNodeId,
    SumSeconds,
    Text,
)
from tenax._core.events import FromCoordinator
from tenax._core.ledger import Ledger
from tenax._core.model import HANG, Assignment, Departure, Diagnosis, Failure, Member, Stopped, Verdict
from tenax._core.policy import AnyDecision
from tenax._core.record import RunRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one run. Constant during the run."""

    run_id: Text
    min_nodes: NodeLimit = 1
    max_nodes: NodeLimit = 1
    max_restarts: Number = 0
    # How long to wait for the minimum number of nodes, at the first rendezvous and after nodes were lost.
    join_timeout_s: float = 600.0
    # How long the first rendezvous waits for more nodes once the minimum, but not the maximum, has joined.
    last_call_s: float = 5.0
    scale_up: bool = True  # whether a new node ends the running generation, or waits for the next one
    waiting_every_s: float = 10.0  # how often waiting nodes are sent ``Waiting``
    serving_node: str = ""  # the node whose agent hosts this coordinator
    on_hang: str = "off"  # what to do when no node shows activity: off, report, restart
    hang_after_s: float = 300.0  # the minimum time without activity
    stacks_timeout_s: float = 10.0  # how long members may take to send the locations of their workers


# --- events -----------------------------------------------------------------------------------------------------------


class CoordinatorEvent(msgspec.Struct, frozen=True, tag=True, tag_field="event", omit_defaults=True):
    """Base of all events of the coordinator."""


class Opened(CoordinatorEvent, frozen=True):
    """The first event: the coordinator was opened.

    With ``recover_s``, a generation of an earlier coordinator may be running: its members have that long to reconnect
    before another one is formed.
    """

    recover_s: SumSeconds = 0.0
    dead_rank: NodeRank = -1  # the group rank of the earlier coordinator's node, if that is known to be dead
    generation: OldGeneration = 0  # the last known generation
    restarts_used: Number = 0
    store: Address = ""  # of that generation
    verdict: Verdict | None = None  # set if an earlier coordinator ended the run; some nodes may not have received it
    # The record of an elected coordinator's predecessor. With a record, the members are known, and how long each may
    # run without a coordinator (``authority.py``).
    record: RunRecord | None = None
    return_s: SumSeconds = 0.0  # after the first member is back
    alone_s: SumSeconds = 0.0  # for a generation with one member


class Received(CoordinatorEvent, frozen=True):
    """A node sent a message."""

    node_id: NodeId
    message: messages.FromNode


class NodeLost(CoordinatorEvent, frozen=True):
    """A node's connection was closed, or its lease expired."""

    node_id: NodeId
    why: LongText


class EarlierCoordinatorGone(CoordinatorEvent, frozen=True):
    """The agent that hosted an earlier coordinator is dead, and so are all its processes."""

    node_id: OptionalNodeId  # empty: this node hosted all earlier coordinators
    others: NodeCount = 0  # earlier coordinators that may be alive and connected to missing members


class CancelRequested(CoordinatorEvent, frozen=True):
    """An operator ends the run."""

    why: LongText


class RestartRequested(CoordinatorEvent, frozen=True):
    """An operator requests a restart of all workers."""

    why: LongText


class DrainRequested(CoordinatorEvent, frozen=True):
    """An operator drains a node."""

    node_id: NodeId
    why: LongText


class Tick(CoordinatorEvent, frozen=True):
    """Time has passed: a deadline may be due."""


class Resumed(CoordinatorEvent, frozen=True):
    """The coordinator's process was suspended for ``absent_s`` (SIGSTOP, a paused VM, a suspended host)."""

    absent_s: float


AnyCoordinatorEvent = (
    Opened
    | Received
    | NodeLost
    | EarlierCoordinatorGone
    | CancelRequested
    | RestartRequested
    | DrainRequested
    | Tick
    | Resumed
)


class Send(msgspec.Struct, frozen=True):
    """An event to send, and the ids of the nodes that receive it."""

    to: tuple[str, ...]
    event: FromCoordinator


class Step(msgspec.Struct, frozen=True):
    """What follows one event."""

    sends: list[Send]
    decision: AnyDecision | None = None  # of the restart policy, if this step called it


# --- nodes ------------------------------------------------------------------------------------------------------------


class NodePhase(enum.Enum):
    JOINED = "joined"  # connected, but not ready for a generation
    READY = "ready"  # clear, or holding workers, and waiting for the next generation
    MEMBER = "member"  # runs workers of the current generation
    STALE = "stale"  # runs workers of another generation, and was sent its end
    DONE = "done"  # its workers succeeded


class NodeRecord(msgspec.Struct):
    info: messages.NodeInfo
    arrival: int
    label: str  # its display name: its host, and a number if there are several agents on that host
    phase: NodePhase = NodePhase.JOINED
    last_rank: int = -1  # in the last generation that was formed
    generation: int = 0  # the last one that it was a member of; a ready message for an earlier one is late
    part: Assignment | None = None  # in that generation, if this coordinator formed it
    is_draining: bool = False
    is_superseded: bool = False  # a new node has replaced it; its workers must still stop
    offer: messages.NodeReady = messages.NodeReady(0)  # the last one: where the store would be, its host's addresses
    since: float = 0.0  # when it entered this phase
    pids: tuple[int, ...] = ()  # of its workers of this generation, once all of them run
    progress: tuple[messages.WorkerProgress, ...] = ()  # of its workers, on the coordinator's clock


_MAX_SUPERSEDED = 100


class Names(msgspec.Struct):
    """Which node has which display name, which name, and which requested rank."""

    arrivals: int = 0  # number of nodes so far
    labels: dict[str, str] = {}  # node ids by display name
    by_name: dict[str, str] = {}  # ids of nodes that have a name, without superseded ones
    by_rank: dict[int, str] = {}  # ids of nodes that requested a rank
    superseded: list[str] = []  # ids of replaced nodes, which are rejected if they return
    ranks_by_name: dict[str, int] = {}  # the last group rank of nodes that have a name

    def label(self, node: messages.NodeInfo, kept: str, reserved: Collection[str]) -> str:
        """Choose the node's display name: the one that an earlier coordinator gave it, or its host with a number."""
        label, number = kept, 1
        if not label or label in self.labels:
            label = node.where
            while label in self.labels or label in reserved:
                number += 1
                label = f"{node.where} #{number}"
        self.labels[label] = node.node_id
        return label

    def holders(self, node: messages.NodeInfo) -> Iterable[str | None]:
        """Return the ids of nodes with the same name or rank; a dict, because the order must be deterministic."""
        return dict.fromkeys((self.by_name.get(node.name), self.by_rank.get(node.rank)))

    def claim(self, node: messages.NodeInfo) -> None:
        if node.name:
            self.by_name[node.name] = node.node_id
        if node.rank >= 0:
            self.by_rank[node.rank] = node.node_id

    def release(self, node: messages.NodeInfo) -> None:
        if self.by_name.get(node.name) == node.node_id:
            del self.by_name[node.name]
        if self.by_rank.get(node.rank) == node.node_id:
            del self.by_rank[node.rank]

    def supersede(self, node: messages.NodeInfo, last_rank: int) -> None:
        self.superseded = [*self.superseded[-_MAX_SUPERSEDED + 1 :], node.node_id]
        if node.name and last_rank >= 0:
            self.ranks_by_name[node.name] = last_rank

    def remember_ranks(self, ranks: dict[int, str], max_nodes: int) -> None:
        """Remember the last name of each rank, so that there are at most ``max_nodes`` entries."""
        names = {rank: name for name, rank in self.ranks_by_name.items() if rank < max_nodes} | ranks
        self.ranks_by_name = {name: rank for rank, name in names.items() if name}


# --- a generation -----------------------------------------------------------------------------------------------------

_MAX_STOPPED = 10_000
_MAX_STOPPED_WITH_TEXTS = 1000


class Generation(msgspec.Struct):
    """The members of one generation, and what happened to them: of the current one, or of the last one.

    Forming a generation replaces it as a whole. Its number is in ``CoordinatorState``, because a node may report a
    greater one that this coordinator did not form (C8).
    """

    members: dict[str, int] = {}  # with their group ranks; including those that are gone
    labels: dict[str, str] = {}  # of the members
    world_size: int = 0
    formed_at: float = 0.0
    unstarted: set[str] = set()  # members whose workers have not all been started
    done: set[str] = set()  # members whose workers all succeeded
    accounted: set[str] = set()  # members that reported how each of their workers ended
    gone: set[str] = set()  # members that left or were lost; their later messages do not concern this generation
    lost: dict[str, str] = {}  # hosts that it lost, and why
    drained: list[str] = []  # hosts that were drained from it
    parts: dict[str, Member] = {}  # where the members' workers ran, if this coordinator formed it
    failures: dict[int, Failure] = {}  # by global rank, on the coordinator's clock
    stopped: dict[int, Stopped] = {}  # by global rank
    held: set[int] = set()  # global ranks of the workers that were held after it
    survivors: dict[str, int] = {}  # by member: how many of its workers took part in the generation before
    is_uncharged: bool = False  # its failures cost no restart
    keeps_survivors: bool = True  # workers that are held after it take part in the next one
    hang: ReportedHang | None = None  # the last one of it
    diagnosis: Diagnosis | None = None  # once all members have stopped

    def has(self, node_id: str) -> bool:
        return node_id in self.members and node_id not in self.gone

    def drain(self, label: str) -> None:
        if label not in self.drained:  # it may have been lost and be back
            self.drained.append(label)

    def add_failure(self, failure: Failure) -> None:
        known = self.failures.get(failure.global_rank)
        if known is not None and known.evidence.cause == HANG:
            return  # its exit is a consequence of the hang
        if known is not None:
            # The same failure, now with evidence. Of the two messages, the one with the shorter delay dates it.
            failure = failure.shifted(min(0.0, known.seen_at - failure.seen_at))
        self.failures[failure.global_rank] = failure

    def add_stopped(self, stopped: Stopped, host: str) -> None:
        """Add a stopped worker once: a node sends them again after it reconnects.

        The texts of a limited number of workers are kept.
        """
        if stopped.global_rank not in self.stopped and len(self.stopped) < _MAX_STOPPED:
            stopped = stopped.brief() if len(self.stopped) >= _MAX_STOPPED_WITH_TEXTS else stopped
            self.stopped[stopped.global_rank] = msgspec.structs.replace(stopped, host=host)


class ReportedHang(msgspec.Struct):
    """A hang that was reported."""

    report: messages.HangReport
    over_at: float | None = None  # when activity was seen again


class Quiet(msgspec.Struct):
    """A member without activity."""

    since: float  # on the coordinator's clock
    why: str


class Suspicion(msgspec.Struct):
    """A suspected hang: no member shows activity."""

    number: int
    since: float
    why: str
    awaited: set[str]  # members that have not sent the locations of their workers
    locations: tuple[messages.StackLocation, ...] = ()
    earlier: tuple[messages.StackLocation, ...] | None = None  # those of the first request
    report: messages.HangReport | None = None  # once it was sent


class HangWatch(msgspec.Struct):
    """Whether the members of the current generation show activity. ``hang_suspicion.py`` decides about it."""

    quiet: dict[str, Quiet] = {}  # members without activity
    moved_at: float = 0.0  # when activity was last reported, or the generation was formed
    suspicion: Suspicion | None = None
    refuted: int = 0  # suspicions in a row that ended because a stack had changed


# --- phases -----------------------------------------------------------------------------------------------------------


class RunDeadline(enum.Enum):
    JOIN = "join"  # the minimum number of nodes must have joined
    LAST_CALL = "last call"  # later nodes are not in the first generation
    PAUSE = "pause"  # the policy's pause ends
    RECOVER = "recover"  # members of an earlier coordinator's generation must have reconnected
    WAITING = "waiting"  # send ``Waiting`` again
    QUIET = "quiet"  # no activity for long enough to suspect a hang, or to request the stacks again
    STACKS = "stacks"  # members must have sent the locations of their workers


class RunPhase(msgspec.Struct, kw_only=True, tag_field="phase", tag=str.lower):
    """Base of the phases. A phase owns its deadlines: they end with it.

    C7  Every wait has a deadline: if there are too few nodes for too long, the run ends with that reason.
    """

    deadlines: dict[RunDeadline, float] = {}

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)


class Gathering(RunPhase):
    """Nodes gather until a generation can be formed.

    C1  A generation is formed once, with one list of members, and its number is greater than every earlier one.
    C2  A generation is formed only of nodes that reported to be clear or to hold their workers, and only while no
        connected node runs workers of any earlier generation, whichever coordinator formed it.
    C3  The ranks of a generation are a permutation; every member gets the same world size, store and restart count.
    """


class Running(RunPhase):
    """The members run a generation. A suspected hang ends with this phase (H8)."""

    watch: HangWatch


class EndCause(enum.Enum):
    """Why a generation ended."""

    FAILURE = "failure"
    LOSS = "loss"
    DRAIN = "drain"
    JOIN = "join"
    REQUEST = "request"
    LATECOMER = "latecomer"  # it had ended before; a node that still runs workers of it, or of another one, connected


class Ending(RunPhase):
    """The members stop their workers.

    C4  Restarts are counted per run and never exceed what the policy granted. A generation that lost or drained a node,
        or ended to admit one, is charged only if the policy says so.
        If the policy does not keep the survivors, the decision takes effect when they have stopped as well.
    C5  When a generation ends, every connected member is sent the reason; the first cause is kept for the report.
    C9  An operator's restart ends a running generation and is uncharged; a drain makes one node leave. Neither ends a
        run that can continue.
    """

    cause: EndCause
    why: str
    at: float
    unstopped: set[str] = set()  # connected nodes that ran workers when it began and are not ready yet
    decision: AnyDecision | None = None  # of the restart policy, if it was called before: a node joined
    is_decided: bool = False  # the decision is final; held workers are being stopped before it takes effect
    stops: bool = False  # no worker is held
    hung: int | None = None  # the global rank of the worker that the others waited for: it is not held


class Paused(RunPhase):
    """A pause that the restart policy requested."""


class Recorded(msgspec.Struct, tag=True):
    """The members of an earlier coordinator's generation, known from its record."""

    awaited: dict[str, str]  # those that have not reconnected, with their labels
    return_s: float  # from ``Opened``
    recover_s: float  # from ``Opened``
    is_deserted: bool = False  # no earlier coordinator is alive
    has_returned: bool = False  # a member has; the others have stopped ``return_s`` later


class Unrecorded(msgspec.Struct, tag=True):
    """The members of an earlier coordinator's generation, known from those that reconnect."""

    dead_rank: int = -1
    expected: int = 0  # number of its members; 0: not known
    is_renumbered: bool = False  # a node reported a greater generation than the one known before


class Recovering(RunPhase):
    """A new coordinator waits for the members of an earlier coordinator's generation."""

    period_s: float  # the whole period of the deadline
    source: Recorded | Unrecorded
    is_broken: bool = False  # a member no longer runs
    watch: HangWatch = msgspec.field(default_factory=HangWatch)

    @property
    def awaited(self) -> dict[str, str]:
        """The recorded members that have not reconnected, with their labels."""
        return self.source.awaited if isinstance(self.source, Recorded) else {}


class Over(RunPhase):
    """The run has ended.

    C6  When the run ends, every connected node is sent the same verdict, and no generation is formed afterwards.
    """

    verdict: Verdict


AnyRunPhase = Gathering | Running | Ending | Paused | Recovering | Over


class CoordinatorState(msgspec.Struct):
    """The whole state.

    C8  A message about another generation changes nothing but the number of the next one, and that a
        superseded node has stopped.
    C10 After the coordinator itself was suspended, every deadline for nodes is a full period away again, and nothing
        else has changed.
    """

    settings: RunSettings
    phase: AnyRunPhase = msgspec.field(default_factory=Gathering)
    generation: int = 0  # the greatest known number
    store: str = ""  # of that generation, which it identifies
    last: Generation = msgspec.field(default_factory=Generation)
    settled: int = 0  # the last generation that has stopped on every node
    nodes: dict[str, NodeRecord] = {}
    ready: dict[str, bool] = {}  # nodes that wait for a generation, in the order they joined (an ordered set)
    names: Names = msgspec.field(default_factory=Names)
    next_why: str = "first generation"  # why the next generation will be formed; later, why it was
    # Counters and history.
    restarts_used: int = 0
    membership_changes: int = 0
    drains: int = 0
    requests: int = 0
    suspicions: int = 0
    earlier: list[Failure] = []
    left: dict[str, Departure] = {}  # the last nodes that left, by label
    longest_s: float = 0.0
    ledger: Ledger = msgspec.field(default_factory=Ledger)

    @property
    def deadlines(self) -> dict[RunDeadline, float]:
        return self.phase.deadlines

    @property
    def members(self) -> dict[str, int]:
        return self.last.members

    @property
    def verdict(self) -> Verdict | None:
        return self.phase.verdict if isinstance(self.phase, Over) else None

    @property
    def hang(self) -> Suspicion | None:
        return self.phase.watch.suspicion if isinstance(self.phase, Running) else None

    def next_deadline(self) -> float | None:
        return min(self.phase.deadlines.values(), default=None)

    def seconds_left(self, deadline: RunDeadline, now: float) -> float:
        """Return the time until a deadline; 0 if it has passed or is not set."""
        return max(0.0, self.phase.deadlines.get(deadline, now) - now)
