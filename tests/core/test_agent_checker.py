"""The agent's checks detect broken machines, each as a violation of the invariant that it breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import msgspec
import pytest

from tenax._core import commands as command_types
from tenax._core import events, messages
from tenax._core.agent import SIGTERM, AgentMachine, Phase, Rung
from tenax._core.agent_state import Decided
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import Outcome, Stopped, Verdict
from tenax.testing.agent_invariants import InvariantBroken

from .random_node import ExpectationBroken, RandomNode

SEEDS = 1_000


class AssumesTheNodeIsClear(AgentMachine):
    """Does not wait for NodeCleared after its workers have ended."""

    def _clear(self, now: float) -> None:
        super()._clear(now)
        self.state.last.stop.is_clear, self.state.last.stop.until = True, None
        self._continue_if_stopped(now)


class StartsBeforeTheLastGenerationStopped(AgentMachine):
    """Accepts the next generation while the last one is still stopping."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.STOPPING:
            self._start(assignment, now)
        super()._on_generation_formed(assignment, now)


class AcceptsUnrequestedClearance(AgentMachine):
    """Accepts a NodeCleared that it did not request."""

    def _on_node_cleared(self, held, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.last.stop.rung < Rung.CLEARING:
            self.state.last.stop.rung = Rung.CLEARING
        super()._on_node_cleared(held, now)


class AcceptsAnyGeneration(AgentMachine):
    """Accepts a generation whose number is not greater than the last."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        if self.state.phase is Phase.JOINING:
            self.state.last.assignment = msgspec.structs.replace(assignment, generation=assignment.generation - 1)
        super()._on_generation_formed(assignment, now)


class StartsTwice(AgentMachine):
    """Starts its workers again when it receives its assignment again."""

    def _on_generation_formed(self, assignment, now: float) -> None:
        super()._on_generation_formed(assignment, now)
        if self.state.phase is Phase.RUNNING and assignment == self.state.assignment and not self._commands:
            self._commands.append(command_types.StartWorkers(assignment))


class StartsAnUnformedGeneration(AgentMachine):
    """Starts the next generation before the coordinator has formed it."""

    def _join(self) -> None:
        super()._join()
        if self.state.assignment is not None:
            own = msgspec.structs.replace(self.state.assignment, generation=self.state.generation + 1)
            self._on_generation_formed(own, self.state.last.stop.since)


class ReportsReadyTooEarly(AgentMachine):
    """Reports ready as soon as its workers were sent a stop signal."""

    def _stop(self, *details) -> None:
        super()._stop(*details)
        self._send(messages.NodeReady(self.state.generation))


class ReportsSuccessAfterFailure(AgentMachine):
    """Reports success when all workers have ended."""

    def _continue_if_stopped(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.cleared:
            self._after_success()


class ReportsTheWrongGeneration(AgentMachine):
    def _send(self, message: messages.FromNode) -> None:
        if isinstance(
            message, messages.NodeStopped | messages.NodeSucceeded | messages.FailureSeen | messages.NodeDraining
        ):
            message = msgspec.structs.replace(message, generation=message.generation + 1)
        super()._send(message)


class IssuesCommandsAfterTheVerdict(AgentMachine):
    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        commands = super().step(event, now)
        if self.state.phase is Phase.ENDED and not commands:
            return [command_types.KillNode(self.state.generation, "after the end")]
        return commands


class EndsBeforeTheNodeIsClear(AgentMachine):
    """Does not clear processes that successful workers left behind."""

    def _clear(self, now: float) -> None:
        if self.state.phase is Phase.CLOSING:
            self._end(self._own_verdict(Outcome.SUCCEEDED, "done"))
        else:
            super()._clear(now)


class FailsWithoutAFailure(AgentMachine):
    def _end(self, verdict: Verdict) -> None:
        super()._end(msgspec.structs.replace(verdict, failures=()))


class ReportsFailedAsStopped(AgentMachine):
    def _own_verdict(self, *details, **more) -> Verdict:
        workers = self.state.workers.items()
        stopped = tuple(Stopped(rank, self._global_rank(rank), each.pid, each.exit_code) for rank, each in workers)
        return msgspec.structs.replace(super()._own_verdict(*details, **more), stopped=stopped)


class ReportsTheLastCauseFirst(AgentMachine):
    def _end(self, verdict: Verdict) -> None:
        super()._end(msgspec.structs.replace(verdict, failures=verdict.failures[::-1]))


class IgnoresFaults(AgentMachine):
    """Ignores faults of workers that exited with code 0."""

    def _on_worker_ended(self, worker, exited, now: float) -> None:
        super()._on_worker_ended(worker, msgspec.structs.replace(exited, fault=""), now)


class SucceedsWhenAllHaveEnded(AgentMachine):
    def _continue_if_stopped(self, now: float) -> None:
        if self.state.phase is Phase.STOPPING and self.state.cleared:
            self._end(self._own_verdict(Outcome.SUCCEEDED, "all workers ended"))


class ForgetsTheGracePeriod(AgentMachine):
    def _stop(self, *details) -> None:
        super()._stop(*details)
        self.state.last.stop.until = None


class ForgetsToAbandon(AgentMachine):
    def _kill(self, why: str, now: float) -> None:
        super()._kill(why, now)
        self.state.last.stop.until = None


class WaitsForEvidenceForever(AgentMachine):
    def _record_bad_exit(self, worker, fault: str, wrote_error: bool, now: float) -> None:
        super()._record_bad_exit(worker, fault, wrote_error, now)
        self.state.last.examination.until = None


class KeepsADeadline(AgentMachine):
    def _on_generation_formed(self, assignment, now: float) -> None:
        super()._on_generation_formed(assignment, now)
        if self.state.phase is Phase.RUNNING:
            self.state.last.examination.until = 1e9


class ClearsAfterKilling(AgentMachine):
    """Issues ClearNode after KillNode."""

    def _on_worker_ended(self, worker, exited, now: float) -> None:
        super()._on_worker_ended(worker, exited, now)
        if (
            self.state.phase is Phase.STOPPING
            and self.state.last.stop.rung is Rung.KILLED
            and self.state.last.have_all_ended()
        ):
            self._clear(now)


class AcceptsStaleEvents(AgentMachine):
    def _is_stale(self, event: AnyEvent) -> bool:
        return False


class StoresStaleEvents(AgentMachine):
    """Lets a stale event change its state."""

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        if self._is_stale(event) and self.state.phase is Phase.RUNNING:
            self.state.last.stop.since = now
        return super().step(event, now)


class IgnoresFailures(AgentMachine):
    """Does not stop the other workers after a failure."""

    def _stop(self, *details) -> None:
        pass


class ForgetsToJoin(AgentMachine):
    """Does not send that it is ready."""

    def _join(self) -> None:
        super()._join()
        if self.state.generation:
            self._commands.pop()


class ClearsTooEarly(AgentMachine):
    """Issues ClearNode while workers are alive."""

    def _stop(self, *details) -> None:
        super()._stop(*details)
        if self.state.last.stop.rung is Rung.SIGNALLED:
            self._clear(self.state.last.stop.since)


class ForgetsTheSecondFailure(AgentMachine):
    """Reports only one failure per generation."""

    def _send(self, message: messages.FromNode) -> None:
        if isinstance(message, messages.NodeStopped):
            message = msgspec.structs.replace(message, failures=message.failures[:1])
        super()._send(message)


class ContinuesAnEndedGeneration(AgentMachine):
    """Ignores GenerationEnded."""

    def _on_generation_ended(self, *details) -> None:
        pass


class GivesGraceWhenLate(AgentMachine):
    """Does not kill workers when GenerationEnded arrives late."""

    def _on_generation_ended(self, ended: events.GenerationEnded, now: float) -> None:
        super()._on_generation_ended(msgspec.structs.replace(ended, is_late=False), now)


class ContinuesAnEndedRun(AgentMachine):
    """Ignores RunEnded while workers run."""

    def _decide(self, decided: Decided, now: float) -> None:
        if self.state.phase is not Phase.RUNNING:
            super()._decide(decided, now)


class GivesGraceWhenFenced(AgentMachine):
    """Sends SIGTERM instead of killing when it is fenced."""

    def _on_fenced(self, why: str, now: float) -> None:
        if self.state.phase is Phase.RUNNING:
            self._stop(SIGTERM, why, 1.0, now)


class ReplacesTheVerdict(AgentMachine):
    """Replaces the coordinator's verdict by success."""

    def _decide(self, decided: Decided, now: float) -> None:
        super()._decide(Decided(Verdict(Outcome.SUCCEEDED, "all workers succeeded")), now)


class DoesNotWaitForTheVerdict(AgentMachine):
    """Ends when its own workers succeeded, before the coordinator's verdict."""

    def _after_success(self) -> None:
        super()._after_success()
        if self.state.phase is Phase.DONE:
            self._end(self._own_verdict(Outcome.SUCCEEDED, "all workers succeeded"))


class ForwardsNoticesWithoutWorkers(AgentMachine):
    def _forward_notice(self, host: str, why: str, in_s: float | None) -> None:
        self._commands.append(command_types.ForwardNotice(self.state.generation, host, why, in_s))


class EndsOnASignalWhileClosing(AgentMachine):
    """Ends at once on a signal, although the node is not clear."""

    def _on_leave_requested(self, *details) -> None:
        super()._on_leave_requested(*details)
        if self.state.phase is Phase.CLOSING:
            self._end(self._own_verdict(Outcome.CANCELLED, "received SIGTERM"))


class IgnoresExpiredScopes(AgentMachine):
    """Ignores ScopeExpired."""

    def _on_scope_expired(self, *details) -> None:
        pass


class DumpsOnlyTheOverdueWorker(AgentMachine):
    """Requests only the stacks of the overdue worker, not of the others."""

    def _dump_stacks(self, worker, now: float) -> None:
        if worker.overdue is not None:
            super()._dump_stacks(worker, now)


class ForgetsTheOverdueDeadline(AgentMachine):
    """Requests the stacks and does not end the worker."""

    def _on_scope_expired(self, worker, event, now: float) -> None:
        super()._on_scope_expired(worker, event, now)
        for worker in self.state.workers.values():
            if worker.overdue is not None:
                worker.overdue.until = None


class EndsAnotherWorkerToo(AgentMachine):
    """Ends the worker with the next rank as well."""

    def _escalate(self, worker, overdue, now: float) -> None:
        super()._escalate(worker, overdue, now)
        for command in list(self._commands):
            if isinstance(command, command_types.EndWorker):
                self._commands.append(msgspec.structs.replace(command, local_rank=command.local_rank + 1))


BROKEN = [
    (StartsBeforeTheLastGenerationStopped, "A1: generation"),
    (AcceptsUnrequestedClearance, "A1"),
    (StartsTwice, "A1"),
    (AcceptsAnyGeneration, "A2: generation"),
    (StartsAnUnformedGeneration, "but was not formed"),
    (AssumesTheNodeIsClear, "A3: NodeStopped while processes may be alive"),
    (ReportsReadyTooEarly, "A3: NodeReady while processes may be alive"),
    (ReportsSuccessAfterFailure, "A3: NodeSucceeded, but not every worker succeeded"),
    (ReportsTheWrongGeneration, "A3: FailureSeen of generation"),
    (IssuesCommandsAfterTheVerdict, "A4"),
    (EndsBeforeTheNodeIsClear, "A5"),
    (EndsOnASignalWhileClosing, "A5"),
    (FailsWithoutAFailure, "A6: failed, but no worker failed"),
    (ReportsFailedAsStopped, "both failed and were stopped"),
    (ReportsTheLastCauseFirst, "A6: the first cause does not come first"),
    (SucceedsWhenAllHaveEnded, "A6: succeeded, but a worker failed"),
    (ForgetsTheGracePeriod, "A7"),
    (ForgetsToAbandon, "A7"),
    (WaitsForEvidenceForever, "A7"),
    (KeepsADeadline, "A7"),
    (IgnoresFailures, "A7"),
    (ClearsAfterKilling, "A8"),
    (AcceptsStaleEvents, "A9"),
    (StoresStaleEvents, "A9"),
    (ForgetsTheOverdueDeadline, "A7"),
    (EndsAnotherWorkerToo, "A10"),
    (IgnoresExpiredScopes, "a scope has expired, but not all stacks were requested"),
    (DumpsOnlyTheOverdueWorker, "a scope has expired, but not all stacks were requested"),
    (IgnoresFaults, "success is sent, but not every worker succeeded"),
    (ForgetsToJoin, "waits for no event or deadline"),
    (ClearsTooEarly, "ClearNode while workers"),
    (ForgetsTheSecondFailure, "are not reported"),
    (ContinuesAnEndedGeneration, "continues after GenerationEnded"),
    (GivesGraceWhenLate, "the end arrived late, but the workers were not killed"),
    (ContinuesAnEndedRun, "continues after RunEnded"),
    (GivesGraceWhenFenced, "fenced, but the workers were not killed"),
    (ReplacesTheVerdict, "differs from the coordinator's verdict"),
    (DoesNotWaitForTheVerdict, "but the coordinator sent no verdict"),
    (ForwardsNoticesWithoutWorkers, "a notice is forwarded, but no worker is alive"),
]


def detections(kind: type[AgentMachine]) -> Iterator[str]:
    """Yield the errors that the checks raise for this machine, by seed."""
    for seed in range(SEEDS):
        try:
            RandomNode(random.Random(seed), invalid_events=seed % 2 == 1, make_machine=kind).run()
        except (InvariantBroken, ExpectationBroken) as error:
            yield str(error)


@pytest.mark.parametrize(("kind", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_machine_is_detected(kind: type[AgentMachine], message: str) -> None:
    """A machine that breaks one invariant is detected within a thousand short histories, with the right message."""
    errors: list[str] = []
    assert any(errors.append(error) or message in error for error in detections(kind)), errors[:5] or "not detected"


def test_the_real_machine_breaks_no_invariant() -> None:
    """The same search finds no error."""
    assert list(detections(AgentMachine)) == []


def test_every_invariant_is_broken_by_some_machine() -> None:
    """Each of A1-A10 is seen to fail."""
    cited = {match for _, message in BROKEN for match in re.findall(r"^A\d+", message)}
    assert cited == {f"A{number}" for number in range(1, 11)}


def test_an_early_or_missing_verdict_is_detected() -> None:
    """A4: no verdict before the end, and no end without a verdict."""

    class VerdictTooEarly(AgentMachine):
        def _on_worker_started(self, *details) -> None:
            self._end(self._own_verdict(Outcome.BROKEN, "too early"))
            self.state.phase = Phase.RUNNING

    class EndWithoutVerdict(AgentMachine):
        def _decide(self, decided: Decided, now: float) -> None:
            self.state.phase = Phase.ENDED

        def _handle(self, event: AnyEvent, now: float) -> None:
            super()._handle(events.JoinRefused("always") if isinstance(event, events.GenerationFormed) else event, now)

    assert any("A4: a verdict while running" in error for error in detections(VerdictTooEarly))
    assert any("A4: ended without a verdict" in error for error in detections(EndWithoutVerdict))
