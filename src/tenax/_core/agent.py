"""The agent machine: the lifecycle of one node.

    NEW -> JOINING -> RUNNING -> STOPPING -> JOINING ...     the generation ended, on this node or elsewhere
                         |          '-----> ENDED            this node leaves, or the run ended
                         '-------> CLOSING -> DONE -> ENDED  all workers on this node succeeded; the run ends when
                                                             those of all nodes have

It decides when workers start and stop, and how a stop escalates (the kill ladder: signal -> clear -> kill -> abandon).
The coordinator (``coordinator.py``) decides whether there is a next generation and how the run ends. This machine sends
it messages and receives its events, also if both are in one process. It has no access to processes, logs, sockets or a
clock: the time of each event is an argument.

Invariants (tests cite the numbers; ``tenax.testing.agent_invariants`` checks them after every step):

A1  Workers of a generation start only when no process of an earlier one is alive on the node.
A2  Generation numbers only grow. A generation starts its workers once at most, and only if the coordinator formed it.
A3  Messages are true: ready and stopped are sent only when the node is clear, succeeded only if every worker succeeded.
A4  No command follows the verdict.
A5  A verdict is reached only when the node is clear, except ABANDONED (a process survived) and BROKEN (keeper lost).
A6  A FAILED verdict names at least one failure, first cause first; no worker is both failed and stopped.
A7  Every wait for processes has a deadline.
A8  The kill ladder only escalates.
A9  An event of another generation changes nothing.
A10 A single worker is ended only after one of its scopes expired, and gets SIGKILL after the grace period at latest.
    Stacks are collected only if a worker is overdue or the coordinator requested them.
A11 The start and the end of a quiet period are each sent once. A request for stacks is answered within a bounded time,
    with locations or with why they are not known. A hang is reported once, and its end only after that.
"""

from __future__ import annotations

import enum

import msgspec

from tenax._core import commands, events, messages
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import (
    MAX_EARLIER,
    AgentSettings,
    Assignment,
    Evidence,
    Failure,
    Outcome,
    Overdue,
    Stopped,
    Verdict,
    WorkerPhase,
    WorkerRecord,
    by_cause,
    truncate_failures,
    truncate_stacks,
)
from tenax._core.text import format_seconds

# The same on every supported system; the core imports no `signal`.
SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM = 1, 2, 3, 9, 15
_SIGNAL_NAMES = {SIGHUP: "SIGHUP", SIGINT: "SIGINT", SIGQUIT: "SIGQUIT", SIGTERM: "SIGTERM"}
_EXCEPTION_EXIT_CODE = 1  # of a Python process
_URGENT_SIGNALS = (SIGINT, SIGQUIT)
_MAX_SCOPE_CHARS = 200  # of a scope's name in a message
_GRACE_OVER = "the grace period is over"
_MAX_WITH_STACKS = 16  # stopped workers whose stacks are reported


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
    SIGNALLED = 1  # the workers were sent the stop signal
    CLEARING = 2  # the workers have exited; the processes they left behind are being ended
    KILLED = 3  # all processes were sent SIGKILL
    ABANDONED = 4


class Deadline(enum.Enum):
    GRACE = "grace"  # signalled processes must have exited
    ABANDON = "abandon"  # killed processes must have exited
    EXAMINE = "examine"  # the evidence must be collected
    OVERDUE = "overdue"  # an overdue worker must have exited, else the next signal follows
    STACKS = "stacks"  # workers must have written their stacks; after that, the stacks must have been read


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


class AgentState(msgspec.Struct):
    """The whole state of the machine. Printable, comparable, serialisable."""

    settings: AgentSettings
    phase: Phase = Phase.NEW
    assignment: Assignment | None = None
    generation: int = 0
    workers: dict[int, WorkerRecord] = {}
    rung: Rung = Rung.NONE
    cleared: bool = True  # no process of any generation is alive
    running_since: float = 0.0
    stopping_since: float = 0.0
    stop_signal: int = 0  # the signal that the workers were sent
    failures: list[Failure] = []  # of this generation on this node, in the order seen
    unexamined: set[int] = set()  # local ranks whose evidence is being collected
    earlier: list[Failure] = []  # this node's first failure of each earlier generation, in brief
    cancelled_by: int = 0  # the signal that makes this node leave; SIGTERM for an operator's request
    leave_why: str = ""  # the operator's reason, if an operator drained this node
    has_generation_ended: bool = False  # the coordinator has ended the generation
    is_uncharged: bool = False  # ... because a node joined or left
    was_cut_off: bool = False  # the lease expired before the workers had stopped
    decided: Verdict | None = None  # the coordinator's verdict, which takes effect when the node is clear
    is_refused: bool = False  # ``decided`` concerns this node alone
    deadlines: dict[Deadline, float] = {}
    verdict: Verdict | None = None
    quiet: Quiet | None = None  # None: workers show activity, or detection is off
    stacks_request: StacksRequest | None = None
    is_hang_reported: bool = False  # the hang of this generation was printed

    def next_deadline(self) -> float | None:
        """Return when the next ``Tick`` is due."""
        return min(self.deadlines.values(), default=None)

    @property
    def restarts_used(self) -> int:
        """Restarts of the whole run when the current generation was formed."""
        return self.assignment.restarts_used if self.assignment is not None else 0


class AgentMachine:
    """``step(event, now)`` returns the commands that follow. One instance per run."""

    def __init__(self, settings: AgentSettings) -> None:
        self.state = AgentState(settings)
        self._commands: list[AnyCommand] = []

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Handle one event; return the commands that follow."""
        self._commands = []
        if self.state.phase is not Phase.ENDED and not self._is_stale(event):
            self._handle(event, now)
            self._update_overdue_deadline()
            self._update_stacks_deadline()
        return self._commands

    def _is_stale(self, event: AnyEvent) -> bool:
        """Whether the event belongs to another generation. The only check of this kind (A9)."""
        generation = getattr(event, "generation", None)
        return generation is not None and generation != self.state.generation

    def _handle(self, event: AnyEvent, now: float) -> None:
        match event:
            case events.RunRequested():
                self._on_run_requested()
            case events.GenerationFormed(assignment):
                self._on_generation_formed(assignment, now)
            case events.GenerationEnded(_, why, is_late, is_uncharged):
                self.state.is_uncharged |= is_uncharged
                self._on_generation_ended(why, is_late, now)
            case events.RunEnded(verdict, sent_at):
                self._on_run_ended(verdict.shifted(now - sent_at), now)
            case events.JoinRefused(reason):
                self._on_refused(reason, now)
            case events.Fenced(_, why):
                self._on_fenced(why, now)
            case events.LeaveNoticed(_, host, why, in_s):
                self._forward_notice(host, why, in_s)
            case events.NoticeReceived(why, in_s):
                self._send(messages.NodeWillLeave(self.state.generation, why, in_s))
                self._forward_notice("", why, in_s)
            case events.LeaveRequested(why):
                self._on_leave_requested(why, now)
            case events.ProgressSeen(generation, workers):
                if self.state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
                    self._send(messages.NodeProgress(generation, now, workers))
            case events.WorkerStarted(_, local_rank, pid):
                self._on_worker_started(local_rank, pid)
            case events.WorkerStartFailed(_, local_rank, reason, exit_code, ended_at):
                fault = f"could not be started: {reason}"
                self._on_worker_ended(local_rank, exit_code, fault, now, ended_at=ended_at, before_stop=True)
            case events.WorkerExited(_, local_rank, exit_code, fault, before_stop, wrote_error, ended_at):
                self._on_worker_ended(
                    local_rank,
                    exit_code,
                    fault,
                    now,
                    ended_at=ended_at,
                    before_stop=before_stop,
                    wrote_error=wrote_error,
                )
            case events.FailureExamined(_, local_rank, evidence):
                self._on_failure_examined(local_rank, evidence, now)
            case events.ScopeExpired():
                self._on_scope_expired(event, now)
            case events.StacksRefused(_, local_rank, why):
                self._on_stacks_refused(local_rank, why, now)
            case events.NodeCleared():
                self._on_node_cleared(now)
            case events.SignalReceived(signal, grace_s):
                self._on_signal(signal, self.state.settings.grace_s if grace_s is None else grace_s, now)
            case events.KeeperLost(reason):
                self._end(self._own_verdict(Outcome.BROKEN, f"the keeper was lost: {reason}"))
            case events.Tick():
                self._on_tick(now)
            case events.Waiting():
                pass  # for display only
            case _:
                self._handle_hang_event(event, now)

    def _send(self, message: messages.FromNode) -> None:
        self._commands.append(commands.SendMessage(message))

    # --- joining ------------------------------------------------------------------------------------------------------

    def _on_run_requested(self) -> None:
        if self.state.phase is Phase.NEW:
            self._join()

    def _join(self) -> None:
        self.state.phase = Phase.JOINING
        self._send(messages.NodeReady(self.state.generation))

    def _on_generation_formed(self, assignment: Assignment, now: float) -> None:
        state = self.state
        if state.phase is not Phase.JOINING or assignment.generation <= state.generation:
            return
        state.phase = Phase.RUNNING
        state.assignment = assignment
        state.generation = assignment.generation
        state.running_since = now
        state.workers = {rank: WorkerRecord(rank) for rank in range(state.settings.local_world_size)}
        state.rung = Rung.NONE
        state.cleared = False
        state.earlier = [*state.earlier, *(failure.brief() for failure in state.failures[:1])][-MAX_EARLIER:]
        state.failures = []
        state.unexamined = set()
        state.has_generation_ended = False
        state.is_uncharged = state.was_cut_off = state.is_hang_reported = False
        state.quiet = None
        self._commands.append(commands.StartWorkers(assignment))

    # --- decisions of the coordinator ---------------------------------------------------------------------------------

    def _on_generation_ended(self, why: str, is_late: bool, now: float) -> None:
        state = self.state
        state.has_generation_ended = True
        if is_late and state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
            self._on_fenced(why, now)
        elif state.phase is Phase.RUNNING:
            self._stop(SIGTERM, why, state.settings.grace_s, now)
        elif state.phase is Phase.DONE:
            if state.cancelled_by:  # it stayed only to receive the verdict
                self._leave()
            else:
                self._join()

    def _on_refused(self, why: str, now: float) -> None:
        if self.state.decided is None:
            self.state.is_refused = True
            self._on_run_ended(self._own_verdict(Outcome.BROKEN, why), now)

    def _on_run_ended(self, verdict: Verdict, now: float) -> None:
        state = self.state
        if state.decided is not None:
            return  # a run ends once; a link that breaks after that changes nothing
        state.decided = verdict
        if state.phase is Phase.RUNNING:
            self._stop(SIGTERM, f"the run {verdict.outcome.text}: {verdict.why}", state.settings.grace_s, now)
        elif state.phase in (Phase.NEW, Phase.JOINING, Phase.DONE):
            self._end(verdict)

    def _on_fenced(self, why: str, now: float) -> None:
        """Kill without a grace period: the other nodes may be about to start without this one."""
        state = self.state
        if state.phase is Phase.RUNNING:
            state.phase = Phase.STOPPING
            state.rung = Rung.SIGNALLED
            state.stopping_since = now
            state.stop_signal = SIGKILL
        state.was_cut_off |= state.phase is Phase.STOPPING
        # DONE stays DONE. If the others continued without this node, the coordinator reports it on reconnecting.
        if state.phase in (Phase.STOPPING, Phase.CLOSING):
            self._kill(why, now)

    def _forward_notice(self, host: str, why: str, in_s: float | None) -> None:
        if self.state.phase is Phase.RUNNING:
            self._commands.append(commands.ForwardNotice(self.state.generation, host, why, in_s))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_started(self, local_rank: int, pid: int) -> None:
        worker = self.state.workers.get(local_rank)
        if worker is not None and worker.phase is WorkerPhase.REQUESTED:
            worker.phase = WorkerPhase.RUNNING
            worker.pid = pid
            if self.state.phase is Phase.RUNNING and is_started(self.state):
                self._send(running_message(self.state))

    def _on_worker_ended(
        self,
        local_rank: int,
        exit_code: int,
        fault: str,
        now: float,
        *,
        ended_at: float | None,
        before_stop: bool,
        wrote_error: bool = False,
    ) -> None:
        state = self.state
        worker = state.workers.get(local_rank)
        if worker is None or worker.phase is WorkerPhase.ENDED:
            return
        worker.phase = WorkerPhase.ENDED
        worker.exit_code = exit_code
        worker.ended_at = now if ended_at is None else min(ended_at, now)
        # A worker that could not start, or exited before the stop request reached it, was not stopped by the agent.
        worker.was_stopped = state.rung >= Rung.SIGNALLED and not before_stop
        overdue = worker.overdue
        if overdue is not None and (exit_code < 0 or (overdue.sent and not before_stop)):
            # The expired scope is the cause, even if the worker was stopped for another reason meanwhile.
            overdue.is_cause, worker.was_stopped, fault = True, False, overdue.reason
        if state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return  # the outcome of this generation is already decided
        if exit_code != 0 or fault or self._has_stacks_to_show(worker):
            self._record_bad_exit(worker, fault, wrote_error, now)
        if state.phase is Phase.RUNNING and state.failures:
            self._send(messages.FailureSeen(state.generation, state.failures[0], now))
            self._stop(SIGTERM, f"rank {state.failures[0].global_rank} failed", state.settings.grace_s, now)
        elif self._all_workers_ended():
            if state.phase is Phase.RUNNING:
                state.phase = Phase.CLOSING
                self._clear(now)
            elif state.phase is Phase.STOPPING and state.rung is Rung.SIGNALLED:
                self._clear(now)

    def _record_bad_exit(self, worker: WorkerRecord, fault: str, wrote_error: bool, now: float) -> None:
        """Record a failure. If the worker was stopped, only examine whether it had failed by itself before."""
        state = self.state
        if not worker.was_stopped:
            state.failures.append(self._failure(worker, fault, Evidence()))
        elif (
            worker.exit_code in (-state.stop_signal, -SIGKILL)
            and not wrote_error
            and not self._has_stacks_to_show(worker)
        ):
            return  # the stop signal ended it: nothing to examine
        state.unexamined.add(worker.local_rank)
        state.deadlines[Deadline.EXAMINE] = now + state.settings.examine_s  # each worker gets the full time
        self._commands.append(
            commands.ExamineFailure(
                generation=state.generation,
                local_rank=worker.local_rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                started_at=state.running_since,
                ended_at=worker.ended_at,
                was_stopped=worker.was_stopped,
            )
        )

    @staticmethod
    def _has_stacks_to_show(worker: WorkerRecord) -> bool:
        """Whether a stopped worker wrote stacks: an overdue worker may have been waiting for this one."""
        return worker.was_stopped and worker.stacks_asked_at is not None

    def _failure(self, worker: WorkerRecord, fault: str, evidence: Evidence) -> Failure:
        is_late = worker.overdue is not None and worker.overdue.is_cause
        return Failure(
            generation=self.state.generation,
            local_rank=worker.local_rank,
            global_rank=self._global_rank(worker.local_rank),
            pid=worker.pid,
            # A stopped worker is a failure only because it had raised an exception before.
            exit_code=_EXCEPTION_EXIT_CODE if worker.was_stopped and worker.exit_code < 0 else worker.exit_code,
            # An overdue worker failed when its scope expired: its consequences may be seen before its exit.
            seen_at=worker.overdue.since if worker.overdue is not None and is_late else worker.ended_at,
            reason=fault,
            was_stopped=worker.was_stopped,
            evidence=evidence,
            was_late=is_late,
        )

    def _on_failure_examined(self, local_rank: int, evidence: Evidence, now: float) -> None:
        state = self.state
        if local_rank not in state.unexamined:
            return
        state.unexamined.discard(local_rank)
        if not state.unexamined:
            state.deadlines.pop(Deadline.EXAMINE, None)
        for index, failure in enumerate(state.failures):
            if failure.local_rank == local_rank:
                state.failures[index] = msgspec.structs.replace(failure, evidence=evidence)
                break
        else:
            # It was stopped. Its error file may prove that it had failed by itself before that.
            worker = state.workers[local_rank]
            worker.stacks = truncate_stacks(evidence.stacks)
            if evidence.raised_at is not None and evidence.raised_at < state.stopping_since:
                state.failures.append(self._failure(worker, "", evidence))
        self._continue_if_stopped(now)

    def _all_workers_ended(self) -> bool:
        return all(worker.phase is WorkerPhase.ENDED for worker in self.state.workers.values())

    # --- expired scopes -----------------------------------------------------------------------------------------------

    def _on_scope_expired(self, event: events.ScopeExpired, now: float) -> None:
        """Collect the stacks of all workers before the overdue one is sent its signal.

        The first overdue worker may be waiting for another one that expires later or has no scope.
        """
        state = self.state
        worker = state.workers.get(event.local_rank)
        if state.phase is not Phase.RUNNING or worker is None or worker.phase is not WorkerPhase.RUNNING:
            return  # it is being stopped, or has exited
        if event.signal <= 0 or event.pid != worker.pid or worker.overdue is not None:
            return
        worker.overdue = Overdue(
            overrun(event), event.scope, event.expiration_time, event.signal, now, until=now + state.settings.stacks_s
        )
        asked_at = worker.stacks_asked_at
        if asked_at is None or now - asked_at >= state.settings.stacks_s:
            self._dump_stacks(worker, now)
        for other in state.workers.values():
            if other.phase is WorkerPhase.RUNNING and other.stacks_asked_at is None:
                self._dump_stacks(other, now)

    def _dump_stacks(self, worker: WorkerRecord, now: float) -> None:
        worker.stacks_asked_at = now
        self._commands.append(commands.DumpStacks(self.state.generation, worker.local_rank))

    def _on_stacks_refused(self, local_rank: int, why: str, now: float) -> None:
        worker = self.state.workers.get(local_rank)
        if worker is None:
            return
        worker.stacks_asked_at = None
        if self.state.stacks_request is not None:
            self.state.stacks_request.unknown[local_rank] = why
        if worker.overdue is None or worker.overdue.sent or not self._can_escalate(worker):
            return
        worker.overdue.reason += f" (no stacks: {why})"
        self._escalate(worker, worker.overdue, now)

    def _can_escalate(self, worker: WorkerRecord) -> bool:
        """Whether the worker is still being ended alone, and not by the kill ladder."""
        return worker.phase is not WorkerPhase.ENDED and self.state.rung < Rung.KILLED

    def _escalate(self, worker: WorkerRecord, overdue: Overdue, now: float) -> None:
        """Send the next signal: the one its scope requests, then SIGKILL. After that, stop all workers."""
        state = self.state
        if overdue.sent == SIGKILL:
            overdue.until = None
            if state.phase is Phase.RUNNING:
                why = f"rank {self._global_rank(worker.local_rank)} survived SIGKILL"
                self._stop(SIGTERM, why, state.settings.grace_s, now)
            return
        why = overdue.reason if not overdue.sent else _GRACE_OVER
        overdue.sent = SIGKILL if overdue.sent else overdue.signal
        is_last = overdue.sent == SIGKILL
        overdue.until = now + (state.settings.abandon_s if is_last else state.settings.grace_s)
        self._commands.append(
            commands.EndWorker(
                generation=state.generation,
                local_rank=worker.local_rank,
                pid=worker.pid,
                signal=overdue.sent,
                why=why,
                scope=overdue.scope,
                expiration_time=overdue.expiration_time,
            )
        )

    def _on_overdue(self, now: float) -> None:
        for worker in self.state.workers.values():
            overdue = worker.overdue
            if (
                overdue is not None
                and overdue.until is not None
                and overdue.until <= now
                and self._can_escalate(worker)
            ):
                self._escalate(worker, overdue, now)

    def _update_overdue_deadline(self) -> None:
        """Set the deadline to the earliest of all overdue workers."""
        due = [
            worker.overdue.until
            for worker in self.state.workers.values()
            if worker.overdue is not None and worker.overdue.until is not None and self._can_escalate(worker)
        ]
        self.state.deadlines.pop(Deadline.OVERDUE, None)
        if due and self.state.phase is not Phase.ENDED:
            self.state.deadlines[Deadline.OVERDUE] = min(due)

    # --- hangs --------------------------------------------------------------------------------------------------------

    def _handle_hang_event(
        self,
        event: events.QuietSeen
        | events.MovementSeen
        | events.StacksRequested
        | events.StacksRead
        | events.HangFound
        | events.HangOver,
        now: float,
    ) -> None:
        state = self.state
        match event:
            case events.HangFound(generation, report):
                if not state.is_hang_reported and state.phase in (Phase.RUNNING, Phase.CLOSING, Phase.DONE):
                    state.is_hang_reported = True
                    self._commands.append(commands.ReportHang(generation, report))
            case events.HangOver():
                self._on_hang_over()
            case _ if state.phase is not Phase.RUNNING:
                pass
            case events.QuietSeen(_, since, why, stopped):
                is_news = state.quiet is None
                state.quiet = Quiet(since, why, stopped)
                if is_news:
                    self._send(quiet_message(state.generation, state.quiet, now))
            case events.MovementSeen():
                if state.quiet is not None:
                    state.quiet = None
                    self._send(messages.NodeBusy(state.generation))
            case events.StacksRequested(_, number):
                self._on_stacks_requested(number, now)
            case events.StacksRead(_, number, workers):
                if state.stacks_request is not None and state.stacks_request.number == number:
                    self._send_stacks(workers)

    def _on_hang_over(self) -> None:
        state = self.state
        for worker in state.workers.values():
            if worker.overdue is None:
                worker.stacks_asked_at = None  # those stacks explain no later failure
        if state.is_hang_reported:
            state.is_hang_reported = False
            self._commands.append(commands.ReportMovement(state.generation))

    def _on_stacks_requested(self, number: int, now: float) -> None:
        """Make every worker write its stacks, except stopped ones, which the request would resume."""
        state = self.state
        request = state.stacks_request = StacksRequest(number, now + state.settings.stacks_s)
        stopped = state.quiet.stopped if state.quiet is not None else ()
        for worker in state.workers.values():
            if worker.phase is WorkerPhase.RUNNING:
                if worker.local_rank in stopped:
                    request.unknown[worker.local_rank] = "stopped by SIGSTOP or a debugger; SIGCONT resumes it"
                else:
                    self._dump_stacks(worker, now)

    def _on_stacks_due(self, now: float) -> None:
        state, request = self.state, self.state.stacks_request
        if request is None:
            return
        asked = tuple(
            rank
            for rank, worker in state.workers.items()
            if worker.phase is WorkerPhase.RUNNING and rank not in request.unknown
        )
        if request.is_read or not asked:
            self._send_stacks(())
            return
        request.is_read, request.until = True, now + state.settings.examine_s
        self._commands.append(commands.ReadStacks(state.generation, request.number, asked, state.running_since))

    def _send_stacks(self, read: tuple[events.WorkerStacks, ...]) -> None:
        from tenax._core.hang_report import LocalStacks, places_of

        state, request = self.state, self.state.stacks_request
        if request is None:
            return
        known = {each.local_rank: each for each in read}
        workers = []
        for rank, worker in state.workers.items():
            if worker.phase is WorkerPhase.RUNNING:
                found = known.get(rank, events.WorkerStacks(rank))
                why = request.unknown.get(rank) or found.why or "its stacks could not be read in time"
                workers.append(LocalStacks(rank, self._global_rank(rank), worker.pid, found.stacks, why))
        state.stacks_request = None
        self._send(messages.StacksTaken(state.generation, request.number, places_of(workers)))

    def _update_stacks_deadline(self) -> None:
        state = self.state
        if state.phase is not Phase.RUNNING:
            state.stacks_request = state.quiet = None
        state.deadlines.pop(Deadline.STACKS, None)
        if state.stacks_request is not None:
            state.deadlines[Deadline.STACKS] = state.stacks_request.until

    # --- the kill ladder ----------------------------------------------------------------------------------------------

    def _stop(self, signal: int, why: str, grace_s: float, now: float) -> None:
        """RUNNING -> STOPPING: signal the workers, which have the grace period to exit."""
        state = self.state
        state.phase = Phase.STOPPING
        state.rung = Rung.SIGNALLED
        state.stopping_since = now
        state.stop_signal = signal
        state.deadlines[Deadline.GRACE] = now + grace_s
        if self._all_workers_ended():
            self._clear(now)
        else:
            self._commands.append(commands.SignalWorkers(state.generation, signal, why))

    def _clear(self, now: float) -> None:
        state = self.state
        state.rung = Rung.CLEARING
        state.deadlines.setdefault(Deadline.GRACE, now + state.settings.grace_s)
        self._commands.append(commands.ClearNode(state.generation))

    def _kill(self, why: str, now: float) -> None:
        state = self.state
        if state.rung >= Rung.KILLED or state.cleared:
            return
        state.rung = Rung.KILLED
        state.deadlines.pop(Deadline.GRACE, None)
        state.deadlines[Deadline.ABANDON] = now + state.settings.abandon_s
        self._commands.append(commands.KillNode(state.generation, why))

    def _abandon(self) -> None:
        state = self.state
        state.rung = Rung.ABANDONED
        stuck = tuple(w.pid for w in state.workers.values() if w.phase is not WorkerPhase.ENDED and w.pid)
        named = f"process {', '.join(map(str, stuck))}" if stuck else "a process of the job"
        survived = f"{named} survived SIGKILL for {format_seconds(state.settings.abandon_s)}"
        why = f"{survived}: stuck in the kernel; check this host"
        self._send(messages.NodeLeft(why, is_clear=False))
        self._end(self._own_verdict(Outcome.ABANDONED, why, stuck_pids=stuck))

    def _on_node_cleared(self, now: float) -> None:
        state = self.state
        if state.rung < Rung.CLEARING or state.cleared:
            return
        state.cleared = True
        state.deadlines.pop(Deadline.GRACE, None)
        state.deadlines.pop(Deadline.ABANDON, None)
        if state.phase is Phase.CLOSING:
            self._after_success()
        else:
            self._continue_if_stopped(now)

    # --- after the workers have exited --------------------------------------------------------------------------------

    def _after_success(self) -> None:
        """All workers of this node succeeded, and the node is clear."""
        state = self.state
        state.phase = Phase.DONE
        self._send(messages.NodeSucceeded(state.generation))
        if state.decided is not None:
            self._end_as_decided(state.decided)
        elif state.cancelled_by and (state.has_generation_ended or not self._is_alone()):
            self._leave()  # a node that is alone waits: its success ends the run, and the verdict follows
        elif state.has_generation_ended:
            self._join()

    def _is_alone(self) -> bool:
        return self.state.assignment is not None and self.state.assignment.group_world_size == 1

    def _continue_if_stopped(self, now: float) -> None:
        state = self.state
        if state.phase is not Phase.STOPPING or not state.cleared or state.unexamined:
            return
        state.failures.sort(key=by_cause)
        self._send(stopped_message(state, now))
        if state.decided is not None:
            self._end_as_decided(state.decided)
        elif state.cancelled_by:
            self._leave()
        else:
            self._join()

    def _leave(self) -> None:
        self._send(messages.NodeLeft(leave_reason(self.state)))
        self._end(self._own_verdict(Outcome.CANCELLED, leave_reason(self.state, is_local=True)))

    def _on_signal(self, signal: int, grace_s: float, now: float) -> None:
        state = self.state
        if state.cancelled_by:
            if state.phase is Phase.DONE:
                self._leave()
            elif signal in _URGENT_SIGNALS:
                self._on_second_signal(now)
            return
        state.cancelled_by = signal
        match state.phase:
            case Phase.RUNNING:
                self._send(messages.NodeDraining(state.generation, grace_s, leave_reason(state)))
                why = leave_reason(state, is_local=True)
                self._forward_notice("", why, grace_s)
                self._stop(signal, why, grace_s, now)
            case Phase.NEW | Phase.JOINING | Phase.DONE:
                self._leave()
            case Phase.CLOSING:
                self._kill("stop requested after all workers had succeeded", now)
            case Phase.STOPPING | Phase.ENDED:
                # Already stopping; the verdict will be CANCELLED.
                if Deadline.GRACE in state.deadlines:
                    state.deadlines[Deadline.GRACE] = min(state.deadlines[Deadline.GRACE], now + grace_s)

    def _on_leave_requested(self, why: str, now: float) -> None:
        if not self.state.cancelled_by:
            self.state.leave_why = why
        self._on_signal(SIGTERM, self.state.settings.grace_s, now)

    def _on_second_signal(self, now: float) -> None:
        """On a second stop request, kill at once and do not wait for evidence."""
        self._kill("second stop request", now)
        if self.state.cleared:
            self._stop_examining(now)

    def _stop_examining(self, now: float) -> None:
        self.state.deadlines.pop(Deadline.EXAMINE, None)
        self.state.unexamined.clear()
        self._continue_if_stopped(now)

    def _on_tick(self, now: float) -> None:
        due = [deadline for deadline, at in self.state.deadlines.items() if at <= now]
        for deadline in due:
            del self.state.deadlines[deadline]
        for deadline in due:
            if self.state.phase is Phase.ENDED:
                return
            match deadline:
                case Deadline.GRACE:
                    self._kill(_GRACE_OVER, now)
                case Deadline.ABANDON:
                    self._abandon()
                case Deadline.EXAMINE:
                    self._stop_examining(now)
                case Deadline.OVERDUE:
                    self._on_overdue(now)
                case Deadline.STACKS:
                    self._on_stacks_due(now)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _own_verdict(self, outcome: Outcome, why: str, *, stuck_pids: tuple[int, ...] = ()) -> Verdict:
        """Return a verdict for this node alone."""
        state = self.state
        return Verdict(
            outcome=outcome,
            why=why,
            failures=tuple(sorted(state.failures, key=by_cause)),
            stopped=stopped_workers(state),
            restarts_used=state.restarts_used,
            generation=state.generation,
            signal=state.cancelled_by if outcome is Outcome.CANCELLED and not state.leave_why else 0,
            earlier=tuple(state.earlier),
            stuck_pids=stuck_pids,
        )

    def _end_as_decided(self, verdict: Verdict) -> None:
        """End with the coordinator's verdict, or if this node was refused, with its own and the evidence since then."""
        self._end(self._own_verdict(verdict.outcome, verdict.why) if self.state.is_refused else verdict)

    def _end(self, verdict: Verdict) -> None:
        state = self.state
        state.phase = Phase.ENDED
        state.deadlines.clear()
        state.verdict = verdict
        self._commands.append(commands.Finish(verdict))

    def _global_rank(self, local_rank: int) -> int:
        return global_rank(self.state, local_rank)


def overrun(event: events.ScopeExpired) -> str:
    """Return which scope the worker did not leave in time, as the predicate of a sentence about the worker."""
    scope = event.scope
    if len(scope) > _MAX_SCOPE_CHARS:
        scope = "..." + scope[-_MAX_SCOPE_CHARS:]  # for a file and line, the end is more specific
    in_time = f"within {format_seconds(event.after_s)}" if event.after_s > 0 else "in time"
    return f"did not leave the scope {scope!r} {in_time}"


def global_rank(state: AgentState, local_rank: int) -> int:
    return (state.assignment.first_global_rank if state.assignment else 0) + local_rank


def stopped_workers(state: AgentState) -> tuple[Stopped, ...]:
    """Return the workers that the agent stopped, without failures. Only the first ones include their stacks."""
    failed = {failure.local_rank for failure in state.failures}
    stopped = [
        Stopped(worker.local_rank, global_rank(state, worker.local_rank), worker.pid, worker.exit_code, worker.stacks)
        for worker in state.workers.values()
        if worker.was_stopped and worker.local_rank not in failed
    ]
    return (*stopped[:_MAX_WITH_STACKS], *(each.brief() for each in stopped[_MAX_WITH_STACKS:]))


def is_started(state: AgentState) -> bool:
    return all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())


def quiet_message(generation: int, quiet: Quiet, now: float) -> messages.NodeQuiet:
    return messages.NodeQuiet(generation, now, quiet.since, quiet.why)


def running_message(state: AgentState) -> messages.WorkersRunning:
    return messages.WorkersRunning(state.generation, tuple(worker.pid for worker in state.workers.values()))


def leave_reason(state: AgentState, *, is_local: bool = False) -> str:
    """Return why this node leaves, as a message to other nodes or on this one."""
    if state.leave_why:
        return f"an operator drained {'this node' if is_local else 'it'}: {state.leave_why}"
    number = state.cancelled_by
    return f"{'the' if is_local else 'its'} agent received {_SIGNAL_NAMES.get(number, f'signal {number}')}"


def stopped_message(state: AgentState, now: float) -> messages.NodeStopped:
    return messages.NodeStopped(
        state.generation, now, truncate_failures(state.failures), stopped_workers(state), state.was_cut_off
    )


def messages_on_connecting(state: AgentState, node: messages.NodeInfo, now: float) -> list[messages.FromNode]:
    """Return the messages that open every connection: the coordinator may be a new one, or may have missed some.

    They are derived from the state alone, so no message is queued while there is no connection.
    """
    part = state.assignment
    sent: list[messages.FromNode] = [
        messages.NodeJoined(
            node,
            generation=state.generation,
            is_running=state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING),
            is_uncharged=state.is_uncharged,
            has_succeeded=state.phase is Phase.DONE,
            group_rank=part.group_rank if part else -1,
            group_world_size=part.group_world_size if part else 0,
            coordinator_rank=part.coordinator_rank if part else -1,
            restarts_used=state.restarts_used,
            store=part.store if part else "",
        )
    ]
    if state.phase is Phase.RUNNING and is_started(state):
        sent.append(running_message(state))
        if state.quiet is not None:
            sent.append(quiet_message(state.generation, state.quiet, now))
        elif state.settings.on_hang != "off":
            sent.append(messages.NodeBusy(state.generation))  # the last message received may be NodeQuiet
    elif state.phase is Phase.STOPPING:
        sent += [messages.FailureSeen(state.generation, failure, now) for failure in state.failures[:1]]
        if state.cancelled_by:
            sent.append(messages.NodeDraining(state.generation, state.settings.grace_s, leave_reason(state)))
    elif state.phase is Phase.JOINING:
        if state.failures or state.was_cut_off:
            sent.append(stopped_message(state, now))
        sent.append(messages.NodeReady(state.generation))
    return sent
