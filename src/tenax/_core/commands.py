"""Orders, in the imperative. Each does one obvious thing and says why; the edges obey and never decide."""

from __future__ import annotations

import msgspec

from tenax._core.messages import FromNode, HangReport
from tenax._core.model import Assignment, Verdict


class Command(msgspec.Struct, frozen=True, tag=True, tag_field="command", omit_defaults=True):
    """Base of all orders."""


class SendMessage(Command, frozen=True):
    """Say this to the coordinator."""

    message: FromNode


class StartWorkers(Command, frozen=True):
    assignment: Assignment


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


class DumpStacks(Command, frozen=True):
    """Make this worker write down where each of its threads is, if it can."""

    generation: int
    local_rank: int


class ReadStacks(Command, frozen=True):
    """Read what these workers have written down (``events.StacksRead``)."""

    generation: int
    number: int
    local_ranks: tuple[int, ...]
    started_at: float  # what is older is another worker's


class ReportHang(Command, frozen=True):
    """Tell the person at the console where the workers hang."""

    generation: int
    report: HangReport


class ReportMovement(Command, frozen=True):
    """Tell the person at the console that it goes on."""

    generation: int


class EndWorker(Command, frozen=True):
    """Send the signal to this worker alone. Its end will be a failure like any other."""

    generation: int
    local_rank: int
    pid: int
    signal: int
    why: str
    scope: str  # that it did not leave
    expiration_time: float  # seconds since the epoch


class ClearNode(Command, frozen=True):
    """All workers are gone: end what they left behind.

    What is still in the group of a worker that we asked to end is asked too; everything else is killed.
    """

    generation: int


class KillNode(Command, frozen=True):
    """Kill everything that descends from this generation's workers, and go on until nothing is left."""

    generation: int
    why: str


class ForwardNotice(Command, frozen=True):
    """Let the workers know that a node of their generation is going to leave."""

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
