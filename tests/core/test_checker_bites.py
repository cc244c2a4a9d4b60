"""The checks of the core can fail: each of these broken machines is caught, by the promise that it breaks."""

from __future__ import annotations

import random

import msgspec
import pytest

from tenax.core import commands as order
from tenax.core import events as fact
from tenax.core.agent import AgentMachine, Deadline, Phase, Rung
from tenax.core.commands import AnyCommand
from tenax.core.events import AnyEvent
from tenax.core.invariants import InvariantBroken
from tenax.core.model import Outcome, Stopped

from .world import World, WorldBroken

SEEDS = 1_000


class StartsBesideTheOldGeneration(AgentMachine):
    """Thinks a node is clear as soon as its workers are."""

    def _clear(self, now: float) -> None:
        super()._clear(now)
        self.state.cleared = True
        self.state.deadlines.pop(Deadline.GRACE, None)
        self._decide_if_ready(now)


class BelievesAnyClearance(AgentMachine):
    """Takes an unasked "cleared" for an answer."""

    def _on_node_cleared(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.rung < Rung.CLEARING:
            self.state.rung = Rung.CLEARING
        super()._on_node_cleared(now)


class TakesAnyGeneration(AgentMachine):
    """Starts whatever the rendezvous forms."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.JOINING:
            self.state.generation = assignment.generation - 1
        super()._on_generation_formed(assignment, now)


class StartsTwice(AgentMachine):
    """Starts its workers again when told of its generation again."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        super()._on_generation_formed(assignment, now)
        if self.state.phase is Phase.RUNNING and assignment == self.state.assignment and not self._orders:
            self._orders.append(order.StartWorkers(assignment, self.state.restarts_used))


class CountsRestartsTwice(AgentMachine):
    def _decide_if_ready(self, now: float) -> None:
        before = self.state.restarts_used
        super()._decide_if_ready(now)
        self.state.restarts_used += self.state.restarts_used - before


class RestartsForFree(AgentMachine):
    """Never counts."""

    def _decide_if_ready(self, now: float) -> None:
        super()._decide_if_ready(now)
        self.state.restarts_used = 0


class SpeaksAfterTheVerdict(AgentMachine):
    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        commands = super().step(event, now)
        if self.state.phase is Phase.ENDED and not commands:
            return [order.KillNode(self.state.generation, "to be sure")]
        return commands


class LeavesBeforeTheNodeIsClear(AgentMachine):
    """Is content with workers that have succeeded; forgets what they left behind."""

    def _clear(self, now: float) -> None:
        if self.state.phase is Phase.CLOSING:
            self._end(Outcome.SUCCEEDED, "done")
        else:
            super()._clear(now)


class GivesUpWithoutACause(AgentMachine):
    def _end(self, outcome: Outcome, why: str, **more) -> None:
        self.state.failures.clear()
        super()._end(outcome, why, **more)


class CallsTheFailedStopped(AgentMachine):
    def _stopped_workers(self) -> tuple[Stopped, ...]:
        return tuple(Stopped(rank, rank, worker.pid, worker.exit_code) for rank, worker in self.state.workers.items())


class NamesTheLastCauseFirst(AgentMachine):
    def _end(self, outcome: Outcome, why: str, **more) -> None:
        super()._end(outcome, why, **more)
        assert self.state.verdict is not None
        backwards = msgspec.structs.replace(self.state.verdict, failures=self.state.verdict.failures[::-1])
        self.state.verdict = backwards
        self._orders[-1] = order.Finish(backwards)


class OverlooksFailures(AgentMachine):
    """Sees only exit codes."""

    def _on_worker_ended(self, local_rank: int, exit_code: int, fault: str, now: float, **more) -> None:
        super()._on_worker_ended(local_rank, exit_code, "", now, **more)


class CallsItSuccessWhenAllHaveEnded(AgentMachine):
    def _decide_if_ready(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.cleared:
            self._end(Outcome.SUCCEEDED, "all workers ended")


class ForgetsTheGracePeriod(AgentMachine):
    def _stop(self, *details) -> None:
        super()._stop(*details)
        self.state.deadlines.pop(Deadline.GRACE, None)


class ForgetsToAbandon(AgentMachine):
    def _kill(self, why: str, now: float) -> None:
        super()._kill(why, now)
        self.state.deadlines.pop(Deadline.ABANDON, None)


class WaitsForEvidenceForever(AgentMachine):
    def _note_bad_end(self, worker, fault: str, wrote_error: bool, now: float) -> None:
        super()._note_bad_end(worker, fault, wrote_error, now)
        self.state.deadlines.pop(Deadline.EXAMINE, None)


class LeavesADeadlineBehind(AgentMachine):
    def _on_generation_formed(self, assignment, now: float) -> None:
        super()._on_generation_formed(assignment, now)
        if self.state.phase is Phase.RUNNING:
            self.state.deadlines[Deadline.EXAMINE] = 1e9


class StepsDownTheLadder(AgentMachine):
    """Clears politely after it has killed."""

    def _on_worker_ended(self, local_rank: int, exit_code: int, fault: str, now: float, **more) -> None:
        super()._on_worker_ended(local_rank, exit_code, fault, now, **more)
        if self.state.phase is Phase.STOPPING and self.state.rung is Rung.KILLED and self._all_workers_ended():
            self._clear(now)


class HearsEchoes(AgentMachine):
    def _is_stale(self, event: AnyEvent) -> bool:
        return False


class RemembersEchoes(AgentMachine):
    """Obeys no echo, but does not forget it either."""

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        if self._is_stale(event) and self.state.phase is Phase.RUNNING:
            self.state.stopping_since = now
        return super().step(event, now)


class NeverStopsWhatFailed(AgentMachine):
    """Deaf to failures: waits for the others to end by themselves."""

    def _stop(self, *details) -> None:
        pass


class ForgetsToJoin(AgentMachine):
    """Wants to join, and tells nobody."""

    def _join(self, why: str) -> None:
        super()._join(why)
        if self.state.generation:
            self._orders.pop()


class ClearsTooEarly(AgentMachine):
    """Orders the node cleared while workers still live."""

    def _stop(self, *details) -> None:
        super()._stop(*details)
        if self.state.rung is Rung.ASKED:
            self._clear(self.state.stopping_since)


class ExceedsTheBudget(AgentMachine):
    """Grants itself one more."""

    def __init__(self, settings, policy) -> None:
        super().__init__(msgspec.structs.replace(settings, max_restarts=settings.max_restarts + 1), policy)


class ForgetsTheSecondFailure(AgentMachine):
    """Keeps only one failure per generation."""

    def _end(self, outcome: Outcome, why: str, **more) -> None:
        del self.state.failures[1:]
        super()._end(outcome, why, **more)


class RunsAwayFromASignal(AgentMachine):
    """Asked to stop while it tidies up, it drops everything."""

    def _on_signal(self, *details) -> None:
        super()._on_signal(*details)
        if self.state.phase is Phase.CLOSING:
            self._end(Outcome.CANCELLED, "asked to stop")


BROKEN = [
    (StartsBesideTheOldGeneration, "A1"),
    (BelievesAnyClearance, "A1"),
    (TakesAnyGeneration, "A2"),
    (StartsTwice, "A1"),
    (CountsRestartsTwice, "A3"),
    (RestartsForFree, "A3"),
    (SpeaksAfterTheVerdict, "A4"),
    (LeavesBeforeTheNodeIsClear, "A5"),
    (RunsAwayFromASignal, "A5"),
    (GivesUpWithoutACause, "A6"),
    (CallsTheFailedStopped, "A6"),
    (NamesTheLastCauseFirst, "A6"),
    (CallsItSuccessWhenAllHaveEnded, "A6"),
    (ForgetsTheGracePeriod, "A7"),
    (ForgetsToAbandon, "A7"),
    (WaitsForEvidenceForever, "A7"),
    (LeavesADeadlineBehind, "A7"),
    (NeverStopsWhatFailed, "A7"),
    (StepsDownTheLadder, "A8"),
    (HearsEchoes, "A9"),
    (RemembersEchoes, "A9"),
    (OverlooksFailures, "succeeded, but not every worker did"),
    (ForgetsToJoin, "waits for nothing"),
    (ClearsTooEarly, "told to clear while workers"),
    (ExceedsTheBudget, "restarts of"),
    (ForgetsTheSecondFailure, "are not named"),
]


def how_it_is_caught(kind: type[AgentMachine]) -> list[str]:
    """What the checks say about this machine, in the order of the histories that catch it."""
    complaints = []
    for seed in range(SEEDS):
        try:
            World(random.Random(seed), lies=seed % 2 == 1, make_machine=kind).play()
        except (InvariantBroken, WorldBroken) as complaint:
            complaints.append(str(complaint))
            if len(complaints) == 20:
                break
    return complaints


@pytest.mark.parametrize(("kind", "complaint"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_machine_is_caught(kind: type[AgentMachine], complaint: str) -> None:
    """A machine that breaks one promise is caught within a thousand short histories, and for the right reason."""
    complaints = how_it_is_caught(kind)
    assert any(complaint in said for said in complaints), complaints[:5] or "nobody noticed"


def test_the_machine_itself_is_not_caught() -> None:
    """The same search finds nothing wrong with the machine that we ship."""
    assert how_it_is_caught(AgentMachine) == []


def test_every_promise_has_a_machine_that_breaks_it() -> None:
    """None of A1-A9 is checked by words alone."""
    assert {complaint for _, complaint in BROKEN} >= {f"A{number}" for number in range(1, 10)}


def test_a_verdict_out_of_place_is_caught() -> None:
    """A4, both halves: no verdict before the end, no end without one."""

    class VerdictTooEarly(AgentMachine):
        def _on_worker_started(self, local_rank: int, pid: int) -> None:
            self._end(Outcome.BROKEN, "just so")
            self.state.phase = Phase.RUNNING

    class EndWithoutVerdict(AgentMachine):
        def _on_join_refused(self, reason: str) -> None:
            self.state.phase = Phase.ENDED

        def _take(self, event: AnyEvent, now: float) -> None:
            super()._take(fact.JoinRefused("always") if isinstance(event, fact.GenerationFormed) else event, now)

    assert any("A4: a verdict while running" in said for said in how_it_is_caught(VerdictTooEarly))
    assert any("A4: ended without a verdict" in said for said in how_it_is_caught(EndWithoutVerdict))
