"""The agent machine's promises, as a check that runs after every step in tests and replays.

Each function that can fail names the promise by its number (see ``agent.py``).
"""

from __future__ import annotations

from tenax.core import commands as order
from tenax.core.agent import AgentState, Phase, Rung
from tenax.core.commands import AnyCommand
from tenax.core.events import AnyEvent
from tenax.core.model import Outcome, WorkerPhase


class InvariantBroken(AssertionError):
    """A promise of the machine does not hold: a bug in tenax."""


class InvariantChecker:
    """Watches one run from the outside. ``check`` is called after every step."""

    def __init__(self, state: AgentState) -> None:
        self._started_generations: list[int] = []
        self._last_rung = (0, Rung.NONE)
        self._had_verdict = False
        self._was_cleared = state.cleared

    def check(self, state: AgentState, event: AnyEvent, commands: list[AnyCommand]) -> None:
        for command in commands:
            self._check_command(state, command)
        self._check_ladder(state)
        self._check_deadlines(state)
        if state.verdict is not None:
            self._check_verdict(state)
        elif state.phase is Phase.ENDED:
            raise InvariantBroken(f"A4: ended without a verdict after {event}")
        self._was_cleared = state.cleared
        self._had_verdict = state.verdict is not None

    def _check_command(self, state: AgentState, command: AnyCommand) -> None:
        if self._had_verdict:
            raise InvariantBroken(f"A4: {command} after the verdict")
        if isinstance(command, order.StartWorkers):
            generation = command.assignment.generation
            if not self._was_cleared:
                raise InvariantBroken(f"A1: generation {generation} starts on a node that is not clear")
            if self._started_generations and generation != self._started_generations[-1] + 1:
                raise InvariantBroken(f"A2: generation {generation} after {self._started_generations[-1]}")
            self._started_generations.append(generation)
            if command.restarts_used > len(state.earlier):
                raise InvariantBroken("A3: a restart that no failure paid for")

    def _check_ladder(self, state: AgentState) -> None:
        generation, rung = self._last_rung
        if state.generation == generation and state.rung < rung:
            raise InvariantBroken(f"A8: from {rung.name} down to {state.rung.name}")
        self._last_rung = (state.generation, state.rung)

    @staticmethod
    def _check_deadlines(state: AgentState) -> None:
        waits = state.phase in (Phase.STOPPING, Phase.CLOSING, Phase.PAUSED)
        if waits and not state.deadlines:
            raise InvariantBroken(f"A7: {state.phase.value} without a deadline")

    @staticmethod
    def _check_verdict(state: AgentState) -> None:
        verdict = state.verdict
        assert verdict is not None
        if not state.cleared and verdict.outcome not in (Outcome.ABANDONED, Outcome.BROKEN):
            raise InvariantBroken(f"A5: {verdict.outcome.value} while processes may be alive")
        if verdict.outcome is Outcome.FAILED and not verdict.failures:
            raise InvariantBroken("A6: failed, but nobody failed")
        both = {f.local_rank for f in verdict.failures} & {s.local_rank for s in verdict.stopped}
        if both:
            raise InvariantBroken(f"A6: local ranks {sorted(both)} both failed and stopped by us")
        if verdict.outcome is Outcome.SUCCEEDED and any(
            worker.phase is not WorkerPhase.ENDED or worker.exit_code != 0 for worker in state.workers.values()
        ):
            raise InvariantBroken("A6: succeeded, but not every worker did")
