"""The agent machine's invariants, as a check that runs after every step in tests and replays.

The checker derives what it can (which generations started, whether the node is clear) from events and commands, not
from the machine's state, so that it also detects a wrong state. Each error names the invariant by its number (see
``_core/agent.py``).
"""

from __future__ import annotations

import re

import msgspec

from tenax._core import commands as command_types
from tenax._core import events, messages
from tenax._core.agent import SIGKILL, AgentState, Deadline, Phase, Rung
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import Outcome, Verdict, WorkerPhase, WorkerRecord, by_cause

_encode = msgspec.json.Encoder().encode


class InvariantBroken(AssertionError):
    """An invariant of the machine does not hold: a bug in tenax."""


_NEGATIVE = re.compile(r"(?<![\w.-])-\d[\d.]* (?:ms|s|min|h)\b")


def check_text(message: object) -> None:
    """Raise ``InvariantBroken`` if a displayed text of a message or command contains a negative duration."""
    for name in ("why", "reason"):
        text = getattr(message, name, "")
        if "-" in text and _NEGATIVE.search(text):
            raise InvariantBroken(f"{type(message).__name__} contains a negative duration: {text}")


class InvariantChecker:
    """Checks one run. Call ``expect`` before and ``check`` after every step."""

    def __init__(self, state: AgentState) -> None:
        self._started = state.generation  # the last generation whose workers were started
        self._occupied = not state.cleared  # processes of the last generation may be alive
        rung = state.last.stop.rung
        self._clearing = rung is Rung.HELD or rung >= Rung.CLEARING  # ClearNode or KillNode was issued ...
        held = set(state.last.held())
        self._spared = held if rung is Rung.HELD else set()  # ... and these local ranks were to stay
        self._clears = state.last.clears  # the number of the last ClearNode
        self._held = held.copy() if state.cleared else set()  # local ranks that stayed
        self._acknowledged = held.copy()  # local ranks that acknowledged the end of their generation
        self._is_ended_here = rung >= Rung.HOLDING  # HoldWorkers was issued
        self._pending = state.formed.assignment.generation if state.formed is not None else 0  # formed, not started
        self._late = {rank for rank, worker in state.workers.items() if worker.overdue}  # with an expired scope
        self._is_wanted = state.last.hang.request is not None  # the coordinator has requested stacks
        self._is_quiet = state.last.hang.quiet is not None  # as last sent
        self._is_hang_reported = state.last.hang.is_reported
        self._written = b""
        self._remember(state)

    def expect(self, state: AgentState, event: AnyEvent) -> None:
        """Remember the state if the event must not change it."""
        self._written = _encode(state) if self._ended or self._is_of_another_generation(event) else b""

    def check(self, state: AgentState, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Raise ``InvariantBroken`` unless the step from ``event`` to ``commands`` kept every invariant."""
        self._check_silence(state, event, commands)
        if self._ended:
            return
        if isinstance(event, events.NodeCleared) and self._is_clear_after(event):
            self._occupied, self._held = False, set(event.held)
        self._follow_acknowledgements(event)
        if isinstance(event, events.ScopeExpired) and event.generation == self._started and event.signal > 0:
            self._late.add(event.local_rank)
        if isinstance(event, events.StacksRequested) and event.generation == self._started:
            self._is_wanted = True
        formed = event.assignment.generation if isinstance(event, events.GenerationFormed) else self._pending
        if not self._occupied and self._pending and state.generation == self._pending and not _starts(commands):
            self._started, self._held = state.generation, set()  # it ended before it could start here
        for command in commands:
            check_text(command.message if isinstance(command, command_types.SendMessage) else command)
            self._check_command(state, command, formed)
        self._check_ladder(state)
        self._check_deadlines(state)
        if state.cleared == self._occupied:
            raise InvariantBroken(
                f"A1: after {event} the state says that the node is {'' if state.cleared else 'not '}clear"
            )
        if state.phase is Phase.ENDED:
            self._check_verdict(state.verdict)
        elif state.verdict is not None:
            raise InvariantBroken(f"A4: a verdict while {state.phase.value}")
        self._remember(state)

    def _is_clear_after(self, event: events.NodeCleared) -> bool:
        is_last_reply = event.number in (0, self._clears) and set(event.held) == self._spared
        is_expected = self._clearing and event.generation == self._started
        return is_expected and is_last_reply and self._spared <= self._acknowledged

    def _follow_acknowledgements(self, event: AnyEvent) -> None:
        """Follow which workers are held. One that exits or loses its channel may leave processes behind."""
        if getattr(event, "generation", 0) != self._started:
            return
        if isinstance(event, events.WorkerHeld) and self._is_ended_here:
            self._acknowledged.add(event.local_rank)
        elif isinstance(event, events.WorkerExited | events.WorkerOptedOut | events.WorkerStartFailed):
            self._acknowledged.discard(event.local_rank)
            if event.local_rank in self._held:
                self._held.discard(event.local_rank)
                self._occupied = True

    def _remember(self, state: AgentState) -> None:
        self._pending = state.formed.assignment.generation if state.formed is not None else 0
        self._generation = state.generation
        self._rung = state.last.stop.rung
        self._ended = state.phase is Phase.ENDED

    def _is_of_another_generation(self, event: AnyEvent) -> bool:
        generation = getattr(event, "generation", self._generation)
        if isinstance(event, events.GenerationEnded | events.Fenced) and generation == self._pending:
            return False
        return bool(generation != self._generation)

    def _check_silence(self, state: AgentState, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Check that events without effect change nothing and issue no command."""
        if self._ended:
            if commands or _encode(state) != self._written:
                raise InvariantBroken(f"A4: {event} had consequences after the verdict: {commands}")
            return
        if self._is_of_another_generation(event) and (commands or _encode(state) != self._written):
            raise InvariantBroken(f"A9: {event} had consequences in generation {self._generation}: {commands}")

    def _check_command(self, state: AgentState, command: AnyCommand, formed: int) -> None:
        match command:
            case command_types.StartWorkers(assignment, survivors):
                generation = assignment.generation
                if set(survivors) != self._held:
                    raise InvariantBroken(f"A1: {survivors} survive in generation {generation}, held: {self._held}")
                if self._occupied:
                    raise InvariantBroken(f"A1: generation {generation} starts on a node that is not clear")
                if generation <= self._started:
                    raise InvariantBroken(f"A2: generation {generation} starts after {self._started}")
                if generation != formed:
                    raise InvariantBroken(f"A2: generation {generation} starts, but was not formed")
                self._started = generation
                self._occupied = True
                self._clearing = self._is_ended_here = False
                self._held, self._spared, self._acknowledged = set(), set(), set()
                self._late = set()
                self._is_wanted = self._is_quiet = self._is_hang_reported = False
            case command_types.DumpStacks(generation):
                if generation != self._started or not (self._late or self._is_wanted):
                    raise InvariantBroken(f"A10: {command}, but no worker is overdue")
            case command_types.ReadStacks(generation):
                if generation != self._started or not self._is_wanted:
                    raise InvariantBroken(f"A11: {command}, but stacks were not requested")
            case command_types.ReportHang() | command_types.ReportMovement():
                if self._is_hang_reported is isinstance(command, command_types.ReportHang):
                    raise InvariantBroken(f"A11: {type(command).__name__}, but that was already reported")
                self._is_hang_reported = not self._is_hang_reported
            case command_types.EndWorker(generation, local_rank):
                if generation != self._started or local_rank not in self._late:
                    raise InvariantBroken(f"A10: {command}, but no scope of that worker has expired")
            case command_types.HoldWorkers(generation):
                if generation != self._started or self._is_ended_here:
                    raise InvariantBroken(f"A8: {command}, but its end was already sent")
                self._is_ended_here = True
            case command_types.StopWorker(generation, local_rank):
                if generation != self._started or not self._is_ended_here or local_rank in self._held:
                    raise InvariantBroken(f"A10: {command}, but it was not to be held, or is held")
            case command_types.SignalWorkers():
                self._occupied, self._held = True, set()
                self._clearing = False  # a reply that comes now is to an earlier command
            case command_types.ClearNode(held=held, number=number):
                if not set(held) <= self._acknowledged:
                    raise InvariantBroken(f"A1: {command}, but only {self._acknowledged} acknowledged the end")
                self._clearing, self._spared, self._clears = True, set(held), number
            case command_types.KillNode():
                self._clearing, self._spared = True, set()
                self._occupied, self._held = self._occupied or bool(self._held), set()
            case command_types.SendMessage(message):
                self._check_message(state, message)

    def _check_message(self, state: AgentState, message: messages.FromNode) -> None:
        what = type(message).__name__
        if self._occupied and isinstance(message, messages.NodeReady | messages.NodeStopped | messages.NodeSucceeded):
            raise InvariantBroken(f"A3: {what} while processes may be alive")
        if isinstance(message, messages.NodeLeft) and message.is_clear and (self._occupied or self._held):
            raise InvariantBroken("A3: left and clear while processes may be alive")
        if isinstance(message, messages.NodeReady) and message.held != len(self._held):
            raise InvariantBroken(f"A3: ready with {message.held} held workers, which are {self._held}")
        if isinstance(message, messages.NodeStopped) and len(message.held) != len(self._held):
            raise InvariantBroken(f"A3: stopped with held ranks {message.held}, held locally: {self._held}")
        if isinstance(message, messages.WorkersRunning) and not self._occupied:
            raise InvariantBroken("A3: WorkersRunning on a node that is clear")
        if isinstance(message, messages.NodeSucceeded) and not _all_succeeded(state):
            raise InvariantBroken("A3: NodeSucceeded, but not every worker succeeded")
        if isinstance(message, messages.NodeQuiet | messages.NodeBusy):
            if self._is_quiet is isinstance(message, messages.NodeQuiet):
                raise InvariantBroken(f"A11: {what}, but that was already reported")
            self._is_quiet = not self._is_quiet
        if isinstance(message, messages.StacksTaken):
            if not self._is_wanted:
                raise InvariantBroken("A11: StacksTaken, but stacks were not requested")
            self._is_wanted = False
        if isinstance(message, messages.GenerationMessage) and message.generation != self._started:
            of = f"{what} of generation {message.generation}"
            raise InvariantBroken(f"A3: {of} while {self._started} was started last")

    def _check_ladder(self, state: AgentState) -> None:
        if state.generation == self._generation and state.last.stop.rung < self._rung:
            raise InvariantBroken(f"A8: from {self._rung.name} down to {state.last.stop.rung.name}")

    @staticmethod
    def _check_deadlines(state: AgentState) -> None:
        """Check that exactly the events being waited for have a deadline."""
        awaited = set()
        if state.phase in (Phase.STOPPING, Phase.CLOSING, Phase.JOINING) and not state.cleared:
            by_rung = {Rung.KILLED: Deadline.ABANDON, Rung.HOLDING: Deadline.HOLD}
            awaited.add(by_rung.get(state.last.stop.rung, Deadline.GRACE))
        if state.phase is Phase.STOPPING and state.last.examination.ranks:
            awaited.add(Deadline.EXAMINE)
        if (
            state.phase is not Phase.ENDED
            and state.last.stop.rung < Rung.KILLED
            and any(map(_is_awaited_alone, state.workers.values()))
        ):
            awaited.add(Deadline.OVERDUE)
        if state.last.hang.request is not None:
            awaited.add(Deadline.STACKS)
        if state.deadlines.keys() != awaited:
            raise InvariantBroken(
                f"A7: {state.phase.value} awaits {_names(awaited)}, but has deadlines for {_names(state.deadlines)}"
            )
        if state.phase is Phase.STOPPING and not awaited:
            raise InvariantBroken("A7: stopping, but nothing is awaited")

    def _check_verdict(self, verdict: Verdict | None) -> None:
        if verdict is None:
            raise InvariantBroken("A4: ended without a verdict")
        if (self._occupied or self._held) and verdict.outcome not in (Outcome.ABANDONED, Outcome.BROKEN):
            raise InvariantBroken(f"A5: {verdict.outcome.value} while processes may be alive")
        if verdict.outcome is Outcome.FAILED and not verdict.failures:
            raise InvariantBroken("A6: failed, but no worker failed")
        if list(verdict.failures) != sorted(verdict.failures, key=by_cause):
            raise InvariantBroken("A6: the first cause does not come first")
        both = {f.global_rank for f in verdict.failures} & {s.global_rank for s in verdict.stopped}
        if both:
            raise InvariantBroken(f"A6: ranks {sorted(both)} both failed and were stopped")
        if verdict.outcome is Outcome.SUCCEEDED and verdict.failures:
            raise InvariantBroken("A6: succeeded, but a worker failed")


def _starts(commands: list[AnyCommand]) -> bool:
    return any(isinstance(command, command_types.StartWorkers) for command in commands)


def _all_succeeded(state: AgentState) -> bool:
    return all(worker.phase is WorkerPhase.ENDED and worker.exit_code == 0 for worker in state.workers.values())


def _is_awaited_alone(worker: WorkerRecord) -> bool:
    """Whether the worker must exit or be sent the next signal. After SIGKILL, there is none."""
    overdue, is_alive = worker.overdue, worker.phase is not WorkerPhase.ENDED
    return is_alive and overdue is not None and (overdue.until is not None or overdue.sent != SIGKILL)


def _names(deadlines: set[Deadline] | dict[Deadline, float]) -> str:
    return " and ".join(sorted(deadline.value for deadline in deadlines)) or "nothing"
