"""The stop of a generation's workers on one node: which are held, and how the stop of the others escalates.

Part of the agent machine (``agent.py``, invariants A1, A5, A7, A8 and A10). The steps are those of ``Rung``: hold the
workers that opted in, signal, clear what exited workers left behind, kill. It does not decide that a generation ends,
and not what follows when the node is clear.
"""

from __future__ import annotations

from tenax._core import commands
from tenax._core.agent_hangs import HangObserver
from tenax._core.agent_state import SIGKILL, SIGTERM, Phase, Rung, Stop
from tenax._core.model import Hold, WorkerPhase, WorkerRecord
from tenax._core.text import format_seconds

GRACE_OVER = "the grace period is over"
UNTIL_HELD = (Rung.HOLDING, Rung.HELD)
_NOT_IN_LOOP = "it has not entered elastic.generations(), or has left it"


class WorkersStop(HangObserver):
    """The decisions about holding, signalling, clearing and killing the workers of the current generation."""

    # --- held workers -------------------------------------------------------------------------------------------------

    def _on_opted_out(self, worker: WorkerRecord, now: float) -> None:
        """The worker cannot be held any more. It may be exiting, so it is not stopped before its time has passed."""
        state = self.state
        if worker.hold is None:
            return
        if state.phase is Phase.RUNNING:
            worker.hold = None
        elif worker.local_rank in state.last.held():
            if state.last.stop.rung is Rung.HOLDING:
                worker.phase = WorkerPhase.RUNNING
                worker.hold.until = now + worker.hold.timeout_s
            else:
                worker.hold.sent = SIGKILL
                self._clear_again(now)  # which kills it

    def _on_worker_held(self, worker: WorkerRecord, step: int, now: float) -> None:
        rung = self.state.last.stop.rung
        if rung not in (Rung.HOLDING, Rung.SIGNALLED) or worker.hold is None:
            return
        if worker.hold.until is None or worker.hold.sent:
            return  # it was not sent the end, or is being stopped alone
        if worker.phase in (WorkerPhase.REQUESTED, WorkerPhase.RUNNING):
            worker.phase = WorkerPhase.HELD
            worker.hold.until, worker.hold.has_acknowledged, worker.hold.step = None, True, step
            if rung is Rung.HOLDING:
                self._clear_if_held(now)

    def _end_generation(self, why: str, now: float, *, stops: bool = False, hung: int | None = None) -> None:
        """RUNNING -> STOPPING: hold the workers that opted in and stop the others, or stop all."""
        state = self.state
        living = state.last.living()
        for worker in living:
            if self._global_rank(worker.local_rank) == hung:
                worker.hold = None
        can_hold = any(worker.hold is not None for worker in living) and all(
            worker.overdue is None for worker in living
        )
        if stops or not can_hold:
            self._stop(SIGTERM, why, state.settings.grace_s, now)
            return
        self._enter(Phase.STOPPING)
        state.last.stop = Stop(Rung.HOLDING, now)
        ranks = tuple(worker.local_rank for worker in living if worker.hold is not None)
        self._commands.append(commands.HoldWorkers(state.generation, ranks, why))
        for worker in living:
            if worker.hold is not None:
                worker.hold.until = now + worker.hold.timeout_s
            else:
                worker.hold = Hold(0.0)
                is_hung = self._global_rank(worker.local_rank) == hung
                self._stop_alone(worker, worker.hold, "it hung" if is_hung else _NOT_IN_LOOP, now)

    def _stop_alone(self, worker: WorkerRecord, hold: Hold, why: str, now: float) -> None:
        """Send the next signal to a worker that is not held: SIGTERM, then SIGKILL. After that, kill all processes."""
        state = self.state
        if hold.sent == SIGKILL:
            self._kill(f"rank {self._global_rank(worker.local_rank)} survived SIGKILL", now)
            return
        hold.sent = SIGKILL if hold.sent else SIGTERM
        hold.until = now + (state.settings.abandon_s if hold.sent == SIGKILL else state.settings.grace_s)
        self._commands.append(commands.StopWorker(state.generation, worker.local_rank, worker.pid, hold.sent, why))

    def _on_hold_due(self, now: float) -> None:
        for worker in self.state.last.living():
            hold = worker.hold
            is_due = hold is not None and hold.until is not None and hold.until <= now
            if is_due and hold is not None and self.state.last.stop.rung is Rung.HOLDING:
                late = f"it did not acknowledge the end of its generation within {format_seconds(hold.timeout_s)}"
                self._stop_alone(worker, hold, GRACE_OVER if hold.sent else late, now)

    def _clear_if_held(self, now: float) -> None:
        """HOLDING -> HELD, or CLEARING if all have exited."""
        if self.state.last.have_all_ended():
            self._clear(now)
        elif all(worker.phase is WorkerPhase.HELD for worker in self.state.last.living()):
            self._clear_again(now)

    def _clear_again(self, now: float) -> None:
        """End what exited workers left behind, and workers that cannot be held; the held ones stay."""
        state, stop = self.state, self.state.last.stop
        held = state.last.held()
        stop.rung, stop.is_clear = Rung.HELD if held else Rung.CLEARING, False
        # Without a grace period, processes that were killed still need time to end. After it, the held ones are killed.
        wait_s = max(state.settings.grace_s, state.settings.abandon_s) if held else state.settings.grace_s
        stop.until = now + wait_s if stop.until is None else stop.until
        self._append_clear(held)

    def _stop_held(self, signal: int, why: str, grace_s: float, now: float) -> bool:
        """Stop workers that are held, or are about to be. Return False if there is nothing to wait for."""
        state, stop = self.state, self.state.last.stop
        if state.phase is Phase.STOPPING and stop.rung not in UNTIL_HELD:
            return True
        if state.phase is Phase.STOPPING or (state.phase is Phase.JOINING and not self._is_idle()):
            self._enter(Phase.STOPPING)
            if stop.rung in UNTIL_HELD:
                stop.rung, stop.signal, stop.until, stop.is_clear = Rung.SIGNALLED, signal, now + grace_s, False
                self._commands.append(commands.SignalWorkers(state.generation, signal, why))
            return True
        return False

    def _is_idle(self) -> bool:
        return self.state.cleared and not self.state.last.held()

    def _give_up_held(self) -> None:
        """Prepare to kill held workers."""
        state, stop = self.state, self.state.last.stop
        if state.phase is Phase.JOINING and not self._is_idle():
            self._enter(Phase.STOPPING)
        if state.phase is Phase.STOPPING and stop.rung is Rung.HELD:
            stop.rung, stop.signal, stop.is_clear = Rung.SIGNALLED, SIGKILL, False

    # --- the kill ladder ----------------------------------------------------------------------------------------------

    def _stop(self, signal: int, why: str, grace_s: float, now: float) -> None:
        """RUNNING -> STOPPING: signal the workers, which have the grace period to exit."""
        state = self.state
        self._enter(Phase.STOPPING)
        state.last.stop = Stop(Rung.SIGNALLED, now, signal, now + grace_s)
        if state.last.have_all_ended():
            self._clear(now)
        else:
            self._commands.append(commands.SignalWorkers(state.generation, signal, why))

    def _clear(self, now: float) -> None:
        state, stop = self.state, self.state.last.stop
        stop.rung = Rung.CLEARING
        if stop.is_short:  # the workers have exited; what they left behind has the whole grace period
            stop.until, stop.is_short = stop.since + state.settings.grace_s, False
        stop.until = now + state.settings.grace_s if stop.until is None else stop.until
        self._append_clear()

    def _append_clear(self, held: tuple[int, ...] = ()) -> None:
        last = self.state.last
        last.clears += 1
        self._commands.append(commands.ClearNode(self.state.generation, held, last.clears))

    def _kill(self, why: str, now: float) -> None:
        state, stop = self.state, self.state.last.stop
        if stop.rung >= Rung.KILLED or stop.is_clear:
            return
        stop.rung, stop.until = Rung.KILLED, now + state.settings.abandon_s
        self._commands.append(commands.KillNode(state.generation, why))

    def _why_kill(self) -> str:
        if not self.state.last.stop.is_short:
            return GRACE_OVER
        left = [worker.local_rank for worker in self.state.workers.values() if worker.phase is not WorkerPhase.ENDED]
        who = f"rank{'s' if len(left) > 1 else ''} {', '.join(str(self._global_rank(rank)) for rank in left)}"
        return f"{who} raised an exception and did not exit within {format_seconds(self.state.settings.exit_s)}"
