"""The agent's messages: what the console shows during a run, and what ``tenax replay`` prints afterwards.

Pure functions from an event, the commands that followed and the state to lines. The console shows only ``important``
lines, a replay shows all.
"""

from __future__ import annotations

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import SIGINT, AgentState, Phase, Rung, is_started, overrun
from tenax._core.agent_state import global_rank
from tenax._core.commands import AnyCommand
from tenax._core.environment import max_restarts
from tenax._core.events import AnyEvent
from tenax._core.model import Assignment, Outcome, Verdict, WorkerPhase, assert_never
from tenax._core.text import counted, format_seconds
from tenax._view.exit_text import describe_exit, signal_name

_AGAIN = "; Ctrl-C again kills them now"
_SHORT_RUN_S = 10.0
_SLOWDOWN = 1.8  # a repeated message is shown again when it has been true for this many times longer


class Line(msgspec.Struct, frozen=True):
    text: str
    important: bool = True
    colour: str = ""  # on a terminal: "red" for what failed, "yellow" for what may need attention, "green" for success


class Repetitions:
    """Thins out messages about waiting, which arrive every 10 s: the longer nothing changes, the fewer are shown."""

    def __init__(self) -> None:
        self._what: tuple[str, str] | None = None
        self._since = self._shown_at = 0.0

    def is_shown(self, event: AnyEvent, now: float) -> bool:
        """Return whether the lines of this event are shown. Call it for every event."""
        if not isinstance(event, events.Waiting):
            self._what = None
            return True
        before, _, after = event.why.partition("waiting up to ")
        what = before, after.partition(" for ")[2]  # without the time left
        if what != self._what:
            self._what, self._since = what, now
        elif now - self._since < _SLOWDOWN * (self._shown_at - self._since):
            return False
        self._shown_at = now
        return True


def lines_for(event: AnyEvent, issued: list[AnyCommand], state: AgentState) -> list[Line]:
    """Return the lines for one step: the event first, then the commands. ``state`` is the state after the step."""
    before = _of_event(event, state)
    follows = next((each for each in issued if isinstance(each, commands.SignalWorkers | commands.HoldWorkers)), None)
    if follows is not None and before and isinstance(event, events.WorkerExited | events.WorkerStartFailed):
        what = (
            f"stopping all workers ({_how(follows.signal, state)})"
            if isinstance(follows, commands.SignalWorkers)
            else _holding(state, follows.local_ranks)
        )
        before = [Line(f"{before[0].text}; {what}", colour="red")]  # one line for the failure
        issued = [command for command in issued if command is not follows]
    lines = [line for command in issued for line in _of_command(command, state)]
    if not lines or not isinstance(event, events.SignalReceived):  # what follows a signal names it
        lines = [*before, *lines]
    if not issued and state.phase is Phase.STOPPING and isinstance(event, events.SignalReceived):
        hint = _AGAIN if event.signal == SIGINT and state.last.stop.rung < Rung.KILLED else ""
        lines.append(Line(f"the workers are already being stopped{hint}"))
    return lines


def _of_event(event: AnyEvent, state: AgentState) -> list[Line]:
    match event:
        case events.WorkerStarted(generation, local_rank, pid) if generation == state.generation:
            return [Line(f"{_rank(state, local_rank)} started (pid {pid})", important=False)]
        case events.WorkerStartFailed(generation, local_rank, reason) if generation == state.generation:
            return [Line(f"{_rank(state, local_rank)} could not be started: {reason}", colour="red")]
        case events.WorkerOptedIn(generation, local_rank) if generation == state.generation:
            return [Line(f"{_rank(state, local_rank)} can survive a failure of another worker", important=False)]
        case events.WorkerOptedOut(generation, local_rank, why) if generation == state.generation:
            return [Line(f"{_rank(state, local_rank)} cannot survive a failure of another worker: {why}", False)]
        case events.WorkerHeld(generation, local_rank, step) if generation == state.generation:
            after = f" after step {step}" if step >= 0 else ""
            return [Line(f"{_rank(state, local_rank)} is held{after}", important=False)]
        case events.WorkerExited(generation, local_rank, exit_code, fault) if generation == state.generation:
            return [_of_exit(state, local_rank, exit_code, fault)]
        case events.FailureExamined(generation, local_rank, evidence) if generation == state.generation:
            cause = evidence.out_of_memory or evidence.message
            return [Line(f"{_rank(state, local_rank)}: {cause}", colour="red")] if cause else []
        case events.ScopeExpired(generation, local_rank, pid) if generation == state.generation:
            return [Line(f"{_rank(state, local_rank)} (pid {pid}) {overrun(event)}", colour="yellow")]
        case events.StacksRefused(generation, local_rank, why) if generation == state.generation:
            worker = state.workers.get(local_rank)
            is_late = worker is not None and worker.overdue is not None
            return [Line(f"no stacks of {_rank(state, local_rank)}: {why}", important=is_late)]
        case events.QuietSeen(generation, _, why) if generation == state.generation:
            return [Line(f"no activity on this node: {why}", important=False)]
        case events.MovementSeen(generation, local_rank, what) if generation == state.generation:
            who = f"{_rank(state, local_rank)} " if local_rank >= 0 else ""
            return [Line(f"the workers of this node are active again: {who}{what}", important=False)]
        case events.StacksRequested(generation, _, why) if generation == state.generation:
            return [Line(f"no activity on any node ({why}); requesting the stacks of all workers", important=False)]
        case events.SignalReceived(number):
            return [Line(f"received {signal_name(number)}")]
        case events.Waiting(why):
            return [Line(why)]
        case events.GenerationEnded(generation, why) if generation == state.generation:
            # The command that follows has its own line, unless there is nothing to end here.
            return [Line(f"generation {generation} ended: {why}")] if state.phase is Phase.JOINING else []
        case events.LeaveNoticed(generation, host, why) if generation == state.generation:
            return [Line(f"{host} is leaving{_within(event.in_s)}: {why}")]
        case events.NoticeReceived(why, in_s):
            return [Line(f"this node is leaving{_within(in_s)}: {why}")]
        case events.NodeCleared(generation) if generation == state.generation:
            return [Line("no process of this generation is left", important=False)]
    return []


def _of_start(state: AgentState, part: Assignment, survivors: tuple[int, ...]) -> str:
    count, first = state.settings.local_world_size, part.first_global_rank
    ranks = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
    started = count - len(survivors)
    starting = [f"starting {counted(started, 'worker')}"] if started else []
    if survivors:
        starting.insert(0, f"{counted(len(survivors), 'worker')} {'continues' if len(survivors) == 1 else 'continue'}")
    among = f", node {part.group_rank} of {part.group_world_size}" if part.group_world_size > 1 else ""
    why = f" ({part.why})" if part.generation > 1 and part.why else ""
    return f"generation {part.generation}{why}: {', '.join(starting)}, {ranks} of {part.world_size}{among}"


def _how(signal: int, state: AgentState) -> str:
    return f"{signal_name(signal)}, {format_seconds(state.settings.grace_s)} grace"


def _holding(state: AgentState, local_ranks: tuple[int, ...]) -> str:
    """Without a restart left there may be no next generation."""
    has_restart = state.restarts_used < max_restarts(state.settings, state.assignment)
    return f"holding {_ranks(state, local_ranks)}{' until the next generation' if has_restart else ''}"


def _within(in_s: float | None) -> str:
    return "" if in_s is None else f" (up to {format_seconds(in_s)})"


def _of_exit(state: AgentState, local_rank: int, exit_code: int, fault: str) -> Line:
    worker = state.workers.get(local_rank)
    subject = _rank(state, local_rank) + (f" (pid {worker.pid})" if worker is not None and worker.pid else "")
    if worker is not None and worker.was_stopped:
        from tenax._view.text import exit_summary

        return Line(f"{subject} stopped ({exit_summary(exit_code)})", important=False)
    if fault:
        return Line(f"{subject} failed: {fault}", colour="red")
    return Line(f"{subject} {describe_exit(exit_code)}", important=exit_code != 0, colour="red" if exit_code else "")


def _of_command(command: AnyCommand, state: AgentState) -> list[Line]:
    match command:
        case commands.SendMessage(messages.NodeReady(generation)):
            return [Line(f"ready for {'the next' if generation else 'a'} generation", important=False)]
        case commands.SendMessage(messages.NodeSucceeded()) if (
            state.assignment is not None and state.phase is Phase.DONE
        ):
            others = state.assignment.group_world_size - 1
            return [Line("all workers of this node succeeded; waiting for the other nodes")] if others else []
        case commands.StartWorkers(assignment, survivors):
            own, limit = state.settings.max_restarts, max_restarts(state.settings, assignment)
            note = f"--max-restarts {own} of this node has no effect: the coordinator's node has {limit}"
            start = _of_start(state, assignment, survivors)
            return [Line(start), *([Line(note, colour="yellow")] if own != limit else [])]
        case commands.SignalWorkers(_, number, why):
            hint = _AGAIN if state.leave is not None and state.leave.signal == SIGINT else ""
            return [Line(f"stopping all workers because {why} ({_how(number, state)}){hint}")]
        case commands.HoldWorkers(_, local_ranks, why):
            return [Line(f"{_holding(state, local_ranks)} because {why}")]
        case commands.StopWorker(_, local_rank, _, number, why):
            return [Line(f"stopping {_rank(state, local_rank)}: {why} ({signal_name(number)})", colour="yellow")]
        case commands.DumpStacks(_, local_rank):
            return [Line(f"requesting the stacks of {_rank(state, local_rank)}", important=False)]
        case commands.ReadStacks(_, _, local_ranks):
            ranks = ", ".join(_rank(state, rank) for rank in local_ranks)
            return [Line(f"reading the stacks of {ranks}", important=False)]
        case commands.ReportHang(_, report):
            from tenax._core.hang_report import format_report

            headline, *rest = format_report(report)
            return [Line(headline, colour="yellow"), *(Line(line) for line in rest)]
        case commands.ReportMovement(generation, why):
            return [Line(f"generation {generation} does not hang any more{f': {why}' if why else ''}")]
        case commands.EndWorker(_, local_rank, _, number, why):
            overdue = state.workers[local_rank].overdue
            was_shown = overdue is not None and why == overdue.reason  # when the scope expired
            reason = "" if was_shown else f" because {why}"
            return [Line(f"stopping {_rank(state, local_rank)}{reason} ({signal_name(number)})")]
        case commands.KillNode(_, why):
            return [Line(f"killing all remaining processes: {why}", colour="yellow")]
        case commands.ClearNode(_, held):
            still = f"; {_ranks(state, held)} stay held" if held else ""
            return [Line(f"ending leftover processes of the workers{still}", important=False)]
        case commands.Finish(verdict):
            important = verdict.outcome is Outcome.SUCCEEDED  # the report shows every other outcome
            line = Line(f"the run {verdict.outcome.text}: {verdict.why}", important, "green" if important else "")
            return [line, *_goodput(verdict)] if important else [line]
    return []


def _goodput(verdict: Verdict) -> list[Line]:
    """Return the goodput summary, except for a short run without restarts."""
    goodput = verdict.goodput
    if goodput is None or (goodput.spent.total_s < _SHORT_RUN_S and verdict.restarts_used == 0):
        return []
    from tenax._view.text import format_goodput

    text = format_goodput(goodput)
    return [Line(text)] if text else []


def live_line(state: AgentState) -> tuple[str, float | None, float | None]:
    """Return the live line at the bottom of a terminal: phase, generation, pending workers, nodes, restarts left.

    And the time since which it counts, or until which: the start of the generation, or SIGKILL. While workers are being
    stopped, the restarts are omitted, so that the time until SIGKILL fits into the row.
    """
    settings, part = state.settings, state.assignment
    since: float | None = state.last.formed_at if part is not None else None
    until: float | None = None
    match state.phase:
        case Phase.JOINING | Phase.NEW:
            what = "waiting for the next generation" if state.generation else "waiting for the first generation"
            if held := state.last.held():
                what += f", {counted(len(held), 'worker')} held"
        case Phase.DONE:
            what = f"generation {state.generation}: done here, waiting for the other nodes"
        case Phase.RUNNING:
            done = sum(worker.phase is WorkerPhase.ENDED for worker in state.workers.values())
            doing = "running" if is_started(state) else "starting"
            if state.last.hang.is_reported:
                doing = "seems to hang"
            what = f"generation {state.generation} {doing}, {len(state.workers) - done} of {len(state.workers)} workers"
            if part is not None and part.group_world_size > 1:
                what += f" here, {part.group_world_size} nodes"
        case Phase.STOPPING | Phase.CLOSING:
            from tenax._core.hang_report import format_ranks

            is_holding = state.last.stop.rung <= Rung.HELD
            gone = (WorkerPhase.ENDED, WorkerPhase.HELD) if is_holding else (WorkerPhase.ENDED,)
            pending = sorted(rank for rank, worker in state.workers.items() if worker.phase not in gone)
            doing = f"waiting for local {format_ranks(pending)}" if pending else "ending leftover processes"
            if pending and state.last.stop.rung < Rung.KILLED:
                until = state.last.stop.until
            return f"tenax {settings.run_id}: generation {state.generation} stopping, {doing}", since, until
        case Phase.ENDED:
            return "", None, None
        case _:
            assert_never(state.phase)
    limit = max_restarts(settings, state.assignment)
    budget = f", {limit - state.restarts_used} of {limit} restarts left" if limit else ""
    return f"tenax {settings.run_id}: {what}{budget}", since, until


def _ranks(state: AgentState, local_ranks: tuple[int, ...]) -> str:
    if len(local_ranks) == 1:
        return _rank(state, local_ranks[0])
    shown = ", ".join(str(global_rank(state, rank)) for rank in local_ranks[:8])
    return f"ranks {shown}{', ...' if len(local_ranks) > 8 else ''}"


def _rank(state: AgentState, local_rank: int) -> str:
    return f"rank {global_rank(state, local_rank)}"
