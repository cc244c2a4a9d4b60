"""The agent machine: the life of one node.

    NEW -> JOINING -> RUNNING -> STOPPING -> JOINING ...     the generation ended, here or elsewhere
                         |          '-----> ENDED            this node was asked to leave, or the run is over
                         '-------> CLOSING -> DONE -> ENDED  every worker here succeeded; the run ends when all did

It decides when workers start and stop and how hard they are pushed (the kill ladder: ask -> clear -> kill ->
abandon). Whether there is a next generation, and how the run ends, is the coordinator's decision (``coordinator.py``):
this machine tells it what happened and hears what follows, also when the coordinator lives in the same process. It does
not know what a process, a log or a socket is, and it never reads a clock: the time of each event is an argument.

What always holds (tests cite the numbers; ``invariants.py`` checks them after every step):

A1  Workers of a generation start only when the node was cleared of every earlier one.
A2  Generations only grow, and each starts its workers at most once, and only when the coordinator formed it.
A3  What the coordinator is told is true: ready and stopped only when clear, succeeded only if every worker was.
A4  After the verdict nothing is ordered any more.
A5  A verdict comes only when the node is clear, or says what was left (ABANDONED) or that our hold was lost (BROKEN).
A6  A FAILED verdict names at least one failure, the first cause first; no worker is both failed and stopped.
A7  While processes are awaited a deadline stands: no wait is without end.
A8  The kill ladder only climbs.
A9  A fact of another generation changes nothing.
A10 A worker is ended alone only if a scope of its had expired, and by SIGKILL at the latest after the grace period.
    Stacks are taken only when somebody is late, or the coordinator wants them.
A11 That nothing moves is told once, and that it moves again once. Whoever wants stacks hears where the workers are, or
    that it is not known, within a bounded time. A hang is told to people once, and that it is over only after that.
"""

from __future__ import annotations

import enum

import msgspec

from tenax._core import commands, events, messages
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import (
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

SIGINT, SIGQUIT, SIGKILL, SIGTERM = 2, 3, 9, 15  # the same on every system we run on; the core imports no `signal`
EXIT_CODE_OF_EXCEPTION = 1  # of a Python process
_HURRY = (SIGINT, SIGQUIT)
_HISTORY_KEPT = 100
_MAX_OF_SCOPE = 200  # characters in a sentence
_MAX_STACKS = 16  # workers of this node that were stopped


class Phase(enum.Enum):
    NEW = "new"
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    CLOSING = "closing"
    DONE = "done"
    ENDED = "ended"


class Rung(enum.IntEnum):
    """How hard the workers are being pushed."""

    NONE = 0
    ASKED = 1  # each worker got the signal
    CLEARING = 2  # the workers are gone; what they left behind is being ended
    KILLED = 3  # everything got SIGKILL
    ABANDONED = 4


class Deadline(enum.Enum):
    GRACE = "grace"  # asked processes must be gone
    ABANDON = "abandon"  # killed processes must be gone
    EXAMINE = "examine"  # the evidence must be in
    OVERDUE = "overdue"  # a worker that did not leave a scope in time must be gone, or is pushed harder
    STACKS = "stacks"  # workers must have written down where they are; then, what they wrote must have been read


class Stillness(msgspec.Struct):
    """That nothing moves on this node."""

    since: float
    why: str
    stopped: tuple[int, ...] = ()  # local ranks that somebody has stopped


class StacksWish(msgspec.Struct):
    """The coordinator wants to know where our workers are."""

    number: int  # of its suspicion
    until: float  # the next thing happens
    is_read: bool = False  # it was ordered to read what they wrote
    unknown: dict[int, str] = {}  # local ranks that cannot be asked, and why


class AgentState(msgspec.Struct):
    """Everything the machine remembers. Printable, comparable, serialisable."""

    settings: AgentSettings
    phase: Phase = Phase.NEW
    assignment: Assignment | None = None
    generation: int = 0
    workers: dict[int, WorkerRecord] = {}
    rung: Rung = Rung.NONE
    cleared: bool = True  # no process of any generation is alive
    running_since: float = 0.0
    stopping_since: float = 0.0
    stop_signal: int = 0  # what the workers were asked with
    failures: list[Failure] = []  # of this generation on this node, in the order seen
    unexamined: set[int] = set()  # local ranks whose evidence is still being gathered
    earlier: list[Failure] = []  # this node's first cause of each generation that failed here, in brief
    cancelled_by: int = 0  # the signal that asked us to leave
    leave_why: str = ""  # no signal did, but an operator, for this reason
    has_ended_elsewhere: bool = False  # the generation is over for all nodes, whatever our workers did
    is_free: bool = False  # ... because a node came or went
    was_cut_off: bool = False  # our lease ran out before its workers had stopped
    decided: Verdict | None = None  # how the run ends, said by the coordinator; ours as soon as the node is clear
    is_refused: bool = False  # what was decided is the end of this node alone
    deadlines: dict[Deadline, float] = {}
    verdict: Verdict | None = None
    stillness: Stillness | None = None  # None: something moves, or nobody looks
    stacks_wish: StacksWish | None = None
    is_hang_told: bool = False  # the person at the console knows that this generation hangs

    def next_deadline(self) -> float | None:
        """When the loop must wake up at the latest."""
        return min(self.deadlines.values(), default=None)

    @property
    def restarts_used(self) -> int:
        """Of the whole run, when our generation was formed."""
        return self.assignment.restarts_used if self.assignment is not None else 0


class AgentMachine:
    """``step(event, now)`` returns the orders that follow. One instance per run."""

    def __init__(self, settings: AgentSettings) -> None:
        self.state = AgentState(settings)
        self._orders: list[AnyCommand] = []

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take one fact, return what to do about it."""
        self._orders = []
        if self.state.phase is not Phase.ENDED and not self._is_stale(event):
            self._take(event, now)
            self._watch_overdue()
            self._watch_stacks_wish()
        return self._orders

    def _is_stale(self, event: AnyEvent) -> bool:
        """A late echo of an older generation. The one place where such are dropped (A9)."""
        generation = getattr(event, "generation", None)
        return generation is not None and generation != self.state.generation

    def _take(self, event: AnyEvent, now: float) -> None:
        match event:
            case events.RunRequested():
                self._on_run_requested()
            case events.GenerationFormed(assignment):
                self._on_generation_formed(assignment, now)
            case events.GenerationEnded(_, why, is_late, is_free):
                self.state.is_free |= is_free
                self._on_generation_ended(why, is_late, now)
            case events.RunEnded(verdict, sent_at):
                self._on_run_ended(_on_our_clock(verdict, now - sent_at), now)
            case events.JoinRefused(reason):
                self._on_refused(reason, now)
            case events.Fenced(_, why):
                self._on_fenced(why, now)
            case events.LeaveNoticed(_, host, why, in_s):
                self._pass_on_notice(host, why, in_s)
            case events.NoticeReceived(why, in_s):
                self._tell(messages.NodeWillLeave(self.state.generation, why, in_s))
                self._pass_on_notice("", why, in_s)
            case events.LeaveRequested(why):
                self._on_leave_requested(why, now)
            case events.ProgressSeen(generation, workers):
                if self.state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
                    self._tell(messages.NodeProgress(generation, now, workers))
            case events.WorkerStarted(_, local_rank, pid):
                self._on_worker_started(local_rank, pid)
            case events.WorkerStartFailed(_, local_rank, reason, exit_code, ended_at):
                fault = f"could not be started: {reason}"
                self._on_worker_ended(local_rank, exit_code, fault, now, ended_at=ended_at, unasked=True)
            case events.WorkerExited(_, local_rank, exit_code, fault, unasked, wrote_error, ended_at):
                self._on_worker_ended(
                    local_rank, exit_code, fault, now, ended_at=ended_at, unasked=unasked, wrote_error=wrote_error
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
                self._end(self._own_verdict(Outcome.BROKEN, f"the keeper of the workers was lost: {reason}"))
            case events.Tick():
                self._on_time_passed(now)
            case events.Waiting():
                pass  # for the people who watch
            case _:
                self._take_of_hang(event, now)

    def _tell(self, message: messages.FromNode) -> None:
        self._orders.append(commands.SendMessage(message))

    # --- joining ------------------------------------------------------------------------------------------------------

    def _on_run_requested(self) -> None:
        if self.state.phase is Phase.NEW:
            self._join()

    def _join(self) -> None:
        self.state.phase = Phase.JOINING
        self._tell(messages.NodeReady(self.state.generation))

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
        state.earlier = [*state.earlier, *(failure.brief() for failure in state.failures[:1])][-_HISTORY_KEPT:]
        state.failures = []
        state.unexamined = set()
        state.has_ended_elsewhere = False
        state.is_free = state.was_cut_off = state.is_hang_told = False
        state.stillness = None
        self._orders.append(commands.StartWorkers(assignment))

    # --- what the coordinator decided ---------------------------------------------------------------------------------

    def _on_generation_ended(self, why: str, is_late: bool, now: float) -> None:
        state = self.state
        state.has_ended_elsewhere = True
        if is_late and state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
            self._on_fenced(why, now)
        elif state.phase is Phase.RUNNING:
            self._stop(SIGTERM, why, state.settings.grace_s, now)
        elif state.phase is Phase.DONE:
            if state.cancelled_by:  # it only stayed to hear the verdict
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
            return  # a run ends once; a link that breaks after that does not make it another end
        state.decided = verdict
        if state.phase is Phase.RUNNING:
            self._stop(SIGTERM, verdict.why, state.settings.grace_s, now)
        elif state.phase in (Phase.NEW, Phase.JOINING, Phase.DONE):
            self._end(verdict)

    def _on_fenced(self, why: str, now: float) -> None:
        """No grace: by now the others may be about to start without us."""
        state = self.state
        if state.phase is Phase.RUNNING:
            state.phase = Phase.STOPPING
            state.rung = Rung.ASKED
            state.stopping_since = now
            state.stop_signal = SIGKILL
        state.was_cut_off |= state.phase is Phase.STOPPING
        # A success stays one. If the others went on without us, we shall be told as soon as we are back.
        if state.phase in (Phase.STOPPING, Phase.CLOSING):
            self._kill(why, now)

    def _pass_on_notice(self, host: str, why: str, in_s: float | None) -> None:
        if self.state.phase is Phase.RUNNING:
            self._orders.append(commands.ForwardNotice(self.state.generation, host, why, in_s))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_started(self, local_rank: int, pid: int) -> None:
        worker = self.state.workers.get(local_rank)
        if worker is not None and worker.phase is WorkerPhase.REQUESTED:
            worker.phase = WorkerPhase.RUNNING
            worker.pid = pid
            if self.state.phase is Phase.RUNNING and is_started(self.state):
                self._tell(running_message(self.state))

    def _on_worker_ended(
        self,
        local_rank: int,
        exit_code: int,
        fault: str,
        now: float,
        *,
        ended_at: float | None,
        unasked: bool,
        wrote_error: bool = False,
    ) -> None:
        state = self.state
        worker = state.workers.get(local_rank)
        if worker is None or worker.phase is WorkerPhase.ENDED:
            return
        worker.phase = WorkerPhase.ENDED
        worker.exit_code = exit_code
        worker.ended_at = now if ended_at is None else min(ended_at, now)
        # What never came to life, or had ended already, was not ended by us, whatever we had asked for meanwhile.
        worker.asked_to_end = state.rung >= Rung.ASKED and not unasked
        overdue = worker.overdue
        if overdue is not None and (exit_code < 0 or (overdue.sent and not unasked)):
            # Whoever else asked it to end meanwhile: this is why.
            overdue.is_cause, worker.asked_to_end, fault = True, False, overdue.reason
        if state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return  # seen after its generation was decided upon: for the record only
        if exit_code != 0 or fault or self._has_stacks_to_show(worker):
            self._note_bad_end(worker, fault, wrote_error, now)
        if state.phase is Phase.RUNNING and state.failures:
            self._tell(messages.FailureSeen(state.generation, state.failures[0], now))
            self._stop(SIGTERM, f"rank {state.failures[0].global_rank} failed", state.settings.grace_s, now)
        elif self._all_workers_ended():
            if state.phase is Phase.RUNNING:
                state.phase = Phase.CLOSING
                self._clear(now)
            elif state.phase is Phase.STOPPING and state.rung is Rung.ASKED:
                self._clear(now)

    def _note_bad_end(self, worker: WorkerRecord, fault: str, wrote_error: bool, now: float) -> None:
        """Keep it as a failure; or, if we had asked it to end, only look whether it had failed by itself before."""
        state = self.state
        if not worker.asked_to_end:
            state.failures.append(self._failure(worker, fault, Evidence()))
        elif (
            worker.exit_code in (-state.stop_signal, -SIGKILL)
            and not wrote_error
            and not self._has_stacks_to_show(worker)
        ):
            return  # our own doing: nothing to find out
        state.unexamined.add(worker.local_rank)
        state.deadlines[Deadline.EXAMINE] = now + state.settings.examine_s  # the last one has the full time, too
        self._orders.append(
            commands.ExamineFailure(
                generation=state.generation,
                local_rank=worker.local_rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                started_at=state.running_since,
                ended_at=worker.ended_at,
                asked_to_end=worker.asked_to_end,
            )
        )

    @staticmethod
    def _has_stacks_to_show(worker: WorkerRecord) -> bool:
        """It did not fail, but somebody was late, and it may be the one that the other waited for."""
        return worker.asked_to_end and worker.stacks_asked_at is not None

    def _failure(self, worker: WorkerRecord, fault: str, evidence: Evidence) -> Failure:
        is_late = worker.overdue is not None and worker.overdue.is_cause
        return Failure(
            generation=self.state.generation,
            local_rank=worker.local_rank,
            global_rank=self._global_rank(worker.local_rank),
            pid=worker.pid,
            # One that we stopped while it was exiting is a failure only because it had raised before.
            exit_code=EXIT_CODE_OF_EXCEPTION if worker.asked_to_end and worker.exit_code < 0 else worker.exit_code,
            # What follows from a worker that hangs can be seen before its own end.
            seen_at=worker.overdue.since if worker.overdue is not None and is_late else worker.ended_at,
            reason=fault,
            asked_to_end=worker.asked_to_end,
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
            # It ended after we asked it to. Its error file may prove that it had failed by itself before that.
            worker = state.workers[local_rank]
            worker.stacks = truncate_stacks(evidence.stacks)
            if evidence.raised_at is not None and evidence.raised_at < state.stopping_since:
                state.failures.append(self._failure(worker, "", evidence))
        self._go_on_if_stopped(now)

    def _all_workers_ended(self) -> bool:
        return all(worker.phase is WorkerPhase.ENDED for worker in self.state.workers.values())

    # --- scopes that were not left in time ----------------------------------------------------------------------------

    def _on_scope_expired(self, event: events.ScopeExpired, now: float) -> None:
        """First the stacks of all, while each hangs where it hangs; then the signal that the late one asked for.

        Whoever is late first may only wait for another one, which is late a moment later, or never.
        """
        state = self.state
        worker = state.workers.get(event.local_rank)
        if state.phase is not Phase.RUNNING or worker is None or worker.phase is not WorkerPhase.RUNNING:
            return  # it is being ended already, or has ended
        if event.signal <= 0 or event.pid != worker.pid or worker.overdue is not None:
            return
        worker.overdue = Overdue(
            lateness(event), event.scope, event.expiration_time, event.signal, now, until=now + state.settings.stacks_s
        )
        asked_at = worker.stacks_asked_at
        if asked_at is None or now - asked_at >= state.settings.stacks_s:
            self._dump_stacks(worker, now)
        for other in state.workers.values():
            if other.phase is WorkerPhase.RUNNING and other.stacks_asked_at is None:
                self._dump_stacks(other, now)

    def _dump_stacks(self, worker: WorkerRecord, now: float) -> None:
        worker.stacks_asked_at = now
        self._orders.append(commands.DumpStacks(self.state.generation, worker.local_rank))

    def _on_stacks_refused(self, local_rank: int, why: str, now: float) -> None:
        worker = self.state.workers.get(local_rank)
        if worker is None:
            return
        worker.stacks_asked_at = None
        if self.state.stacks_wish is not None:
            self.state.stacks_wish.unknown[local_rank] = why
        if worker.overdue is None or worker.overdue.sent or not self._is_pushed(worker):
            return
        worker.overdue.reason += f" (its stacks are not known: {why})"
        self._push(worker, worker.overdue, now)

    def _is_pushed(self, worker: WorkerRecord) -> bool:
        """Whether it is ended as one that is overdue, not as one of all."""
        return worker.phase is not WorkerPhase.ENDED and self.state.rung < Rung.KILLED

    def _push(self, worker: WorkerRecord, overdue: Overdue, now: float) -> None:
        """One step further: the signal that it asked for, SIGKILL, and if even that does not help, the kill ladder."""
        state = self.state
        if overdue.sent == SIGKILL:
            overdue.until = None
            if state.phase is Phase.RUNNING:
                why = f"rank {self._global_rank(worker.local_rank)} survives SIGKILL"
                self._stop(SIGTERM, why, state.settings.grace_s, now)
            return
        why = overdue.reason if not overdue.sent else "not gone within the grace period"
        overdue.sent = SIGKILL if overdue.sent else overdue.signal
        is_last = overdue.sent == SIGKILL
        overdue.until = now + (state.settings.abandon_s if is_last else state.settings.grace_s)
        self._orders.append(
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
            if overdue is not None and overdue.until is not None and overdue.until <= now and self._is_pushed(worker):
                self._push(worker, overdue, now)

    def _watch_overdue(self) -> None:
        """The deadline is the first of all workers'."""
        due = [
            worker.overdue.until
            for worker in self.state.workers.values()
            if worker.overdue is not None and worker.overdue.until is not None and self._is_pushed(worker)
        ]
        self.state.deadlines.pop(Deadline.OVERDUE, None)
        if due and self.state.phase is not Phase.ENDED:
            self.state.deadlines[Deadline.OVERDUE] = min(due)

    # --- hangs --------------------------------------------------------------------------------------------------------

    def _take_of_hang(
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
                if not state.is_hang_told and state.phase in (Phase.RUNNING, Phase.CLOSING, Phase.DONE):
                    state.is_hang_told = True
                    self._orders.append(commands.ReportHang(generation, report))
            case events.HangOver():
                self._on_hang_over()
            case _ if state.phase is not Phase.RUNNING:
                pass
            case events.QuietSeen(_, since, why, stopped):
                is_news = state.stillness is None
                state.stillness = Stillness(since, why, stopped)
                if is_news:
                    self._tell(quiet_message(state.generation, state.stillness, now))
            case events.MovementSeen():
                if state.stillness is not None:
                    state.stillness = None
                    self._tell(messages.NodeBusy(state.generation))
            case events.StacksRequested(_, number):
                self._on_stacks_wanted(number, now)
            case events.StacksRead(_, number, workers):
                if state.stacks_wish is not None and state.stacks_wish.number == number:
                    self._tell_stacks(workers)

    def _on_hang_over(self) -> None:
        state = self.state
        for worker in state.workers.values():
            if worker.overdue is None:
                worker.stacks_asked_at = None  # where it was then says nothing of what may happen to it
        if state.is_hang_told:
            state.is_hang_told = False
            self._orders.append(commands.ReportMovement(state.generation))

    def _on_stacks_wanted(self, number: int, now: float) -> None:
        """Each worker writes down where it hangs. That would wake one that somebody has stopped: it is left alone."""
        state = self.state
        wish = state.stacks_wish = StacksWish(number, now + state.settings.stacks_s)
        stopped = state.stillness.stopped if state.stillness is not None else ()
        for worker in state.workers.values():
            if worker.phase is WorkerPhase.RUNNING:
                if worker.local_rank in stopped:
                    wish.unknown[worker.local_rank] = "it is stopped, by SIGSTOP or a debugger; SIGCONT lets it go on"
                else:
                    self._dump_stacks(worker, now)

    def _on_stacks_due(self, now: float) -> None:
        state, wish = self.state, self.state.stacks_wish
        if wish is None:
            return
        asked = tuple(
            rank
            for rank, worker in state.workers.items()
            if worker.phase is WorkerPhase.RUNNING and rank not in wish.unknown
        )
        if wish.is_read or not asked:
            self._tell_stacks(())
            return
        wish.is_read, wish.until = True, now + state.settings.examine_s
        self._orders.append(commands.ReadStacks(state.generation, wish.number, asked, state.running_since))

    def _tell_stacks(self, read: tuple[events.WorkerStacks, ...]) -> None:
        from tenax._core.hang_report import LocalStacks, places_of

        state, wish = self.state, self.state.stacks_wish
        if wish is None:
            return
        known = {each.local_rank: each for each in read}
        workers = []
        for rank, worker in state.workers.items():
            if worker.phase is WorkerPhase.RUNNING:
                found = known.get(rank, events.WorkerStacks(rank))
                why = wish.unknown.get(rank) or found.why or "what it wrote could not be read in time"
                workers.append(LocalStacks(rank, self._global_rank(rank), worker.pid, found.stacks, why))
        state.stacks_wish = None
        self._tell(messages.StacksTaken(state.generation, wish.number, places_of(workers)))

    def _watch_stacks_wish(self) -> None:
        state = self.state
        if state.phase is not Phase.RUNNING:
            state.stacks_wish = state.stillness = None
        state.deadlines.pop(Deadline.STACKS, None)
        if state.stacks_wish is not None:
            state.deadlines[Deadline.STACKS] = state.stacks_wish.until

    # --- the kill ladder ----------------------------------------------------------------------------------------------

    def _stop(self, signal: int, why: str, grace_s: float, now: float) -> None:
        """RUNNING -> STOPPING: ask, and give everybody the grace period."""
        state = self.state
        state.phase = Phase.STOPPING
        state.rung = Rung.ASKED
        state.stopping_since = now
        state.stop_signal = signal
        state.deadlines[Deadline.GRACE] = now + grace_s
        if self._all_workers_ended():
            self._clear(now)
        else:
            self._orders.append(commands.SignalWorkers(state.generation, signal, why))

    def _clear(self, now: float) -> None:
        state = self.state
        state.rung = Rung.CLEARING
        state.deadlines.setdefault(Deadline.GRACE, now + state.settings.grace_s)
        self._orders.append(commands.ClearNode(state.generation))

    def _kill(self, why: str, now: float) -> None:
        state = self.state
        if state.rung >= Rung.KILLED or state.cleared:
            return
        state.rung = Rung.KILLED
        state.deadlines.pop(Deadline.GRACE, None)
        state.deadlines[Deadline.ABANDON] = now + state.settings.abandon_s
        self._orders.append(commands.KillNode(state.generation, why))

    def _abandon(self) -> None:
        state = self.state
        state.rung = Rung.ABANDONED
        stuck = tuple(w.pid for w in state.workers.values() if w.phase is not WorkerPhase.ENDED and w.pid)
        named = f"process {', '.join(map(str, stuck))}" if stuck else "a process of the job"
        why = (
            f"{named} did not end within {state.settings.abandon_s:g} s of SIGKILL; "
            "it is stuck in the kernel and this host needs attention"
        )
        self._tell(messages.NodeLeft(why, is_clear=False))
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
            self._go_on_if_stopped(now)

    # --- what now? ----------------------------------------------------------------------------------------------------

    def _after_success(self) -> None:
        """All our workers succeeded and nothing of them is left."""
        state = self.state
        state.phase = Phase.DONE
        self._tell(messages.NodeSucceeded(state.generation))
        if state.decided is not None:
            self._end_as_decided(state.decided)
        elif state.cancelled_by and (state.has_ended_elsewhere or not self._is_alone()):
            self._leave()  # alone, our success is the run's, and the verdict is on its way
        elif state.has_ended_elsewhere:
            self._join()

    def _is_alone(self) -> bool:
        return self.state.assignment is not None and self.state.assignment.group_world_size == 1

    def _go_on_if_stopped(self, now: float) -> None:
        state = self.state
        if state.phase is not Phase.STOPPING or not state.cleared or state.unexamined:
            return
        state.failures.sort(key=by_cause)
        self._tell(stopped_message(state, now))
        if state.decided is not None:
            self._end_as_decided(state.decided)
        elif state.cancelled_by:
            self._leave()
        else:
            self._join()

    def _leave(self) -> None:
        verdict = self._own_verdict(Outcome.CANCELLED, why_asked(self.state))
        self._tell(messages.NodeLeft(verdict.why))
        self._end(verdict)

    def _on_signal(self, signal: int, grace_s: float, now: float) -> None:
        state = self.state
        if state.cancelled_by:
            if state.phase is Phase.DONE:
                self._leave()
            elif signal in _HURRY:
                self._hurry(now)
            return
        state.cancelled_by = signal
        match state.phase:
            case Phase.RUNNING:
                why = why_asked(self.state)
                self._tell(messages.NodeDraining(state.generation, grace_s, why))
                self._pass_on_notice("", why, grace_s)
                self._stop(signal, why, grace_s, now)
            case Phase.NEW | Phase.JOINING | Phase.DONE:
                self._leave()
            case Phase.CLOSING:
                self._kill("asked to stop after all workers had succeeded", now)
            case Phase.STOPPING | Phase.ENDED:
                # Already on the way down; the verdict will say that it was cancelled.
                if Deadline.GRACE in state.deadlines:
                    state.deadlines[Deadline.GRACE] = min(state.deadlines[Deadline.GRACE], now + grace_s)

    def _on_leave_requested(self, why: str, now: float) -> None:
        if not self.state.cancelled_by:
            self.state.leave_why = why
        self._on_signal(SIGTERM, self.state.settings.grace_s, now)

    def _hurry(self, now: float) -> None:
        """Asked to stop a second time: no grace, and no wait for evidence either."""
        self._kill("asked to stop a second time", now)
        if self.state.cleared:
            self._stop_examining(now)

    def _stop_examining(self, now: float) -> None:
        self.state.deadlines.pop(Deadline.EXAMINE, None)
        self.state.unexamined.clear()
        self._go_on_if_stopped(now)

    def _on_time_passed(self, now: float) -> None:
        due = [deadline for deadline, at in self.state.deadlines.items() if at <= now]
        for deadline in due:
            del self.state.deadlines[deadline]
        for deadline in due:
            if self.state.phase is Phase.ENDED:
                return
            match deadline:
                case Deadline.GRACE:
                    self._kill("not gone within the grace period", now)
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
        """How it ended for this node alone."""
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
        """If it is the end of this node alone, with what was found out about its workers since."""
        self._end(self._own_verdict(verdict.outcome, verdict.why) if self.state.is_refused else verdict)

    def _end(self, verdict: Verdict) -> None:
        state = self.state
        state.phase = Phase.ENDED
        state.deadlines.clear()
        state.verdict = verdict
        self._orders.append(commands.Finish(verdict))

    def _global_rank(self, local_rank: int) -> int:
        return global_rank(self.state, local_rank)


def lateness(event: events.ScopeExpired) -> str:
    """What the worker did not do, as the rest of a sentence that begins with its name."""
    scope = event.scope
    if len(scope) > _MAX_OF_SCOPE:
        scope = "..." + scope[-_MAX_OF_SCOPE:]  # of a file and a line, the end says more
    in_time = f"within {event.after_s:g} s" if event.after_s > 0 else "in time"
    return f"did not leave the scope {scope!r} {in_time}"


def global_rank(state: AgentState, local_rank: int) -> int:
    return (state.assignment.first_global_rank if state.assignment else 0) + local_rank


def stopped_workers(state: AgentState) -> tuple[Stopped, ...]:
    """Those that we ended. Never failures. Of many, only some show their stacks: messages between hosts are bounded."""
    failed = {failure.local_rank for failure in state.failures}
    stopped = [
        Stopped(worker.local_rank, global_rank(state, worker.local_rank), worker.pid, worker.exit_code, worker.stacks)
        for worker in state.workers.values()
        if worker.asked_to_end and worker.local_rank not in failed
    ]
    return (*stopped[:_MAX_STACKS], *(each.brief() for each in stopped[_MAX_STACKS:]))


def is_started(state: AgentState) -> bool:
    return all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())


def quiet_message(generation: int, stillness: Stillness, now: float) -> messages.NodeQuiet:
    return messages.NodeQuiet(generation, now, stillness.since, stillness.why)


def running_message(state: AgentState) -> messages.WorkersRunning:
    return messages.WorkersRunning(state.generation, tuple(worker.pid for worker in state.workers.values()))


def why_asked(state: AgentState) -> str:
    """Why this node leaves."""
    why = state.leave_why
    return f"an operator wants this node to leave: {why}" if why else "the agent was asked to stop"


def stopped_message(state: AgentState, now: float) -> messages.NodeStopped:
    return messages.NodeStopped(
        state.generation, now, truncate_failures(state.failures), stopped_workers(state), state.was_cut_off
    )


def words_on_connecting(state: AgentState, node: messages.NodeInfo, now: float) -> list[messages.FromNode]:
    """Everything that a coordinator must know of this node, said again: it may be a new one, or have missed some of it.

    Derived from the state alone, so nothing has to be kept for the time without a connection.
    """
    part = state.assignment
    words: list[messages.FromNode] = [
        messages.NodeJoined(
            node,
            generation=state.generation,
            is_running=state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING),
            is_free=state.is_free,
            has_succeeded=state.phase is Phase.DONE,
            group_rank=part.group_rank if part else -1,
            group_world_size=part.group_world_size if part else 0,
            coordinator_rank=part.coordinator_rank if part else -1,
            restarts_used=state.restarts_used,
            store=part.store if part else "",
        )
    ]
    if state.phase is Phase.RUNNING and is_started(state):
        words.append(running_message(state))
        if state.stillness is not None:
            words.append(quiet_message(state.generation, state.stillness, now))
        elif state.settings.on_hang != "off":
            words.append(messages.NodeBusy(state.generation))  # the one before may have been told the opposite
    elif state.phase is Phase.STOPPING:
        words += [messages.FailureSeen(state.generation, failure, now) for failure in state.failures[:1]]
        if state.cancelled_by:
            words.append(messages.NodeDraining(state.generation, state.settings.grace_s, why_asked(state)))
    elif state.phase is Phase.JOINING:
        if state.failures or state.was_cut_off:
            words.append(stopped_message(state, now))
        words.append(messages.NodeReady(state.generation))
    return words


def _on_our_clock(verdict: Verdict, by_s: float) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        failures=tuple(failure.shifted(by_s) for failure in verdict.failures),
        earlier=tuple(failure.shifted(by_s) for failure in verdict.earlier),
    )
