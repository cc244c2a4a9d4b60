"""Commands of the agent machine, in the imperative. Each does one thing and carries its reason.

The edges carry out commands and decide nothing.
"""

from __future__ import annotations

import msgspec

from tenax._core.messages import FromNode, HangReport
from tenax._core.model import Assignment, Verdict


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command", omit_defaults=True):
    """Base of all commands."""


class SendMessage(Command, frozen=True):
    """Send this message to the coordinator."""

    message: FromNode


class StartWorkers(Command, frozen=True):
    """Start the workers of this generation; the survivors continue in it."""

    assignment: Assignment
    survivors: tuple[int, ...] = ()  # local ranks of the held workers


class ExamineFailure(Command, frozen=True):
    """Find out why this worker ended."""

    generation: int
    local_rank: int
    pid: int
    exit_code: int
    started_at: float
    ended_at: float
    was_stopped: bool = False  # if so, only an error file can prove that it failed before it was stopped


class SignalWorkers(Command, frozen=True):
    """Send the signal to every live worker, but not to its children."""

    generation: int
    signal: int
    why: str


class HoldWorkers(Command, frozen=True):
    """Send the workers that opted in the end of their generation. Each must acknowledge it in time."""

    generation: int
    local_ranks: tuple[int, ...]
    why: str


class StopWorker(Command, frozen=True):
    """Send the signal to this worker alone: it did not acknowledge the end of its generation. It is not a failure."""

    generation: int
    local_rank: int
    pid: int
    signal: int
    why: str


class DumpStacks(Command, frozen=True):
    """Make this worker write the stack of each of its threads, if it can."""

    generation: int
    local_rank: int


class ReadStacks(Command, frozen=True):
    """Read the stacks that these workers have written; ``events.StacksRead`` follows."""

    generation: int
    number: int
    local_ranks: tuple[int, ...]
    started_at: float  # older stacks belong to an earlier worker


class ReportHang(Command, frozen=True):
    """Print where the workers hang."""

    generation: int
    report: HangReport


class ReportMovement(Command, frozen=True):
    """Print that the workers make progress again."""

    generation: int
    why: str = ""


class EndWorker(Command, frozen=True):
    """Send the signal to this worker alone. Its exit counts as a failure."""

    generation: int
    local_rank: int
    pid: int
    signal: int
    why: str
    scope: str  # the scope that it did not leave in time
    expiration_time: float  # seconds since the epoch


class ClearNode(Command, frozen=True):
    """End the processes that exited workers left behind.

    Processes in the group of a worker that was signalled get the same signal; all others are killed. Held workers and
    their descendants stay.
    """

    generation: int
    held: tuple[int, ...] = ()  # local ranks
    number: int = 0  # of the clear in its generation, from 1


class KillNode(Command, frozen=True):
    """Kill all descendants of this generation's workers, repeatedly, until none is left."""

    generation: int
    why: str


class ForwardNotice(Command, frozen=True):
    """Notify the workers that a node of their generation is about to leave."""

    generation: int
    host: str
    why: str
    in_s: float | None = None


class Finish(Command, frozen=True):
    verdict: Verdict


AnyCommand = (
    SendMessage
    | StartWorkers
    | ExamineFailure
    | SignalWorkers
    | HoldWorkers
    | StopWorker
    | DumpStacks
    | ReadStacks
    | ReportHang
    | ReportMovement
    | EndWorker
    | ClearNode
    | KillNode
    | ForwardNotice
    | Finish
)
