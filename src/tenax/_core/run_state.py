"""What the coordinator is told, hears, says and remembers: the values of ``coordinator.py``, which decides.

All of it is serialisable: the state is one value that a journal can rebuild and a page can show.
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
    """What the coordinator is told before its first step."""

    run_id: Text
    min_nodes: NodeLimit = 1
    max_nodes: NodeLimit = 1
    max_restarts: Number = 0
    # How long fewer nodes than the least are waited for: at the first gathering, and whenever nodes were lost.
    join_timeout_s: float = 600.0
    # How long strangers are waited for at the first gathering when there are enough nodes, but not all.
    last_call_s: float = 5.0
    scale_up: bool = True  # whether a newcomer ends the running generation, or waits for the next
    tell_waiting_every_s: float = 10.0
    serving_node: str = ""  # the node whose agent serves this coordinator
    on_hang: str = "off"  # what follows when nothing moves on any node: off, report, restart
    hang_after_s: float = 300.0  # how long nothing may move at the least
    stacks_timeout_s: float = 10.0  # how long members may take to tell where their workers are


# --- what the coordinator hears ---------------------------------------------------------------------------------------


class CoordinatorEvent(msgspec.Struct, frozen=True, tag=True, tag_field="event", omit_defaults=True):
    """Base of all facts for the coordinator."""


class Opened(CoordinatorEvent, frozen=True):
    """The first event. With ``recover_s``, an earlier coordinator of this run may have left a generation at work:
    its members have that long to show up before another one is formed."""

    recover_s: SumSeconds = 0.0
    dead_rank: NodeRank = -1  # the group rank of a member that is known to be dead: the one that served
    generation: OldGeneration = 0  # what is known of the past
    restarts_used: Number = 0
    store: Address = ""  # of that generation
    verdict: Verdict | None = None  # an earlier coordinator has ended the run, and not everybody may have heard it
    # Where an elected coordinator keeps a record: then it is known who the members were, and how long each may be
    # at work without us (``authority.py``).
    record: RunRecord | None = None
    return_s: SumSeconds = 0.0  # since the first of them is here
    alone_s: SumSeconds = 0.0  # for a generation of one


class Received(CoordinatorEvent, frozen=True):
    """A node said something."""

    node_id: NodeId
    message: messages.FromNode


class NodeLost(CoordinatorEvent, frozen=True):
    """A node's connection was closed, or it was silent for too long."""

    node_id: NodeId
    why: LongText


class EarlierCoordinatorGone(CoordinatorEvent, frozen=True):
    """The agent in which an earlier coordinator lived is dead, and everything that it had started."""

    node_id: OptionalNodeId  # empty: this node served them all, in earlier terms
    others: NodeCount = 0  # earlier ones that may live, and answer members that are not here


class CancelRequested(CoordinatorEvent, frozen=True):
    """An operator ends the run for everybody."""

    why: LongText


class RestartRequested(CoordinatorEvent, frozen=True):
    """An operator wants all workers to be started again."""

    why: LongText


class DrainRequested(CoordinatorEvent, frozen=True):
    """An operator wants a node to leave the run."""

    node_id: NodeId
    why: LongText


class Tick(CoordinatorEvent, frozen=True):
    """Some deadline may be due."""


class Resumed(CoordinatorEvent, frozen=True):
    """The coordinator's process did not run for ``absent_s`` (SIGSTOP, a paused VM, a suspended host)."""

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
    """What to say, and to whom."""

    to: tuple[str, ...]
    event: FromCoordinator


# --- what the coordinator remembers -----------------------------------------------------------------------------------


class RunPhase(enum.Enum):
    GATHERING = "gathering"
    RECOVERING = "recovering"
    RUNNING = "running"
    ENDING = "ending"
    PAUSED = "paused"
    OVER = "over"


class NodePhase(enum.Enum):
    JOINED = "joined"  # here, but not ready for a generation
    READY = "ready"  # clear, and waiting for the next
    MEMBER = "member"  # at work
    STALE = "stale"  # at work in a generation of an earlier coordinator, and told to stop
    DONE = "done"  # its workers succeeded


class RunDeadline(enum.Enum):
    JOIN = "join"  # there must be enough nodes
    LAST_CALL = "last call"  # who is not here by then is not in the first generation
    PAUSE = "pause"  # the policy's pause is over
    RECOVER = "recover"  # members of an earlier coordinator's generation must have shown up
    TELL = "tell"  # say again who is waited for
    QUIET = "quiet"  # nothing was heard to move for long enough to suspect a hang
    STACKS = "stacks"  # members must have told where their workers are


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
    label: str  # what people call it: its host, and a number if there are several agents on that host
    phase: NodePhase = NodePhase.JOINED
    last_rank: int = -1  # in the last generation that was formed
    generation: int = 0  # the last one that it was part of; an earlier ready is an echo
    part: Assignment | None = None  # in that one, if we formed it
    is_draining: bool = False
    is_superseded: bool = False  # its new self is here; only its workers are waited for
    store_addr: str = ""
    store_port: int = 0
    is_agent_store: bool = False
    addresses: tuple[str, ...] = ()  # of its host, the most likely source of a connection first
    since: float = 0.0  # it is in this phase
    pids: tuple[int, ...] = ()  # of its workers of this generation, once all of them run
    progress: tuple[messages.WorkerProgress, ...] = ()  # what they have said of their steps, on our clock


class Quiet(msgspec.Struct):
    """A member on which nothing moves."""

    since: float  # on our clock
    why: str


class Suspicion(msgspec.Struct):
    """Nothing moves on any member."""

    number: int
    since: float
    why: str
    awaited: set[str]  # members that have not told where their workers are
    places: tuple[messages.StackPlace, ...] = ()
    report: messages.HangReport | None = None  # once it was said


class CoordinatorState(msgspec.Struct):
    settings: RunSettings
    phase: RunPhase = RunPhase.GATHERING
    generation: int = 0
    nodes: dict[str, NodeRecord] = {}
    labels: dict[str, str] = {}  # who is called what
    by_name: dict[str, str] = {}  # who of them has a name; without those whose new self is here
    by_rank: dict[int, str] = {}  # who has asked for a rank
    arrivals: int = 0
    ready: dict[str, bool] = {}  # nodes that wait for a generation, in the order they came (a set with an order)
    members: dict[str, int] = {}  # of the current generation, with their group ranks; also those that are gone
    member_labels: dict[str, str] = {}  # also of those that are gone
    done: set[str] = set()  # members whose workers all succeeded
    store: str = ""  # of the current generation, which it identifies
    settled: int = 0  # the last generation that has ended everywhere
    unstopped: set[str] = set()  # connected nodes that were at work when a generation ended and are not ready yet
    world_size: int = 0
    formed_at: float = 0.0
    ended_by: Ending | None = None
    ended_why: str = ""
    ended_at: float = 0.0
    gone: set[str] = set()  # members that left or were lost; what they say later is not about this generation
    lost: dict[str, str] = {}  # hosts that this generation lost, and why
    drained: list[str] = []  # hosts that were asked to leave this generation
    failures: list[Failure] = []  # of this generation, on our clock
    stopped: list[Stopped] = []
    # The ledger.
    restarts_used: int = 0
    membership_changes: int = 0
    drains: int = 0
    requests: int = 0
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    unstarted: set[str] = set()  # members whose workers have not all been started
    earlier: list[Failure] = []
    longest_s: float = 0.0
    # Of an earlier coordinator's generation.
    expected: int = 0  # members it had; 0: not known
    dead_rank: int = -1
    is_broken: bool = False  # some member of it does not run any more
    awaited: dict[str, str] = {}  # its members that have not shown up, if they are on record, with their labels
    is_recorded: bool = False  # they are
    is_deserted: bool = False  # nobody answers them any more but we
    return_s: float = 0.0  # as opened with
    recover_s: float = 0.0
    recover_period_s: float = 0.0  # the whole period of the deadline RECOVER
    is_free: bool = False  # it had ended it because a node came or went
    superseded: list[str] = []  # nodes whose new self is here: should they come back, they are refused
    ranks_by_name: dict[str, int] = {}  # the last group rank of nodes that have a name
    next_why: str = "first generation"
    gathering_since: float = 0.0
    deadlines: dict[RunDeadline, float] = {}
    # Hangs, of the current generation.
    quiet: dict[str, Quiet] = {}  # members on which nothing moves
    moved_at: float = 0.0  # when something was last heard to move, apart from members that never were quiet
    hang: Suspicion | None = None
    suspicions: int = 0  # of all generations
    decision: AnyDecision | None = None
    verdict: Verdict | None = None

    def next_deadline(self) -> float | None:
        return min(self.deadlines.values(), default=None)

    def seconds_left(self, deadline: RunDeadline, now: float) -> float:
        """How long until a deadline; 0 if it has passed or is not set."""
        return max(0.0, self.deadlines.get(deadline, now) - now)
