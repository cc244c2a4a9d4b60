"""Agents with mistakes about held workers, which a simulation of workers that opt in must find."""

from __future__ import annotations

from tenax._core import commands
from tenax._core.agent import AgentMachine, Phase, Rung
from tenax._core.model import WorkerPhase


class HoldsWithoutAcknowledgement(AgentMachine):
    """Takes the workers that it sent the end of their generation for held."""

    def _end_generation(self, why: str, now: float, **how) -> None:
        super()._end_generation(why, now, **how)
        if self.state.last.stop.rung is Rung.HOLDING:
            for worker in self.state.last.living():
                if worker.hold is not None and not worker.hold.sent:
                    worker.phase = WorkerPhase.HELD
            self._clear_if_held(now)


class KeepsALateWorker(AgentMachine):
    """Clears the node and starts the next generation with a worker whose time to acknowledge the end is over."""

    def _on_hold_due(self, now: float) -> None:
        for worker in self.state.last.living():
            worker.phase = WorkerPhase.HELD
        self._clear_if_held(now)


class StartsBesideLeftovers(AgentMachine):
    """Starts the next generation although a held worker has exited and may have left processes behind."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.JOINING and assignment.generation > self.state.generation:
            self._start(assignment, now)


class BeginsTwice(AgentMachine):
    """Sends the begin of a generation to its survivors twice."""

    def _start(self, assignment, now: float) -> None:
        super()._start(assignment, now)
        started = self._commands[-1]
        if isinstance(started, commands.StartWorkers) and started.survivors:
            self._commands.append(started)


class EndsWithHeldWorkers(AgentMachine):
    """Ends at once when the run ends, whatever it holds."""

    def _stop_held(self, signal: int, why: str, grace_s: float, now: float) -> bool:
        return self.state.phase is Phase.STOPPING and super()._stop_held(signal, why, grace_s, now)


class AcceptsAnyClearance(AgentMachine):
    """Takes the reply to an earlier command, which spared workers that must stop now, for the last one."""

    def _on_node_cleared(self, held, now: float) -> None:
        rung = self.state.last.stop.rung
        super()._on_node_cleared(self.state.last.held() if rung is Rung.HELD else (), now)


class IgnoresTheEndOfAPendingGeneration(AgentMachine):
    """Starts a generation that ended while this node was not clear."""

    def _is_stale(self, event) -> bool:
        return getattr(event, "generation", self.state.generation) != self.state.generation


class DropsAPendingGeneration(AgentMachine):
    """Ignores a generation that is formed while a held worker's leftovers are ended."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.cleared:
            super()._on_generation_formed(assignment, now)


# With a seed that finds it, and the property that breaks.
MISTAKES = {
    HoldsWithoutAcknowledgement: (4, "S11"),
    KeepsALateWorker: (8, "S11"),
    StartsBesideLeftovers: (240, "S2"),
    BeginsTwice: (2, "S11"),
    EndsWithHeldWorkers: (5, "S2"),
    AcceptsAnyClearance: (836, "S2"),
    IgnoresTheEndOfAPendingGeneration: (2934, "L3"),
    DropsAPendingGeneration: (437, "L3"),
}
