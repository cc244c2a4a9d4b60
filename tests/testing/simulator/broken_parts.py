"""Machines with bugs that the simulator must detect from the outside.

The first ones are invented. The bugs at the end were real: ``seeds.txt`` describes them.
"""

from __future__ import annotations

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import AgentMachine, Phase
from tenax._core.coordinator import CoordinatorMachine, EndCause, Ending, NodeLost, Over, Recovering, Send, Step
from tenax._core.leadership.machine import Leadership
from tenax._core.link.client import LinkClient
from tenax._core.link.server import LinkServer
from tenax._core.model import failure_began_at
from tenax._core.policy import GiveUp, Restart
from tenax._core.run_state import Unrecorded
from tenax.testing.simulator import Parts


def parts_with(part: type) -> Parts:
    """Return the machines under test with one broken machine, without their own invariant checkers."""
    if issubclass(part, AgentMachine):
        return Parts(make_agent=part, are_checked_inside=False)
    if issubclass(part, LinkClient):
        return Parts(make_client=part, are_checked_inside=False)
    if issubclass(part, Leadership):
        return Parts(make_leadership=part, are_checked_inside=False)
    if issubclass(part, LinkServer):
        return Parts(make_server=part, are_checked_inside=False)
    return Parts(make_coordinator=part, are_checked_inside=False)


class NeverFences(AgentMachine):
    def _on_fenced(self, why: str, now: float) -> None:
        pass


class ReportsReadyBeforeClear(AgentMachine):
    """Does not wait for processes that its workers left behind."""

    def _clear(self, now: float) -> None:
        super()._clear(now)
        self._on_node_cleared((), now)


class RestartsWorkersOfEndedGeneration(AgentMachine):
    """Starts its workers again when the coordinator ends its generation."""

    def _on_generation_ended(self, *details) -> None:
        if self.state.phase is Phase.RUNNING and self.state.assignment.group_rank > 0:
            self._commands.append(commands.StartWorkers(self.state.assignment))
        super()._on_generation_ended(*details)


class ReportsFailureAsSuccess(AgentMachine):
    """Ignores exit codes."""

    def _on_worker_ended(self, worker, exited, now: float) -> None:
        super()._on_worker_ended(worker, msgspec.structs.replace(exited, exit_code=0, fault=""), now)


class FormsWhileWorkersRun(CoordinatorMachine):
    """Forms the next generation as soon as enough nodes are ready, while others have live workers."""

    def _on_ready(self, record, ready, now: float) -> None:
        if isinstance(self.state.phase, Ending):
            self.state.phase.unstopped = set()
        super()._on_ready(record, ready, now)


class ForgetsEarlierGenerations(CoordinatorMachine):
    """Numbers its generations from 1, whatever an earlier coordinator or a node reports."""

    def _on_opened(self, opened, now: float) -> None:
        super()._on_opened(msgspec.structs.replace(opened, generation=0, store=""), now)

    def _on_greater_generation(self, joined, now: float) -> None:
        pass

    def _form(self, now: float) -> None:
        for record in self.state.nodes.values():
            record.generation = min(record.generation, self.state.generation)
        super()._form(now)


class AssignsARankTwice(CoordinatorMachine):
    def _form(self, now: float) -> None:
        super()._form(now)
        formed = [send for send in self._outbox if isinstance(send.event, events.GenerationFormed)]
        if len(formed) > 1:
            part = msgspec.structs.replace(formed[-1].event.assignment, first_global_rank=0)
            self._outbox[self._outbox.index(formed[-1])] = Send(formed[-1].to, events.GenerationFormed(part))


class SendsDifferentRestartCounts(CoordinatorMachine):
    def _form(self, now: float) -> None:
        super()._form(now)
        for index, send in enumerate(self._outbox):
            if isinstance(send.event, events.GenerationFormed):
                part = msgspec.structs.replace(send.event.assignment, restarts_used=index)
                self._outbox[index] = Send(send.to, events.GenerationFormed(part))


class ChargesTwice(CoordinatorMachine):
    def _after_failure(self, ending, now: float) -> None:
        self.state.restarts_used += 1
        super()._after_failure(ending, now)


class ChargesNothing(CoordinatorMachine):
    def _after_failure(self, ending, now: float) -> None:
        before = self.state.restarts_used
        super()._after_failure(ending, now)
        self.state.restarts_used = before


class NeverGivesUp(CoordinatorMachine):
    def _ask_policy(self, failure, history):
        decision = super()._ask_policy(failure, history)
        return Restart("try again") if isinstance(decision, GiveUp) else decision


class NamesTheLastCause(CoordinatorMachine):
    def _after_failure(self, ending, now: float) -> None:
        self.state.last.diagnosis = None
        failures = self.state.last.failures
        times = [failure_began_at(failure) for failure in failures.values()]
        for failure, at in zip(list(failures.values()), reversed(times), strict=True):
            evidence = msgspec.structs.replace(failure.evidence, raised_at=-at)
            failures[failure.global_rank] = msgspec.structs.replace(failure, seen_at=-at, evidence=evidence)
        self.state.last.diagnosis = None  # made again, of the wrong times
        super()._after_failure(ending, now)


class ContinuesAfterTheVerdict(CoordinatorMachine):
    """Withdraws its verdict when a node joins late."""

    def _on_joined(self, joined, now: float) -> None:
        if isinstance(self.state.phase, Over):
            self._gather("a node joined", now)
        super()._on_joined(joined, now)


class IgnoresLostNodes(CoordinatorMachine):
    def step(self, event, now: float):
        return Step([]) if isinstance(event, NodeLost) else super().step(event, now)


class DoesNotSendGenerationEnded(CoordinatorMachine):
    """Does not notify the members when a generation ends."""

    def _end_generation(self, cause: EndCause, why: str, now: float, *decision, **how) -> None:
        super()._end_generation(cause, why, now, *decision, **how)
        self._outbox = [send for send in self._outbox if not isinstance(send.event, events.GenerationEnded)]


# --- bugs that were real ----------------------------------------------------------------------------------------------


class ChargesForFencedNodes(CoordinatorMachine):
    def _on_received(self, node_id: str, message: messages.FromNode, now: float) -> None:
        if isinstance(message, messages.NodeStopped):
            message = msgspec.structs.replace(message, was_cut_off=False)
        super()._on_received(node_id, message, now)


class KeepsEveryName(CoordinatorMachine):
    def _remember_ranks(self) -> None:
        for node_id, rank in self.state.members.items():
            if self.state.nodes[node_id].info.name:
                self.state.names.ranks_by_name[self.state.nodes[node_id].info.name] = rank


class DoesNotWaitForSupersededNodes(CoordinatorMachine):
    def _wait_for_superseded(self, old, now: float) -> None:
        self._on_gone(old.info.node_id, "replaced by a new agent", now, is_loss=True)


class ReadmitsSupersededNodes(CoordinatorMachine):
    def _on_joined(self, joined, now: float) -> None:
        self.state.names.superseded = []
        super()._on_joined(joined, now)


class ForgetsWhyAGenerationEnded(CoordinatorMachine):
    def _adopt(self, phase, record, joined, now: float) -> None:
        super()._adopt(phase, record, msgspec.structs.replace(joined, is_uncharged=False), now)


class ConfusesGenerationsOfOneNumber(CoordinatorMachine):
    def _drop_other_generation(self, record, joined, now: float):
        is_current = joined.generation == self.state.generation
        return joined if is_current else super()._drop_other_generation(record, joined, now)


class DoesNotWaitForStaleNodes(CoordinatorMachine):
    def _stale(self) -> set[str]:
        return set()

    def _await_stale(self, record, now: float) -> None:
        """Do not wait: the node was only sent a stop."""


class DoesNotWaitForRefusedNodes(CoordinatorMachine):
    def _await_refused(self, joined, now: float) -> None:
        """Do not wait: the node was only refused."""


class EndsRecoveryEarly(CoordinatorMachine):
    def _on_greater_generation(self, joined, now: float) -> None:
        super()._on_greater_generation(joined, now)
        if isinstance(self.state.phase, Recovering) and isinstance(self.state.phase.source, Unrecorded):
            self.state.phase.source.is_renumbered = False


class ForgetsTheVerdict(CoordinatorMachine):
    def _on_opened(self, opened, now: float) -> None:
        super()._on_opened(msgspec.structs.replace(opened, verdict=None), now)


class DatesExitsOnReceipt(AgentMachine):
    def _on_worker_ended(self, worker, exited, now: float) -> None:
        super()._on_worker_ended(worker, msgspec.structs.replace(exited, ended_at=now), now)
