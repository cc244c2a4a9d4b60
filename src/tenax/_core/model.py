"""The nouns that every decision speaks of: settings, assignments, workers, failures, verdicts.

Values only. Everything here is frozen and serialisable, so that a journal can hold it and a replay can rebuild it.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from tenax._core.bounds import (
    MAX_FRAMES,
    MAX_TOLD,
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
    Text,
    Time,
    WorldSize,
    clamped_time,
)
from tenax._core.ledger import Goodput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_OF_MESSAGE = 1000
_MAX_OF_STACKS = 6000  # characters, of a worker that is not told in full
MAX_STORE_PEERS = 1 << 16  # so that the message of the largest run stays within its limit

StorePeers = Annotated[tuple[HostAddress, ...], msgspec.Meta(max_length=MAX_STORE_PEERS)]


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one node is told before its first step. Nothing in it changes during a run."""

    run_id: Text
    role: Text
    local_world_size: Slots
    max_restarts: Number  # what the workers are told; the coordinator keeps the ledger
    # How long a worker may take to end after it was asked to, on every path: signal, failure, restart, end of the run.
    grace_s: float = 30.0
    # How long a killed process may stay before it is abandoned. Only one stuck in the kernel survives SIGKILL.
    abandon_s: float = 10.0
    # How long the evidence of a failure (error file, last lines) may take before the decision goes on without it.
    examine_s: float = 2.0
    # How long a worker that did not leave a scope in time may take to write down its stacks before it is ended.
    stacks_s: float = 1.0
    # What follows when workers seem to hang: off (nobody looks), report, restart.
    on_hang: str = "off"
    # How long nothing may move before that is called a hang, at the least.
    hang_after_s: float = 300.0


class Assignment(msgspec.Struct, frozen=True):
    """One node's part in one generation: what a rendezvous answers."""

    generation: Generation  # also the fencing token: whatever carries an older one is refused
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
    coordinator_rank: NodeRank = -1  # the group rank of the node that serves the coordinator; -1: none of the group
    store_peers: StorePeers = ()  # for rank 0, if it hosts the store: the addresses of the other members

    @property
    def store(self) -> str:
        """No two generations have the same, so it also tells two apart that have the same number by mistake."""
        return f"{self.master_addr}:{self.master_port}"


class WorkerPhase(enum.Enum):
    """The life of one worker process as the agent knows it."""

    REQUESTED = "requested"  # asked for, not yet confirmed
    RUNNING = "running"
    ENDED = "ended"  # exited, or never came to life


class Overdue(msgspec.Struct):
    """A worker that did not leave a scope in time, and how far it has been pushed since."""

    reason: str  # "did not leave the scope 'step' within 60 s"
    scope: str
    expiration_time: float  # seconds since the epoch
    signal: int  # what it asked to be ended by
    since: float
    until: float | None  # when it is pushed harder; None: never again
    sent: int = 0  # the signal that it got last; 0: none yet, its stacks are being taken
    is_cause: bool = False  # it has ended, and this is why


class WorkerRecord(msgspec.Struct):
    """What is known of one worker of the current generation."""

    local_rank: int
    phase: WorkerPhase = WorkerPhase.REQUESTED
    pid: int = 0
    exit_code: int = 0
    ended_at: float = 0.0
    asked_to_end: bool = False  # we had asked it to end before it did
    overdue: Overdue | None = None
    stacks_asked_at: float | None = None  # when it was last made to write down its stacks; None: never, or it cannot
    stacks: str = ""  # what it had written by then, if it was we who ended it


HANG = "hang"  # the cause of a failure that only the coordinator can know: nothing moved any more


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """What could be found out about why a worker ended. Every field may be empty: a dead process owes us nothing."""

    error_type: Text = ""  # "RuntimeError"
    message: Text = ""  # one line: "RuntimeError: boom"
    traceback: LongText = ""
    last_lines: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_FRAMES)] = ()  # of stderr
    out_of_memory: Text = ""  # the sentence that proves it, when the kernel's OOM killer did it
    error_file: Path = ""
    log_file: Path = ""  # where the worker's stderr (or output) was kept, if it was
    raised_at: Time | None = None  # on the agent's clock: when the error file says the exception was raised
    stacks: LongText = ""  # where each of its threads was when a scope had expired, innermost call first
    cause: Text = ""  # the kind of failure, as ``_failures/cause.py`` names it; empty: not known
    is_consequence: bool = False  # what such a worker says follows from what happened to another
    proof: Text = ""  # the line that shows the cause, or what the system says of it


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker that ended badly, by itself."""

    generation: Generation
    local_rank: LocalRank
    global_rank: Rank
    pid: Pid
    exit_code: ExitCode  # negative: the number of the signal that killed it
    seen_at: Time
    reason: Text = ""  # why it is a failure when the exit code alone does not say so ("could not be started: ...")
    evidence: Evidence = Evidence()
    asked_to_end: bool = False  # it had failed before we stopped it; the exit code is that of its failure
    host: Label = ""  # where it ran
    was_late: bool = False  # it had not left a scope in time, and was ended for that

    def shifted(self, by_s: float) -> Failure:
        """The same on another clock. Nodes have their own; only differences travel."""
        raised_at = self.evidence.raised_at
        evidence = self.evidence
        if raised_at is not None:
            evidence = msgspec.structs.replace(evidence, raised_at=clamped_time(raised_at + by_s))
        return msgspec.structs.replace(self, seen_at=clamped_time(self.seen_at + by_s), evidence=evidence)

    def brief(self) -> Failure:
        """The same without what is long. Messages between hosts are bounded, and one full story is enough."""
        evidence = msgspec.structs.replace(
            self.evidence, traceback="", last_lines=(), stacks="", message=self.evidence.message[:_MAX_OF_MESSAGE]
        )
        return msgspec.structs.replace(self, evidence=evidence, reason=self.reason[:_MAX_OF_MESSAGE])


def told_in_full(
    failures: Sequence[Failure], full: int = 4, with_stacks: int = 16, most: int = 256
) -> tuple[Failure, ...]:
    """The first few as they are, then some in brief with the most of their stacks, then some in brief, then none.

    Of workers that hang together the last one may be the one that the others wait for.
    """
    return (
        *failures[:full],
        *(_brief_with_stacks(failure) for failure in failures[full:with_stacks]),
        *(failure.brief() for failure in failures[with_stacks:most]),
    )


def _brief_with_stacks(failure: Failure) -> Failure:
    brief = failure.brief()
    stacks = most_of_stacks(failure.evidence.stacks)
    return msgspec.structs.replace(brief, evidence=msgspec.structs.replace(brief.evidence, stacks=stacks))


def most_of_stacks(stacks: str) -> str:
    """The newest threads stand first and the main thread last; what is in between is left out first."""
    if len(stacks) <= _MAX_OF_STACKS:
        return stacks
    head = _MAX_OF_STACKS // 4
    return f"{stacks[:head]}\n[...]\n{stacks[head - _MAX_OF_STACKS :]}"


def when_it_began(failure: Failure) -> float:
    """An exception that was raised earlier is the earlier cause, however long its process took to die."""
    raised_at = failure.evidence.raised_at
    return failure.seen_at if raised_at is None else min(raised_at, failure.seen_at)


def by_cause(failure: Failure) -> tuple[bool, float]:
    """The order of a report: causes before what follows from another's, and the earlier before the later."""
    return failure.evidence.is_consequence, when_it_began(failure)


class Stopped(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker that we ended because another one failed or the run was stopped. Never a failure."""

    local_rank: LocalRank
    global_rank: Rank
    pid: Pid
    exit_code: ExitCode
    stacks: LongText = ""  # where its threads were when another worker of its node was late
    host: Label = ""  # where it ran; only of those with stacks

    def brief(self) -> Stopped:
        """The same without what is long."""
        return msgspec.structs.replace(self, stacks="", host="") if self.stacks else self


Failures = Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_TOLD)]
StoppedWorkers = Annotated[tuple[Stopped, ...], msgspec.Meta(max_length=MAX_TOLD)]


class Outcome(enum.Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a worker failed and the budget is spent, or the policy gave up
    CANCELLED = "cancelled"  # someone asked the agent to stop
    ABANDONED = "abandoned"  # a process survived SIGKILL: this host needs attention
    BROKEN = "broken"  # the launcher itself could not do its work: no keeper, no rendezvous, too few nodes

    @property
    def in_words(self) -> str:
        """What the run did, or what became of it."""
        return _OUTCOMES[self]


_OUTCOMES = {
    Outcome.SUCCEEDED: "succeeded",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "was cancelled",
    Outcome.ABANDONED: "was abandoned",
    Outcome.BROKEN: "could not go on",
}


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the run ended, and why, in words. Decided once for the whole run, unless this node left it before."""

    outcome: Outcome
    why: LongText
    failures: Failures = ()  # of the last generation, on all nodes, first cause first
    stopped: StoppedWorkers = ()
    restarts_used: Count = 0
    generation: Generation = 0
    signal: Signal = 0  # the signal that cancelled the run
    stuck_pids: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=MAX_TOLD)] = ()
    earlier: Failures = ()  # the first cause of each generation that was tried again
    membership_changes: Count = 0  # generations that ended because nodes came or went: free of charge
    drains: Count = 0  # ... because a node was asked to leave
    requests: Count = 0  # ... because an operator wanted a restart
    goodput: Goodput | None = None  # what the time was spent on; None: this node left before the end
