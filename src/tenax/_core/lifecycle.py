"""The lifecycle of generations: nodes gather, form a generation, run it, end it, and gather again until the run ends.

The part of the coordinator machine that decides what follows an event of a node that takes part. Which nodes take part,
and what is known of earlier coordinators, is decided in ``coordinator.py``. The phases are values (``run_state.py``).
"""

from __future__ import annotations

import msgspec

from tenax._core import events, messages
from tenax._core.events import FromCoordinator
from tenax._core.model import (
    MAX_EARLIER,
    MAX_LEFT,
    MAX_STORE_PEERS,
    Assignment,
    Departure,
    Diagnosis,
    Failure,
    Member,
    Outcome,
    Verdict,
    assert_never,
    by_cause,
    failure_began_at,
)
from tenax._core.policy import (
    AnyDecision,
    BudgetPolicy,
    Change,
    GiveUp,
    History,
    Keep,
    Restart,
    RestartPolicy,
    Wait,
    ask_policy,
    first_cause_first,
)
from tenax._core.ranks import Candidate, NodeRanks, arrange, assign_ranks, choose
from tenax._core.run_state import (
    CoordinatorState,
    EndCause,
    Ending,
    Gathering,
    Generation,
    HangWatch,
    NodePhase,
    NodeRecord,
    Over,
    Paused,
    Quiet,
    Recovering,
    RunDeadline,
    Running,
    RunSettings,
    Send,
)
from tenax._core.run_text import describe_lost, describe_waiting
from tenax._core.text import counted, format_seconds, some_of

CUT_OFF = "it was cut off and stopped its workers"
SUPERSEDED = "its agent was started again"
_NO_SURVIVORS = "all workers restart from the checkpoint"


class Lifecycle:
    """The state, the messages to send, and the decisions about generations."""

    def __init__(
        self, settings: RunSettings, policy: RestartPolicy | None = None, state: CoordinatorState | None = None
    ) -> None:
        self.state = state if state is not None else CoordinatorState(settings)
        self._policy = policy or BudgetPolicy()
        self._outbox: list[Send] = []
        self._decision: AnyDecision | None = None

    def _send(self, event: FromCoordinator, *to: str) -> None:
        if to:
            self._outbox.append(Send(to, event))

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _on_ready(self, record: NodeRecord, ready: messages.NodeReady, now: float) -> None:
        state, last, node_id = self.state, self.state.last, record.info.node_id
        if record.is_superseded:
            self._on_gone(node_id, SUPERSEDED, now, is_loss=True)
            return
        record.offer = ready
        if ready.held and not last.keeps_survivors:
            self._stop_held(record, now)
            return
        if record.phase is NodePhase.READY:
            return
        is_member = last.has(node_id)
        record.phase, record.since = NodePhase.READY, now
        state.ready[node_id] = True
        match state.phase:
            case Running() if is_member:
                last.gone.add(node_id)
                last.lost[record.label] = CUT_OFF
                self._end_generation(EndCause.LOSS, f"{record.label} was lost: {CUT_OFF}", now)
            case Running():
                self._consider_newcomer(record, now)
            case Ending(unstopped=unstopped):
                unstopped.discard(node_id)
                self._after_generation_if_stopped(now)
            case Gathering():
                self._form_if_possible(now)
            case Recovering() as recovering:
                recovering.is_broken |= is_member
            case Paused() | Over():
                pass
            case phase:
                assert_never(phase)
        is_informed = any(isinstance(send.event, events.Waiting) and node_id in send.to for send in self._outbox)
        if node_id in state.ready and not is_informed and not isinstance(state.phase, Ending | Over):
            self._send(events.Waiting(describe_waiting(state, now)), node_id)

    def _consider_newcomer(self, record: NodeRecord, now: float) -> None:
        """End the generation to admit the node, if there is room and scaling up is allowed."""
        settings, last = self.state.settings, self.state.last
        if len(last.members) < settings.max_nodes and not last.done and settings.scale_up:
            why = f"{record.label} joined"
            decision = self._ask_policy(Change("join", (record.label,), why), self._history(now - last.formed_at))
            if isinstance(decision, Keep):
                text = f"generation {self.state.generation} continues without this node: {decision.why}"
                self._send(events.Waiting(text), record.info.node_id)
            else:
                self._end_generation(EndCause.JOIN, why, now, decision)

    def _gather(self, why: str, now: float) -> None:
        state, settings = self.state, self.state.settings
        state.next_why = why
        if stale := self._stale():  # nodes that stop held workers
            self._begin_ending(EndCause.LATECOMER, why, now).unstopped = stale
            return
        join_by, waiting_at = now + settings.join_timeout_s, now + settings.waiting_every_s
        state.phase = Gathering(deadlines={RunDeadline.JOIN: join_by, RunDeadline.WAITING: waiting_at})
        self._form_if_possible(now)
        if isinstance(state.phase, Gathering):
            self._send(events.Waiting(describe_waiting(state, now)), *state.ready)

    def _form_if_possible(self, now: float) -> None:
        state, settings = self.state, self.state.settings
        count = len(state.ready)
        if count >= settings.max_nodes or (count >= settings.min_nodes and state.generation > 0):
            self._form(now)
        elif count >= settings.min_nodes:
            state.deadlines.setdefault(RunDeadline.LAST_CALL, now + settings.last_call_s)
        else:
            state.deadlines.pop(RunDeadline.LAST_CALL, None)

    def _form(self, now: float) -> None:
        state, settings = self.state, self.state.settings
        arranged = arrange(choose([self._candidate(node_id) for node_id in state.ready], settings.max_nodes))
        assigned = assign_ranks(arranged)
        first = state.nodes[arranged[0].node_id]
        members = {ranks.node_id: ranks.group_rank for ranks in assigned}
        last = state.last = Generation(
            members=members,
            labels={node_id: state.nodes[node_id].label for node_id in members},
            parts={ranks.node_id: self._part(ranks) for ranks in assigned},
            world_size=sum(candidate.slots for candidate in arranged),
            formed_at=now,
            unstarted=set(members),
        )
        state.phase = Running(HangWatch(moved_at=now))
        state.generation = 1 + max(state.generation, *(record.generation for record in state.nodes.values()))
        state.store = f"{first.offer.store_addr}:{first.offer.store_port}"
        state.ledger.formed(state.generation, state.next_why, len(members), last.world_size, now)
        for record in state.nodes.values():
            record.last_rank, record.pids, record.progress = -1, (), ()
        self._remember_ranks()
        coordinator_rank = members.get(settings.serving_node, -1)
        for ranks in assigned:
            record = state.nodes[ranks.node_id]
            record.phase, record.since, record.is_draining = NodePhase.MEMBER, now, False
            record.last_rank = ranks.group_rank
            del state.ready[ranks.node_id]
            part = Assignment(
                generation=state.generation,
                group_rank=ranks.group_rank,
                group_world_size=len(assigned),
                first_global_rank=ranks.first_global_rank,
                world_size=last.world_size,
                first_role_rank=ranks.first_role_rank,
                role_world_size=ranks.role_world_size,
                master_addr=first.offer.store_addr,
                master_port=first.offer.store_port,
                use_agent_store=first.offer.is_agent_store,
                restarts_used=state.restarts_used,
                why=state.next_why,
                coordinator_rank=coordinator_rank,
                store_peers=self._store_peers(first) if record is first and first.offer.is_agent_store else (),
                max_restarts=settings.max_restarts,
            )
            record.generation, record.part = part.generation, part
            self._outbox.append(Send((ranks.node_id,), events.GenerationFormed(part)))
        if state.ready:
            self._send(events.Waiting(describe_waiting(state, now)), *state.ready)

    def _part(self, ranks: NodeRanks) -> Member:
        record = self.state.nodes[ranks.node_id]
        return Member(record.label, record.info.where, ranks.first_global_rank, record.info.slots)

    def _remember_ranks(self) -> None:
        state = self.state
        ranks = {rank: state.nodes[node_id].info.name for node_id, rank in state.last.members.items()}
        state.names.remember_ranks(ranks, state.settings.max_nodes)

    def _store_peers(self, first: NodeRecord) -> tuple[str, ...]:
        """Return the addresses from which members other than the first may connect to its store."""
        others = [record for each in self.state.members if (record := self.state.nodes[each]) is not first]
        per_node = MAX_STORE_PEERS // max(1, len(others))
        return tuple(dict.fromkeys(address for record in others for address in record.offer.addresses[:per_node]))

    def _candidate(self, node_id: str) -> Candidate:
        record = self.state.nodes[node_id]
        info = record.info
        return Candidate(node_id, record.arrival, record.last_rank, info.rank, info.order, info.slots, info.role)

    def _on_join_timeout(self, now: float) -> None:
        state, settings = self.state, self.state.settings
        if len(state.ready) >= settings.min_nodes:
            self._form(now)
            return
        self._end_run(
            Outcome.BROKEN,
            f"only {len(state.ready)} of at least {counted(settings.min_nodes, 'node')} joined within "
            f"{format_seconds(settings.join_timeout_s)}{describe_lost(state)}; start the missing nodes, or allow "
            "more time with --rdzv-conf join_timeout=SECONDS",
            now,
        )

    # --- a running generation -----------------------------------------------------------------------------------------

    def _on_workers_started(self, record: NodeRecord, now: float) -> None:
        unstarted = self.state.last.unstarted
        unstarted.discard(record.info.node_id)
        if not unstarted and isinstance(self.state.phase, Running):
            self.state.ledger.running(now)

    def _on_progress(
        self, record: NodeRecord, workers: tuple[messages.WorkerProgress, ...], by_s: float, now: float
    ) -> None:
        record.progress = tuple(
            msgspec.structs.replace(
                each,
                first_at=each.first_at + by_s,
                last_at=each.last_at + by_s,
                output_at=each.output_at + by_s if each.output_at else 0.0,
                imported_at=each.imported_at + by_s if each.imported_at else 0.0,
            )
            for each in workers
        )
        if imported_at := max((each.imported_at for each in record.progress), default=0.0):
            self.state.ledger.imported(imported_at, now)
        if stepped := [each for each in record.progress if each.last_step >= 0]:  # others reported only a phase
            first = min(stepped, key=lambda each: each.first_step)
            last = max(stepped, key=lambda each: each.last_step)
            self.state.ledger.stepped(first.first_step, first.first_at, last.last_step, last.last_at, now)

    def _on_stopped(self, record: NodeRecord, stopped: messages.NodeStopped, now: float) -> None:
        last = self.state.last
        if stopped.was_cut_off:
            last.lost[record.label] = CUT_OFF
        last.accounted.add(record.info.node_id)
        for each in stopped.stopped:
            last.add_stopped(each, record.info.where)
        last.held.update(stopped.held)
        self._add_failures(record, stopped.failures, now - stopped.sent_at, now)
        if isinstance(self.state.phase, Recovering):
            self.state.phase.is_broken = True
        if record.is_superseded:
            self._on_gone(record.info.node_id, SUPERSEDED, now, is_loss=True)

    def _add_failures(self, record: NodeRecord, failures: tuple[Failure, ...], by_s: float, now: float) -> None:
        last = self.state.last
        for failure in failures:
            last.add_failure(msgspec.structs.replace(failure.shifted(by_s), host=record.info.where))
        if isinstance(self.state.phase, Running) and last.failures:
            self._end_by_failure(now)

    def _end_by_failure(self, now: float) -> None:
        from tenax._core.diagnosis import describe_first_cause

        first = min(self.state.last.failures.values(), key=by_cause)
        self._end_generation(EndCause.FAILURE, describe_first_cause(first), now)

    def _on_succeeded(self, record: NodeRecord, now: float) -> None:
        phase, last, node_id = self.state.phase, self.state.last, record.info.node_id
        if record.is_superseded:  # its agent may stay, to host the coordinator, so nothing else ends the wait for it
            self._on_gone(node_id, SUPERSEDED, now, is_loss=True)
            return
        if isinstance(phase, Ending):  # the failure of another node was reported first
            last.accounted.add(node_id)
        if not isinstance(phase, Running | Recovering) or record.phase is NodePhase.READY:
            return
        record.phase, record.since = NodePhase.DONE, now
        self._on_workers_started(record, now)  # its message may have been lost with its link
        last.done.add(node_id)
        phase.watch.quiet.pop(node_id, None)
        if isinstance(phase, Running):
            if len(last.done) == len(last.members):
                self._succeeded(now)
            else:
                self._on_movement(phase, f"the workers of {record.label} succeeded", now)

    def _succeeded(self, now: float) -> None:
        count = self.state.last.world_size
        why = "the worker succeeded" if count == 1 else f"all {count} workers succeeded" if count else "all succeeded"
        self._end_run(Outcome.SUCCEEDED, why, now)

    def _on_draining(self, record: NodeRecord, grace_s: float, why: str) -> None:
        """Forward the notice. The generation runs until the node leaves, so that all nodes can save a checkpoint."""
        if not record.is_draining:
            record.is_draining = True
            self.state.last.drain(record.label)
            self._forward_notice(record, why, grace_s)

    def _forward_notice(self, record: NodeRecord, why: str, in_s: float | None) -> None:
        state = self.state
        others = (each for each in state.members if each != record.info.node_id and each in state.nodes)
        self._send(events.LeaveNoticed(state.generation, record.label, why, in_s), *others)

    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        state, last = self.state, self.state.last
        record = state.nodes.pop(node_id, None)
        if record is None:
            return
        del state.names.labels[record.label]
        state.names.release(record.info)
        state.ready.pop(node_id, None)
        is_drain = record.is_draining or not is_loss
        if why != SUPERSEDED:
            self._remember_departure(record, why, now, is_loss=is_loss)
        was_stopping = isinstance(state.phase, Ending) and node_id in state.phase.unstopped
        if isinstance(state.phase, Ending):
            state.phase.unstopped.discard(node_id)
        if last.has(node_id) and node_id not in last.done:
            last.gone.add(node_id)
            if is_drain:
                last.drain(record.label)
            else:
                last.lost[record.label] = why
            if isinstance(state.phase, Ending) and state.phase.is_decided:
                state.phase.decision, state.phase.is_decided = None, False  # it did not consider this
            if isinstance(state.phase, Running):
                what = "was drained" if is_drain else f"was lost: {why}"
                self._end_generation(EndCause.DRAIN if is_drain else EndCause.LOSS, f"{record.label} {what}", now)
            elif isinstance(state.phase, Recovering):
                state.phase.is_broken = True
        if was_stopping:
            self._after_generation_if_stopped(now)
        elif isinstance(state.phase, Gathering):
            self._form_if_possible(now)

    def _remember_departure(self, record: NodeRecord, why: str, now: float, *, is_loss: bool) -> None:
        how = "drained" if record.is_draining else "lost" if is_loss else "left"
        if isinstance(self.state.phase, Over):
            how, why = "left", "the run has ended"
        info = record.info
        left = {label: each for label, each in self.state.left.items() if label != record.label}
        left[record.label] = Departure(record.label, how, why, info.where, now, info.slots)
        self.state.left = dict(list(left.items())[-MAX_LEFT:])

    # --- a generation hangs (``hang_suspicion.py``) -------------------------------------------------------------------

    def _on_quiet(self, node_id: str, quiet: Quiet, now: float) -> None:
        phase = self.state.phase
        is_watched = self.state.settings.on_hang != "off" and node_id not in self.state.last.done
        if is_watched and isinstance(phase, Running | Recovering):
            phase.watch.quiet[node_id] = quiet
            self._suspect_if_all_are_quiet(now)

    def _on_busy(self, node_id: str, why: str, now: float) -> None:
        phase = self.state.phase
        if isinstance(phase, Running | Recovering):
            was_quiet = phase.watch.quiet.pop(node_id, None) is not None
            if was_quiet and isinstance(phase, Running):
                self._on_movement(phase, why, now)

    def _on_movement(self, running: Running, why: str, now: float) -> None:
        from tenax._core.hang_suspicion import end_suspicion

        self._outbox += end_suspicion(self.state, running, why, now)
        self._suspect_if_all_are_quiet(now)

    def _suspect_if_all_are_quiet(self, now: float) -> None:
        phase = self.state.phase
        if isinstance(phase, Running) and phase.watch.quiet:
            from tenax._core.hang_suspicion import suspect

            self._outbox += suspect(self.state, phase, now)

    def _on_stacks_taken(
        self, record: NodeRecord, number: int, locations: tuple[messages.StackLocation, ...], now: float
    ) -> None:
        from tenax._core.hang_suspicion import add_stacks

        if self.state.hang is not None and add_stacks(self.state.hang, record, number, locations):
            self._on_stacks_complete(now)

    def _on_stacks_complete(self, now: float) -> None:
        from tenax._core.hang_suspicion import confirm, failure_by_hang, report_hang

        state = self.state
        hang = state.hang
        if hang is None or not isinstance(state.phase, Running) or not confirm(state, state.phase, hang, now):
            return
        self._outbox += report_hang(state, hang, now)
        state.ledger.hung(hang.since)
        if state.settings.on_hang == "restart":
            failure = failure_by_hang(hang, state.generation)
            state.last.failures[failure.global_rank] = failure
            where = f" on {failure.host}" if failure.host else ""
            is_odd = hang.report is not None and hang.report.is_odd
            hung = failure.global_rank if is_odd else None  # if none stands out, any of them may hang again
            why = f"rank {failure.global_rank}{where} hung"
            self._end_generation(EndCause.FAILURE, why, now, stops=not is_odd, hung=hung)

    # --- a generation ends --------------------------------------------------------------------------------------------

    def _on_restart_requested(self, why: str, now: float) -> None:
        match self.state.phase:
            case Running():
                self._end_generation(EndCause.REQUEST, f"an operator restarted the run: {why}", now, stops=True)
            case Paused():
                self._stop_survivors(now)
                self._gather(self.state.next_why, now)
            case Gathering() | Ending() | Recovering() | Over():
                pass
            case phase:
                assert_never(phase)

    def _end_generation(
        self,
        cause: EndCause,
        why: str,
        now: float,
        decision: AnyDecision | None = None,
        *,
        stops: bool = False,
        hung: int | None = None,
    ) -> None:
        state = self.state
        ending = self._begin_ending(cause, why, now)
        ending.decision, ending.stops, ending.hung = decision, stops, hung
        state.last.keeps_survivors = not stops
        at_work = (NodePhase.MEMBER, NodePhase.DONE)
        members = {each for each in state.members if each in state.nodes and state.nodes[each].phase in at_work}
        self._send(self._ended_event(state.generation, ending), *sorted(members))
        if stops:
            self._stop_survivors(now)  # also those of an earlier generation, which wait for the next one
        ending.unstopped = members | self._stale()
        self._after_generation_if_stopped(now)

    def _begin_ending(self, cause: EndCause, why: str, now: float) -> Ending:
        state = self.state
        waiting_at = now + state.settings.waiting_every_s
        ending = state.phase = Ending(cause, why, now, deadlines={RunDeadline.WAITING: waiting_at})
        failures = state.last.failures.values() if cause is EndCause.FAILURE else ()
        state.ledger.ended(cause.value, why, min(map(failure_began_at, failures), default=None), now)
        return ending

    def _stale(self) -> set[str]:
        return {node_id for node_id, record in self.state.nodes.items() if record.phase is NodePhase.STALE}

    @staticmethod
    def _ended_event(generation: int, ending: Ending) -> events.GenerationEnded:
        is_uncharged = ending.cause is not EndCause.FAILURE
        return events.GenerationEnded(
            generation, ending.why, is_uncharged=is_uncharged, stops=ending.stops, hung=ending.hung
        )

    # --- survivors ----------------------------------------------------------------------------------------------------

    def _holding(self) -> list[str]:
        return [node_id for node_id in self.state.ready if self.state.nodes[node_id].offer.held]

    def _must_stop_survivors(self, ending: Ending, decision: AnyDecision, now: float) -> bool:
        """Stop the held workers if the policy does not keep them; return whether they must be awaited."""
        if getattr(decision, "keeps_survivors", True) or not self._holding():
            return False
        ending.decision, ending.is_decided = decision, True
        self._stop_survivors(now)
        return True

    def _stop_survivors(self, now: float) -> None:
        self.state.last.keeps_survivors = False
        for node_id in self._holding():
            self._stop_held(self.state.nodes[node_id], now)

    def _stop_held(self, record: NodeRecord, now: float) -> None:
        """Stop the workers that this node holds. It is ready when they have exited."""
        state, node_id = self.state, record.info.node_id
        self._send(events.GenerationEnded(record.generation, _NO_SURVIVORS, stops=True), node_id)
        if record.phase is NodePhase.STALE:
            return  # sent again: the link may have broken before the node received it
        state.ready.pop(node_id, None)
        record.phase, record.since = NodePhase.STALE, now
        if isinstance(state.phase, Ending):
            state.phase.unstopped.add(node_id)
        elif isinstance(state.phase, Gathering):
            self._gather(state.next_why, now)

    def _after_generation_if_stopped(self, now: float) -> None:
        phase = self.state.phase
        if isinstance(phase, Ending) and not phase.unstopped:
            self._after_generation(phase, now)

    def _after_generation(self, ending: Ending, now: float) -> None:
        """Decide what follows, and what it is counted as, when every member has stopped or is gone."""
        from tenax._core.diagnosis import describe_first_cause, diagnosis_of

        state, last = self.state, self.state.last
        state.settled = state.generation
        diagnosis = last.diagnosis = diagnosis_of(state)
        if diagnosis.first is not None and not diagnosis.is_change and state.ledger.current is not None:
            state.ledger.current.ended_why = describe_first_cause(diagnosis.first)
        state.ledger.settled(now)
        if ending.cause is EndCause.LATECOMER:  # not counted
            self._gather(ending.why, now)
            return
        if ending.cause is EndCause.REQUEST and not last.lost and not last.drained:
            state.requests += 1
            self._gather(ending.why, now)
        elif last.drained and not last.lost:
            why = f"{some_of(last.drained)} {_was(len(last.drained))} drained"
            self._after_change(Change("drain", tuple(last.drained), why), ending, now)
        elif last.lost or not last.failures or last.is_uncharged or ending.cause in (EndCause.JOIN, EndCause.LOSS):
            # If a node was lost, that is the reason, even if a worker failed first.
            is_reason = ending.cause is not EndCause.FAILURE or not last.lost
            why = ending.why if is_reason else f"{some_of(list(last.lost))} {_was(len(last.lost))} lost"
            self._after_change(Change("loss", tuple(last.lost), why), ending, now)
        else:
            self._after_failure(ending, now)
        state.longest_s = max(state.longest_s, ending.at - last.formed_at)

    def _history(self, lived_s: float, failures: tuple[Failure, ...] = ()) -> History:
        state = self.state
        return History(
            state.restarts_used,
            state.settings.max_restarts,
            tuple(state.earlier),
            failures,
            state.last.world_size,
            lived_s,
            state.longest_s,
            state.membership_changes,
            state.drains,
            sum(state.last.survivors.values()),
        )

    def _after_change(self, change: Change, ending: Ending, now: float) -> None:
        state, last = self.state, self.state.last
        decision = ending.decision
        if decision is None or (not ending.is_decided and (last.lost or last.drained)):
            failures = last.diagnosis.failures if last.diagnosis is not None else ()
            decision = self._ask_policy(change, self._history(ending.at - last.formed_at, failures))
        if self._must_stop_survivors(ending, decision, now):
            return
        match decision:
            case GiveUp(why):
                self._end_run(Outcome.BROKEN, f"{change.why}; {why}", now)
            case Restart() | Wait():
                self._restart(decision, now)
            case _:
                if change.kind == "drain":
                    state.drains += 1
                else:
                    state.membership_changes += 1
                self._gather(change.why, now)

    def _after_failure(self, ending: Ending, now: float) -> None:
        from tenax._core.diagnosis import diagnosis_of

        last, diagnosis = self.state.last, diagnosis_of(self.state)
        failures = tuple(first_cause_first(diagnosis.failures, last.formed_at))
        last.diagnosis, first = msgspec.structs.replace(diagnosis, failures=failures), failures[0]
        decision = ending.decision if ending.is_decided else None
        if decision is None:
            decision = self._ask_policy(first, self._history(first.lived_s, failures))
        if self._must_stop_survivors(ending, decision, now):
            return
        if isinstance(decision, Restart | Wait):
            self.state.earlier = [*self.state.earlier[-MAX_EARLIER + 1 :], first.brief()]
            self._restart(decision, now)
        else:
            self._end_run(Outcome.FAILED, decision.why, now)

    def _restart(self, decision: Restart | Wait, now: float) -> None:
        state = self.state
        state.restarts_used += 1
        if isinstance(decision, Wait):
            state.phase = Paused(deadlines={RunDeadline.PAUSE: now + decision.seconds})
            state.next_why = decision.why
            why = f"waiting {format_seconds(decision.seconds)} before the restart: {decision.why}"
            self._send(events.Waiting(why), *state.nodes)
        else:
            self._gather(decision.why, now)

    def _ask_policy(self, what: Failure | Change, history: History) -> AnyDecision:
        self._decision = ask_policy(self._policy, what, history)
        return self._decision

    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        state = self.state
        state.ledger.over(outcome.value, why, now)
        diagnosis = Diagnosis()
        if outcome is not Outcome.SUCCEEDED:
            from tenax._core.diagnosis import diagnosis_of, truncated

            diagnosis = truncated(diagnosis_of(state))
        verdict = Verdict(
            outcome=outcome,
            why=why,
            **{name: getattr(diagnosis, name) for name in diagnosis.__struct_fields__},
            restarts_used=state.restarts_used,
            generation=state.generation,
            earlier=tuple(state.earlier),
            membership_changes=state.membership_changes,
            drains=state.drains,
            requests=state.requests,
            goodput=state.ledger.goodput(now),
        )
        state.phase = Over(verdict)
        self._send(events.RunEnded(verdict, now), *state.nodes)


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
