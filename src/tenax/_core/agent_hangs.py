"""Hangs on one node: what the agent machine reports of activity, and how it collects the stacks of its workers.

The lower part of the agent machine (``agent.py``, invariants A10 and A11): it starts, stops and signals no worker.
"""

from __future__ import annotations

from tenax._core import commands, events, messages
from tenax._core.agent_state import AgentState, HangSigns, Phase, Quiet, StacksRequest, global_rank, quiet_message
from tenax._core.commands import AnyCommand
from tenax._core.model import AgentSettings, WorkerPhase, WorkerRecord, assert_never

HangEvent = (
    events.QuietSeen
    | events.MovementSeen
    | events.StacksRequested
    | events.StacksRead
    | events.HangFound
    | events.HangOver
)


class HangObserver:
    """The state, the commands to issue, and the decisions about hangs."""

    def __init__(self, settings: AgentSettings) -> None:
        self.state = AgentState(settings)
        self._commands: list[AnyCommand] = []

    def _send(self, message: messages.FromNode) -> None:
        self._commands.append(commands.SendMessage(message))

    def _global_rank(self, local_rank: int) -> int:
        return global_rank(self.state, local_rank)

    def _enter(self, phase: Phase) -> None:
        """Enter a phase. Hangs are observed only while workers run."""
        hang = self.state.last.hang
        self.state.phase = phase
        if phase is not Phase.RUNNING and (hang.quiet is not None or hang.request is not None):
            self.state.last.hang = HangSigns(is_reported=hang.is_reported)

    def _dump_stacks(self, worker: WorkerRecord, now: float) -> None:
        worker.stacks_asked_at = now
        self._commands.append(commands.DumpStacks(self.state.generation, worker.local_rank))

    def _handle_hang_event(self, event: HangEvent, now: float) -> None:
        state, hang = self.state, self.state.last.hang
        match event:
            case events.HangFound(generation, report):
                if not hang.is_reported and state.phase in (Phase.RUNNING, Phase.CLOSING, Phase.DONE):
                    hang.is_reported = True
                    self._commands.append(commands.ReportHang(generation, report))
            case events.HangOver(_, why):
                self._on_hang_over(why)
            case _ if state.phase is not Phase.RUNNING:
                pass
            case events.QuietSeen(_, since, why, stopped):
                is_news, hang.quiet = hang.quiet is None, Quiet(since, why, stopped)
                if is_news:
                    self._send(quiet_message(state.generation, hang.quiet, now))
            case events.MovementSeen(_, local_rank, what):
                if hang.quiet is not None:
                    hang.quiet = None
                    why = f"rank {self._global_rank(local_rank)} {what}" if local_rank >= 0 else what
                    self._send(messages.NodeBusy(state.generation, why))
            case events.StacksRequested(_, number):
                self._on_stacks_requested(number, now)
            case events.StacksRead(_, number, workers):
                if hang.request is not None and hang.request.number == number:
                    self._send_stacks(hang.request, workers)
            case _:
                assert_never(event)

    def _on_hang_over(self, why: str) -> None:
        state = self.state
        for worker in state.workers.values():
            if worker.overdue is None:
                worker.stacks_asked_at = None  # those stacks explain no later failure
        if state.last.hang.is_reported:
            state.last.hang.is_reported = False
            self._commands.append(commands.ReportMovement(state.generation, why))

    def _on_stacks_requested(self, number: int, now: float) -> None:
        """Make every worker write its stacks, except stopped ones, which the request would resume."""
        state, hang = self.state, self.state.last.hang
        request = hang.request = StacksRequest(number, now + state.settings.stacks_s)
        stopped = hang.quiet.stopped if hang.quiet is not None else ()
        for worker in state.workers.values():
            if worker.phase is WorkerPhase.RUNNING:
                if worker.local_rank in stopped:
                    request.unknown[worker.local_rank] = "stopped by SIGSTOP or a debugger; SIGCONT resumes it"
                else:
                    self._dump_stacks(worker, now)

    def _on_stacks_due(self, now: float) -> None:
        state, request = self.state, self.state.last.hang.request
        if request is None:
            return
        asked = tuple(
            rank
            for rank, worker in state.workers.items()
            if worker.phase is WorkerPhase.RUNNING and rank not in request.unknown
        )
        if request.is_read or not asked:
            self._send_stacks(request, ())
            return
        request.is_read, request.until = True, now + state.settings.examine_s
        self._commands.append(commands.ReadStacks(state.generation, request.number, asked, state.last.formed_at))

    def _send_stacks(self, request: StacksRequest, read: tuple[events.WorkerStacks, ...]) -> None:
        from tenax._core.hang_report import LocalStacks, places_of

        state = self.state
        known = {each.local_rank: each for each in read}
        workers = []
        for rank, worker in state.workers.items():
            if worker.phase is WorkerPhase.RUNNING:
                found = known.get(rank, events.WorkerStacks(rank))
                why = request.unknown.get(rank) or found.why or "its stacks could not be read in time"
                workers.append(LocalStacks(rank, self._global_rank(rank), worker.pid, found.stacks, why))
        state.last.hang.request = None
        self._send(messages.StacksTaken(state.generation, request.number, places_of(workers)))
