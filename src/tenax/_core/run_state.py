"""The coordinator machine's settings, events, output and state. ``coordinator.py`` contains the decisions.

All of them can be serialised.
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
from tenax._core.model import Assignment, Failure, Stopped, Verdict
from tenax._core.policy import AnyDecision
from tenax._core.record import RunRecord


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


# --- state ------------------------------------------------------------------------------------------------------------


class RunPhase(enum.Enum):
    GATHERING = "gathering"
    RECOVERING = "recovering"
    RUNNING = "running"
    ENDING = "ending"
    PAUSED = "paused"
    OVER = "over"


class NodePhase(enum.Enum):
    JOINED = "joined"  # connected, but not ready for a generation
    READY = "ready"  # clear, and waiting for the next generation
    MEMBER = "member"  # runs workers of the current generation
    STALE = "stale"  # runs workers of another generation, and was sent its end
    DONE = "done"  # its workers succeeded


class RunDeadline(enum.Enum):
    JOIN = "join"  # the minimum number of nodes must have joined
    LAST_CALL = "last call"  # later nodes are not in the first generation
    PAUSE = "pause"  # the policy's pause ends
    RECOVER = "recover"  # members of an earlier coordinator's generation must have reconnected
    WAITING = "waiting"  # send ``Waiting`` again
    QUIET = "quiet"  # no activity for long enough to suspect a hang
    STACKS = "stacks"  # members must have sent the locations of their workers


class Ending(enum.Enum):
    """Why a generation ended."""

    FAILURE = "failure"
    LOSS = "loss"
    DRAIN = "drain"
    JOIN = "join"
    REQUEST = "request"


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
    store_addr: str = ""
    store_port: int = 0
    is_agent_store: bool = False
    addresses: tuple[str, ...] = ()  # of its host, the most likely source of a connection first
    since: float = 0.0  # when it entered this phase
    pids: tuple[int, ...] = ()  # of its workers of this generation, once all of them run
    progress: tuple[messages.WorkerProgress, ...] = ()  # of its workers, on the coordinator's clock


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
    report: messages.HangReport | None = None  # once it was sent


class CoordinatorState(msgspec.Struct):
    settings: RunSettings
    phase: RunPhase = RunPhase.GATHERING
    generation: int = 0
    nodes: dict[str, NodeRecord] = {}
    labels: dict[str, str] = {}  # node ids by display name
    by_name: dict[str, str] = {}  # ids of nodes that have a name, without superseded ones
    by_rank: dict[int, str] = {}  # ids of nodes that requested a rank
    arrivals: int = 0
    ready: dict[str, bool] = {}  # nodes that wait for a generation, in the order they joined (an ordered set)
    members: dict[str, int] = {}  # of the current generation, with their group ranks; including those that are gone
    member_labels: dict[str, str] = {}  # including those that are gone
    done: set[str] = set()  # members whose workers all succeeded
    store: str = ""  # of the current generation, which it identifies
    settled: int = 0  # the last generation that has stopped on every node
    unstopped: set[str] = set()  # connected nodes that ran workers when a generation ended and are not ready yet
    world_size: int = 0
    formed_at: float = 0.0
    ended_by: Ending | None = None
    ended_why: str = ""
    ended_at: float = 0.0
    gone: set[str] = set()  # members that left or were lost; their later messages do not concern this generation
    lost: dict[str, str] = {}  # hosts that this generation lost, and why
    drained: list[str] = []  # hosts that were drained from this generation
    failures: list[Failure] = []  # of this generation, on the coordinator's clock
    stopped: list[Stopped] = []
    # Counters and history.
    restarts_used: int = 0
    membership_changes: int = 0
    drains: int = 0
    requests: int = 0
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    unstarted: set[str] = set()  # members whose workers have not all been started
    earlier: list[Failure] = []
    longest_s: float = 0.0
    # Recovery of an earlier coordinator's generation.
    expected: int = 0  # number of its members; 0: not known
    dead_rank: int = -1
    is_broken: bool = False  # a member of it no longer runs
    awaited: dict[str, str] = {}  # its recorded members that have not reconnected, with their labels
    is_recorded: bool = False  # its members are known from a record
    is_deserted: bool = False  # no earlier coordinator is alive
    is_renumbered: bool = False  # a node reported a greater generation than the one known before
    return_s: float = 0.0  # from ``Opened``
    recover_s: float = 0.0  # from ``Opened``
    recover_period_s: float = 0.0  # the whole period of the deadline RECOVER
    is_uncharged: bool = False  # its failures cost no restart
    superseded: list[str] = []  # ids of replaced nodes, which are rejected if they return
    ranks_by_name: dict[str, int] = {}  # the last group rank of nodes that have a name
    next_why: str = "first generation"
    gathering_since: float = 0.0
    deadlines: dict[RunDeadline, float] = {}
    # Hangs of the current generation.
    quiet: dict[str, Quiet] = {}  # members without activity
    moved_at: float = 0.0  # when activity was last reported, or the generation was formed
    hang: Suspicion | None = None
    suspicions: int = 0  # of all generations
    decision: AnyDecision | None = None
    verdict: Verdict | None = None

    def next_deadline(self) -> float | None:
        return min(self.deadlines.values(), default=None)

    def seconds_left(self, deadline: RunDeadline, now: float) -> float:
        """Return the time until a deadline; 0 if it has passed or is not set."""
        return max(0.0, self.deadlines.get(deadline, now) - now)
