"""Commands of the agent machine, in the imperative. Each does one thing and carries its reason.

The edges carry out commands and decide nothing.
"""

from __future__ import annotations

import msgspec

from tenax._core.messages import FromNode, HangReport
from tenax._core.model import Assignment, Verdict


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command", omit_defaults=True):
    """Base of all commands."""


class GenerationCommand(Command, frozen=True):
    """Base of commands about a generation."""

    generation: int


class WorkerCommand(GenerationCommand, frozen=True):
    """Base of commands about one worker."""

    local_rank: int


class SendMessage(Command, frozen=True):
    """Send this message to the coordinator."""

    message: FromNode


class StartWorkers(Command, frozen=True):
    """Start the workers of this generation; the survivors continue in it."""

    assignment: Assignment
    survivors: tuple[int, ...] = ()  # local ranks of the held workers


class ExamineFailure(WorkerCommand, frozen=True):
    """Find out why this worker ended."""

    pid: int
    exit_code: int
    started_at: float
    ended_at: float
    was_stopped: bool = False  # if so, only an error file can prove that it failed before it was stopped


class SignalWorkers(GenerationCommand, frozen=True):
    """Send the signal to every live worker, but not to its children."""

    signal: int
    why: str


class HoldWorkers(GenerationCommand, frozen=True):
    """Send the workers that opted in the end of their generation. Each must acknowledge it in time."""

    local_ranks: tuple[int, ...]
    why: str


class StopWorker(WorkerCommand, frozen=True):
    """Send the signal to this worker alone: it did not acknowledge the end of its generation. It is not a failure."""

    pid: int
    signal: int
    why: str


class DumpStacks(WorkerCommand, frozen=True):
    """Make this worker write the stack of each of its threads, if it can."""


class ReadStacks(GenerationCommand, frozen=True):
    """Read the stacks that these workers have written; ``events.StacksRead`` follows."""

    number: int
    local_ranks: tuple[int, ...]
    started_at: float  # older stacks belong to an earlier worker


class ReportHang(GenerationCommand, frozen=True):
    """Print where the workers hang."""

    report: HangReport


class ReportMovement(GenerationCommand, frozen=True):
    """Print that the workers make progress again."""

    why: str = ""


class EndWorker(WorkerCommand, frozen=True):
    """Send the signal to this worker alone. Its exit counts as a failure."""

    pid: int
    signal: int
    why: str
    scope: str  # the scope that it did not leave in time
    expiration_time: float  # seconds since the epoch


class ClearNode(GenerationCommand, frozen=True):
    """End the processes that exited workers left behind.

    Processes in the group of a worker that was signalled get the same signal; all others are killed. Held workers and
    their descendants stay.
    """

    held: tuple[int, ...] = ()  # local ranks
    number: int = 0  # of the clear in its generation, from 1


class KillNode(GenerationCommand, frozen=True):
    """Kill all descendants of this generation's workers, repeatedly, until none is left."""

    why: str


class ForwardNotice(GenerationCommand, frozen=True):
    """Notify the workers that a node of their generation is about to leave."""

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
