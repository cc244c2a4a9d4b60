"""Facts, in the past tense. Each says what an edge has seen; none says what to do about it.

A fact about a generation carries its number, so that a late echo of an older one can be dropped in one place.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tenax._core.bounds import (
    MAX_SLOTS,
    ExitCode,
    Generation,
    Label,
    LocalRank,
    LongText,
    Number,
    Pid,
    Seconds,
    Signal,
    Text,
    Time,
)
from tenax._core.messages import HangReport, WorkerProgress
from tenax._core.model import Assignment, Evidence, Verdict


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", omit_defaults=True):
    """Base of all facts."""


class RunRequested(Event, frozen=True):
    """Somebody wants this node to run. The first event of every run."""


# --- what the coordinator says; these travel -------------------------------------------------------------------------


class GenerationFormed(Event, frozen=True):
    """This is our part in the next generation."""

    assignment: Assignment


class GenerationEnded(Event, frozen=True):
    """The generation is over for every node: a worker failed somewhere, a node went away, or one is let in."""

    generation: Generation
    why: LongText
    is_late: bool = False  # the next one is at work already: whoever is still there has no time to lose
    is_free: bool = False  # a node came or went: what fails in it is not charged, whichever coordinator asks


class RunEnded(Event, frozen=True):
    """The run is over, with the same verdict on every node."""

    verdict: Verdict
    sent_at: Time  # on the coordinator's clock, as the times in the verdict


class JoinRefused(Event, frozen=True):
    """This node cannot be part of the run."""

    reason: LongText


class Waiting(Event, frozen=True):
    """No generation for us yet. A sentence for the person who waits too."""

    why: LongText


class LeaveNoticed(Event, frozen=True):
    """A node of the generation is going to leave: time to save what should be saved."""

    generation: Generation
    host: Label
    why: LongText
    in_s: Seconds | None = None  # how soon, if that is known


class LeaveRequested(Event, frozen=True):
    """An operator wants this node to leave the run, as if its agent had got SIGTERM."""

    why: LongText


class StacksRequested(Event, frozen=True):
    """Nothing moves on any node: the coordinator wants to know where all workers are."""

    generation: Generation
    number: Number  # of the suspicion
    why: LongText


class HangFound(Event, frozen=True):
    """The generation hangs, and this is where its workers are. The same words for every node."""

    generation: Generation
    report: HangReport


class HangOver(Event, frozen=True):
    """What was said to hang moves again."""

    generation: Generation


# --- what the hold on the coordinator says ----------------------------------------------------------------------------


class Fenced(Event, frozen=True):
    """This node was cut off for so long that the others may go on without it: its generation is no longer ours."""

    generation: Generation
    why: LongText


# --- what this node sees ----------------------------------------------------------------------------------------------


class WorkerStarted(Event, frozen=True):
    generation: Generation
    local_rank: LocalRank
    pid: Pid


class ProgressSeen(Event, frozen=True):
    """What the workers have written down about their steps."""

    generation: Generation
    workers: Annotated[tuple[WorkerProgress, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class WorkerStartFailed(Event, frozen=True):
    """The operating system would not start it: no such file, no more processes, not permitted."""

    generation: Generation
    local_rank: LocalRank
    reason: LongText
    exit_code: ExitCode = 1  # as a shell would say it: 127 not found, 126 not executable
    ended_at: Time | None = None  # as of WorkerExited


class WorkerExited(Event, frozen=True):
    generation: Generation
    local_rank: LocalRank
    exit_code: ExitCode  # negative: the number of the signal that killed it
    fault: LongText = ""  # why even exit code 0 is a failure: "its result cannot be read: ..."
    unasked: bool = False  # it had ended before our request to end could reach it
    wrote_error: bool = False  # it left an error file
    ended_at: Time | None = None  # on this host's clock; None: now. An agent that was stopped receives it later


class FailureExamined(Event, frozen=True):
    """What could be found out about a worker that ended badly."""

    generation: Generation
    local_rank: LocalRank
    evidence: Evidence


class ScopeExpired(Event, frozen=True):
    """A worker did not leave a scope in time. With a signal, it asked to be ended by that in this case."""

    generation: Generation
    local_rank: LocalRank
    pid: Pid
    scope: Text
    after_s: float  # how long it may take to leave the scope
    expiration_time: float  # seconds since the epoch, as the worker asked for it
    signal: Signal = 0


class StacksRefused(Event, frozen=True):
    """A worker cannot be asked where its threads are."""

    generation: Generation
    local_rank: LocalRank
    why: LongText


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker has written down about its threads, when it was asked last."""

    local_rank: LocalRank
    stacks: LongText = ""
    why: LongText = ""  # there are none


class StacksRead(Event, frozen=True):
    """What the workers have written down, as ordered."""

    generation: Generation
    number: Number
    workers: Annotated[tuple[WorkerStacks, ...], msgspec.Meta(max_length=MAX_SLOTS)]


class QuietSeen(Event, frozen=True):
    """No worker of this node has done anything since then that can be seen, for longer than is usual."""

    generation: Generation
    since: Time
    why: LongText
    stopped: Annotated[
        tuple[LocalRank, ...], msgspec.Meta(max_length=MAX_SLOTS)
    ] = ()  # local ranks that somebody has stopped (SIGSTOP, a debugger)


class MovementSeen(Event, frozen=True):
    """They do something again."""

    generation: Generation


class NodeCleared(Event, frozen=True):
    """No process that this generation's workers started, directly or not, is alive on this node."""

    generation: Generation


class SignalReceived(Event, frozen=True):
    """The agent was asked to stop, by the system or by a person."""

    signal: Signal
    grace_s: Seconds | None = None  # None: what the settings say


class NoticeReceived(Event, frozen=True):
    """This node will be asked to stop later: a scheduler's advance notice."""

    why: LongText
    in_s: Seconds | None = None


class KeeperLost(Event, frozen=True):
    """The process above our workers is gone, and with it our hold on them."""

    reason: LongText


class Tick(Event, frozen=True):
    """Nothing happened but time: some deadline may be due."""


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
    | WorkerStarted
    | WorkerStartFailed
    | WorkerExited
    | FailureExamined
    | ScopeExpired
    | StacksRefused
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
# What a coordinator says to a node.
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
