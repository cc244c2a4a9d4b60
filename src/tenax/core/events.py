"""Facts, in the past tense. Each says what an edge has seen; none says what to do about it.

A fact about a generation carries its number, so that a late echo of an older one can be dropped in one place.
"""

from __future__ import annotations

import msgspec

from tenax.core.model import Assignment, Evidence


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event", omit_defaults=True):
    """Base of all facts."""


class RunRequested(Event, frozen=True):
    """Somebody wants this node to run. The first event of every run."""


class GenerationFormed(Event, frozen=True):
    """The rendezvous answered: this is our part in the next generation."""

    assignment: Assignment


class JoinRefused(Event, frozen=True):
    """The rendezvous will not have us."""

    reason: str


class WorkerStarted(Event, frozen=True):
    generation: int
    local_rank: int
    pid: int


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


class FailureExamined(Event, frozen=True):
    """What could be found out about a worker that ended badly."""

    generation: int
    local_rank: int
    evidence: Evidence


class NodeCleared(Event, frozen=True):
    """No process that this generation's workers started, directly or not, is alive on this node."""

    generation: int


class SignalReceived(Event, frozen=True):
    """The agent was asked to stop, by the system or by a person."""

    signal: int
    grace_s: float | None = None  # None: what the settings say


class KeeperLost(Event, frozen=True):
    """The process above our workers is gone, and with it our hold on them."""

    reason: str


class TimePassed(Event, frozen=True):
    """Nothing happened but time: some deadline may be due."""


AnyEvent = (
    RunRequested
    | GenerationFormed
    | JoinRefused
    | WorkerStarted
    | WorkerStartFailed
    | WorkerExited
    | FailureExamined
    | NodeCleared
    | SignalReceived
    | KeeperLost
    | TimePassed
)
