"""The checks of the coordinator can fail: each of these broken machines is caught, by the promise that it breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, Ending, NodePhase, RunDeadline, RunPhase, RunSettings, Send
from tenax._core.model import Outcome, Verdict
from tenax._core.policy import AnyDecision, GiveUp, Restart
from tenax.testing.agent_invariants import InvariantBroken
from tenax.testing.run_invariants import RunChecker

from .run_world import RunWorld
from .world import WorldBroken

SEEDS = 500


# --- C1 ---------------------------------------------------------------------------------------------------------------


class UsesANumberAgain(CoordinatorMachine):
    """Counts the generations that were formed, not those that were heard of."""

    def _form(self, now: float) -> None:
        if self.state.generation:
            self.state.generation -= 1
        super()._form(now)


class FormsWithTooFew(CoordinatorMachine):
    """Impatient."""

    def _form_if_possible(self, now: float) -> None:
        if self.state.ready:
            self._form(now)


class FormsWithTooMany(CoordinatorMachine):
    """Everybody is welcome."""

    def _form(self, now: float) -> None:
        state = self.state
        state.settings, settings = msgspec.structs.replace(state.settings, max_nodes=9), state.settings
        super()._form(now)
        state.settings = settings


class FormsForEachItsOwn(CoordinatorMachine):
    """Gives every node a generation of its own."""

    def step(self, event, now: float) -> list[Send]:
        says = super().step(event, now)
        formed = [say for say in says if isinstance(say.event, events.GenerationFormed)]
        for index, say in enumerate(formed):
            part = msgspec.structs.replace(say.event.assignment, generation=say.event.assignment.generation + index)
            says[says.index(say)] = Send(say.to, events.GenerationFormed(part))
        return says


# --- C2 ---------------------------------------------------------------------------------------------------------------


class DoesNotWait(CoordinatorMachine):
    """Goes on as soon as one has stopped."""

    def _after_generation_if_stopped(self, now: float) -> None:
        if self.state.ready:
            self.state.unstopped.clear()
        super()._after_generation_if_stopped(now)


class TakesTheUnready(CoordinatorMachine):
    """Who is here is in."""

    def _form(self, now: float) -> None:
        for node_id, record in self.state.nodes.items():
            if record.phase is NodePhase.JOINED:
                self.state.ready[node_id] = True
        super()._form(now)


class ForgetsLatecomers(CoordinatorMachine):
    """Does not care what another coordinator left at work."""

    def _await_latecomer(self, *details) -> None:
        pass


class DoesNotWaitForTheOldSelf(CoordinatorMachine):
    """Started again means dead."""

    def _wait_for_superseded(self, old, now: float) -> None:
        self._on_gone(old.info.node_id, "started again", now, is_loss=True)


# --- C3 ---------------------------------------------------------------------------------------------------------------


class Retells(CoordinatorMachine):
    """Base of those who get a part wrong."""

    def step(self, event, now: float) -> list[Send]:
        return [
            Send(say.to, events.GenerationFormed(self.retell(say.event.assignment)))
            if isinstance(say.event, events.GenerationFormed)
            else say
            for say in super().step(event, now)
        ]

    def retell(self, part):
        raise NotImplementedError


class GivesARankTwice(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, group_rank=0)


class LeavesGapsBetweenRanks(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, first_global_rank=part.group_rank * 8)


class ForgetsRoles(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, first_role_rank=part.first_global_rank, role_world_size=part.world_size)


class TellsEverybodyAnotherWorld(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, world_size=part.world_size + part.group_rank)


class TellsEverybodyAnotherStore(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, master_port=part.master_port + part.group_rank)


class TellsOldCounts(Retells):
    def retell(self, part):
        return msgspec.structs.replace(part, restarts_used=max(0, part.restarts_used - 1))


# --- C4 ---------------------------------------------------------------------------------------------------------------


class ChargesLosses(CoordinatorMachine):
    """A lost node must have been somebody's fault."""

    def _after_generation(self, now: float) -> None:
        if self.state.lost and self.state.failures and self.state.ended_by is not None:
            self._after_failure(now)
        else:
            super()._after_generation(now)


class ChargesNewcomers(CoordinatorMachine):
    def _after_generation(self, now: float) -> None:
        changes = self.state.membership_changes
        was_opened = self.state.ended_by is Ending.JOIN
        super()._after_generation(now)
        if was_opened and self.state.membership_changes > changes:
            self.state.membership_changes -= 1
            self.state.restarts_used += 1


class CountsTwice(CoordinatorMachine):
    def _after_failure(self, now: float) -> None:
        before = self.state.restarts_used
        super()._after_failure(now)
        self.state.restarts_used += self.state.restarts_used - before


class RestartsForFree(CoordinatorMachine):
    """Never counts."""

    def _ask_policy(self, failure, history) -> AnyDecision:
        decision = super()._ask_policy(failure, history)
        self.state.restarts_used -= not isinstance(decision, GiveUp)
        return decision


class CountsDrainsAsLosses(CoordinatorMachine):
    def _after_generation(self, now: float) -> None:
        if self.state.drained and self.state.ended_by is not None:
            self.state.lost.setdefault("somebody", "left")
        super()._after_generation(now)


class CountsLossesAsDrains(CoordinatorMachine):
    def _after_generation(self, now: float) -> None:
        if self.state.lost and self.state.ended_by is not None:
            self.state.drained, self.state.lost = list(self.state.lost), {}
        super()._after_generation(now)


class DoesNotAskThePolicy(CoordinatorMachine):
    def _ask_policy(self, failure, history) -> AnyDecision:
        return Restart("one more")


class GivesUpOnALoss(CoordinatorMachine):
    """What failed beside a loss has failed all the same."""

    def _after_generation(self, now: float) -> None:
        if self.state.lost and self.state.failures:
            self.state.decision = GiveUp("that is too much")
            self._end_run(Outcome.FAILED, "that is too much", now)
        else:
            super()._after_generation(now)


# --- C5 ---------------------------------------------------------------------------------------------------------------


class TellsOnlySome(CoordinatorMachine):
    def step(self, event, now: float) -> list[Send]:
        says = super().step(event, now)
        return [Send(say.to[:1], say.event) if isinstance(say.event, events.GenerationEnded) else say for say in says]


class GivesNoReason(CoordinatorMachine):
    def _end_generation(self, kind: Ending, why: str, now: float) -> None:
        super()._end_generation(kind, "", now)


class GoesOnAfterALoss(CoordinatorMachine):
    """One more or less."""

    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        if self.state.phase is RunPhase.RUNNING:
            self.state.nodes.pop(node_id, None)
            self.state.ready.pop(node_id, None)
        else:
            super()._on_gone(node_id, why, now, is_loss=is_loss)


class GoesOnAfterAFailure(CoordinatorMachine):
    """Waits until the node has stopped."""

    def _add_failures(self, record, failures, by_s: float, now: float) -> None:
        phase = self.state.phase
        if phase is RunPhase.RUNNING:
            self.state.phase = RunPhase.GATHERING
        super()._add_failures(record, failures, by_s, now)
        self.state.phase = phase


class EndsForNothing(CoordinatorMachine):
    """Does not wait for the end that was announced."""

    def _forward_notice(self, record, why: str, in_s: float | None) -> None:
        super()._forward_notice(record, why, in_s)
        if self.state.phase is RunPhase.RUNNING:
            self._end_generation(Ending.DRAIN, why, self.state.formed_at)


class LetsInWhoCannotComeIn(CoordinatorMachine):
    def _consider_newcomer(self, record, now: float) -> None:
        self._end_generation(Ending.JOIN, f"{record.info.host} joins", now)


class NamesTheLastCauseFirst(CoordinatorMachine):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        super()._end_run(outcome, why, now)
        self.replace(failures=self.verdict.failures[::-1])

    @property
    def verdict(self) -> Verdict:
        assert self.state.verdict is not None
        return self.state.verdict

    def replace(self, **more) -> None:
        self.state.verdict = msgspec.structs.replace(self.verdict, **more)
        for index, say in enumerate(self._outbox):
            if isinstance(say.event, events.RunEnded):
                self._outbox[index] = Send(say.to, msgspec.structs.replace(say.event, verdict=self.state.verdict))


class ForgetsACause(NamesTheLastCauseFirst):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        CoordinatorMachine._end_run(self, outcome, why, now)
        self.replace(failures=self.verdict.failures[:1])


class NamesTheStoppedTwice(NamesTheLastCauseFirst):
    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        CoordinatorMachine._end_run(self, outcome, why, now)
        self.replace(stopped=self.verdict.stopped * 2)


# --- C6 ---------------------------------------------------------------------------------------------------------------


class TellsOnlyMembersOfTheEnd(CoordinatorMachine):
    def step(self, event, now: float) -> list[Send]:
        says = super().step(event, now)
        members = self.state.members
        return [
            Send(tuple(each for each in say.to if each in members), say.event)
            if isinstance(say.event, events.RunEnded)
            else say
            for say in says
        ]


class TellsEverybodySomethingElse(CoordinatorMachine):
    def step(self, event, now: float) -> list[Send]:
        says: list[Send] = []
        for say in super().step(event, now):
            if isinstance(say.event, events.RunEnded):
                for node_id in say.to:
                    verdict = msgspec.structs.replace(say.event.verdict, why=f"{node_id} is told so")
                    says.append(Send((node_id,), msgspec.structs.replace(say.event, verdict=verdict)))
            else:
                says.append(say)
        return says


class SucceedsTooEarly(CoordinatorMachine):
    """The first who is done has won."""

    def _on_succeeded(self, record, now: float) -> None:
        super()._on_succeeded(record, now)
        if self.state.phase is RunPhase.RUNNING:
            self._succeeded(now)


class BeginsAnew(CoordinatorMachine):
    """After the end is before the beginning."""

    def _on_joined(self, joined, now: float) -> None:
        if self.state.phase is RunPhase.OVER:
            self.state.phase = RunPhase.GATHERING
        super()._on_joined(joined, now)


class TurnsAwaySilently(CoordinatorMachine):
    def _on_joined(self, joined, now: float) -> None:
        if self.state.phase is not RunPhase.OVER:
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


class WaitsForMore(CoordinatorMachine):
    """Wants everybody back, always."""

    def _form_if_possible(self, now: float) -> None:
        if len(self.state.ready) >= self.state.settings.max_nodes:
            super()._form_if_possible(now)


class SaysNothing(CoordinatorMachine):
    """Let them wonder."""

    def step(self, event, now: float) -> list[Send]:
        return [say for say in super().step(event, now) if not isinstance(say.event, events.Waiting)]


class DoesNotSayItAgain(CoordinatorMachine):
    """Once must be enough."""

    def _resend_assignment(self, *details) -> None:
        pass


class WaitsForTheDead(CoordinatorMachine):
    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        was_awaited = node_id in self.state.unstopped
        super()._on_gone(node_id, why, now, is_loss=is_loss)
        if was_awaited and self.state.phase is RunPhase.ENDING:
            self.state.unstopped.add(node_id)

    def _describe_waiting(self, now: float) -> str:
        return "waiting"


class IsNeverContent(CoordinatorMachine):
    def _succeeded(self, now: float) -> None:
        pass


# --- C8 ---------------------------------------------------------------------------------------------------------------


class HearsEchoes(CoordinatorMachine):
    def _is_current(self, record, generation: int) -> bool:
        return self.state.phase is not RunPhase.OVER and self._is_member(record.info.node_id)


class BelievesAnOldReady(CoordinatorMachine):
    """Ready is ready."""

    def _on_ready(self, record, ready, now: float) -> None:
        super()._on_ready(record, msgspec.structs.replace(ready, generation=self.state.generation), now)


class RemembersStrangers(CoordinatorMachine):
    def _on_received(self, node_id: str, message, now: float) -> None:
        if node_id not in self.state.nodes and not isinstance(message, messages.NodeJoined):
            self.state.arrivals += 1
        super()._on_received(node_id, message, now)


# --- C9 ---------------------------------------------------------------------------------------------------------------


class ChargesAnOperator(CoordinatorMachine):
    """Who wants a restart shall pay for it."""

    def _after_generation(self, now: float) -> None:
        self.state.restarts_used += self.state.ended_by is Ending.REQUEST
        super()._after_generation(now)


class CountsRequestsAsChanges(CoordinatorMachine):
    def _after_generation(self, now: float) -> None:
        if self.state.ended_by is Ending.REQUEST:
            self.state.ended_by = Ending.LOSS
        super()._after_generation(now)


class CountsLossesAsRequests(CoordinatorMachine):
    def _after_generation(self, now: float) -> None:
        if self.state.ended_by is Ending.LOSS:
            self.state.ended_by = Ending.REQUEST
            self.state.lost = {}
        super()._after_generation(now)


class IsDeafToOperators(CoordinatorMachine):
    def _on_restart_requested(self, why: str, now: float) -> None:
        pass


class RestartsWhatDoesNotRun(CoordinatorMachine):
    """Ends the gathering, too."""

    def _on_restart_requested(self, why: str, now: float) -> None:
        if self.state.phase is RunPhase.GATHERING:
            self._gather(why, now)
        else:
            super()._on_restart_requested(why, now)


class AsksEverybodyToLeave(CoordinatorMachine):
    def step(self, event, now: float) -> list[Send]:
        says = super().step(event, now)
        return [
            Send(tuple(self.state.nodes), s.event) if isinstance(s.event, events.LeaveRequested) else s for s in says
        ]


class DrainsAtOnce(CoordinatorMachine):
    """Does not wait for the node's answer."""

    def step(self, event, now: float) -> list[Send]:
        says = super().step(event, now)
        if isinstance(event, run.DrainRequested) and event.node_id in self.state.nodes:
            self.state.nodes[event.node_id].is_draining = True
        return says


class AsksNewcomersToLeave(CoordinatorMachine):
    def _on_ready(self, record, ready, now: float) -> None:
        super()._on_ready(record, ready, now)
        if self.state.phase is RunPhase.RUNNING and record.phase is NodePhase.READY:
            self._send(events.LeaveRequested("there is no place"), record.info.node_id)


# --- L1 of the ledger ------------------------------------------------------------------------------------------------


class ForgetsWhatItWaited(CoordinatorMachine):
    """Only what a generation does is worth a line."""

    def _form(self, now: float) -> None:
        super()._form(now)
        self.state.ledger.entries[-1].waited_s = 0.0


class CountsFromZero(CoordinatorMachine):
    """As if the first node had come when the clock began."""

    def _on_joined(self, joined, now: float) -> None:
        self.state.ledger.begin(0.0)
        super()._on_joined(joined, now)


class JudgesWhenItResumes(CoordinatorMachine):
    """Acts at once on what it missed."""

    def _on_resumed(self, now: float) -> None:
        self._on_tick(now)


class ForgetsToWaitAgain(CoordinatorMachine):
    """Leaves its deadlines as they were before it was frozen."""

    def _on_resumed(self, now: float) -> None:
        pass


BROKEN = [
    (JudgesWhenItResumes, "C10: resumed, and "),
    (ForgetsToWaitAgain, "C10: resumed, and "),
    (UsesANumberAgain, "C1: generations"),
    (FormsWithTooFew, "C1: generation"),
    (FormsWithTooMany, "C1: generation"),
    (FormsForEachItsOwn, "C1: generations"),
    (DoesNotWait, "C2: "),
    (TakesTheUnready, "which are not clear"),
    (ForgetsLatecomers, "C2: "),
    (DoesNotWaitForTheOldSelf, "were not notified"),
    (GivesARankTwice, "C3: "),
    (LeavesGapsBetweenRanks, "C3: "),
    (ForgetsRoles, "C3: "),
    (TellsEverybodyAnotherWorld, "C3: "),
    (TellsEverybodyAnotherStore, "C3: the members were sent different stores"),
    (TellsOldCounts, "C3: "),
    (ChargesLosses, "C4: a restart was charged"),
    (ChargesNewcomers, "C4: a restart was charged"),
    (CountsTwice, "C4: the ledger"),
    (RestartsForFree, "C4: "),
    (CountsDrainsAsLosses, "counted as a change of the membership, and was none"),
    (CountsLossesAsDrains, "counted as a drain, and was none"),
    (DoesNotAskThePolicy, "were granted"),
    (GivesUpOnALoss, "C4: failed, but the policy did not give up"),
    (TellsOnlySome, "were not notified"),
    (GivesNoReason, "without a reason"),
    (GoesOnAfterALoss, "C5: generation"),
    (GoesOnAfterAFailure, "C5: generation"),
    (EndsForNothing, "without a cause"),
    (LetsInWhoCannotComeIn, "which cannot be admitted"),
    (NamesTheLastCauseFirst, "C5: the first cause does not come first"),
    (ForgetsACause, "C5: failed, and the report names"),
    (NamesTheStoppedTwice, "were stopped"),
    (TellsOnlyMembersOfTheEnd, "C6: "),
    (TellsEverybodySomethingElse, "C6: not all nodes were sent the same verdict"),
    (SucceedsTooEarly, "C6: succeeded, and not every member has"),
    (BeginsAnew, "C6: the run continues after its end"),
    (TurnsAwaySilently, "joined after the end and was not sent the verdict"),
    (ForgetsTheJoinTimeout, "C7: gathering needs deadlines"),
    (ForgetsTheLastCall, "C7: gathering needs deadlines"),
    (WaitsForMore, "C7: "),
    (SaysNothing, "waits and was not sent a reason"),
    (DoesNotSayItAgain, "and is not sent it again"),
    (WaitsForTheDead, "C7: ending, but no node is awaited"),
    (IsNeverContent, "C7: all members are done and the run continues"),
    (HearsEchoes, "C8: "),
    (BelievesAnOldReady, "C8: "),
    (RemembersStrangers, "C8: "),
    (ChargesAnOperator, "C4: the ledger goes"),
    (CountsRequestsAsChanges, "counted as a change of the membership, and was none"),
    (CountsLossesAsRequests, "C9: generation"),
    (IsDeafToOperators, "C5: generation"),
    (RestartsWhatDoesNotRun, "C8: RestartRequested"),
    (AsksEverybodyToLeave, "C9: "),
    (DrainsAtOnce, "C9: "),
    (AsksNewcomersToLeave, "but no operator requested it"),
    (ForgetsWhatItWaited, "L1: "),
    (CountsFromZero, "L1: "),
]


def how_it_is_caught(kind: type[CoordinatorMachine]) -> Iterator[str]:
    """What the checks say about this machine, in the order of the histories that catch it."""
    for seed in range(SEEDS):
        try:
            RunWorld(random.Random(seed), lies=seed % 2 == 1, make_machine=kind).play()
        except (InvariantBroken, WorldBroken) as complaint:
            yield str(complaint)


@pytest.mark.parametrize(("kind", "complaint"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_coordinator_is_caught(kind: type[CoordinatorMachine], complaint: str) -> None:
    """A machine that breaks one promise is caught within some hundred short runs, and for the right reason."""
    heard: list[str] = []
    assert any(heard.append(said) or complaint in said for said in how_it_is_caught(kind)), heard[:5] or "unnoticed"


def test_the_coordinator_itself_is_not_caught() -> None:
    """The same search finds nothing wrong with the machine that we ship."""
    assert list(how_it_is_caught(CoordinatorMachine)) == []


def test_every_promise_has_a_coordinator_that_breaks_it() -> None:
    """None of C1-C10 is checked by words alone."""
    cited = {match for _, complaint in BROKEN for match in re.findall(r"^C\d+", complaint)}
    assert cited == {f"C{number}" for number in range(1, 11)}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"phase": RunPhase.RUNNING}, "C6: running, and the verdict is Verdict"),
        ({"verdict": None}, "C6: over, and the verdict is None"),
        ({"deadlines": {RunDeadline.JOIN: 1.0}}, "C7: over needs deadlines for"),
    ],
)
def test_an_end_that_is_none_is_caught(wrong: dict[str, object], complaint: str) -> None:
    """The phase, the verdict and the deadlines tell the same story at the end."""
    machine = CoordinatorMachine(RunSettings("run"))
    checker = RunChecker(machine.state.settings)
    checker.check(machine.state, run.Opened(), machine.step(run.Opened(), 0.0))
    says = machine.step(run.CancelRequested("enough"), 1.0)
    for name, value in wrong.items():
        setattr(machine.state, name, value)
    with pytest.raises(InvariantBroken, match=complaint):
        checker.check(machine.state, run.CancelRequested("enough"), says)
