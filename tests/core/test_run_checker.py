"""The coordinator's checks detect broken machines, each as a violation of the invariant that it breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, EndCause, NodePhase, RunDeadline, RunSettings, Send, Step
from tenax._core.model import Outcome, Verdict
from tenax._core.policy import AnyDecision, GiveUp, Restart
from tenax.testing.agent_invariants import InvariantBroken
from tenax.testing.run_invariants import RunChecker

from .random_node import ExpectationBroken
from .random_run import RandomRun

SEEDS = 500


# --- C1 ---------------------------------------------------------------------------------------------------------------


class ReusesANumber(CoordinatorMachine):
    """Gives a new generation the number of the last one."""

    def _form(self, now: float) -> None:
        if self.state.generation:
            self.state.generation -= 1
        super()._form(now)


class FormsWithTooFewNodes(CoordinatorMachine):
    """Forms a generation as soon as one node is ready."""

    def _form_if_possible(self, now: float) -> None:
        if self.state.ready:
            self._form(now)


class FormsWithTooManyNodes(CoordinatorMachine):
    """Ignores the maximum number of nodes."""

    def _form(self, now: float) -> None:
        state = self.state
        state.settings, settings = msgspec.structs.replace(state.settings, max_nodes=9), state.settings
        super()._form(now)
        state.settings = settings


class FormsAGenerationPerNode(CoordinatorMachine):
    """Sends every node another generation number."""

    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        formed = [send for send in sends if isinstance(send.event, events.GenerationFormed)]
        for index, send in enumerate(formed):
            part = msgspec.structs.replace(send.event.assignment, generation=send.event.assignment.generation + index)
            sends[sends.index(send)] = Send(send.to, events.GenerationFormed(part))
        return Step(sends, decision)


# --- C2 ---------------------------------------------------------------------------------------------------------------


class DoesNotWaitForAllMembers(CoordinatorMachine):
    """Continues as soon as one member has stopped."""

    def _after_generation_if_stopped(self, now: float) -> None:
        if self.state.ready:
            self.state.phase.unstopped.clear()
        super()._after_generation_if_stopped(now)


class AdmitsNodesThatAreNotReady(CoordinatorMachine):
    """Makes nodes members that have joined but are not ready."""

    def _form(self, now: float) -> None:
        for node_id, record in self.state.nodes.items():
            if record.phase is NodePhase.JOINED:
                self.state.ready[node_id] = True
        super()._form(now)


class ForgetsLatecomers(CoordinatorMachine):
    """Does not wait for members of an earlier coordinator that join late."""

    def _await_latecomer(self, *details) -> None:
        pass


class DoesNotWaitForSupersededNodes(CoordinatorMachine):
    """Takes a node whose agent was restarted as dead."""

    def _wait_for_superseded(self, old, now: float) -> None:
        self._on_gone(old.info.node_id, "started again", now, is_loss=True)


# --- C3 ---------------------------------------------------------------------------------------------------------------


class ChangesAssignments(CoordinatorMachine):
    """Base of machines that send wrong assignments."""

    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        changed = [
            Send(send.to, events.GenerationFormed(self.change(send.event.assignment)))
            if isinstance(send.event, events.GenerationFormed)
            else send
            for send in sends
        ]
        return Step(changed, decision)

    def change(self, part):
        raise NotImplementedError


class AssignsARankTwice(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, group_rank=0)


class LeavesGapsBetweenRanks(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, first_global_rank=part.group_rank * 8)


class ForgetsRoles(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, first_role_rank=part.first_global_rank, role_world_size=part.world_size)


class SendsDifferentWorldSizes(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, world_size=part.world_size + part.group_rank)


class SendsDifferentStores(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, master_port=part.master_port + part.group_rank)


class SendsOldRestartCounts(ChangesAssignments):
    def change(self, part):
        return msgspec.structs.replace(part, restarts_used=max(0, part.restarts_used - 1))


# --- C4 ---------------------------------------------------------------------------------------------------------------


class ChargesLosses(CoordinatorMachine):
    """Charges a restart for a generation that lost a node."""

    def _after_generation(self, ending, now: float) -> None:
        if self.state.last.lost and self.state.last.failures and ending.cause is not EndCause.LATECOMER:
            self._after_failure(ending, now)
        else:
            super()._after_generation(ending, now)


class ChargesNewcomers(CoordinatorMachine):
    def _after_generation(self, ending, now: float) -> None:
        changes = self.state.membership_changes
        super()._after_generation(ending, now)
        if ending.cause is EndCause.JOIN and self.state.membership_changes > changes:
            self.state.membership_changes -= 1
            self.state.restarts_used += 1


class CountsTwice(CoordinatorMachine):
    def _after_failure(self, ending, now: float) -> None:
        before = self.state.restarts_used
        super()._after_failure(ending, now)
        self.state.restarts_used += self.state.restarts_used - before


class NeverCharges(CoordinatorMachine):
    """Does not count granted restarts."""

    def _ask_policy(self, failure, history) -> AnyDecision:
        decision = super()._ask_policy(failure, history)
        self.state.restarts_used -= not isinstance(decision, GiveUp)
        return decision


class CountsDrainsAsLosses(CoordinatorMachine):
    def _after_generation(self, ending, now: float) -> None:
        if self.state.last.drained and ending.cause is not EndCause.LATECOMER:
            self.state.last.lost.setdefault("host-x", "left")
        super()._after_generation(ending, now)


class CountsLossesAsDrains(CoordinatorMachine):
    def _after_generation(self, ending, now: float) -> None:
        last = self.state.last
        if last.lost and ending.cause is not EndCause.LATECOMER:
            last.drained, last.lost = list(last.lost), {}
        super()._after_generation(ending, now)


class DoesNotAskThePolicy(CoordinatorMachine):
    def _ask_policy(self, failure, history) -> AnyDecision:
        return Restart("one more")


class FailsOnALoss(CoordinatorMachine):
    """Fails the run when a worker failed in a generation that lost a node."""

    def _after_generation(self, ending, now: float) -> None:
        if self.state.last.lost and self.state.last.failures:
            self._decision = GiveUp("a worker failed")
            self._end_run(Outcome.FAILED, "a worker failed", now)
        else:
            super()._after_generation(ending, now)


# --- C5 ---------------------------------------------------------------------------------------------------------------


class NotifiesOnlySomeMembers(CoordinatorMachine):
    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        fewer = [
            Send(send.to[:1], send.event) if isinstance(send.event, events.GenerationEnded) else send for send in sends
        ]
        return Step(fewer, decision)


class GivesNoReason(CoordinatorMachine):
    def _end_generation(self, cause: EndCause, why: str, now: float, *decision, **how) -> None:
        super()._end_generation(cause, "", now, *decision, **how)


class ContinuesAfterALoss(CoordinatorMachine):
    """Does not end the generation when a node is lost."""

    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        if isinstance(self.state.phase, run.Running):
            self.state.nodes.pop(node_id, None)
            self.state.ready.pop(node_id, None)
        else:
            super()._on_gone(node_id, why, now, is_loss=is_loss)


class ContinuesAfterAFailure(CoordinatorMachine):
    """Ends the generation only when the node with the failure has stopped."""

    def _add_failures(self, record, failures, by_s: float, now: float) -> None:
        phase = self.state.phase
        if isinstance(phase, run.Running):
            self.state.phase = run.Gathering()
        super()._add_failures(record, failures, by_s, now)
        self.state.phase = phase


class EndsOnANotice(CoordinatorMachine):
    """Ends the generation when a node announces that it will leave."""

    def _forward_notice(self, record, why: str, in_s: float | None) -> None:
        super()._forward_notice(record, why, in_s)
        if isinstance(self.state.phase, run.Running):
            self._end_generation(EndCause.DRAIN, why, self.state.last.formed_at)


class EndsForNodesItCannotAdmit(CoordinatorMachine):
    def _consider_newcomer(self, record, now: float) -> None:
        self._end_generation(EndCause.JOIN, f"{record.info.host} joins", now)


class ReportsTheLastCauseFirst(CoordinatorMachine):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        super()._end_run(outcome, why, now)
        self.replace(failures=self.verdict.failures[::-1])

    @property
    def verdict(self) -> Verdict:
        assert self.state.verdict is not None
        return self.state.verdict

    def replace(self, **more) -> None:
        self.state.phase.verdict = msgspec.structs.replace(self.verdict, **more)
        for index, send in enumerate(self._outbox):
            if isinstance(send.event, events.RunEnded):
                self._outbox[index] = Send(send.to, msgspec.structs.replace(send.event, verdict=self.state.verdict))


class OmitsAFailure(ReportsTheLastCauseFirst):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        CoordinatorMachine._end_run(self, outcome, why, now)
        self.replace(failures=self.verdict.failures[:1])


class ReportsStoppedWorkersTwice(ReportsTheLastCauseFirst):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        CoordinatorMachine._end_run(self, outcome, why, now)
        self.replace(stopped=self.verdict.stopped * 2)


# --- C6 ---------------------------------------------------------------------------------------------------------------


class SendsTheVerdictOnlyToMembers(CoordinatorMachine):
    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        members = self.state.members
        fewer = [
            Send(tuple(each for each in send.to if each in members), send.event)
            if isinstance(send.event, events.RunEnded)
            else send
            for send in sends
        ]
        return Step(fewer, decision)


class SendsDifferentVerdicts(CoordinatorMachine):
    def step(self, event, now: float) -> Step:
        sends: list[Send] = []
        step = super().step(event, now)
        for send in step.sends:
            if isinstance(send.event, events.RunEnded):
                for node_id in send.to:
                    verdict = msgspec.structs.replace(send.event.verdict, why=f"verdict for {node_id}")
                    sends.append(Send((node_id,), msgspec.structs.replace(send.event, verdict=verdict)))
            else:
                sends.append(send)
        return Step(sends, step.decision)


class SucceedsTooEarly(CoordinatorMachine):
    """Ends the run when the first member has succeeded."""

    def _on_succeeded(self, record, now: float) -> None:
        super()._on_succeeded(record, now)
        if isinstance(self.state.phase, run.Running):
            self._succeeded(now)


class GathersAfterTheEnd(CoordinatorMachine):
    """Gathers again when a node joins after the end."""

    def _on_joined(self, joined, now: float) -> None:
        if isinstance(self.state.phase, run.Over):
            self.state.phase = run.Gathering()
        super()._on_joined(joined, now)


class IgnoresNodesAfterTheEnd(CoordinatorMachine):
    def _on_joined(self, joined, now: float) -> None:
        if not isinstance(self.state.phase, run.Over):
            super()._on_joined(joined, now)


# --- C7 ---------------------------------------------------------------------------------------------------------------


class ForgetsTheJoinTimeout(CoordinatorMachine):
    def _gather(self, why: str, now: float) -> None:
        super()._gather(why, now)
        self.state.deadlines.pop(RunDeadline.JOIN, None)


class ForgetsTheLastCall(CoordinatorMachine):
    def _form_if_possible(self, now: float) -> None:
        super()._form_if_possible(now)
        self.state.deadlines.pop(RunDeadline.LAST_CALL, None)


class WaitsForTheMaximum(CoordinatorMachine):
    """Forms a generation only with the maximum number of nodes."""

    def _form_if_possible(self, now: float) -> None:
        if len(self.state.ready) >= self.state.settings.max_nodes:
            super()._form_if_possible(now)


class SendsNoWaitingReason(CoordinatorMachine):
    """Does not send Waiting."""

    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        return Step([send for send in sends if not isinstance(send.event, events.Waiting)], decision)


class DoesNotResendAssignments(CoordinatorMachine):
    """Does not send an assignment again to a node that missed it."""

    def _resend_assignment(self, *details) -> None:
        pass


class WaitsForLostNodes(CoordinatorMachine):
    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        if isinstance(self.state.phase, run.Ending) and self.state.phase.unstopped == {node_id}:
            self.state.nodes.pop(node_id, None)
        else:
            super()._on_gone(node_id, why, now, is_loss=is_loss)


class NeverSucceeds(CoordinatorMachine):
    def _succeeded(self, now: float) -> None:
        pass


# --- C8 ---------------------------------------------------------------------------------------------------------------


class AcceptsStaleMessages(CoordinatorMachine):
    def _is_stale(self, record, message) -> bool:
        if isinstance(message, messages.NodeReady):
            return super()._is_stale(record, message)
        return isinstance(self.state.phase, run.Over) or not self.state.last.has(record.info.node_id)


class AcceptsAStaleReady(CoordinatorMachine):
    """Ignores the generation in NodeReady."""

    def _is_stale(self, record, message) -> bool:
        return super()._is_stale(record, message) and not isinstance(message, messages.NodeReady)


class StoresUnknownNodes(CoordinatorMachine):
    def _on_received(self, node_id: str, message, now: float) -> None:
        if node_id not in self.state.nodes and not isinstance(message, messages.NodeJoined):
            self.state.names.arrivals += 1
        super()._on_received(node_id, message, now)


# --- C9 ---------------------------------------------------------------------------------------------------------------


class ChargesRequests(CoordinatorMachine):
    """Charges a restart that an operator requested."""

    def _after_generation(self, ending, now: float) -> None:
        self.state.restarts_used += ending.cause is EndCause.REQUEST
        super()._after_generation(ending, now)


class CountsRequestsAsChanges(CoordinatorMachine):
    def _after_generation(self, ending, now: float) -> None:
        if ending.cause is EndCause.REQUEST:
            ending.cause = EndCause.LOSS
        super()._after_generation(ending, now)


class CountsLossesAsRequests(CoordinatorMachine):
    def _after_generation(self, ending, now: float) -> None:
        if ending.cause is EndCause.LOSS:
            ending.cause = EndCause.REQUEST
            self.state.last.lost = {}
        super()._after_generation(ending, now)


class IgnoresRestartRequests(CoordinatorMachine):
    def _on_restart_requested(self, why: str, now: float) -> None:
        pass


class RestartsWhileGathering(CoordinatorMachine):
    """Handles a restart request also while gathering."""

    def _on_restart_requested(self, why: str, now: float) -> None:
        if isinstance(self.state.phase, run.Gathering):
            self._gather(why, now)
        else:
            super()._on_restart_requested(why, now)


class DrainsAllNodes(CoordinatorMachine):
    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        sends, decision = step.sends, step.decision
        more = [
            Send(tuple(self.state.nodes), s.event) if isinstance(s.event, events.LeaveRequested) else s for s in sends
        ]
        return Step(more, decision)


class DrainsWithoutAnAnswer(CoordinatorMachine):
    """Marks a node as draining before it has answered."""

    def step(self, event, now: float) -> Step:
        step = super().step(event, now)
        if isinstance(event, run.DrainRequested) and event.node_id in self.state.nodes:
            self.state.nodes[event.node_id].is_draining = True
        return step


class DrainsSpares(CoordinatorMachine):
    def _on_ready(self, record, ready, now: float) -> None:
        super()._on_ready(record, ready, now)
        if isinstance(self.state.phase, run.Running) and record.phase is NodePhase.READY:
            self._send(events.LeaveRequested("not needed"), record.info.node_id)


# --- L1 of the ledger -------------------------------------------------------------------------------------------------


class DoesNotCountWaiting(CoordinatorMachine):
    """Does not count the time before a generation is formed."""

    def _form(self, now: float) -> None:
        super()._form(now)
        self.state.ledger.entries[-1].waited_s = 0.0


class CountsFromTheClocksStart(CoordinatorMachine):
    """Counts from time 0 instead of the arrival of the first node."""

    def _on_joined(self, joined, now: float) -> None:
        self.state.ledger.begin(0.0)
        super()._on_joined(joined, now)


class ActsAtOnceWhenResumed(CoordinatorMachine):
    """Handles deadlines that passed while it was suspended."""

    def _on_resumed(self, now: float) -> None:
        self._on_tick(now)


class KeepsDeadlinesWhenResumed(CoordinatorMachine):
    """Does not extend its deadlines after a suspension."""

    def _on_resumed(self, now: float) -> None:
        pass


BROKEN = [
    (ActsAtOnceWhenResumed, "C10: resumed, but "),
    (KeepsDeadlinesWhenResumed, "C10: resumed, but "),
    (ReusesANumber, "C1: generations"),
    (FormsWithTooFewNodes, "C1: generation"),
    (FormsWithTooManyNodes, "C1: generation"),
    (FormsAGenerationPerNode, "C1: generations"),
    (DoesNotWaitForAllMembers, "C2: "),
    (AdmitsNodesThatAreNotReady, "which are not clear"),
    (ForgetsLatecomers, "C2: "),
    (DoesNotWaitForSupersededNodes, "were not notified"),
    (AssignsARankTwice, "C3: "),
    (LeavesGapsBetweenRanks, "C3: "),
    (ForgetsRoles, "C3: "),
    (SendsDifferentWorldSizes, "C3: "),
    (SendsDifferentStores, "C3: the members were sent different stores"),
    (SendsOldRestartCounts, "C3: "),
    (ChargesLosses, "C4: a restart was charged"),
    (ChargesNewcomers, "C4: a restart was charged"),
    (CountsTwice, "C4: the ledger"),
    (NeverCharges, "C4: "),
    (CountsDrainsAsLosses, "counted as a membership change, but was not one"),
    (CountsLossesAsDrains, "counted as a drain, but was not one"),
    (DoesNotAskThePolicy, "C4: a restart was charged"),
    (FailsOnALoss, "C4: failed, but the policy did not give up"),
    (NotifiesOnlySomeMembers, "were not notified"),
    (GivesNoReason, "without a reason"),
    (ContinuesAfterALoss, "C5: generation"),
    (ContinuesAfterAFailure, "C5: generation"),
    (EndsOnANotice, "without a cause"),
    (EndsForNodesItCannotAdmit, "which cannot be admitted"),
    (ReportsTheLastCauseFirst, "C5: the first cause does not come first"),
    (OmitsAFailure, "C5: failed, but the report has"),
    (ReportsStoppedWorkersTwice, "were stopped"),
    (SendsTheVerdictOnlyToMembers, "C6: "),
    (SendsDifferentVerdicts, "C6: not all nodes were sent the same verdict"),
    (SucceedsTooEarly, "C6: succeeded, but not every member has"),
    (GathersAfterTheEnd, "C6: the run continues after its end"),
    (IgnoresNodesAfterTheEnd, "joined after the end, but was not sent the verdict"),
    (ForgetsTheJoinTimeout, "C7: gathering needs deadlines"),
    (ForgetsTheLastCall, "C7: gathering needs deadlines"),
    (WaitsForTheMaximum, "C7: "),
    (SendsNoWaitingReason, "waits, but was not sent a reason"),
    (DoesNotResendAssignments, "but is not sent it again"),
    (WaitsForLostNodes, "C7: ending, but no node is awaited"),
    (NeverSucceeds, "C7: all members are done, but the run continues"),
    (AcceptsStaleMessages, "C8: "),
    (AcceptsAStaleReady, "C8: "),
    (StoresUnknownNodes, "C8: "),
    (ChargesRequests, "C4: the ledger goes"),
    (CountsRequestsAsChanges, "counted as a membership change, but was not one"),
    (CountsLossesAsRequests, "C9: generation"),
    (IgnoresRestartRequests, "C5: generation"),
    (RestartsWhileGathering, "C8: RestartRequested"),
    (DrainsAllNodes, "C9: "),
    (DrainsWithoutAnAnswer, "C9: "),
    (DrainsSpares, "but no operator requested it"),
    (DoesNotCountWaiting, "L1: "),
    (CountsFromTheClocksStart, "L1: "),
]


def detections(kind: type[CoordinatorMachine]) -> Iterator[str]:
    """Yield the errors that the checks raise for this machine, by seed."""
    for seed in range(SEEDS):
        try:
            RandomRun(random.Random(seed), invalid_events=seed % 2 == 1, make_machine=kind).run()
        except (InvariantBroken, ExpectationBroken) as error:
            yield str(error)


@pytest.mark.parametrize(("kind", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_coordinator_is_detected(kind: type[CoordinatorMachine], message: str) -> None:
    """A machine that breaks one invariant is detected within 500 short runs, with the right message."""
    errors: list[str] = []
    assert any(errors.append(error) or message in error for error in detections(kind)), errors[:5] or "not detected"


def test_the_real_coordinator_breaks_no_invariant() -> None:
    """The same search finds no error."""
    assert list(detections(CoordinatorMachine)) == []


def test_every_invariant_is_broken_by_some_coordinator() -> None:
    """Each of C1-C10 is seen to fail."""
    cited = {match for _, message in BROKEN for match in re.findall(r"^C\d+", message)}
    assert cited == {f"C{number}" for number in range(1, 11)}


def test_a_deadline_after_the_end_is_detected() -> None:
    machine = CoordinatorMachine(RunSettings("run"))
    checker = RunChecker(machine.state.settings)
    checker.check(machine.state, run.Opened(), machine.step(run.Opened(), 0.0))
    step = machine.step(run.CancelRequested("enough"), 1.0)
    machine.state.deadlines[RunDeadline.JOIN] = 1.0
    with pytest.raises(InvariantBroken, match="C7: over needs deadlines for"):
        checker.check(machine.state, run.CancelRequested("enough"), step)
