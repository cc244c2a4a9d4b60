"""The values that all machines share: settings, assignments, workers, failures, verdicts.

All of them can be serialised, so that a journal can store them and a replay can restore them.
"""

from __future__ import annotations

import enum
from typing import Annotated, NoReturn

import msgspec

from tenax._core.bounds import (
    MAX_FRAMES,
    MAX_REPORTED,
    Address,
    Count,
    ExitCode,
    FirstRank,
    Generation,
    HostAddress,
    Label,
    LocalRank,
    LongText,
    NodeCount,
    NodeRank,
    Number,
    Path,
    Pid,
    Port,
    Rank,
    Signal,
    Slots,
    SumSeconds,
    Text,
    Time,
    WorldSize,
    clamped_time,
)
from tenax._core.ledger import Goodput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_MESSAGE_CHARS = 1000
_MAX_STACKS_CHARS = 6000  # of a worker whose failure is truncated
MAX_STORE_PEERS = 1 << 16  # keeps the message of the largest run within its size limit
MAX_EARLIER = 100  # earlier failures that are kept, for reports and restart policies
MAX_LEFT = 100  # nodes that left and are kept, for views

StorePeers = Annotated[tuple[HostAddress, ...], msgspec.Meta(max_length=MAX_STORE_PEERS)]


def assert_never(value: NoReturn) -> NoReturn:
    """End a ``match`` over a closed union: the type checker proves that nothing gets here (Python 3.11 has its own)."""
    raise AssertionError(f"not handled: {value!r}")


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one agent. Constant during a run."""

    run_id: Text
    role: Text
    local_world_size: Slots
    max_restarts: Number  # for the workers' environment; the coordinator counts the restarts
    # How long a worker may take to exit after a stop request: on a signal, a failure, a restart, the end of the run.
    grace_s: float = 30.0
    # How long to wait for a killed process before abandoning it. Only a process stuck in the kernel survives SIGKILL.
    abandon_s: float = 10.0
    # How long a worker that raised an uncaught exception may take to exit, if all are stopped because of a failure.
    exit_s: float = 2.0
    # How long to wait for the evidence of a failure (error file, last lines) before deciding without it.
    examine_s: float = 2.0
    # How long a worker that did not leave a scope in time may take to write its stacks before it is ended.
    stacks_s: float = 1.0
    # What to do when workers seem to hang: off (no detection), report, restart.
    on_hang: str = "off"
    # The minimum time without activity before a hang is suspected.
    hang_after_s: float = 300.0


class Assignment(msgspec.Struct, frozen=True):
    """One node's part in one generation: the result of a rendezvous."""

    generation: Generation  # also the fencing token: anything with an older number is rejected
    group_rank: NodeRank = 0
    group_world_size: NodeCount = 1
    first_global_rank: FirstRank = 0
    world_size: WorldSize = 1
    first_role_rank: FirstRank = 0
    role_world_size: WorldSize = 1
    master_addr: Address = "127.0.0.1"
    master_port: Port = 0
    use_agent_store: bool = False
    restarts_used: Count = 0  # of the whole run, the same on every node
    why: LongText = ""  # why this generation was formed
    coordinator_rank: NodeRank = -1  # the group rank of the node that hosts the coordinator; -1: not a member
    store_peers: StorePeers = ()  # for rank 0, if it hosts the store: the addresses of the other members
    max_restarts: Count | None = None  # of the run; None: that of this node applies

    @property
    def store(self) -> str:
        """The address of the workers' store. Unique per generation, even if two have the same number by mistake."""
        return f"{self.master_addr}:{self.master_port}"


class WorkerPhase(enum.Enum):
    """The lifecycle of one worker process."""

    REQUESTED = "requested"  # start requested, not yet confirmed
    RUNNING = "running"
    HELD = "held"  # it acknowledged the end of its generation and waits for the next one
    ENDED = "ended"  # exited, or could not be started


class Overdue(msgspec.Struct):
    """A worker that did not leave a scope in time, and which signal it has been sent since."""

    reason: str  # "did not leave the scope 'step' within 1 min"
    scope: str
    expiration_time: float  # seconds since the epoch
    signal: int  # the signal that the scope requests
    since: float
    until: float | None  # when to escalate; None: never again
    sent: int = 0  # the last signal sent; 0: none yet, its stacks are being collected
    is_cause: bool = False  # it has exited because of this


class Hold(msgspec.Struct):
    """A worker that can be held, or that is stopped alone because it did not acknowledge the end of its generation."""

    timeout_s: float  # how long it may take to acknowledge
    until: float | None = None  # when to escalate; None: nothing is awaited
    sent: int = 0  # the last signal sent; 0: none
    has_acknowledged: bool = False  # it does nothing of its generation any more: its exit is not a failure
    step: int = -1  # the last one that it completed, as it acknowledged; -1: none


class WorkerRecord(msgspec.Struct):
    """The state of one worker of the current generation."""

    local_rank: int
    phase: WorkerPhase = WorkerPhase.REQUESTED
    pid: int = 0
    exit_code: int = 0
    ended_at: float = 0.0
    was_stopped: bool = False  # it exited after a stop request
    has_raised: bool = False  # an uncaught exception, while it was being stopped
    overdue: Overdue | None = None
    hold: Hold | None = None  # None: it has not opted in
    is_survivor: bool = False  # it took part in the generation before
    stacks_asked_at: float | None = None  # when its stacks were last requested; None: never, or it cannot write them
    stacks: str = ""  # its stacks, if the agent stopped it
    last_lines: tuple[str, ...] = ()  # of its output, when the agent stopped it
    log_file: str = ""

    @property
    def escalates_at(self) -> float | None:
        """When its next signal is due, if it is being ended alone."""
        return self.overdue.until if self.overdue is not None and self.phase is not WorkerPhase.ENDED else None


HANG = "hang"  # the cause of a failure that only the coordinator detects: no activity on any node


Lines = Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_FRAMES)]


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a worker exited, as far as it could be determined. Any field may be empty."""

    error_type: Text = ""  # "RuntimeError"
    message: Text = ""  # one line: "RuntimeError: boom"
    traceback: LongText = ""
    last_lines: Lines = ()
    last_lines_of: Text = "stderr"  # "output": stdout and stderr share one stream
    out_of_memory: Text = ""  # the line that proves it, if the kernel's OOM killer ended the worker
    error_file: Path = ""
    log_file: Path = ""  # the file with the worker's stderr (or output), if there is one
    raised_at: Time | None = None  # when the exception was raised, from the error file, on the agent's clock
    stacks: LongText = ""  # of all its threads when a scope expired, innermost call first
    cause: Text = ""  # the kind of failure, as named in ``_view/kinds.py``; empty: not known
    is_consequence: bool = False  # the failure of another worker caused this one
    proof: Text = ""  # the line that shows the cause, or what the system reported


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker that failed by itself, not because it was stopped."""

    generation: Generation
    local_rank: LocalRank
    global_rank: Rank
    pid: Pid
    exit_code: ExitCode  # negative: the number of the signal that killed it
    seen_at: Time
    reason: Text = ""  # why it is a failure if the exit code alone does not show it ("could not be started: ...")
    evidence: Evidence = Evidence()
    was_stopped: bool = False  # it failed before it was stopped; the exit code is that of its failure
    host: Label = ""  # where it ran
    was_late: bool = False  # it was ended because it did not leave a scope in time
    lived_s: SumSeconds = 0.0  # how long its generation had run when it began; known of a first cause

    def shifted(self, by_s: float) -> Failure:
        """Return this failure with its times shifted to another node's clock."""
        raised_at = self.evidence.raised_at
        evidence = self.evidence
        if raised_at is not None:
            evidence = msgspec.structs.replace(evidence, raised_at=clamped_time(raised_at + by_s))
        return msgspec.structs.replace(self, seen_at=clamped_time(self.seen_at + by_s), evidence=evidence)

    def brief(self) -> Failure:
        """Return this failure without its long texts, because messages between hosts have a size limit."""
        evidence = msgspec.structs.replace(
            self.evidence, traceback="", last_lines=(), stacks="", message=self.evidence.message[:_MAX_MESSAGE_CHARS]
        )
        return msgspec.structs.replace(self, evidence=evidence, reason=self.reason[:_MAX_MESSAGE_CHARS])


def truncate_failures(
    failures: Sequence[Failure], full: int = 4, with_stacks: int = 16, limit: int = 256
) -> tuple[Failure, ...]:
    """Return the first ``limit`` failures: some in full, then some in brief with truncated stacks, the rest in brief.

    More stacks than full failures are kept: of workers that hang together, the last may be the one that others wait
    for.
    """
    return (
        *failures[:full],
        *(_brief_with_stacks(failure) for failure in failures[full:with_stacks]),
        *(failure.brief() for failure in failures[with_stacks:limit]),
    )


def _brief_with_stacks(failure: Failure) -> Failure:
    brief = failure.brief()
    stacks = truncate_stacks(failure.evidence.stacks)
    return msgspec.structs.replace(brief, evidence=msgspec.structs.replace(brief.evidence, stacks=stacks))


def truncate_stacks(stacks: str, max_chars: int = _MAX_STACKS_CHARS) -> str:
    """Cut the middle out of long stacks: the newest threads come first and the main thread comes last."""
    if len(stacks) <= max_chars:
        return stacks
    head = max_chars // 4
    return f"{stacks[:head]}\n[...]\n{stacks[head - max_chars :]}"


# Causes that are found by comparing workers: the others waited for this one.
STOPPED_RESPONDING, NEVER_JOINED, EXITED_EARLY = "stopped_responding", "never_joined", "exited_early"
AWAITED = frozenset({STOPPED_RESPONDING, NEVER_JOINED, EXITED_EARLY})
DEADLOCK = "deadlock"  # ... or all waited for each other


def failure_began_at(failure: Failure) -> float:
    """Return when the failure began: when its exception was raised, however long the process took to exit."""
    raised_at = failure.evidence.raised_at
    return failure.seen_at if raised_at is None else min(raised_at, failure.seen_at)


def by_cause(failure: Failure) -> tuple[bool, float]:
    """Sort key of a report: causes before consequences, then by time."""
    return failure.evidence.is_consequence, failure_began_at(failure)


class Stopped(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker that the agent stopped because another one failed or the run ended. Never a failure."""

    local_rank: LocalRank
    global_rank: Rank
    pid: Pid
    exit_code: ExitCode
    stacks: LongText = ""  # of its threads, if a worker of its node did not leave a scope in time
    host: Label = ""  # where it ran
    last_lines: Lines = ()  # of its output before it was stopped
    log_file: Path = ""

    def brief(self) -> Stopped:
        """Return this value without its texts."""
        return msgspec.structs.replace(self, stacks="", last_lines=(), log_file="")


Failures = Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_REPORTED)]
StoppedWorkers = Annotated[tuple[Stopped, ...], msgspec.Meta(max_length=MAX_REPORTED)]


class Outcome(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a worker failed and no restart is left, or the policy gave up
    CANCELLED = "cancelled"  # the agent received a stop request
    ABANDONED = "abandoned"  # a process survived SIGKILL: this host needs attention
    BROKEN = "broken"  # the launcher itself could not work: no keeper, no rendezvous, too few nodes

    @property
    def text(self) -> str:
        """What happened to the run: "was cancelled"."""
        return _OUTCOMES[self]


_OUTCOMES = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.ABANDONED: "was abandoned",
    Outcome.BROKEN: "could not continue",
}


class Member(msgspec.Struct, frozen=True):
    """A node of a generation, and the ranks of its workers."""

    label: Label  # its display name
    host: Label
    first_rank: FirstRank
    slots: Slots


class Departure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node that is no longer in the run. Only a lost one may need attention."""

    label: Label
    how: Text  # drained, left, lost
    why: LongText = ""
    host: Label = ""
    at: Time = 0.0
    slots: Slots = 1

    def shifted(self, by_s: float) -> Departure:
        return msgspec.structs.replace(self, at=clamped_time(self.at + by_s))


class Diagnosis(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What happened to a generation. Made once (``diagnosis.py``); every view shows this value."""

    failures: Failures = ()  # on all nodes, first cause first
    stopped: StoppedWorkers = ()  # by tenax, without failures
    left: Annotated[tuple[Departure, ...], msgspec.Meta(max_length=MAX_REPORTED)] = ()  # nodes that it lost or drained
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_REPORTED)] = ()
    is_change: bool = False  # it ended because nodes came or went, or an operator requested it

    @property
    def first(self) -> Failure | None:
        """The first cause. None: no worker failed, or all of them only followed a change of membership."""
        first = self.failures[0] if self.failures else None
        return None if first is not None and self.is_change and first.evidence.is_consequence else first


class Verdict(Diagnosis, frozen=True, omit_defaults=True):
    """How the run ended, and why, with the diagnosis of its last generation.

    The same on every node, except on nodes that left earlier.
    """

    outcome: Outcome
    why: LongText
    restarts_used: Count = 0
    generation: Generation = 0
    signal: Signal = 0  # the signal that cancelled the run
    stuck_pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=MAX_REPORTED)] = ()
    earlier: Failures = ()  # the first cause of each generation that failed and was restarted
    membership_changes: Count = 0  # generations that ended because nodes joined or were lost: uncharged
    drains: Count = 0  # ... because a node was drained: uncharged
    requests: Count = 0  # ... because an operator requested a restart: uncharged
    goodput: Goodput | None = None  # how the time was spent; None: this node left before the end

    def shifted(self, by_s: float) -> Verdict:
        """Return this verdict with its times shifted to another clock."""
        return msgspec.structs.replace(
            self,
            failures=tuple(failure.shifted(by_s) for failure in self.failures),
            earlier=tuple(failure.shifted(by_s) for failure in self.earlier),
        )
