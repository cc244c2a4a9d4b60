"""The agent machine: the lifecycle of one node.

    NEW -> JOINING -> RUNNING -> STOPPING -> JOINING ...     the generation ended, on this node or elsewhere; workers
                                                             that opted in are held until the next one
                         |          '-----> ENDED            this node leaves, or the run ended
                         '-------> CLOSING -> DONE -> ENDED  all workers on this node succeeded; the run ends when
                                                             those of all nodes have

It decides when workers start and stop, and how a stop escalates (the kill ladder: hold -> signal -> clear -> kill ->
abandon). A worker that opted in is held: it acknowledges the end of its generation, does nothing of it any more, and
takes part in the next one as a survivor. A worker that does not acknowledge it in time is stopped alone.
The coordinator (``coordinator.py``) decides whether there is a next generation and how the run ends. This machine sends
it messages and receives its events, also if both are in one process. It has no access to processes, logs, sockets or a
clock: the time of each event is an argument.

Invariants (tests cite the numbers; ``tenax.testing.agent_invariants`` checks them after every step):

A1  Workers of a generation start only when no process of an earlier one is alive on the node, except held workers,
    which continue in it, and their descendants. A worker is held only if it acknowledged the end of its generation.
A2  Generation numbers only grow. A generation starts its workers once at most, and only if the coordinator formed it.
A3  Messages are true: ready and stopped are sent only when the node is clear, with the workers that it holds; succeeded
    only if every worker succeeded.
A4  No command follows the verdict.
A5  A verdict is reached only when the node is clear and holds no worker, except ABANDONED (a process survived) and
    BROKEN (keeper lost).
A6  A FAILED verdict names at least one failure, first cause first; no worker is both failed and stopped.
A7  Every wait for processes has a deadline.
A8  The kill ladder only escalates.
A9  An event of another generation changes nothing, except the end of one that was formed and has not started here.
A10 A single worker is ended only after one of its scopes expired, or because it is not held although its generation has
    ended, and gets SIGKILL after the grace period at latest.
    Stacks are collected only if a worker is overdue or the coordinator requested them.
A11 The start and the end of a quiet period are each sent once. A request for stacks is answered within a bounded time,
    with locations or with why they are not known. A hang is reported once, and its end only after that.
"""

from __future__ import annotations

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent_state import (
    SIGINT,
    SIGKILL,
    SIGQUIT,
    SIGTERM,
    AgentState,
    Deadline,
    Decided,
    Examination,
    Formed,
    Leave,
    LocalGeneration,
    Phase,
    Rung,
    Stop,
    global_rank,
    is_started,
    messages_on_connecting,
    ready_message,
    ready_messages,
    running_message,
    stopped_message,
    stopped_workers,
)
from tenax._core.agent_stop import GRACE_OVER, UNTIL_HELD, WorkersStop
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import (
    MAX_EARLIER,
    Assignment,
    Evidence,
    Failure,
    Hold,
    Outcome,
    Overdue,
    Verdict,
    WorkerPhase,
    WorkerRecord,
    assert_never,
    by_cause,
    truncate_stacks,
)
from tenax._core.text import format_seconds

__all__ = [
    "SIGINT",
    "SIGKILL",
    "SIGTERM",
    "AgentMachine",
    "AgentState",
    "Deadline",
    "Phase",
    "Rung",
    "global_rank",
    "is_started",
    "messages_on_connecting",
    "overrun",
    "stopped_workers",
]

_EXCEPTION_EXIT_CODE = 1  # of a Python process
_URGENT_SIGNALS = (SIGINT, SIGQUIT)
_MAX_SCOPE_CHARS = 200  # of a scope's name in a message


class AgentMachine(WorkersStop):
    """``step(event, now)`` returns the commands that follow. One instance per run."""

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Handle one event; return the commands that follow."""
        self._commands = []
        if self.state.phase is not Phase.ENDED and not self._is_stale(event):
            self._handle(event, now)
        return self._commands

    def _is_stale(self, event: AnyEvent) -> bool:
        """Whether the event belongs to another generation. The only check of this kind (A9)."""
        generation, formed = getattr(event, "generation", None), self.state.formed
        if formed is not None and isinstance(event, events.GenerationEnded | events.Fenced):
            return generation not in (self.state.generation, formed.assignment.generation)
        return generation is not None and generation != self.state.generation

    def _handle(self, event: AnyEvent, now: float) -> None:
        match event:
            case events.RunRequested() if self.state.phase is Phase.NEW:
                self._join()
            case events.RunRequested() | events.Waiting():
                pass  # the second is for display only
            case events.GenerationFormed(assignment):
                self._on_generation_formed(assignment, now)
            case events.GenerationEnded():
                self._on_generation_ended(event, now)
            case events.RunEnded(verdict, sent_at):
                self._decide(Decided(verdict.shifted(now - sent_at)), now)
            case events.JoinRefused(reason):
                self._decide(Decided(self._own_verdict(Outcome.BROKEN, reason), is_refused=True), now)
            case events.Fenced(_, why):
                self._on_fenced(why, now)
            case events.LeaveNoticed(_, host, why, in_s):
                self._forward_notice(host, why, in_s)
            case events.NoticeReceived(why, in_s):
                self._send(messages.NodeWillLeave(self.state.generation, why, in_s))
                self._forward_notice("", why, in_s)
            case events.LeaveRequested(why):
                self._on_leave_requested(Leave(SIGTERM, why), None, now)
            case events.ProgressSeen():
                self._forward_progress(event, now)
            case events.WorkerEvent(_, local_rank):
                if (worker := self.state.workers.get(local_rank)) is not None:
                    self._handle_worker_event(worker, event, now)
            case events.NodeCleared(_, held, number):
                if number in (0, self.state.last.clears):  # else the reply to an earlier command
                    self._on_node_cleared(held, now)
            case events.SignalReceived(signal, grace_s):
                self._on_leave_requested(Leave(signal), grace_s, now)
            case events.KeeperLost(reason):
                why = f"the keeper was lost: {reason}"
                self._send(messages.NodeLeft(why, is_clear=False))  # this process may stay to host the coordinator
                self._end(self._own_verdict(Outcome.BROKEN, why))
            case events.Tick():
                self._on_tick(now)
            case _:
                self._handle_hang_event(event, now)

    # --- joining ------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._enter(Phase.JOINING)
        self.state.last.is_reported = True
        self._send(ready_message(self.state))

    def _on_generation_formed(self, assignment: Assignment, now: float) -> None:
        state = self.state
        if assignment.generation <= (state.formed.assignment.generation if state.formed else state.generation):
            return
        is_ending = state.leave is not None or state.decided is not None
        if state.phase is Phase.JOINING and state.cleared:
            self._start(assignment, now)
        elif is_ending:
            pass
        elif state.phase is Phase.JOINING or (state.phase is Phase.STOPPING and state.last.is_reported):
            state.formed = Formed(assignment)  # it starts when the node is clear

    def _start_formed(self, formed: Formed, now: float) -> None:
        """Start the generation that was formed while this node was not clear, or report that it has ended."""
        state = self.state
        if not formed.has_ended:
            self._start(formed.assignment, now)
            return
        state.formed = None
        self._remember_failure()
        state.last = LocalGeneration(
            formed.assignment,
            now,
            stop=Stop(is_clear=True),
            has_ended=True,
            is_uncharged=formed.is_uncharged,
            was_cut_off=formed.was_cut_off,
        )
        self._report_stopped(now)

    def _start(self, assignment: Assignment, now: float) -> None:
        state = self.state
        self._remember_failure()
        workers = {rank: WorkerRecord(rank) for rank in range(state.settings.local_world_size)}
        survivors = state.last.held()
        for rank in survivors:
            before = state.workers[rank]
            assert before.hold is not None, "a held worker has opted in"
            workers[rank] = WorkerRecord(rank, pid=before.pid, hold=Hold(before.hold.timeout_s), is_survivor=True)
        state.last, state.formed = LocalGeneration(assignment, now, workers), None
        self._enter(Phase.RUNNING)
        self._commands.append(commands.StartWorkers(assignment, survivors))

    def _remember_failure(self) -> None:
        """Before the next generation: keep the first failure of the last one."""
        state = self.state
        state.earlier = [*state.earlier, *(failure.brief() for failure in state.failures[:1])][-MAX_EARLIER:]

    # --- decisions of the coordinator ---------------------------------------------------------------------------------

    def _on_generation_ended(self, ended: events.GenerationEnded, now: float) -> None:
        state, formed = self.state, self.state.formed
        if formed is not None and ended.generation == formed.assignment.generation:
            formed.has_ended, formed.is_uncharged = True, formed.is_uncharged or ended.is_uncharged
            self._stop_held(SIGTERM, ended.why, state.settings.grace_s, now)
            return
        state.last.is_uncharged |= ended.is_uncharged
        state.last.has_ended = True
        if ended.is_late and state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
            self._on_fenced(ended.why, now)
        elif state.phase is Phase.RUNNING:
            self._end_generation(ended.why, now, stops=ended.stops, hung=ended.hung)
        elif ended.stops and state.phase in (Phase.STOPPING, Phase.JOINING):
            is_stopping = self._stop_held(SIGTERM, ended.why, state.settings.grace_s, now)
            if not is_stopping and any(worker.hold is not None for worker in state.workers.values()):
                self._send(ready_message(state))  # the held workers have exited since it was sent
        elif state.phase is Phase.DONE:
            self._proceed()

    def _decide(self, decided: Decided, now: float) -> None:
        state, verdict = self.state, decided.verdict
        if state.decided is not None:
            return  # a run ends once; a link that breaks after that changes nothing
        state.decided = decided
        if state.formed is not None:
            state.formed.has_ended = True
        why, grace_s = f"the run {verdict.outcome.text}: {verdict.why}", state.settings.grace_s
        if state.phase is Phase.RUNNING:
            self._stop(SIGTERM, why, grace_s, now)
        elif not self._stop_held(SIGTERM, why, grace_s, now) and state.phase in (Phase.NEW, Phase.JOINING, Phase.DONE):
            self._end_as_decided(decided)

    def _on_fenced(self, why: str, now: float) -> None:
        """Kill without a grace period: the other nodes may be about to start without this one."""
        state = self.state
        if state.phase is Phase.RUNNING:
            self._enter(Phase.STOPPING)
            state.last.stop = Stop(Rung.SIGNALLED, now, SIGKILL)
        state.last.was_cut_off |= state.phase is Phase.STOPPING and not state.last.is_reported
        if state.formed is not None:
            state.formed.has_ended = state.formed.was_cut_off = True
        self._give_up_held()
        # DONE stays DONE. If the others continued without this node, the coordinator reports it on reconnecting.
        if state.phase in (Phase.STOPPING, Phase.CLOSING):
            self._kill(why, now)

    def _forward_progress(self, seen: events.ProgressSeen, now: float) -> None:
        if self.state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
            self._send(messages.NodeProgress(seen.generation, now, seen.workers))

    def _forward_notice(self, host: str, why: str, in_s: float | None) -> None:
        if self.state.phase is Phase.RUNNING:
            self._commands.append(commands.ForwardNotice(self.state.generation, host, why, in_s))

    # --- workers ------------------------------------------------------------------------------------------------------

    def _handle_worker_event(self, worker: WorkerRecord, event: events.AnyWorkerEvent, now: float) -> None:
        match event:
            case events.WorkerStarted(pid=pid):
                self._on_worker_started(worker, pid)
            case events.WorkerExited() | events.WorkerStartFailed():
                self._on_worker_ended(worker, _as_exit(event), now)
            case events.WorkerOptedIn(timeout_s=timeout_s):
                if self.state.phase is Phase.RUNNING and worker.phase is not WorkerPhase.ENDED:
                    worker.hold = Hold(timeout_s)
            case events.WorkerOptedOut():
                self._on_opted_out(worker, now)
            case events.WorkerHeld(step=step):
                self._on_worker_held(worker, step, now)
            case events.FailureExamined(evidence=evidence):
                self._on_failure_examined(worker, evidence, now)
            case events.WorkerRaised():
                if worker.phase is WorkerPhase.RUNNING:
                    worker.has_raised = True
                    self._shorten_grace(now)
            case events.LastLinesRead(lines=lines, log_file=log_file):
                worker.last_lines, worker.log_file = lines, log_file
            case events.ScopeExpired():
                self._on_scope_expired(worker, event, now)
            case events.StacksRefused(why=why):
                self._on_stacks_refused(worker, why, now)
            case _:
                assert_never(event)

    def _on_worker_started(self, worker: WorkerRecord, pid: int) -> None:
        if worker.phase is WorkerPhase.HELD and not worker.pid:
            worker.pid = pid
        elif worker.phase is WorkerPhase.REQUESTED:
            worker.phase = WorkerPhase.RUNNING
            worker.pid = pid
            if self.state.phase is Phase.RUNNING and is_started(self.state):
                self._send(running_message(self.state))

    def _on_worker_ended(self, worker: WorkerRecord, exited: events.WorkerExited, now: float) -> None:
        state = self.state
        if worker.phase is WorkerPhase.ENDED:
            return
        leaves_held = worker.local_rank in state.last.held()
        worker.phase = WorkerPhase.ENDED
        worker.exit_code = exited.exit_code
        worker.ended_at = now if exited.ended_at is None else min(exited.ended_at, now)
        # A worker that could not start, or exited before the stop request reached it, was not stopped by the agent.
        is_stopped_alone = worker.hold is not None and worker.hold.sent != 0
        is_stopped = state.last.stop.rung >= Rung.SIGNALLED or is_stopped_alone
        has_acknowledged = worker.hold is not None and worker.hold.has_acknowledged
        worker.was_stopped = has_acknowledged or (is_stopped and not exited.before_stop)
        overdue, fault = worker.overdue, exited.fault
        if overdue is not None and (exited.exit_code < 0 or (overdue.sent and not exited.before_stop)):
            # The expired scope is the cause, even if the worker was stopped for another reason meanwhile.
            overdue.is_cause, worker.was_stopped, fault = True, False, overdue.reason
        if leaves_held and state.last.stop.rung is Rung.HELD:
            self._clear_again(now)
        if state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return  # the outcome of this generation is already decided
        if not has_acknowledged and (exited.exit_code != 0 or fault or self._has_stacks_to_show(worker)):
            self._record_bad_exit(worker, fault, exited.wrote_error, now)
        if state.phase is Phase.RUNNING and state.failures:
            self._send(messages.FailureSeen(state.generation, state.failures[0], now))
            self._end_generation(f"rank {state.failures[0].global_rank} failed", now)
        elif state.last.stop.rung is Rung.HOLDING:
            self._clear_if_held(now)
        elif state.last.have_all_ended():
            if state.phase is Phase.RUNNING:
                self._enter(Phase.CLOSING)
                self._clear(now)
            elif state.last.stop.rung is Rung.SIGNALLED:
                self._clear(now)
        else:
            self._shorten_grace(now)

    def _record_bad_exit(self, worker: WorkerRecord, fault: str, wrote_error: bool, now: float) -> None:
        """Record a failure. If the worker was stopped, only examine whether it had failed by itself before."""
        state = self.state
        if not worker.was_stopped:
            state.failures.append(self._failure(worker, fault, Evidence()))
        elif worker.exit_code in self._stop_codes(worker) and not wrote_error and not self._has_stacks_to_show(worker):
            return  # the stop signal ended it: nothing to examine
        state.last.examination.ranks.add(worker.local_rank)
        state.last.examination.until = now + state.settings.examine_s  # each worker gets the full time
        self._commands.append(
            commands.ExamineFailure(
                generation=state.generation,
                local_rank=worker.local_rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                started_at=state.last.formed_at,
                ended_at=worker.ended_at,
                was_stopped=worker.was_stopped,
            )
        )

    def _stop_codes(self, worker: WorkerRecord) -> list[int]:
        """Return the exit codes of a worker that the stop signals ended."""
        sent = (self.state.last.stop.signal, worker.hold.sent if worker.hold is not None else 0, SIGKILL)
        return [-signal for signal in sent if signal]

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

    def _on_failure_examined(self, worker: WorkerRecord, evidence: Evidence, now: float) -> None:
        state, examination = self.state, self.state.last.examination
        if worker.local_rank not in examination.ranks:
            return
        examination.ranks.discard(worker.local_rank)
        if not examination.ranks:
            examination.until = None
        for index, failure in enumerate(state.failures):
            if failure.local_rank == worker.local_rank:
                state.failures[index] = msgspec.structs.replace(failure, evidence=evidence)
                break
        else:
            # It was stopped. Its error file may prove that it had failed by itself before that.
            worker.stacks = truncate_stacks(evidence.stacks)
            if evidence.raised_at is not None and evidence.raised_at < state.last.stop.since:
                state.failures.append(self._failure(worker, "", evidence))
        self._continue_if_stopped(now)

    def _shorten_grace(self, now: float) -> None:
        """Do not wait the whole grace period for workers that have all raised an exception after a failure.

        Nothing of the script runs in them any more. A library may wait at exit for a peer that is gone.
        """
        state, stop = self.state, self.state.last.stop
        running = [worker for worker in state.workers.values() if worker.phase is not WorkerPhase.ENDED]
        if state.phase is not Phase.STOPPING or stop.rung is not Rung.SIGNALLED or stop.until is None:
            return
        if state.leave is not None or state.last.is_uncharged or not all(worker.has_raised for worker in running):
            return
        if now + state.settings.exit_s < stop.until:
            stop.until, stop.is_short = now + state.settings.exit_s, True

    # --- expired scopes -----------------------------------------------------------------------------------------------

    def _on_scope_expired(self, worker: WorkerRecord, event: events.ScopeExpired, now: float) -> None:
        """Collect the stacks of all workers before the overdue one is sent its signal.

        The first overdue worker may be waiting for another one that expires later or has no scope.
        """
        state = self.state
        if state.phase is not Phase.RUNNING or worker.phase is not WorkerPhase.RUNNING:
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

    def _on_stacks_refused(self, worker: WorkerRecord, why: str, now: float) -> None:
        worker.stacks_asked_at = None
        last, overdue = self.state.last, worker.overdue
        if last.hang.request is not None:
            last.hang.request.unknown[worker.local_rank] = why
        is_alone = worker.phase is not WorkerPhase.ENDED and last.stop.rung < Rung.KILLED
        if overdue is not None and not overdue.sent and is_alone:
            overdue.reason += f" (no stacks: {why})"
            self._escalate(worker, overdue, now)

    def _escalate(self, worker: WorkerRecord, overdue: Overdue, now: float) -> None:
        """Send the next signal: the one its scope requests, then SIGKILL. After that, stop all workers."""
        state = self.state
        if overdue.sent == SIGKILL:
            overdue.until = None
            if state.phase is Phase.RUNNING:
                why = f"rank {self._global_rank(worker.local_rank)} survived SIGKILL"
                self._stop(SIGTERM, why, state.settings.grace_s, now)
            return
        why = overdue.reason if not overdue.sent else GRACE_OVER
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
            at = worker.escalates_at
            if worker.overdue is not None and at is not None and at <= now and self.state.last.stop.rung < Rung.KILLED:
                self._escalate(worker, worker.overdue, now)

    # --- the node is clear, or cannot be cleared ----------------------------------------------------------------------

    def _abandon(self) -> None:
        state = self.state
        state.last.stop.rung = Rung.ABANDONED
        stuck = tuple(w.pid for w in state.workers.values() if w.phase is not WorkerPhase.ENDED and w.pid)
        named = f"process {', '.join(map(str, stuck))}" if stuck else "a process of the job"
        survived = f"{named} survived SIGKILL for {format_seconds(state.settings.abandon_s)}"
        why = f"{survived}: stuck in the kernel; check this host"
        self._send(messages.NodeLeft(why, is_clear=False))
        self._end(self._own_verdict(Outcome.ABANDONED, why, stuck_pids=stuck))

    def _on_node_cleared(self, held: tuple[int, ...], now: float) -> None:
        state, stop = self.state, self.state.last.stop
        if (stop.rung < Rung.CLEARING and stop.rung is not Rung.HELD) or stop.is_clear:
            return
        if held != (state.last.held() if stop.rung is Rung.HELD else ()):
            return  # the reply to an earlier command; the reply to the last one follows
        stop.is_clear, stop.until = True, None
        if state.phase is Phase.CLOSING:
            self._after_success()
        elif state.phase is Phase.JOINING and state.formed is not None:
            self._start_formed(state.formed, now)
        elif state.phase is Phase.JOINING:  # ready with fewer workers than before
            for message in ready_messages(state, now):
                self._send(message)
        else:
            self._continue_if_stopped(now)

    # --- after the workers have exited --------------------------------------------------------------------------------

    def _after_success(self) -> None:
        """All workers of this node succeeded, and the node is clear."""
        state = self.state
        self._enter(Phase.DONE)
        self._send(messages.NodeSucceeded(state.generation))
        # A node that is alone stays: its success ends the run, and the verdict follows.
        is_alone = state.assignment is not None and state.assignment.group_world_size == 1
        if state.decided is not None or state.last.has_ended or (state.leave is not None and not is_alone):
            self._proceed()

    def _continue_if_stopped(self, now: float) -> None:
        state = self.state
        if state.phase is not Phase.STOPPING or not state.cleared or state.last.examination.ranks:
            return
        state.failures.sort(key=by_cause)
        if state.formed is not None:
            self._start_formed(state.formed, now)
        else:
            self._report_stopped(now)

    def _report_stopped(self, now: float) -> None:
        self._send(stopped_message(self.state, now))
        self._proceed()

    def _proceed(self) -> None:
        """End, leave, or join the next generation."""
        state = self.state
        if state.decided is not None:
            self._end_as_decided(state.decided)
        elif state.leave is not None:
            self._leave(state.leave)
        else:
            self._join()

    def _leave(self, leave: Leave) -> None:
        self._send(messages.NodeLeft(leave.reason()))
        self._end(self._own_verdict(Outcome.CANCELLED, leave.reason(is_local=True)))

    def _on_leave_requested(self, leave: Leave, grace_s: float | None, now: float) -> None:
        state, stop = self.state, self.state.last.stop
        grace_s = state.settings.grace_s if grace_s is None else grace_s
        if state.leave is not None:
            if state.phase is Phase.DONE:
                self._leave(state.leave)
            elif leave.signal in _URGENT_SIGNALS:
                self._on_second_signal(now)
            return
        state.leave, state.formed = leave, None
        if state.phase is not Phase.RUNNING and stop.rung in UNTIL_HELD:
            self._stop_held(leave.signal, leave.reason(is_local=True), grace_s, now)
            return
        match state.phase:
            case Phase.RUNNING:
                self._send(messages.NodeDraining(state.generation, grace_s, leave.reason()))
                why = leave.reason(is_local=True)
                self._forward_notice("", why, grace_s)
                self._stop(leave.signal, why, grace_s, now)
            case Phase.JOINING if not state.cleared:
                self._enter(Phase.STOPPING)
            case Phase.NEW | Phase.JOINING | Phase.DONE:
                self._leave(leave)
            case Phase.CLOSING:
                self._kill("stop requested after all workers had succeeded", now)
            case Phase.STOPPING | Phase.ENDED:
                # Already stopping; the verdict will be CANCELLED.
                if stop.until is not None and stop.rung < Rung.KILLED:
                    stop.until = min(stop.until, now + grace_s)
            case _:
                assert_never(state.phase)

    def _on_second_signal(self, now: float) -> None:
        """On a second stop request, kill at once and do not wait for evidence."""
        self._kill("second stop request", now)
        if self.state.cleared:
            self._stop_examining(now)

    def _stop_examining(self, now: float) -> None:
        self.state.last.examination = Examination()
        self._continue_if_stopped(now)

    def _on_tick(self, now: float) -> None:
        for deadline in [deadline for deadline, at in self.state.deadlines.items() if at <= now]:
            if self.state.phase is Phase.ENDED:
                return
            match deadline:
                case Deadline.HOLD:
                    self._on_hold_due(now)
                case Deadline.GRACE:
                    self._kill(self._why_kill(), now)
                case Deadline.ABANDON:
                    self._abandon()
                case Deadline.EXAMINE:
                    self._stop_examining(now)
                case Deadline.OVERDUE:
                    self._on_overdue(now)
                case Deadline.STACKS:
                    self._on_stacks_due(now)
                case _:
                    assert_never(deadline)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _own_verdict(self, outcome: Outcome, why: str, *, stuck_pids: tuple[int, ...] = ()) -> Verdict:
        """Return a verdict for this node alone."""
        state, leave = self.state, self.state.leave
        is_cancelled = outcome is Outcome.CANCELLED and leave is not None and not leave.why
        return Verdict(
            outcome=outcome,
            why=why,
            failures=tuple(sorted(state.failures, key=by_cause)),
            stopped=stopped_workers(state),
            restarts_used=state.restarts_used,
            generation=state.generation,
            signal=leave.signal if leave is not None and is_cancelled else 0,
            earlier=tuple(state.earlier),
            stuck_pids=stuck_pids,
        )

    def _end_as_decided(self, decided: Decided) -> None:
        """End with the coordinator's verdict, or if this node was refused, with its own and the evidence since then.

        A refused node sends that it has left: the coordinator may be waiting for it, in a process that does not exit.
        """
        verdict = decided.verdict
        if decided.is_refused:
            self._send(messages.NodeLeft(verdict.why, was_refused=True))
            verdict = self._own_verdict(verdict.outcome, verdict.why)
        self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        state = self.state
        self._enter(Phase.ENDED)
        state.verdict = verdict
        self._commands.append(commands.Finish(verdict))


def _as_exit(failed: events.WorkerExited | events.WorkerStartFailed) -> events.WorkerExited:
    if isinstance(failed, events.WorkerExited):
        return failed
    fault = f"could not be started: {failed.reason}"
    where = (failed.generation, failed.local_rank)
    return events.WorkerExited(*where, failed.exit_code, fault, before_stop=True, ended_at=failed.ended_at)


def overrun(event: events.ScopeExpired) -> str:
    """Return which scope the worker did not leave in time, as the predicate of a sentence about the worker."""
    scope = event.scope
    if len(scope) > _MAX_SCOPE_CHARS:
        scope = "..." + scope[-_MAX_SCOPE_CHARS:]  # for a file and line, the end is more specific
    in_time = f"within {format_seconds(event.after_s)}" if event.after_s > 0 else "in time"
    return f"did not leave the scope {scope!r} {in_time}"
