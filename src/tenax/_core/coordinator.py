"""The coordinator machine: the lifecycle of one run.

All engines use this machine: local, tcp, etcd and the simulator. It receives messages from nodes (``messages``) and
sends them events (``events.FromCoordinator``). Its state is one serialisable value; ``run_state.py`` has the phases and
their invariants C1 to C10. H5 to H8 concern hangs: see ``hang_suspicion.py``.

This file contains what every event passes: the check whether a message is stale, who may join, and the recovery after
an earlier coordinator. ``lifecycle.py`` decides about the generations of the nodes that take part.
"""

from __future__ import annotations

from tenax._core import events, messages
from tenax._core.lifecycle import SUPERSEDED, Lifecycle
from tenax._core.model import Assignment, Outcome, assert_never
from tenax._core.record import RunRecord
from tenax._core.run_state import (
    AnyCoordinatorEvent,
    CancelRequested,
    CoordinatorEvent,
    CoordinatorState,
    DrainRequested,
    EarlierCoordinatorGone,
    EndCause,
    Ending,
    Gathering,
    Generation,
    HangWatch,
    NodeLost,
    NodePhase,
    NodeRecord,
    Opened,
    Over,
    Paused,
    Quiet,
    Received,
    Recorded,
    Recovering,
    RestartRequested,
    Resumed,
    RunDeadline,
    Running,
    RunPhase,
    RunSettings,
    Send,
    Step,
    Suspicion,
    Tick,
    Unrecorded,
)
from tenax._core.run_text import describe_activity, describe_waiting, span_text
from tenax._core.text import format_seconds, some_of

# The machine, and the values of its interface (``run_state.py``).
__all__ = [
    "AnyCoordinatorEvent",
    "CancelRequested",
    "CoordinatorEvent",
    "CoordinatorMachine",
    "CoordinatorState",
    "DrainRequested",
    "EarlierCoordinatorGone",
    "EndCause",
    "Ending",
    "Gathering",
    "NodeLost",
    "NodePhase",
    "NodeRecord",
    "Opened",
    "Over",
    "Paused",
    "Received",
    "Recovering",
    "RestartRequested",
    "Resumed",
    "RunDeadline",
    "RunPhase",
    "RunSettings",
    "Running",
    "Send",
    "Step",
    "Suspicion",
    "Tick",
]

_SUPERSEDED_HERE = "the agent of this node was started again, and the new agent replaced this one"
_LEFT_BEHIND = "the other nodes continued without this node"


class CoordinatorMachine(Lifecycle):
    """``step(event, now)`` returns what to send and what the policy decided. One instance per run."""

    def step(self, event: AnyCoordinatorEvent, now: float) -> Step:
        """Handle one event; return what follows."""
        self._outbox, self._decision = [], None
        match event:
            case Received(node_id, message):
                self._on_received(node_id, message, now)
            case NodeLost(node_id, why):
                self._on_gone(node_id, why, now, is_loss=True)
            case Tick():
                self._on_tick(now)
            case Resumed():
                self._on_resumed(now)
            case Opened():
                self._on_opened(event, now)
            case EarlierCoordinatorGone(node_id, others):
                self._on_earlier_coordinator_gone(node_id, others, now)
            case CancelRequested(why):
                if not self._is_over():
                    self._end_run(Outcome.CANCELLED, why, now)
            case RestartRequested(why):
                self._on_restart_requested(why, now)
            case DrainRequested(node_id, why):
                if node_id in self.state.nodes and not self._is_over():
                    self._send(events.LeaveRequested(why), node_id)
            case _:
                assert_never(event)
        return Step(self._outbox, self._decision)

    def describe_activity(self, now: float) -> str:
        """Describe what the run is doing, for display."""
        return describe_activity(self.state, now)

    def _is_over(self) -> bool:
        return isinstance(self.state.phase, Over)

    def _on_received(self, node_id: str, message: messages.FromNode, now: float) -> None:
        if isinstance(message, messages.NodeJoined):
            self._on_joined(message, now)
            return
        record = self.state.nodes.get(node_id)
        if record is None:
            return
        if self._is_stale(record, message):
            if record.is_superseded:
                self._on_superseded_stopped(record, message, now)
            return
        match message:
            case messages.NodeReady():
                self._on_ready(record, message, now)
            case messages.WorkersRunning(_, pids, survivors):
                record.pids = pids
                self.state.ledger.survivors += survivors - self.state.last.survivors.get(node_id, 0)
                self.state.last.survivors[node_id] = survivors
                self._on_workers_started(record, now)
            case messages.NodeProgress(_, sent_at, workers):
                self._on_progress(record, workers, now - sent_at, now)
            case messages.FailureSeen(_, failure, sent_at):
                self._add_failures(record, (failure,), now - sent_at, now)
            case messages.NodeStopped():
                self._on_stopped(record, message, now)
            case messages.NodeSucceeded():
                self._on_succeeded(record, now)
            case messages.NodeQuiet(_, sent_at, since, why):
                self._on_quiet(node_id, Quiet(min(now, since + now - sent_at), why), now)
            case messages.NodeBusy(_, why):
                self._on_busy(node_id, why, now)
            case messages.StacksTaken(_, number, locations):
                self._on_stacks_taken(record, number, locations, now)
            case messages.NodeDraining(_, grace_s, why):
                self._on_draining(record, grace_s, why)
            case messages.NodeWillLeave(_, why, in_s):
                self._forward_notice(record, why, in_s)
            case messages.NodeLeft(why, is_clear, was_refused):
                why = SUPERSEDED if was_refused and record.is_superseded else why
                self._on_gone(node_id, why, now, is_loss=was_refused or not is_clear)
            case _:
                assert_never(message)

    def _is_stale(self, record: NodeRecord, message: messages.FromNode) -> bool:
        """Whether the message is about another generation, or not from one of its members.

        The only check of this kind (C8).
        """
        state = self.state
        match message:
            case messages.NodeJoined() | messages.NodeLeft():
                return False
            case _ if self._is_over():
                return True
            case messages.NodeReady(generation):
                return not record.generation <= generation <= max(state.generation, record.generation)
            case _:
                is_current = message.generation == state.generation == record.generation
                return not is_current or not state.last.has(record.info.node_id)

    def _on_superseded_stopped(self, record: NodeRecord, message: messages.FromNode, now: float) -> None:
        """End the wait for a superseded node whose workers were of a generation that is not the current one.

        Its agent may stay, to host the coordinator, so nothing else ends this wait.
        """
        if self._is_over() or not isinstance(message, messages.NodeStopped | messages.NodeSucceeded):
            return
        if message.generation >= record.generation:  # else it is late, and the node has workers of another one
            self._on_gone(record.info.node_id, SUPERSEDED, now, is_loss=True)

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> None:
        state = self.state
        due = [deadline for deadline, at in state.deadlines.items() if at <= now]
        for deadline in due:
            if deadline not in state.deadlines:
                continue  # handling an earlier one removed it
            del state.deadlines[deadline]
            match deadline:
                case RunDeadline.LAST_CALL:
                    self._form(now)
                case RunDeadline.PAUSE:
                    self._gather(state.next_why, now)
                case RunDeadline.RECOVER:
                    self._on_recover_timeout(now)
                case RunDeadline.WAITING:
                    state.deadlines[RunDeadline.WAITING] = now + state.settings.waiting_every_s
                    self._send(events.Waiting(describe_waiting(state, now)), *state.ready)
                case RunDeadline.JOIN:
                    self._on_join_timeout(now)
                case RunDeadline.QUIET:
                    self._suspect_if_all_are_quiet(now)
                case RunDeadline.STACKS:
                    self._on_stacks_complete(now)
                case _:
                    assert_never(deadline)

    def _on_resumed(self, now: float) -> None:
        """Give nodes a full period again: they could not reach this coordinator while it was suspended (C10)."""
        phase, settings = self.state.phase, self.state.settings
        if isinstance(phase, Running) and RunDeadline.QUIET in phase.deadlines:
            phase.watch.moved_at = now
        periods = {
            RunDeadline.JOIN: settings.join_timeout_s,
            RunDeadline.LAST_CALL: settings.last_call_s,
            RunDeadline.RECOVER: phase.period_s if isinstance(phase, Recovering) else 0.0,
            RunDeadline.QUIET: settings.hang_after_s,
            RunDeadline.STACKS: settings.stacks_timeout_s,
        }
        for deadline, at in phase.deadlines.items():
            phase.deadlines[deadline] = max(at, now + periods.get(deadline, 0.0))

    # --- nodes join ---------------------------------------------------------------------------------------------------

    def _on_joined(self, joined: messages.NodeJoined, now: float) -> None:
        state, node = self.state, joined.node
        if self._is_over():
            self._send_verdict(joined, now)
            return
        refusal = self._refusal(joined) or (_SUPERSEDED_HERE if node.node_id in state.names.superseded else "")
        if refusal:
            self._send(events.JoinRefused(refusal), node.node_id)
            refused = state.nodes.get(node.node_id)
            if refused is None:
                if joined.is_running:
                    self._await_refused(joined, now)
            elif refused.is_superseded and joined.generation < refused.generation and not joined.is_running:
                # It has not received its assignment, and will not: links do not let it cross a join (V6 there).
                # Its agent may stay, to host the coordinator.
                self._on_gone(node.node_id, SUPERSEDED, now, is_loss=True)
            return
        self._supersede(node, now)
        if self._is_over():  # the run was waiting only for the node that this one replaces
            self._send_verdict(joined, now)
            return
        record = state.nodes.get(node.node_id)
        if record is None:
            record = self._add_node(node, now)
            state.names.claim(node)
            record.last_rank = state.names.ranks_by_name.get(node.name, -1) if node.name else -1
        state.restarts_used = max(state.restarts_used, joined.restarts_used)
        if joined.generation > max(state.generation, record.generation):
            self._on_greater_generation(joined, now)
        joined = self._drop_other_generation(record, joined, now)
        is_behind = joined.generation < record.generation
        record.generation = max(record.generation, joined.generation)
        if isinstance(state.phase, Recovering) and joined.generation == state.generation > 0:
            self._adopt(state.phase, record, joined, now)
        elif joined.is_running or joined.has_succeeded:
            self._on_at_work(record, joined, now)
        elif is_behind and record.phase is NodePhase.MEMBER and record.part is not None:
            self._resend_assignment(node.node_id, record.part)
        if isinstance(state.phase, Recovering) and node.node_id in state.phase.awaited:
            self._on_uninformed_member(state.phase, record, now)

    def _add_node(self, node: messages.NodeInfo, now: float) -> NodeRecord:
        state, names = self.state, self.state.names
        reserved = state.phase.awaited.values() if isinstance(state.phase, Recovering) else ()
        label = names.label(node, state.last.labels.get(node.node_id, ""), reserved)
        names.arrivals += 1
        record = state.nodes[node.node_id] = NodeRecord(node, names.arrivals, label, since=now)
        state.ledger.begin(now)
        return record

    def _await_refused(self, joined: messages.NodeJoined, now: float) -> None:
        """Wait, before the next generation, for a refused node that has to stop its workers first (C2)."""
        record = self._add_node(joined.node, now)
        record.is_superseded, record.generation = True, joined.generation
        self.state.restarts_used = max(self.state.restarts_used, joined.restarts_used)
        if joined.generation > self.state.generation:
            self._on_greater_generation(joined, now)
        self._await_stale(record, now)

    def _drop_other_generation(
        self, record: NodeRecord, joined: messages.NodeJoined, now: float
    ) -> messages.NodeJoined:
        """Treat a node as new if the run was begun anew after its generation.

        That has the current number, or a greater one: numbers repeat after the state of all coordinators was lost once.
        """
        state = self.state
        is_same = joined.store == state.store or not joined.store or not state.store
        if joined.generation < state.generation or (joined.generation == state.generation and is_same):
            return joined
        if joined.is_running or joined.has_succeeded:
            over = events.GenerationEnded(joined.generation, _LEFT_BEHIND, stops=True)
            self._send(over, joined.node.node_id)
        if joined.is_running:
            self._await_stale(record, now)
        if joined.generation > state.generation:
            record.generation = joined.generation  # the number of the next one is greater
        return messages.NodeJoined(joined.node)

    def _send_verdict(self, joined: messages.NodeJoined, now: float) -> None:
        verdict = self.state.verdict
        assert verdict is not None
        if joined.generation:
            self._send(events.RunEnded(verdict, now), joined.node.node_id)
        else:
            self._send(events.JoinRefused(f"the run is over: {verdict.why}"), joined.node.node_id)

    def _refusal(self, joined: messages.NodeJoined) -> str:
        state, settings, node = self.state, self.state.settings, joined.node
        if (node.min_nodes, node.max_nodes) != (settings.min_nodes, settings.max_nodes):
            return (
                f"this node was started for {span_text(node.min_nodes, node.max_nodes)} nodes, but the run is for "
                f"{span_text(settings.min_nodes, settings.max_nodes)}; start every node with the same --nnodes"
            )
        if node.rank < 0:
            return ""
        if node.rank >= settings.max_nodes:
            return f"this node requests node rank {node.rank}, but the ranks are 0 to {settings.max_nodes - 1}"
        other = state.nodes.get(state.names.by_rank.get(node.rank, node.node_id))
        if other is not None and _has_rank_elsewhere(other, node) and not self._keeps_rank(joined, other):
            return _rank_taken(node.rank, other.label)
        return ""

    def _keeps_rank(self, joined: messages.NodeJoined, other: NodeRecord) -> bool:
        """Whether a member that reconnects keeps its rank, although a node that is not a member requested it first.

        Otherwise the order in which nodes reach a new coordinator would decide whether the generation continues.
        """
        state = self.state
        if not isinstance(state.phase, Recovering):
            return False
        generation = state.generation if joined.node.node_id in state.phase.awaited else joined.generation
        if generation > state.generation and isinstance(state.phase.source, Recorded):
            return False  # the run was begun anew after its generation
        return generation >= state.generation and generation > other.generation

    def _supersede(self, node: messages.NodeInfo, now: float) -> None:
        """Replace a connected node that has the same name or rank as the one that joins, which was not refused.

        Workers of the old one may be alive: then the generation ends, and the next waits until they have stopped (C2).
        """
        state = self.state
        for node_id in state.names.holders(node):
            old = state.nodes.get(node_id) if node_id is not None else None
            if old is not None and old.info.node_id != node.node_id:
                reason = _SUPERSEDED_HERE
                if _has_rank_elsewhere(old, node):
                    reason = _rank_taken(node.rank, state.last.labels.get(node.node_id, node.where))
                self._send(events.JoinRefused(reason), old.info.node_id)
                state.names.supersede(old.info, old.last_rank)
                if old.phase is NodePhase.STALE:
                    old.is_superseded = True
                    state.names.release(old.info)
                elif old.phase is NodePhase.MEMBER:
                    self._wait_for_superseded(old, now)
                else:
                    self._on_gone(old.info.node_id, SUPERSEDED, now, is_loss=True)

    def _wait_for_superseded(self, old: NodeRecord, now: float) -> None:
        phase = self.state.phase
        old.is_superseded = True
        self.state.names.release(old.info)
        self.state.last.lost[old.label] = SUPERSEDED
        if isinstance(phase, Running):
            self._end_generation(EndCause.LOSS, f"{old.label} was lost: {SUPERSEDED}", now)
        elif isinstance(phase, Recovering):
            phase.is_broken = True

    def _on_greater_generation(self, joined: messages.NodeJoined, now: float) -> None:
        """Continue after a generation of an earlier coordinator that this one did not know."""
        state, last = self.state, self.state.last
        match state.phase:
            case Running():
                self._end_generation(EndCause.LOSS, "a node of an earlier coordinator reconnected", now)
            case Recovering(source=Recorded()):
                return  # the run was begun anew after it: every later one is recorded before a node is sent it
            case Recovering() as recovering:
                self._discard_members(recovering)
            case Ending():
                last.is_uncharged = True  # later messages of its members are about an older generation and ignored (C8)
            case Gathering() | Paused() | Over():
                last.members, last.done = {}, set()
            case phase:
                assert_never(phase)
        state.generation, state.store = joined.generation, joined.store
        state.last.gone.discard(joined.node.node_id)  # it referred to the previous generation

    def _on_at_work(self, record: NodeRecord, joined: messages.NodeJoined, now: float) -> None:
        """A node joined whose workers are running or have succeeded."""
        state, phase, node_id = self.state, self.state.phase, record.info.node_id
        is_current = joined.generation == state.generation and state.last.has(node_id)
        if is_current and isinstance(phase, Running):
            if joined.has_succeeded:
                self._on_succeeded(record, now)
            elif state.hang is not None and state.hang.report is not None:  # it may not have received the report
                self._send(events.HangFound(state.generation, state.hang.report), node_id)
            return
        if is_current and isinstance(phase, Ending):
            self._send(self._ended_event(state.generation, phase), node_id)
            return
        others_work = isinstance(phase, Running)
        over = events.GenerationEnded(joined.generation, _LEFT_BEHIND, is_late=others_work, stops=True)
        self._send(over, node_id)
        if not joined.is_running:
            return
        if joined.generation == state.generation and not others_work:
            self._await_latecomer(record, joined.group_rank, now)
        else:
            self._await_stale(record, now)

    def _await_latecomer(self, record: NodeRecord, group_rank: int, now: float) -> None:
        """Wait for a member of the last generation that was unknown or counted as lost (C2)."""
        last, node_id = self.state.last, record.info.node_id
        if record.phase is not NodePhase.READY:
            record.phase = NodePhase.MEMBER
            last.members[node_id] = group_rank
            last.gone.discard(node_id)
            self._await_stop(record, now)

    def _await_stale(self, record: NodeRecord, now: float) -> None:
        """Wait, before the next generation, for a node that stops workers of another one (C2).

        The current generation keeps running.
        """
        if record.phase is NodePhase.JOINED:  # else it has reported to be clear since
            record.phase = NodePhase.STALE
            if not isinstance(self.state.phase, Running | Recovering):
                self._await_stop(record, now)

    def _await_stop(self, record: NodeRecord, now: float) -> None:
        phase = self.state.phase
        if not isinstance(phase, Ending):
            phase = self._begin_ending(EndCause.LATECOMER, f"{record.label} reconnected with running workers", now)
        phase.unstopped.add(record.info.node_id)

    def _resend_assignment(self, node_id: str, part: Assignment) -> None:
        """Send the assignment again: the link broke before the node received it."""
        self._send(events.GenerationFormed(part), node_id)
        if isinstance(self.state.phase, Ending):
            self._send(self._ended_event(part.generation, self.state.phase), node_id)

    # --- after an earlier coordinator ---------------------------------------------------------------------------------

    def _on_opened(self, opened: Opened, now: float) -> None:
        state, record = self.state, opened.record
        state.generation = max(state.generation, opened.generation)
        state.restarts_used = max(state.restarts_used, opened.restarts_used)
        state.store = opened.store
        if opened.verdict is not None:
            state.phase = Over(opened.verdict)
            return
        if record is not None:
            self._inherit(record)
        if state.generation > 0:
            state.ledger.begin(now)  # the run is older than this coordinator
        self._gather(state.next_why, now)
        if record is not None and record.is_at_work:
            self._await_recorded(record, opened, now)
        elif record is None and opened.recover_s > 0:
            self._recover(Unrecorded(opened.dead_rank), opened.recover_s, now)

    def _inherit(self, record: RunRecord) -> None:
        state = self.state
        state.settled, state.next_why = record.settled, record.next_why
        state.membership_changes, state.drains = record.membership_changes, record.drains
        state.requests = record.requests
        state.ledger.inherit(record.cost)
        state.earlier, state.longest_s = list(record.earlier), record.longest_s
        state.left = {each.label: each for each in record.left}
        state.last.world_size, state.last.formed_at = record.world_size, record.formed_at
        state.names.ranks_by_name = dict(record.ranks_by_name)

    def _await_recorded(self, record: RunRecord, opened: Opened, now: float) -> None:
        """Wait for the members of the recorded generation, which may be running without a connection (C2, C7)."""
        last = self.state.last
        last.members = {member.node_id: member.rank for member in record.members}
        last.labels = {member.node_id: member.label for member in record.members}
        wait_s = opened.alone_s if len(last.members) == 1 else self.state.settings.join_timeout_s
        self._recover(Recorded(dict(last.labels), opened.return_s, opened.recover_s), wait_s, now)

    def _recover(self, source: Recorded | Unrecorded, wait_s: float, now: float) -> None:
        self.state.phase = Recovering(wait_s, source, deadlines={RunDeadline.RECOVER: now + wait_s})

    def _on_earlier_coordinator_gone(self, node_id: str, others: int, now: float) -> None:
        phase, last = self.state.phase, self.state.last
        if not isinstance(phase, Recovering) or not isinstance(phase.source, Recorded):
            return
        if others == 0:
            phase.source.is_deserted = True
            if now + phase.source.recover_s < phase.deadlines[RunDeadline.RECOVER]:
                self._recover_within(phase, phase.source.recover_s, now)
        if node_id in phase.source.awaited:
            last.gone.add(node_id)
            last.lost[phase.source.awaited.pop(node_id)] = "its agent died"
            phase.is_broken = True
        self._recover_if_complete(phase, now)

    @staticmethod
    def _recover_within(phase: Recovering, seconds: float, now: float) -> None:
        phase.deadlines[RunDeadline.RECOVER] = now + seconds
        phase.period_s = seconds

    def _discard_members(self, phase: Recovering) -> None:
        """Drop the members found so far, because a later generation exists."""
        state, last = self.state, self.state.last
        at_work = (NodePhase.MEMBER, NodePhase.DONE)
        members = [each for each in last.members if each in state.nodes and state.nodes[each].phase in at_work]
        for node_id in members:
            record = state.nodes[node_id]
            record.phase = NodePhase.STALE if record.phase is NodePhase.MEMBER else NodePhase.JOINED
            record.last_rank = -1
        over = events.GenerationEnded(state.generation, "a later generation exists", stops=True)
        self._send(over, *members)
        state.last = Generation(labels=last.labels, world_size=last.world_size, formed_at=last.formed_at)
        phase.source = Unrecorded(is_renumbered=state.generation > 0)
        phase.is_broken, phase.watch = False, HangWatch()

    def _on_uninformed_member(self, phase: Recovering, record: NodeRecord, now: float) -> None:
        """Handle a member that never received its assignment: the generation is incomplete, so its end is uncharged."""
        record.last_rank = self.state.members[record.info.node_id]
        phase.is_broken = self.state.last.is_uncharged = True
        self._on_member_back(phase, record.info.node_id, now)

    def _on_member_back(self, phase: Recovering, node_id: str, now: float) -> None:
        source = phase.source
        if isinstance(source, Recorded):
            if not source.has_returned and not source.is_deserted:
                self._recover_within(phase, source.return_s, now)
            source.has_returned = True
            source.awaited.pop(node_id, None)
        self._recover_if_complete(phase, now)

    def _recover_if_complete(self, phase: Recovering, now: float) -> None:
        source, members = phase.source, self.state.members
        if isinstance(source, Recorded):
            is_complete = not source.awaited
        else:
            # While it is renumbered, members of the generation that was known before may still be at work. The length
            # is compared first, because most members may be missing.
            is_complete = not source.is_renumbered and len(members) + 1 >= source.expected
            is_complete = is_complete and {*members.values(), source.dead_rank}.issuperset(range(source.expected))
        if is_complete:
            self._end_recovery(phase, now)

    def _on_recover_timeout(self, now: float) -> None:
        phase = self.state.phase
        assert isinstance(phase, Recovering), "the deadline belongs to this phase"
        is_unseen = len(phase.awaited) == len(self.state.members) > 1
        if isinstance(phase.source, Recorded) and is_unseen and not phase.source.is_deserted:
            self._refuse_all(phase, now)
        else:
            self._end_recovery(phase, now)

    def _refuse_all(self, phase: Recovering, now: float) -> None:
        """Reject all nodes: the generation may be running, with its coordinator, in another part of the network."""
        state, settings = self.state, self.state.settings
        self._recover_within(phase, settings.join_timeout_s, now)
        reason = (
            f"generation {state.generation} of run {settings.run_id!r} may still be running on "
            f"{some_of(list(phase.awaited.values()))}, not connected for {format_seconds(settings.join_timeout_s)}; "
            "check those hosts and their network, or start these nodes with another --rdzv-id"
        )
        self._send(events.JoinRefused(reason), *state.nodes)

    def _adopt(self, phase: Recovering, record: NodeRecord, joined: messages.NodeJoined, now: float) -> None:
        state, last, node_id = self.state, self.state.last, record.info.node_id
        state.store = state.store or joined.store
        last.members[node_id] = record.last_rank = joined.group_rank
        last.labels[node_id] = record.label
        last.gone.discard(node_id)
        if isinstance(phase.source, Unrecorded):
            phase.source.expected = min(joined.group_world_size, state.settings.max_nodes)
            last.formed_at = now
        elif joined.group_world_size > len(last.members):  # recorded by a coordinator that was still recovering
            phase.is_broken = last.is_uncharged = True
        if joined.has_succeeded:
            record.phase = NodePhase.DONE
            last.done.add(node_id)
        else:
            record.phase = record.phase if record.phase is NodePhase.READY else NodePhase.MEMBER
            phase.is_broken |= not joined.is_running
        last.is_uncharged |= joined.is_uncharged
        self._on_member_back(phase, node_id, now)

    def _end_recovery(self, phase: Recovering, now: float) -> None:
        """Continue with the members that are back, now that all are or the deadline has passed."""
        state, last, source = self.state, self.state.last, phase.source
        if not last.members:
            stale = sorted(self._stale())
            for node_id in stale:
                self._await_stop(state.nodes[node_id], now)
            if not stale:
                self._gather(state.next_why, now)
            return
        state.phase = Running(HangWatch(phase.watch.quiet, now))
        workers = sum(state.nodes[each].info.slots for each in last.members if each in state.nodes)
        state.ledger.found(state.generation, len(last.members), workers, now)
        if isinstance(source, Recorded):
            missing = list(source.awaited.values())
            last.gone.update(source.awaited)
        else:
            missing = [f"node {rank}" for rank in sorted(set(range(source.expected)) - set(last.members.values()))]
        for label in missing:
            last.lost[label] = "it did not reconnect after the coordinator was lost"
        if last.failures:
            self._end_by_failure(now)
        elif missing or phase.is_broken:
            self._end_incomplete(isinstance(source, Recorded), now)
        elif last.done.issuperset(last.members):
            self._succeeded(now)
        else:
            for node_id in list(state.ready)[:1]:
                self._consider_newcomer(state.nodes[node_id], now)
            self._suspect_if_all_are_quiet(now)

    def _end_incomplete(self, is_recorded: bool, now: float) -> None:
        last = self.state.last
        why = "the generation is incomplete since the coordinator was lost"
        if is_recorded and last.lost:
            why = some_of([f"{host} was lost: {reason}" for host, reason in last.lost.items()])
        # If no member is missing, a worker may have failed without a coordinator; its failure is still to be sent.
        is_whole = is_recorded and not last.lost and not last.is_uncharged
        self._end_generation(EndCause.FAILURE if is_whole else EndCause.LOSS, why, now)


def _has_rank_elsewhere(other: NodeRecord, node: messages.NodeInfo) -> bool:
    """Whether another node, on another host, requests the same rank."""
    return other.info.rank == node.rank >= 0 and other.info.node_id != node.node_id and other.info.host != node.host


def _rank_taken(rank: int, label: str) -> str:
    return f"this node requests node rank {rank}, which {label} has; give each node its own"
