"""Events of the agent machine, in the past tense. Each reports what an edge observed; none requests an action.

An event about a generation carries its number, so that the machine drops late events of older ones in one place.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tenax._core.bounds import (
    MAX_SLOTS,
    ExitCode,
    Generation,
    HoldTimeout,
    Label,
    LocalRank,
    LongText,
    Number,
    Path,
    Pid,
    Rank,
    Seconds,
    Signal,
    Step,
    Text,
    Time,
)
from tenax._core.messages import HangReport, WorkerProgress
from tenax._core.model import Assignment, Evidence, Lines, Verdict

LocalRanks = Annotated[tuple[LocalRank, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", omit_defaults=True):
    """Base of all events."""


class GenerationEvent(Event, frozen=True):
    """Base of events about a generation."""

    generation: Generation


class WorkerEvent(GenerationEvent, frozen=True):
    """Base of events about one worker."""

    local_rank: LocalRank


class RunRequested(Event, frozen=True):
    """This node was started. The first event of every run."""


# --- sent by the coordinator over the wire ---------------------------------------------------------------------------


class GenerationFormed(Event, frozen=True):
    """The coordinator formed a generation, and this is the node's assignment in it."""

    assignment: Assignment


class GenerationEnded(GenerationEvent, frozen=True):
    """The generation ended on every node: a worker failed, or a node left or joined."""

    why: LongText
    is_late: bool = False  # the next generation is running already: kill the workers without a grace period
    is_uncharged: bool = False  # uncharged: failures in it cost no restart, also for a later coordinator
    stops: bool = False  # stop all workers, also those that opted in or are held
    hung: Rank | None = None  # stop this worker, even if it opted in: the others waited for it


class RunEnded(Event, frozen=True):
    """The run ended, with the same verdict on every node."""

    verdict: Verdict
    sent_at: Time  # on the coordinator's clock, like the times in the verdict


class JoinRefused(Event, frozen=True):
    """The coordinator rejected this node."""

    reason: LongText


class Waiting(Event, frozen=True):
    """No generation has been formed for this node yet. For display only."""

    why: LongText


class LeaveNoticed(GenerationEvent, frozen=True):
    """A node of the generation is about to leave. Workers may save a checkpoint."""

    host: Label
    why: LongText
    in_s: Seconds | None = None  # None: not known


class LeaveRequested(Event, frozen=True):
    """An operator drains this node, as if its agent had received SIGTERM."""

    why: LongText


class StacksRequested(GenerationEvent, frozen=True):
    """The coordinator suspects a hang and requests the stacks of all workers."""

    number: Number  # of the suspicion
    why: LongText


class HangFound(GenerationEvent, frozen=True):
    """The generation hangs. Every node receives the same report of where its workers are."""

    report: HangReport


class HangOver(GenerationEvent, frozen=True):
    """A generation that was reported as hanging makes progress again."""

    why: Text = ""  # the activity


# --- from the link to the coordinator ---------------------------------------------------------------------------------


class Fenced(GenerationEvent, frozen=True):
    """The lease expired: the other nodes may form a generation without this node."""

    why: LongText


# --- observed on this node --------------------------------------------------------------------------------------------


class WorkerStarted(WorkerEvent, frozen=True):
    pid: Pid


class WorkerOptedIn(WorkerEvent, frozen=True):
    """The worker can be held: it acknowledges the end of its generation within the timeout, and waits for the next."""

    timeout_s: HoldTimeout


class WorkerOptedOut(WorkerEvent, frozen=True):
    """The worker's channel was closed: it cannot be held, or take part in the next generation."""

    why: LongText


class WorkerHeld(WorkerEvent, frozen=True):
    """The worker acknowledged the end of its generation: it does nothing of it any more, and waits for the next."""

    step: Step = -1  # the last one that it completed, for display; -1: none


class ProgressSeen(GenerationEvent, frozen=True):
    """The workers reported which steps they are at."""

    workers: Annotated[tuple[WorkerProgress, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class WorkerStartFailed(WorkerEvent, frozen=True):
    """The operating system could not start the worker: no such file, too many processes, not permitted."""

    reason: LongText
    exit_code: ExitCode = 1  # as a shell reports it: 127 not found, 126 not executable
    ended_at: Time | None = None  # see WorkerExited


class WorkerExited(WorkerEvent, frozen=True):
    exit_code: ExitCode  # negative: the number of the signal that killed it
    fault: LongText = ""  # why this is a failure even with exit code 0: "its result cannot be read: ..."
    before_stop: bool = False  # it exited before a stop request reached it
    wrote_error: bool = False  # it left an error file
    ended_at: Time | None = None  # on this host's clock; None: now. A paused agent receives the event later


class FailureExamined(WorkerEvent, frozen=True):
    """The evidence on a failed worker was collected."""

    evidence: Evidence


class WorkerRaised(WorkerEvent, frozen=True):
    """A worker that is being stopped has written an uncaught exception to its error file, and still runs."""


class LastLinesRead(WorkerEvent, frozen=True):
    """The last lines of a worker's output when it was stopped. The others may have waited for it."""

    lines: Lines
    log_file: Path = ""


class ScopeExpired(WorkerEvent, frozen=True):
    """A worker did not leave a scope in time. With a signal, the scope requests that the worker be ended by it."""

    pid: Pid
    scope: Text
    after_s: float  # the time limit of the scope
    expiration_time: float  # seconds since the epoch, as the worker requested it
    signal: Signal = 0


class StacksRefused(WorkerEvent, frozen=True):
    """A worker cannot write its stacks."""

    why: LongText


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stacks that one worker wrote on the last request."""

    local_rank: LocalRank
    stacks: LongText = ""
    why: LongText = ""  # why there are none


class StacksRead(GenerationEvent, frozen=True):
    """The stacks were read, after ``commands.ReadStacks``."""

    number: Number
    workers: Annotated[tuple[WorkerStacks, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class QuietSeen(GenerationEvent, frozen=True):
    """No worker of this node has shown activity since ``since``, which is unusually long."""

    since: Time
    why: LongText
    stopped: LocalRanks = ()  # that are stopped by SIGSTOP or a debugger


class MovementSeen(GenerationEvent, frozen=True):
    """A worker of this node shows activity again."""

    local_rank: int = -1  # -1: not one worker
    what: Text = ""  # what it did


class NodeCleared(GenerationEvent, frozen=True):
    """No worker of this generation and none of their descendants is alive on this node, except held ones."""

    held: LocalRanks = ()  # that stay
    number: Number = 0  # of the clear that is answered; 0: unknown


class SignalReceived(Event, frozen=True):
    """The agent received a signal to stop."""

    signal: Signal
    grace_s: Seconds | None = None  # None: as in the settings


class NoticeReceived(Event, frozen=True):
    """The scheduler announced that it will stop this node."""

    why: LongText
    in_s: Seconds | None = None


class KeeperLost(Event, frozen=True):
    """The keeper exited, and with it the control over the workers."""

    reason: LongText


class Tick(Event, frozen=True):
    """Time has passed: a deadline may be due."""


AnyWorkerEvent = (
    WorkerStarted
    | WorkerOptedIn
    | WorkerOptedOut
    | WorkerHeld
    | WorkerStartFailed
    | WorkerExited
    | FailureExamined
    | WorkerRaised
    | LastLinesRead
    | ScopeExpired
    | StacksRefused
)
AnyEvent = (
    RunRequested
    | GenerationFormed
    | GenerationEnded
    | RunEnded
    | JoinRefused
    | Waiting
    | LeaveNoticed
    | LeaveRequested
    | ProgressSeen
    | Fenced
    | AnyWorkerEvent
    | StacksRequested
    | StacksRead
    | HangFound
    | HangOver
    | QuietSeen
    | MovementSeen
    | NodeCleared
    | SignalReceived
    | NoticeReceived
    | KeeperLost
    | Tick
)
# What a coordinator sends to a node.
FromCoordinator = (
    GenerationFormed
    | GenerationEnded
    | RunEnded
    | JoinRefused
    | Waiting
    | LeaveNoticed
    | LeaveRequested
    | StacksRequested
    | HangFound
    | HangOver
)
