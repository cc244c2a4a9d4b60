"""Facts, in the past tense. Each says what an edge has seen; none says what to do about it.

A fact about a generation carries its number, so that a late echo of an older one can be dropped in one place.
"""

from __future__ import annotations

import msgspec

from tenax.core.messages import HangReport, WorkerProgress
from tenax.core.model import Assignment, Evidence, Verdict


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

    generation: int
    why: str
    is_late: bool = False  # the next one is at work already: whoever is still there has no time to lose
    is_free: bool = False  # a node came or went: what fails in it is not charged, whichever coordinator asks


class RunEnded(Event, frozen=True):
    """The run is over, with the same verdict on every node."""

    verdict: Verdict
    sent_at: float  # on the coordinator's clock, as the times in the verdict


class JoinRefused(Event, frozen=True):
    """This node cannot be part of the run."""

    reason: str


class Waiting(Event, frozen=True):
    """No generation for us yet. A sentence for the person who waits too."""

    why: str


class LeaveNoticed(Event, frozen=True):
    """A node of the generation is going to leave: time to save what should be saved."""

    generation: int
    host: str
    why: str
    in_s: float | None = None  # how soon, if that is known


class LeaveRequested(Event, frozen=True):
    """An operator wants this node to leave the run, as if its agent had got SIGTERM."""

    why: str


class StacksWanted(Event, frozen=True):
    """Nothing moves on any node: the coordinator wants to know where all workers are."""

    generation: int
    number: int  # of the suspicion
    why: str


class HangFound(Event, frozen=True):
    """The generation hangs, and this is where its workers are. The same words for every node."""

    generation: int
    report: HangReport


class HangOver(Event, frozen=True):
    """What was said to hang moves again."""

    generation: int


# --- what the hold on the coordinator says ----------------------------------------------------------------------------


class Fenced(Event, frozen=True):
    """This node was cut off for so long that the others may go on without it: its generation is no longer ours."""

    generation: int
    why: str


# --- what this node sees ----------------------------------------------------------------------------------------------


class WorkerStarted(Event, frozen=True):
    generation: int
    local_rank: int
    pid: int


class ProgressSeen(Event, frozen=True):
    """What the workers have written down about their steps."""

    generation: int
    workers: tuple[WorkerProgress, ...]


class WorkerStartFailed(Event, frozen=True):
    """The operating system would not start it: no such file, no more processes, not permitted."""

    generation: int
    local_rank: int
    reason: str
    exit_code: int = 1  # as a shell would say it: 127 not found, 126 not executable


class WorkerExited(Event, frozen=True):
    generation: int
    local_rank: int
    exit_code: int  # negative: the number of the signal that killed it
    fault: str = ""  # why even exit code 0 is a failure: "its result cannot be read: ..."
    unasked: bool = False  # it had ended before our request to end could reach it
    wrote_error: bool = False  # it left an error file
    ended_at: float | None = None  # on this host's clock; None: now. An agent that was stopped hears of it later


class FailureExamined(Event, frozen=True):
    """What could be found out about a worker that ended badly."""

    generation: int
    local_rank: int
    evidence: Evidence


class ScopeExpired(Event, frozen=True):
    """A worker did not leave a scope in time. With a signal, it asked to be ended by that in this case."""

    generation: int
    local_rank: int
    pid: int
    scope: str
    after_s: float  # how long it may take to leave the scope
    expiration_time: float  # seconds since the epoch, as the worker asked for it
    signal: int = 0


class StacksRefused(Event, frozen=True):
    """A worker cannot be asked where its threads are."""

    generation: int
    local_rank: int
    why: str


class WorkerStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker has written down about its threads, when it was asked last."""

    local_rank: int
    stacks: str = ""
    why: str = ""  # there are none


class StacksRead(Event, frozen=True):
    """What the workers have written down, as ordered."""

    generation: int
    number: int
    workers: tuple[WorkerStacks, ...]


class QuietSeen(Event, frozen=True):
    """No worker of this node has done anything since then that can be seen, for longer than is usual."""

    generation: int
    since: float
    why: str
    stopped: tuple[int, ...] = ()  # local ranks that somebody has stopped (SIGSTOP, a debugger)


class MovementSeen(Event, frozen=True):
    """They do something again."""

    generation: int


class NodeCleared(Event, frozen=True):
    """No process that this generation's workers started, directly or not, is alive on this node."""

    generation: int


class SignalReceived(Event, frozen=True):
    """The agent was asked to stop, by the system or by a person."""

    signal: int
    grace_s: float | None = None  # None: what the settings say


class NoticeReceived(Event, frozen=True):
    """This node will be asked to stop later: a scheduler's advance notice."""

    why: str
    in_s: float | None = None


class KeeperLost(Event, frozen=True):
    """The process above our workers is gone, and with it our hold on them."""

    reason: str


class TimePassed(Event, frozen=True):
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
    | StacksWanted
    | StacksRead
    | HangFound
    | HangOver
    | QuietSeen
    | MovementSeen
    | NodeCleared
    | SignalReceived
    | NoticeReceived
    | KeeperLost
    | TimePassed
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
    | StacksWanted
    | HangFound
    | HangOver
)
