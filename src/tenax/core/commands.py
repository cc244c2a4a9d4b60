"""Orders, in the imperative. Each does one obvious thing and says why; the edges obey and never decide."""

from __future__ import annotations

import msgspec

from tenax.core.model import Assignment, Verdict


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command", omit_defaults=True):
    """Base of all orders."""


class Join(Command, frozen=True):
    """Ask the rendezvous for our part in the next generation."""

    generation: int  # the number we expect: one more than the last
    why: str


class StartWorkers(Command, frozen=True):
    assignment: Assignment
    restarts_used: int


class ExamineFailure(Command, frozen=True):
    """Find out why this worker ended."""

    generation: int
    local_rank: int
    pid: int
    exit_code: int
    started_at: float
    ended_at: float
    asked_to_end: bool = False  # then only an error file can show that it had failed before that


class SignalWorkers(Command, frozen=True):
    """Ask every worker that is still alive to end. The signal goes to the worker itself, not to its children."""

    generation: int
    signal: int
    why: str


class ClearNode(Command, frozen=True):
    """All workers are gone: end what they left behind.

    What is still in the group of a worker that we asked to end is asked too; everything else is killed.
    """

    generation: int


class KillNode(Command, frozen=True):
    """Kill everything that descends from this generation's workers, and go on until nothing is left."""

    generation: int
    why: str


class Finish(Command, frozen=True):
    verdict: Verdict


AnyCommand = Join | StartWorkers | ExamineFailure | SignalWorkers | ClearNode | KillNode | Finish
