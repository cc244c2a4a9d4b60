"""The agent machine's state, and what follows from it alone: messages, reports, deadlines. ``agent.py`` decides.

The state is a value of values. What belongs to a generation is in ``LocalGeneration``, which forming the next one
replaces as a whole. The stop of its workers, the search for evidence, an overdue worker and a request for stacks are
values with their own deadlines.
"""

from __future__ import annotations

import enum

import msgspec

from tenax._core import messages
from tenax._core.events import AnyEvent, Fenced
from tenax._core.model import (
    AgentSettings,
    Assignment,
    Failure,
    Stopped,
    Verdict,
    WorkerPhase,
    WorkerRecord,
    truncate_failures,
)

# The same on every supported system; the core imports no `signal`.
SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM = 1, 2, 3, 9, 15
_SIGNAL_NAMES = {SIGHUP: "SIGHUP", SIGINT: "SIGINT", SIGQUIT: "SIGQUIT", SIGTERM: "SIGTERM"}
_MAX_WITH_TEXTS = 16  # stopped workers whose stacks and last lines are reported


class Phase(enum.Enum):
    NEW = "new"
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    DONE = "done"
    ENDED = "ended"


class Rung(enum.IntEnum):
    """The steps of the kill ladder."""

    NONE = 0
    HOLDING = 1  # the workers were sent the end of their generation; those that do not acknowledge it are stopped alone
    HELD = 2  # all have exited or are held; the processes that the exited ones left behind are being ended
    SIGNALLED = 3  # the workers were sent the stop signal
    CLEARING = 4  # the workers have exited; the processes they left behind are being ended
    KILLED = 5  # all processes were sent SIGKILL
    ABANDONED = 6


class Deadline(enum.Enum):
    HOLD = "hold"  # a worker must have acknowledged the end of its generation, or exited, else the next signal follows
    GRACE = "grace"  # signalled processes must have exited
    ABANDON = "abandon"  # killed processes must have exited
    EXAMINE = "examine"  # the evidence must be collected
    OVERDUE = "overdue"  # an overdue worker must have exited, else the next signal follows
    STACKS = "stacks"  # workers must have written their stacks; after that, the stacks must have been read


class Stop(msgspec.Struct):
    """The stop of a generation's workers: the kill ladder."""

    rung: Rung = Rung.NONE
    since: float = 0.0
    signal: int = 0  # the signal that the workers were sent
    until: float | None = None  # when the next step follows; None: nothing is awaited
    is_clear: bool = False  # no process of the generation is alive, except held workers and their descendants
    is_short: bool = False  # the grace period was shortened: all workers that still run have raised an exception


class Examination(msgspec.Struct):
    """The search for the evidence of failures."""

    ranks: set[int] = set()  # local ranks whose evidence is being collected
    until: float | None = None


class Quiet(msgspec.Struct):
    """A period in which no worker of this node shows activity."""

    since: float
    why: str
    stopped: tuple[int, ...] = ()  # local ranks that are stopped by SIGSTOP or a debugger


class StacksRequest(msgspec.Struct):
    """The coordinator's request for the stacks of all workers."""

    number: int  # of the coordinator's suspicion
    until: float  # the deadline of the current step: writing, then reading
    is_read: bool = False  # ReadStacks was issued
    unknown: dict[int, str] = {}  # local ranks that cannot write their stacks, and why


class HangSigns(msgspec.Struct):
    """What this node knows of a hang."""

    quiet: Quiet | None = None  # None: workers show activity, or detection is off
    request: StacksRequest | None = None
    is_reported: bool = False  # the hang of this generation was printed


class LocalGeneration(msgspec.Struct):
    """This node's part of one generation: of the current one, or of the last one."""

    assignment: Assignment | None = None  # None: there was none yet
    formed_at: float = 0.0
    workers: dict[int, WorkerRecord] = {}
    failures: list[Failure] = []  # on this node, in the order seen
    stop: Stop = msgspec.field(default_factory=Stop)
    clears: int = 0  # ClearNode commands
    examination: Examination = msgspec.field(default_factory=Examination)
    hang: HangSigns = msgspec.field(default_factory=HangSigns)
    has_ended: bool = False  # the coordinator has ended it
    is_uncharged: bool = False  # ... because a node joined or left
    was_cut_off: bool = False  # the lease expired before the workers had stopped
    is_reported: bool = False  # this node was ready after it: held workers alone may be alive

    def escalations(self) -> list[float]:
        """Return when the next signals for single workers are due. The kill ladder supersedes these signals."""
        if self.stop.rung >= Rung.KILLED:
            return []
        return [at for worker in self.workers.values() if (at := worker.escalates_at) is not None]

    def acknowledgements(self) -> list[float]:
        """Return when the next signals are due for workers that have not acknowledged the end of the generation."""
        if self.stop.rung is not Rung.HOLDING:
            return []
        awaited = (worker.hold for worker in self.living() if worker.phase is not WorkerPhase.HELD)
        return [hold.until for hold in awaited if hold is not None and hold.until is not None]

    def living(self) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if worker.phase is not WorkerPhase.ENDED]

    def held(self) -> tuple[int, ...]:
        """Return the local ranks of the held workers that are not being stopped."""
        if self.stop.rung > Rung.HELD:
            return ()
        held = [worker for worker in self.workers.values() if worker.phase is WorkerPhase.HELD]
        return tuple(worker.local_rank for worker in held if worker.hold is not None and not worker.hold.sent)

    def have_all_ended(self) -> bool:
        return all(worker.phase is WorkerPhase.ENDED for worker in self.workers.values())


class Leave(msgspec.Struct, frozen=True):
    """A request that makes this node leave."""

    signal: int  # SIGTERM for an operator's request
    why: str = ""  # the operator's reason, if an operator drained this node

    def reason(self, *, is_local: bool = False) -> str:
        """Return why this node leaves, as a message to other nodes or on this one."""
        if self.why:
            return f"an operator drained {'this node' if is_local else 'it'}: {self.why}"
        name = _SIGNAL_NAMES.get(self.signal, f"signal {self.signal}")
        return f"{'the' if is_local else 'its'} agent received {name}"


class Decided(msgspec.Struct, frozen=True):
    """The verdict that takes effect when the node is clear."""

    verdict: Verdict
    is_refused: bool = False  # it concerns this node alone


class Formed(msgspec.Struct):
    """A generation that was formed while this node is not clear: a held worker exited, or the held ones are stopped.

    Its workers start when the node is clear, unless it has ended before.
    """

    assignment: Assignment
    has_ended: bool = False
    is_uncharged: bool = False
    was_cut_off: bool = False


class AgentState(msgspec.Struct):
    """The whole state of the machine. Printable, comparable, serialisable."""

    settings: AgentSettings
    phase: Phase = Phase.NEW
    last: LocalGeneration = msgspec.field(default_factory=lambda: LocalGeneration(stop=Stop(is_clear=True)))
    earlier: list[Failure] = []  # this node's first failure of each earlier generation, in brief
    formed: Formed | None = None
    leave: Leave | None = None
    decided: Decided | None = None
    verdict: Verdict | None = None

    @property
    def deadlines(self) -> dict[Deadline, float]:
        """What is awaited, in the order in which it is handled if several are due."""
        found: dict[Deadline, float] = {}
        last, stop = self.last, self.last.stop
        if self.phase is Phase.ENDED:
            return found
        if acknowledgements := last.acknowledgements():
            found[Deadline.HOLD] = min(acknowledgements)
        if stop.until is not None:
            found[Deadline.ABANDON if stop.rung is Rung.KILLED else Deadline.GRACE] = stop.until
        if last.examination.until is not None:
            found[Deadline.EXAMINE] = last.examination.until
        if overdue := last.escalations():
            found[Deadline.OVERDUE] = min(overdue)
        if last.hang.request is not None:
            found[Deadline.STACKS] = last.hang.request.until
        return found

    def must_be_fenced(self, event: AnyEvent) -> bool:
        """Return whether a node without a lease is fenced first: the event may start a generation that was formed."""
        return self.formed is not None and not self.formed.has_ended and not isinstance(event, Fenced)

    def next_deadline(self) -> float | None:
        """Return when the next ``Tick`` is due."""
        return min(self.deadlines.values(), default=None)

    @property
    def assignment(self) -> Assignment | None:
        return self.last.assignment

    @property
    def generation(self) -> int:
        part = self.last.assignment
        return part.generation if part is not None else 0

    @property
    def workers(self) -> dict[int, WorkerRecord]:
        return self.last.workers

    @property
    def failures(self) -> list[Failure]:
        return self.last.failures

    @property
    def cleared(self) -> bool:
        """Whether no process of any generation is alive, except held workers and their descendants."""
        return self.last.stop.is_clear

    @property
    def restarts_used(self) -> int:
        """Restarts of the whole run when the current generation was formed."""
        return self.assignment.restarts_used if self.assignment is not None else 0


def global_rank(state: AgentState, local_rank: int) -> int:
    return (state.assignment.first_global_rank if state.assignment else 0) + local_rank


def is_started(state: AgentState) -> bool:
    return all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())


def stopped_workers(state: AgentState) -> tuple[Stopped, ...]:
    """Return the workers that the agent stopped, without failures. Only the first ones include their texts."""
    failed = {failure.local_rank for failure in state.failures}
    stopped = [
        Stopped(
            worker.local_rank,
            global_rank(state, worker.local_rank),
            worker.pid,
            worker.exit_code,
            worker.stacks,
            last_lines=worker.last_lines,
            log_file=worker.log_file,
        )
        for worker in state.workers.values()
        if worker.was_stopped and worker.local_rank not in failed
    ]
    return (*stopped[:_MAX_WITH_TEXTS], *(each.brief() for each in stopped[_MAX_WITH_TEXTS:]))


def quiet_message(generation: int, quiet: Quiet, now: float) -> messages.NodeQuiet:
    return messages.NodeQuiet(generation, now, quiet.since, quiet.why)


def running_message(state: AgentState) -> messages.WorkersRunning:
    workers = state.workers.values()
    survivors = sum(worker.is_survivor for worker in workers)
    return messages.WorkersRunning(state.generation, tuple(worker.pid for worker in workers), survivors)


def ready_message(state: AgentState) -> messages.NodeReady:
    return messages.NodeReady(state.generation, held=len(state.last.held()))


def stopped_message(state: AgentState, now: float) -> messages.NodeStopped:
    return messages.NodeStopped(
        state.generation,
        now,
        truncate_failures(state.failures),
        stopped_workers(state),
        state.last.was_cut_off,
        tuple(global_rank(state, rank) for rank in state.last.held()),
    )


def messages_on_connecting(state: AgentState, node: messages.NodeInfo, now: float) -> list[messages.FromNode]:
    """Return the messages that open every connection: the coordinator may be a new one, or may have missed some.

    They are derived from the state alone, so no message is queued while there is no connection.
    """
    last, formed = state.last, state.formed
    part = state.assignment if formed is None else formed.assignment  # that one starts when the node is clear
    is_at_work = state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING) and not last.is_reported
    sent: list[messages.FromNode] = [
        messages.NodeJoined(
            node,
            generation=state.generation if formed is None else formed.assignment.generation,
            is_running=is_at_work or formed is not None,
            is_uncharged=last.is_uncharged if formed is None else formed.is_uncharged,
            has_succeeded=state.phase is Phase.DONE,
            group_rank=part.group_rank if part else -1,
            group_world_size=part.group_world_size if part else 0,
            coordinator_rank=part.coordinator_rank if part else -1,
            restarts_used=part.restarts_used if part else 0,
            store=part.store if part else "",
        )
    ]
    if state.phase is Phase.RUNNING and is_started(state):
        sent.append(running_message(state))
        if state.last.hang.quiet is not None:
            sent.append(quiet_message(state.generation, state.last.hang.quiet, now))
        elif state.settings.on_hang != "off":
            # The last message that the coordinator received may be NodeQuiet.
            sent.append(messages.NodeBusy(state.generation, "the workers of a node are active"))
    elif state.phase is Phase.STOPPING and not last.is_reported:
        sent += [messages.FailureSeen(state.generation, failure, now) for failure in state.failures[:1]]
        if state.leave is not None:
            sent.append(messages.NodeDraining(state.generation, state.settings.grace_s, state.leave.reason()))
    elif state.phase is Phase.JOINING and state.cleared:  # else they are sent when the node is clear
        sent += ready_messages(state, now)
    return sent


def ready_messages(state: AgentState, now: float) -> list[messages.FromNode]:
    """Return that this node is ready, after how the last generation ended on it: this coordinator may not know."""
    last = state.last
    has_ended_badly = bool(state.failures) or last.was_cut_off or bool(last.held())
    return [*([stopped_message(state, now)] if has_ended_badly else []), ready_message(state)]
