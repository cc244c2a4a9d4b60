"""The checks of the core can fail: each of these broken machines is caught, by the promise that it breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import msgspec
import pytest

from tenax._core import commands as order
from tenax._core import events, messages
from tenax._core.agent import SIGTERM, AgentMachine, Deadline, Phase, Rung
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import Outcome, Stopped, Verdict
from tenax.testing.agent_invariants import InvariantBroken

from .world import World, WorldBroken

SEEDS = 1_000


class ThinksTheNodeIsClear(AgentMachine):
    """... as soon as its workers have ended."""

    def _clear(self, now: float) -> None:
        super()._clear(now)
        self.state.cleared = True
        self.state.deadlines.pop(Deadline.GRACE, None)
        self._continue_if_stopped(now)


class StartsBesideTheOldGeneration(AgentMachine):
    """In a hurry: takes the next generation while the last one is still being stopped."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.STOPPING:
            self.state.phase = Phase.JOINING
        super()._on_generation_formed(assignment, now)


class BelievesAnyClearance(AgentMachine):
    """Takes a "cleared" that was not requested for an answer."""

    def _on_node_cleared(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.rung < Rung.CLEARING:
            self.state.rung = Rung.CLEARING
        super()._on_node_cleared(now)


class TakesAnyGeneration(AgentMachine):
    """Starts whatever the coordinator forms."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.JOINING:
            self.state.generation = assignment.generation - 1
        super()._on_generation_formed(assignment, now)


class StartsTwice(AgentMachine):
    """Starts its workers again when told of its generation again."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        super()._on_generation_formed(assignment, now)
        if self.state.phase is Phase.RUNNING and assignment == self.state.assignment and not self._commands:
            self._commands.append(order.StartWorkers(assignment))


class StartsWithoutBeingTold(AgentMachine):
    """Knows which generation comes next, and does not wait for it."""

    def _join(self) -> None:
        super()._join()
        if self.state.assignment is not None:
            own = msgspec.structs.replace(self.state.assignment, generation=self.state.generation + 1)
            self._on_generation_formed(own, self.state.stopping_since)


class IsReadyTooEarly(AgentMachine):
    """Says that it is ready as soon as its workers were asked to end."""

    def _stop(self, *details) -> None:
        super()._stop(*details)
        self._send(messages.NodeReady(self.state.generation))


class TellsOfASuccessThatWasNone(AgentMachine):
    """All have ended: good enough."""

    def _continue_if_stopped(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.cleared:
            self._after_success()


class TellsOfTheWrongGeneration(AgentMachine):
    def _send(self, message: messages.FromNode) -> None:
        if isinstance(
            message, messages.NodeStopped | messages.NodeSucceeded | messages.FailureSeen | messages.NodeDraining
        ):
            message = msgspec.structs.replace(message, generation=message.generation + 1)
        super()._send(message)


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
            self._end(self._own_verdict(Outcome.SUCCEEDED, "done"))
        else:
            super()._clear(now)


class GivesUpWithoutACause(AgentMachine):
    def _end(self, verdict: Verdict) -> None:
        super()._end(msgspec.structs.replace(verdict, failures=()))


class CallsTheFailedStopped(AgentMachine):
    def _own_verdict(self, *details, **more) -> Verdict:
        workers = self.state.workers.items()
        stopped = tuple(Stopped(rank, self._global_rank(rank), each.pid, each.exit_code) for rank, each in workers)
        return msgspec.structs.replace(super()._own_verdict(*details, **more), stopped=stopped)


class NamesTheLastCauseFirst(AgentMachine):
    def _end(self, verdict: Verdict) -> None:
        super()._end(msgspec.structs.replace(verdict, failures=verdict.failures[::-1]))


class OverlooksFailures(AgentMachine):
    """Sees only exit codes."""

    def _on_worker_ended(self, local_rank: int, exit_code: int, fault: str, now: float, **more) -> None:
        super()._on_worker_ended(local_rank, exit_code, "", now, **more)


class CallsItSuccessWhenAllHaveEnded(AgentMachine):
    def _continue_if_stopped(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.cleared:
            self._end(self._own_verdict(Outcome.SUCCEEDED, "all workers ended"))


class ForgetsTheGracePeriod(AgentMachine):
    def _stop(self, *details) -> None:
        super()._stop(*details)
        self.state.deadlines.pop(Deadline.GRACE, None)


class ForgetsToAbandon(AgentMachine):
    def _kill(self, why: str, now: float) -> None:
        super()._kill(why, now)
        self.state.deadlines.pop(Deadline.ABANDON, None)


class WaitsForEvidenceForever(AgentMachine):
    def _record_bad_exit(self, worker, fault: str, wrote_error: bool, now: float) -> None:
        super()._record_bad_exit(worker, fault, wrote_error, now)
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

    def _join(self) -> None:
        super()._join()
        if self.state.generation:
            self._commands.pop()


class ClearsTooEarly(AgentMachine):
    """Orders the node cleared while workers still live."""

    def _stop(self, *details) -> None:
        super()._stop(*details)
        if self.state.rung is Rung.SIGNALLED:
            self._clear(self.state.stopping_since)


class ForgetsTheSecondFailure(AgentMachine):
    """Tells of only one failure per generation."""

    def _send(self, message: messages.FromNode) -> None:
        if isinstance(message, messages.NodeStopped):
            message = msgspec.structs.replace(message, failures=message.failures[:1])
        super()._send(message)


class GoesOnWhenTheGenerationEnded(AgentMachine):
    """What others suffer is not its business."""

    def _on_generation_ended(self, *details) -> None:
        pass


class HasTimeToLose(AgentMachine):
    """Late is late."""

    def _on_generation_ended(self, why: str, is_late: bool, now: float) -> None:
        super()._on_generation_ended(why, False, now)


class GoesOnWhenTheRunEnded(AgentMachine):
    """Finishes what it began."""

    def _on_run_ended(self, verdict: Verdict, now: float) -> None:
        if self.state.phase is not Phase.RUNNING:
            super()._on_run_ended(verdict, now)


class GivesGraceWhenFenced(AgentMachine):
    """Polite to the last."""

    def _on_fenced(self, why: str, now: float) -> None:
        if self.state.phase is Phase.RUNNING:
            self._stop(SIGTERM, why, 1.0, now)


class HasItsOwnOpinion(AgentMachine):
    """Its own workers succeeded: that is how the run ended."""

    def _on_run_ended(self, verdict: Verdict, now: float) -> None:
        super()._on_run_ended(Verdict(Outcome.SUCCEEDED, "ours succeeded"), now)


class DoesNotWaitForTheVerdict(AgentMachine):
    """Its own workers succeeded: that will do."""

    def _after_success(self) -> None:
        super()._after_success()
        if self.state.phase is Phase.DONE:
            self._end(self._own_verdict(Outcome.SUCCEEDED, "ours succeeded"))


class PassesNoticesOnToNobody(AgentMachine):
    def _forward_notice(self, host: str, why: str, in_s: float | None) -> None:
        self._commands.append(order.ForwardNotice(self.state.generation, host, why, in_s))


class RunsAwayFromASignal(AgentMachine):
    """Asked to stop while it tidies up, it drops everything."""

    def _on_signal(self, *details) -> None:
        super()._on_signal(*details)
        if self.state.phase is Phase.CLOSING:
            self._end(self._own_verdict(Outcome.CANCELLED, "asked to stop"))


class LetsTheLateLive(AgentMachine):
    """A scope is nobody's business."""

    def _on_scope_expired(self, *details) -> None:
        pass


class LooksAtTheLateAlone(AgentMachine):
    """It may only wait for another one."""

    def _dump_stacks(self, worker, now: float) -> None:
        if worker.overdue is not None:
            super()._dump_stacks(worker, now)


class ForgetsWhoIsLate(AgentMachine):
    """Takes the stacks, and leaves it at that."""

    def _update_overdue_deadline(self) -> None:
        pass


class EndsTheNextOneToo(AgentMachine):
    """Cannot count."""

    def _escalate(self, worker, overdue, now: float) -> None:
        super()._escalate(worker, overdue, now)
        for command in list(self._commands):
            if isinstance(command, order.EndWorker):
                self._commands.append(msgspec.structs.replace(command, local_rank=command.local_rank + 1))


BROKEN = [
    (StartsBesideTheOldGeneration, "A1: generation"),
    (BelievesAnyClearance, "A1"),
    (StartsTwice, "A1"),
    (TakesAnyGeneration, "A2: generation"),
    (StartsWithoutBeingTold, "and was not formed"),
    (ThinksTheNodeIsClear, "A3: NodeStopped while processes may be alive"),
    (IsReadyTooEarly, "A3: NodeReady while processes may be alive"),
    (TellsOfASuccessThatWasNone, "A3: NodeSucceeded, but not every worker succeeded"),
    (TellsOfTheWrongGeneration, "A3: FailureSeen of generation"),
    (SpeaksAfterTheVerdict, "A4"),
    (LeavesBeforeTheNodeIsClear, "A5"),
    (RunsAwayFromASignal, "A5"),
    (GivesUpWithoutACause, "A6: failed, but no worker failed"),
    (CallsTheFailedStopped, "both failed and stopped"),
    (NamesTheLastCauseFirst, "A6: the first cause does not come first"),
    (CallsItSuccessWhenAllHaveEnded, "A6: succeeded, but a worker failed"),
    (ForgetsTheGracePeriod, "A7"),
    (ForgetsToAbandon, "A7"),
    (WaitsForEvidenceForever, "A7"),
    (LeavesADeadlineBehind, "A7"),
    (NeverStopsWhatFailed, "A7"),
    (StepsDownTheLadder, "A8"),
    (HearsEchoes, "A9"),
    (RemembersEchoes, "A9"),
    (ForgetsWhoIsLate, "A7"),
    (EndsTheNextOneToo, "A10"),
    (LetsTheLateLive, "late, and nobody looks where all of them are"),
    (LooksAtTheLateAlone, "late, and nobody looks where all of them are"),
    (OverlooksFailures, "a success is told, but not every worker succeeded"),
    (ForgetsToJoin, "waits for nothing"),
    (ClearsTooEarly, "told to clear while workers"),
    (ForgetsTheSecondFailure, "are not named"),
    (GoesOnWhenTheGenerationEnded, "goes on after GenerationEnded"),
    (HasTimeToLose, "late, and nobody was killed"),
    (GoesOnWhenTheRunEnded, "goes on after RunEnded"),
    (GivesGraceWhenFenced, "fenced, and nobody was killed"),
    (HasItsOwnOpinion, "is not what the coordinator said"),
    (DoesNotWaitForTheVerdict, "and the coordinator did not say so"),
    (PassesNoticesOnToNobody, "a notice is passed on and nobody is there"),
]


def how_it_is_caught(kind: type[AgentMachine]) -> Iterator[str]:
    """What the checks say about this machine, in the order of the histories that catch it."""
    for seed in range(SEEDS):
        try:
            World(random.Random(seed), lies=seed % 2 == 1, make_machine=kind).play()
        except (InvariantBroken, WorldBroken) as complaint:
            yield str(complaint)


@pytest.mark.parametrize(("kind", "complaint"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_machine_is_caught(kind: type[AgentMachine], complaint: str) -> None:
    """A machine that breaks one promise is caught within a thousand short histories, and for the right reason."""
    heard: list[str] = []
    assert any(heard.append(said) or complaint in said for said in how_it_is_caught(kind)), heard[:5] or "unnoticed"


def test_the_machine_itself_is_not_caught() -> None:
    """The same search finds nothing wrong with the machine that we ship."""
    assert list(how_it_is_caught(AgentMachine)) == []


def test_every_promise_has_a_machine_that_breaks_it() -> None:
    """None of A1-A10 is checked by words alone."""
    cited = {match for _, complaint in BROKEN for match in re.findall(r"^A\d+", complaint)}
    assert cited == {f"A{number}" for number in range(1, 11)}


def test_a_verdict_out_of_place_is_caught() -> None:
    """A4, both halves: no verdict before the end, no end without one."""

    class VerdictTooEarly(AgentMachine):
        def _on_worker_started(self, local_rank: int, pid: int) -> None:
            self._end(self._own_verdict(Outcome.BROKEN, "just so"))
            self.state.phase = Phase.RUNNING

    class EndWithoutVerdict(AgentMachine):
        def _on_refused(self, why: str, now: float) -> None:
            self.state.phase = Phase.ENDED

        def _handle(self, event: AnyEvent, now: float) -> None:
            super()._handle(events.JoinRefused("always") if isinstance(event, events.GenerationFormed) else event, now)

    assert any("A4: a verdict while running" in said for said in how_it_is_caught(VerdictTooEarly))
    assert any("A4: ended without a verdict" in said for said in how_it_is_caught(EndWithoutVerdict))
