"""Machines that break their promises. Each stands for a mistake that the simulator must see from the outside.

The first ones are made up; those at the end were real once, and the comment in ``seeds.txt`` tells their story.
"""

from __future__ import annotations

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import AgentMachine, Phase
from tenax._core.coordinator import CoordinatorMachine, Ending, NodeLost, RunPhase, Send
from tenax._core.lease import Lease, LeaseTerms
from tenax._core.model import failure_began_at
from tenax._core.policy import GiveUp, Restart
from tenax.testing.simulator import Parts


def parts_with(part: type) -> Parts:
    """The machines under test, with one of them broken, and watched only from the outside."""
    if issubclass(part, AgentMachine):
        return Parts(make_agent=part, are_checked_inside=False)
    if issubclass(part, Lease):
        return Parts(make_lease=part, are_checked_inside=False)
    return Parts(make_coordinator=part, are_checked_inside=False)


class FencesTooLate(LeaseTerms, frozen=True):
    """Gives itself more time than the coordinator gives it."""

    @property
    def fence_s(self) -> float:
        return self.lease_s * 1.3


class NeverFences(AgentMachine):
    def _on_fenced(self, why: str, now: float) -> None:
        pass


class IsReadyBeforeItIsClear(AgentMachine):
    """Is content when its workers are gone; what they left behind may stay."""

    def _clear(self, now: float) -> None:
        super()._clear(now)
        self._on_node_cleared(now)


class StartsAgain(AgentMachine):
    """Does not end its workers when its generation ends elsewhere: starts them anew."""

    def _on_generation_ended(self, *details) -> None:
        if self.state.phase is Phase.RUNNING and self.state.assignment.group_rank > 0:
            self._commands.append(commands.StartWorkers(self.state.assignment))
        super()._on_generation_ended(*details)


class CallsFailureSuccess(AgentMachine):
    """Does not look at exit codes."""

    def _on_worker_ended(self, local_rank: int, exit_code: int, fault: str, now: float, **more) -> None:
        super()._on_worker_ended(local_rank, 0, "", now, **more)


class WaitsForNobody(CoordinatorMachine):
    """Forms the next generation as soon as enough are ready, whoever has not stopped."""

    def _on_ready(self, record, ready, now: float) -> None:
        self.state.unstopped = set()
        super()._on_ready(record, ready, now)


class CountsFromOne(CoordinatorMachine):
    """Knows nothing of the past."""

    def _on_opened(self, opened, now: float) -> None:
        super()._on_opened(msgspec.structs.replace(opened, generation=0, store=""), now)

    def _on_greater_generation(self, generation: int, now: float) -> None:
        pass


class GivesARankTwice(CoordinatorMachine):
    def _form(self, now: float) -> None:
        super()._form(now)
        formed = [say for say in self._outbox if isinstance(say.event, events.GenerationFormed)]
        if len(formed) > 1:
            part = msgspec.structs.replace(formed[-1].event.assignment, first_global_rank=0)
            self._outbox[self._outbox.index(formed[-1])] = Send(formed[-1].to, events.GenerationFormed(part))


class TellsEverybodyAnotherCount(CoordinatorMachine):
    def _form(self, now: float) -> None:
        super()._form(now)
        for index, say in enumerate(self._outbox):
            if isinstance(say.event, events.GenerationFormed):
                part = msgspec.structs.replace(say.event.assignment, restarts_used=index)
                self._outbox[index] = Send(say.to, events.GenerationFormed(part))


class ChargesTwice(CoordinatorMachine):
    def _after_failure(self, now: float) -> None:
        self.state.restarts_used += 1
        super()._after_failure(now)


class ChargesNothing(CoordinatorMachine):
    def _after_failure(self, now: float) -> None:
        before = self.state.restarts_used
        super()._after_failure(now)
        self.state.restarts_used = before


class NeverGivesUp(CoordinatorMachine):
    def _ask_policy(self, failure, history):
        decision = super()._ask_policy(failure, history)
        return Restart("once more") if isinstance(decision, GiveUp) else decision


class NamesTheLastCause(CoordinatorMachine):
    def _after_failure(self, now: float) -> None:
        times = [failure_began_at(failure) for failure in self.state.failures]
        turned = zip(self.state.failures, [times[-1 - index] for index in range(len(times))], strict=True)
        self.state.failures = [
            msgspec.structs.replace(
                failure, seen_at=-at, evidence=msgspec.structs.replace(failure.evidence, raised_at=-at)
            )
            for failure, at in turned
        ]
        super()._after_failure(now)


class GoesOnAfterTheEnd(CoordinatorMachine):
    """Takes it back when somebody comes late."""

    def _on_joined(self, joined, now: float) -> None:
        if self.state.phase is RunPhase.OVER:
            self.state.verdict = None
            self._gather("once more", now)
        super()._on_joined(joined, now)


class IsDeafToLosses(CoordinatorMachine):
    def step(self, event, now: float):
        return [] if isinstance(event, NodeLost) else super().step(event, now)


class TellsNobodyOfTheEnd(CoordinatorMachine):
    """Keeps it to itself that a generation has ended."""

    def _end_generation(self, kind: Ending, why: str, now: float) -> None:
        super()._end_generation(kind, why, now)
        self._outbox = [say for say in self._outbox if not isinstance(say.event, events.GenerationEnded)]


# --- what was true once -----------------------------------------------------------------------------------------------


class ChargesForTheCutOff(CoordinatorMachine):
    def _on_received(self, node_id: str, message: messages.FromNode, now: float) -> None:
        if isinstance(message, messages.NodeStopped):
            message = msgspec.structs.replace(message, was_cut_off=False)
        super()._on_received(node_id, message, now)


class RemembersEveryName(CoordinatorMachine):
    def _remember_ranks(self) -> None:
        for node_id, rank in self.state.members.items():
            if self.state.nodes[node_id].info.name:
                self.state.ranks_by_name[self.state.nodes[node_id].info.name] = rank


class DoesNotWaitForTheSuperseded(CoordinatorMachine):
    def _wait_for_superseded(self, old, now: float) -> None:
        self._on_gone(old.info.node_id, "its new self took its place", now, is_loss=True)


class LetsTheSupersededBackIn(CoordinatorMachine):
    def _on_joined(self, joined, now: float) -> None:
        self.state.superseded = []
        super()._on_joined(joined, now)


class ForgetsWhatHadEndedIt(CoordinatorMachine):
    def _adopt(self, record, joined, now: float) -> None:
        super()._adopt(record, msgspec.structs.replace(joined, is_uncharged=False), now)


class ConfusesNamesakes(CoordinatorMachine):
    def _drop_colliding_generation(self, joined, now: float):
        return joined


class DoesNotWaitForTheStale(CoordinatorMachine):
    def _stale(self) -> set[str]:
        return set()

    def _await_stale(self, record, now: float) -> None:
        """Only told to stop."""


class DoesNotWaitForTheRefused(CoordinatorMachine):
    def _await_refused(self, joined, now: float) -> None:
        """Only refused."""


class EndsTheRecoveryEarly(CoordinatorMachine):
    def _on_greater_generation(self, joined, now: float) -> None:
        super()._on_greater_generation(joined, now)
        self.state.is_renumbered = False


class ForgetsTheVerdict(CoordinatorMachine):
    def _on_opened(self, opened, now: float) -> None:
        super()._on_opened(msgspec.structs.replace(opened, verdict=None), now)


class DatesAnEndWhenItHearsOfIt(AgentMachine):
    def _on_worker_ended(self, local_rank: int, exit_code: int, fault: str, now: float, **more) -> None:
        super()._on_worker_ended(local_rank, exit_code, fault, now, **{**more, "ended_at": now})


class RemembersEveryBeat(Lease):
    def all_has_arrived(self) -> None:
        sent = dict(self._sent)
        super().all_has_arrived()
        self._sent = sent
