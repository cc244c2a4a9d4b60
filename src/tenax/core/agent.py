"""The agent machine: the life of one node.

    NEW -> JOINING -> RUNNING -> STOPPING -> JOINING ...     a failed generation that is tried again
                         |          |-----> PAUSED -> JOINING   ... after a pause
                         |          '-----> ENDED            given up, cancelled, abandoned
                         '-------> CLOSING -> ENDED          every worker succeeded

It decides when workers start and stop, how hard they are pushed (the kill ladder: ask -> clear -> kill -> abandon),
whether a failure is tried again (it asks the policy), and when and how the run ends. It does not know what a process, a
log or a socket is, and it never reads a clock: the time of each event is an argument.

What always holds (tests cite the numbers; ``invariants.py`` checks them after every step):

A1  Workers of a generation start only when the node was cleared of every earlier one.
A2  Generations only grow, by one, and each starts its workers at most once.
A3  Restarts used never exceed what the policy granted; with the budget policy, never ``max_restarts``.
A4  After the verdict nothing is ordered any more.
A5  A verdict comes only when the node is clear, or says what was left (ABANDONED) or that our hold was lost (BROKEN).
A6  A FAILED verdict names at least one failure, the first cause first; no worker is both failed and stopped.
A7  While processes are awaited a deadline stands: no wait is without end.
A8  The kill ladder only climbs.
A9  A fact of another generation changes nothing.
"""

from __future__ import annotations

import enum

import msgspec

from tenax.core import commands as order
from tenax.core import events as fact
from tenax.core.commands import AnyCommand
from tenax.core.events import AnyEvent
from tenax.core.model import (
    AgentSettings,
    Assignment,
    Evidence,
    Failure,
    Outcome,
    Stopped,
    Verdict,
    WorkerPhase,
    WorkerRecord,
)
from tenax.core.policy import AnyDecision, BudgetPolicy, GiveUp, History, RestartPolicy, Wait

SIGINT, SIGQUIT, SIGKILL, SIGTERM = 2, 3, 9, 15  # the same on every system we run on; the core imports no `signal`
_HURRY = (SIGINT, SIGQUIT)
_HISTORY_KEPT = 100


class Phase(enum.Enum):
    NEW = "new"
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    CLOSING = "closing"
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
    PAUSE = "pause"  # the policy's pause is over


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
    failures: list[Failure] = []  # of this generation, in the order seen
    unexamined: set[int] = set()  # local ranks whose evidence is still being gathered
    restarts_used: int = 0
    earlier: list[Failure] = []  # first causes of earlier generations
    cancelled_by: int = 0  # the signal that asked us to stop
    deadlines: dict[Deadline, float] = {}
    decision: AnyDecision | None = None  # the policy's last answer
    verdict: Verdict | None = None

    def next_deadline(self) -> float | None:
        """When the loop must wake up at the latest."""
        return min(self.deadlines.values(), default=None)


class AgentMachine:
    """``step(event, now)`` returns the orders that follow. One instance per run."""

    def __init__(self, settings: AgentSettings, policy: RestartPolicy | None = None) -> None:
        self.state = AgentState(settings)
        self._policy = policy or BudgetPolicy()
        self._orders: list[AnyCommand] = []

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Take one fact, return what to do about it."""
        self._orders = []
        if self.state.phase is not Phase.ENDED and not self._is_stale(event):
            self._take(event, now)
        return self._orders

    def _is_stale(self, event: AnyEvent) -> bool:
        """A late echo of an older generation. The one place where such are dropped (A9)."""
        generation = getattr(event, "generation", None)
        return generation is not None and generation != self.state.generation

    def _take(self, event: AnyEvent, now: float) -> None:
        match event:
            case fact.RunRequested():
                self._on_run_requested()
            case fact.GenerationFormed(assignment):
                self._on_generation_formed(assignment, now)
            case fact.JoinRefused(reason):
                self._on_join_refused(reason)
            case fact.WorkerStarted(_, local_rank, pid):
                self._on_worker_started(local_rank, pid)
            case fact.WorkerStartFailed(_, local_rank, reason, exit_code):
                fault = f"could not be started: {reason}"
                self._on_worker_ended(local_rank, exit_code, fault, now, unasked=True)
            case fact.WorkerExited(_, local_rank, exit_code, fault, unasked, wrote_error):
                self._on_worker_ended(local_rank, exit_code, fault, now, unasked=unasked, wrote_error=wrote_error)
            case fact.FailureExamined(_, local_rank, evidence):
                self._on_failure_examined(local_rank, evidence, now)
            case fact.NodeCleared():
                self._on_node_cleared(now)
            case fact.SignalReceived(signal, grace_s):
                self._on_signal(signal, self.state.settings.grace_s if grace_s is None else grace_s, now)
            case fact.KeeperLost(reason):
                self._end(Outcome.BROKEN, f"the keeper of the workers was lost: {reason}")
            case fact.TimePassed():
                self._on_time_passed(now)

    # --- joining ------------------------------------------------------------------------------------------------------

    def _on_run_requested(self) -> None:
        if self.state.phase is Phase.NEW:
            self._join("first generation")

    def _join(self, why: str) -> None:
        self.state.phase = Phase.JOINING
        self._orders.append(order.Join(self.state.generation + 1, why))

    def _on_generation_formed(self, assignment: Assignment, now: float) -> None:
        state = self.state
        if state.phase is not Phase.JOINING or assignment.generation != state.generation + 1:
            return
        state.phase = Phase.RUNNING
        state.assignment = assignment
        state.generation = assignment.generation
        state.running_since = now
        state.workers = {rank: WorkerRecord(rank) for rank in range(state.settings.local_world_size)}
        state.rung = Rung.NONE
        state.cleared = False
        state.failures = []
        state.unexamined = set()
        state.decision = None
        self._orders.append(order.StartWorkers(assignment, state.restarts_used))

    def _on_join_refused(self, reason: str) -> None:
        if self.state.phase is Phase.JOINING:
            self._end(Outcome.BROKEN, f"the rendezvous refused this node: {reason}")

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_worker_started(self, local_rank: int, pid: int) -> None:
        worker = self.state.workers.get(local_rank)
        if worker is not None and worker.phase is WorkerPhase.REQUESTED:
            worker.phase = WorkerPhase.RUNNING
            worker.pid = pid

    def _on_worker_ended(
        self, local_rank: int, exit_code: int, fault: str, now: float, *, unasked: bool, wrote_error: bool = False
    ) -> None:
        state = self.state
        worker = state.workers.get(local_rank)
        if worker is None or worker.phase is WorkerPhase.ENDED:
            return
        worker.phase = WorkerPhase.ENDED
        worker.exit_code = exit_code
        worker.ended_at = now
        # What never came to life, or had ended already, was not ended by us, whatever we had asked for meanwhile.
        worker.asked_to_end = state.rung >= Rung.ASKED and not unasked
        if state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return  # seen after its generation was decided upon: for the record only
        if exit_code != 0 or fault:
            self._note_bad_end(worker, fault, wrote_error, now)
        if state.phase is Phase.RUNNING and state.failures:
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
        elif worker.exit_code in (-state.stop_signal, -SIGKILL) and not wrote_error:
            return  # our own doing: nothing to find out
        state.unexamined.add(worker.local_rank)
        state.deadlines.setdefault(Deadline.EXAMINE, now + state.settings.examine_s)
        self._orders.append(
            order.ExamineFailure(
                generation=state.generation,
                local_rank=worker.local_rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                started_at=state.running_since,
                ended_at=worker.ended_at,
                asked_to_end=worker.asked_to_end,
            )
        )

    def _failure(self, worker: WorkerRecord, fault: str, evidence: Evidence) -> Failure:
        return Failure(
            generation=self.state.generation,
            local_rank=worker.local_rank,
            global_rank=self._global_rank(worker.local_rank),
            pid=worker.pid,
            exit_code=worker.exit_code,
            seen_at=worker.ended_at,
            reason=fault,
            asked_to_end=worker.asked_to_end,
            evidence=evidence,
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
            if evidence.raised_at is not None and evidence.raised_at < state.stopping_since:
                worker = state.workers[local_rank]
                state.failures.append(self._failure(worker, "", evidence))
        self._decide_if_ready(now)

    def _all_workers_ended(self) -> bool:
        return all(worker.phase is WorkerPhase.ENDED for worker in self.state.workers.values())

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
            self._orders.append(order.SignalWorkers(state.generation, signal, why))

    def _clear(self, now: float) -> None:
        state = self.state
        state.rung = Rung.CLEARING
        state.deadlines.setdefault(Deadline.GRACE, now + state.settings.grace_s)
        self._orders.append(order.ClearNode(state.generation))

    def _kill(self, why: str, now: float) -> None:
        state = self.state
        if state.rung >= Rung.KILLED or state.cleared:
            return
        state.rung = Rung.KILLED
        state.deadlines.pop(Deadline.GRACE, None)
        state.deadlines[Deadline.ABANDON] = now + state.settings.abandon_s
        self._orders.append(order.KillNode(state.generation, why))

    def _abandon(self) -> None:
        state = self.state
        state.rung = Rung.ABANDONED
        stuck = tuple(w.pid for w in state.workers.values() if w.phase is not WorkerPhase.ENDED and w.pid)
        named = f"process {', '.join(map(str, stuck))}" if stuck else "a process of the job"
        self._end(
            Outcome.ABANDONED,
            f"{named} did not end within {state.settings.abandon_s:g} s of SIGKILL; "
            "it is stuck in the kernel and this host needs attention",
            stuck_pids=stuck,
        )

    def _on_node_cleared(self, now: float) -> None:
        state = self.state
        if state.rung < Rung.CLEARING or state.cleared:
            return
        state.cleared = True
        state.deadlines.pop(Deadline.GRACE, None)
        state.deadlines.pop(Deadline.ABANDON, None)
        if state.phase is Phase.CLOSING:
            count = state.settings.local_world_size
            self._end(Outcome.SUCCEEDED, "the worker succeeded" if count == 1 else f"all {count} workers succeeded")
        else:
            self._decide_if_ready(now)

    # --- what now? ----------------------------------------------------------------------------------------------------

    def _decide_if_ready(self, now: float) -> None:
        state = self.state
        if state.phase is not Phase.STOPPING or not state.cleared or state.unexamined:
            return
        if state.cancelled_by:
            self._end_cancelled()
            return
        state.failures.sort(key=when_it_began)
        history = History(state.restarts_used, state.settings.max_restarts, tuple(state.earlier))
        decision = state.decision = self._ask_policy(state.failures[0], history)
        if isinstance(decision, GiveUp):
            self._end(Outcome.FAILED, decision.why)
            return
        state.restarts_used += 1
        state.earlier = [*state.earlier[-_HISTORY_KEPT + 1 :], state.failures[0]]
        if isinstance(decision, Wait):
            state.phase = Phase.PAUSED
            state.deadlines[Deadline.PAUSE] = now + decision.seconds
        else:
            self._join(decision.why)

    def _ask_policy(self, failure: Failure, history: History) -> AnyDecision:
        """A policy is somebody's code: what it throws ends the run with a reason, not the agent without one."""
        try:
            return self._policy.decide(failure, history)
        except Exception as error:
            return GiveUp(f"the restart policy {type(self._policy).__name__} raised {type(error).__name__}: {error}")

    def _on_signal(self, signal: int, grace_s: float, now: float) -> None:
        state = self.state
        if state.cancelled_by:
            if signal in _HURRY:
                self._hurry(now)
            return
        state.cancelled_by = signal
        match state.phase:
            case Phase.RUNNING:
                self._stop(signal, "the agent was asked to stop", grace_s, now)
            case Phase.NEW | Phase.JOINING | Phase.PAUSED:
                self._end_cancelled()
            case Phase.CLOSING:
                self._kill("asked to stop after all workers had succeeded", now)
            case Phase.STOPPING | Phase.ENDED:
                # Already on the way down; the verdict will say that it was cancelled.
                if Deadline.GRACE in state.deadlines:
                    state.deadlines[Deadline.GRACE] = min(state.deadlines[Deadline.GRACE], now + grace_s)

    def _hurry(self, now: float) -> None:
        """Asked to stop a second time: no grace, and no wait for evidence either."""
        self._kill("asked to stop a second time", now)
        if self.state.cleared:
            self._stop_examining(now)

    def _stop_examining(self, now: float) -> None:
        self.state.deadlines.pop(Deadline.EXAMINE, None)
        self.state.unexamined.clear()
        self._decide_if_ready(now)

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
                case Deadline.PAUSE:
                    assert self.state.decision is not None
                    self._join(self.state.decision.why)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end_cancelled(self) -> None:
        self._end(Outcome.CANCELLED, "the agent was asked to stop", signal=self.state.cancelled_by)

    def _end(self, outcome: Outcome, why: str, *, signal: int = 0, stuck_pids: tuple[int, ...] = ()) -> None:
        state = self.state
        state.phase = Phase.ENDED
        state.deadlines.clear()
        state.failures.sort(key=when_it_began)
        state.verdict = Verdict(
            outcome=outcome,
            why=why,
            failures=tuple(state.failures),
            stopped=self._stopped_workers(),
            restarts_used=state.restarts_used,
            generation=state.generation,
            signal=signal,
            stuck_pids=stuck_pids,
        )
        self._orders.append(order.Finish(state.verdict))

    def _stopped_workers(self) -> tuple[Stopped, ...]:
        failed = {failure.local_rank for failure in self.state.failures}
        return tuple(
            Stopped(worker.local_rank, self._global_rank(worker.local_rank), worker.pid, worker.exit_code)
            for worker in self.state.workers.values()
            if worker.asked_to_end and worker.local_rank not in failed
        )

    def _global_rank(self, local_rank: int) -> int:
        return (self.state.assignment.first_global_rank if self.state.assignment else 0) + local_rank


def when_it_began(failure: Failure) -> float:
    """An exception that was raised earlier is the earlier cause, however long its process took to die."""
    raised_at = failure.evidence.raised_at
    return failure.seen_at if raised_at is None else min(raised_at, failure.seen_at)
