"""The coordinator machine: the lifecycle of one run.

    GATHERING -> RUNNING -> ENDING -> GATHERING ...     nodes join, run a generation, and re-form after a change
                    |          '----> PAUSED -> GATHERING   ... after a pause that the restart policy requested
                    '-----> OVER                        succeeded, given up, cancelled, or too few nodes for too long
    RECOVERING -> RUNNING | GATHERING                   a new coordinator waits for nodes that run a generation already

All engines use this machine: local, tcp, etcd and the simulator. It receives messages from nodes (``messages``) and
sends them events (``events.FromCoordinator``). Its state is one serialisable value.

Invariants (tests cite the numbers; ``tenax.testing.run_invariants`` checks them after every step):

C1  A generation is formed once, with one list of members, and its number is greater than every earlier one.
C2  A generation is formed only of nodes that reported to be clear, and only while no connected node runs workers of
    any earlier generation, whichever coordinator formed it.
C3  The ranks of a generation are a permutation; every member gets the same world size, store and restart count.
C4  Restarts are counted per run and never exceed what the policy granted. A generation that lost or drained a node, or
    ended to admit one, is uncharged.
C5  When a generation ends, every connected member is sent the reason; the first cause is kept for the report.
C6  When the run ends, every connected node is sent the same verdict, and no generation is formed afterwards.
C7  Every wait has a deadline: if there are too few nodes for too long, the run ends with that reason.
C8  A message about another generation changes nothing but the number of the next one.
C9  An operator's restart ends a running generation and is uncharged; a drain makes one node leave. Neither ends a run
    that can continue.
C10 After the coordinator itself was suspended, every deadline for nodes is a full period away again, and nothing else
    has changed.
H5 to H8 concern hangs: see ``hang_suspicion.py``.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from tenax._core import events, messages
from tenax._core.events import FromCoordinator
from tenax._core.model import (
    HANG,
    MAX_EARLIER,
    MAX_STORE_PEERS,
    Assignment,
    Failure,
    Outcome,
    Stopped,
    Verdict,
    by_cause,
    failure_began_at,
    truncate_failures,
)
from tenax._core.policy import (
    AnyDecision,
    BudgetPolicy,
    GiveUp,
    History,
    RestartPolicy,
    Wait,
    ask_policy,
    first_cause_first,
)
from tenax._core.ranks import Candidate, arrange, assign_ranks, choose
from tenax._core.record import RunRecord
from tenax._core.run_state import (
    AnyCoordinatorEvent,
    CancelRequested,
    CoordinatorEvent,
    CoordinatorState,
    DrainRequested,
    EarlierCoordinatorGone,
    Ending,
    NodeLost,
    NodePhase,
    NodeRecord,
    Opened,
    Quiet,
    Received,
    RestartRequested,
    Resumed,
    RunDeadline,
    RunPhase,
    RunSettings,
    Send,
    Suspicion,
    Tick,
)
from tenax._core.text import MAX_NAMES, format_duration, format_seconds, some_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# The machine, and the values of its interface (``run_state.py``).
__all__ = [
    "AnyCoordinatorEvent",
    "CancelRequested",
    "CoordinatorEvent",
    "CoordinatorMachine",
    "CoordinatorState",
    "DrainRequested",
    "EarlierCoordinatorGone",
    "Ending",
    "NodeLost",
    "NodePhase",
    "NodeRecord",
    "Opened",
    "Quiet",
    "Received",
    "RestartRequested",
    "Resumed",
    "RunDeadline",
    "RunPhase",
    "RunSettings",
    "Send",
    "Suspicion",
    "Tick",
]

_MAX_STOPPED = 10_000
_MAX_STOPPED_WITH_STACKS = 32
_MAX_SUPERSEDED = 100
_CUT_OFF = "it was cut off and stopped its workers"
_SUPERSEDED = "its agent was started again"
_SUPERSEDED_HERE = "the agent of this node was started again, and the new agent replaced this one"
_LEFT_BEHIND = "the other nodes continued without this node"


class _RankIndex:
    """Maps global ranks to positions in a list, because a linear search is slow with many nodes.

    A cache, not part of the state: it is rebuilt for another list.
    """

    def __init__(self) -> None:
        self._list: object = None
        self._positions: dict[int, int] = {}

    def of(self, entries: list[Failure] | list[Stopped]) -> dict[int, int]:
        if self._list is not entries:
            self._list = entries
            ranks = [entry.global_rank for entry in entries]
            self._positions = {rank: position for position, rank in enumerate(ranks)}
        return self._positions


class CoordinatorMachine:
    """``step(event, now)`` returns what to send. One instance per run; the state may be restored."""

    def __init__(
        self, settings: RunSettings, policy: RestartPolicy | None = None, state: CoordinatorState | None = None
    ) -> None:
        self.state = state if state is not None else CoordinatorState(settings)
        self._policy = policy or BudgetPolicy()
        self._failed_ranks, self._stopped_ranks = _RankIndex(), _RankIndex()
        self._outbox: list[Send] = []

    def step(self, event: AnyCoordinatorEvent, now: float) -> list[Send]:
        """Handle one event; return what to send."""
        self._outbox = []
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
                if self.state.phase is not RunPhase.OVER:
                    self._end_run(Outcome.CANCELLED, why, now)
            case RestartRequested(why):
                self._on_restart_requested(why, now)
            case DrainRequested(node_id, why):
                if node_id in self.state.nodes and self.state.phase is not RunPhase.OVER:
                    self._send(events.LeaveRequested(why), node_id)
        return self._outbox

    def _send(self, event: FromCoordinator, *to: str) -> None:
        if to:
            self._outbox.append(Send(to, event))

    def _on_opened(self, opened: Opened, now: float) -> None:
        state = self.state
        state.generation = max(state.generation, opened.generation)
        state.restarts_used = max(state.restarts_used, opened.restarts_used)
        state.dead_rank = opened.dead_rank
        state.store = opened.store
        if opened.verdict is not None:
            state.phase, state.verdict = RunPhase.OVER, opened.verdict
            return
        if opened.record is not None:
            self._inherit(opened.record)
        if state.generation > 0:
            state.ledger.begin(now)  # the run is older than this coordinator
        self._gather(state.next_why, now)
        if opened.record is not None:
            if opened.record.is_at_work:
                self._await_recorded(opened.record, opened, now)
        elif opened.recover_s > 0:
            state.phase = RunPhase.RECOVERING
            state.recover_period_s = opened.recover_s
            state.deadlines = {RunDeadline.RECOVER: now + opened.recover_s}

    def _on_received(self, node_id: str, message: messages.FromNode, now: float) -> None:
        if isinstance(message, messages.NodeJoined):
            self._on_joined(message, now)
            return
        record = self.state.nodes.get(node_id)
        if record is None:
            return
        match message:
            case messages.NodeReady():
                self._on_ready(record, message, now)
            case messages.WorkersRunning(generation, pids):
                if self._is_current(record, generation):
                    self._on_running(record, pids, now)
            case messages.NodeProgress(generation, sent_at, workers):
                if self._is_current(record, generation):
                    self._on_progress(record, workers, now - sent_at, now)
            case messages.FailureSeen(generation, failure, sent_at):
                if self._is_current(record, generation):
                    self._add_failures(record, (failure,), now - sent_at, now)
            case messages.NodeStopped(generation, sent_at, failures, stopped, was_cut_off):
                if self._is_current(record, generation):
                    if was_cut_off:
                        self.state.lost[record.label] = _CUT_OFF
                    self._add_stopped(record, stopped)
                    self._add_failures(record, failures, now - sent_at, now)
                    if record.is_superseded:
                        self._on_gone(node_id, _SUPERSEDED, now, is_loss=True)
            case messages.NodeSucceeded(generation):
                if self._is_current(record, generation):
                    self._on_succeeded(record, now)
            case messages.NodeQuiet(generation, sent_at, since, why):
                if self._is_current(record, generation):
                    self._on_quiet(node_id, Quiet(min(now, since + now - sent_at), why), now)
            case messages.NodeBusy(generation):
                if self._is_current(record, generation) and self.state.quiet.pop(node_id, None) is not None:
                    self._on_movement(now)
            case messages.StacksTaken(generation, number, locations):
                if self._is_current(record, generation):
                    self._on_stacks_taken(record, number, locations, now)
            case messages.NodeDraining(generation, grace_s, why):
                if self._is_current(record, generation):
                    self._on_draining(record, grace_s, why)
            case messages.NodeWillLeave(generation, why, in_s):
                if self._is_current(record, generation):
                    self._forward_notice(record, why, in_s)
            case messages.NodeLeft(why, is_clear):
                self._on_gone(node_id, why, now, is_loss=not is_clear)

    def _is_current(self, record: NodeRecord, generation: int) -> bool:
        """Whether a message is about the current generation, and from one of its members (C8)."""
        state = self.state
        is_current = generation == state.generation == record.generation and state.phase is not RunPhase.OVER
        return is_current and self._is_member(record.info.node_id)

    def _is_member(self, node_id: str) -> bool:
        return node_id in self.state.members and node_id not in self.state.gone

    # --- nodes join ---------------------------------------------------------------------------------------------------

    def _on_joined(self, joined: messages.NodeJoined, now: float) -> None:
        state, node = self.state, joined.node
        if state.phase is RunPhase.OVER:
            self._send_verdict(joined, now)
            return
        refusal = _SUPERSEDED_HERE if node.node_id in state.superseded else self._refusal(node)
        if refusal:
            self._send(events.JoinRefused(refusal), node.node_id)
            if joined.is_running and node.node_id not in state.nodes:
                self._await_refused(joined, now)
            return
        self._supersede(node, now)
        if self._is_over():  # the run was waiting only for the node that this one replaces
            self._send_verdict(joined, now)
            return
        record = state.nodes.get(node.node_id)
        if record is None:
            record = self._add_node(node, now)
            self._claim_names(node)
            record.last_rank = state.ranks_by_name.get(node.name, -1) if node.name else -1
        state.restarts_used = max(state.restarts_used, joined.restarts_used)
        joined = self._drop_colliding_generation(joined, now)
        if joined.generation > state.generation:
            self._on_greater_generation(joined, now)
        is_behind = joined.generation < record.generation
        record.generation = max(record.generation, joined.generation)
        if joined.generation == state.generation > 0 and state.phase is RunPhase.RECOVERING:
            self._adopt(record, joined, now)
        elif joined.is_running or joined.has_succeeded:
            self._on_at_work(record, joined, now)
        elif is_behind and record.phase is NodePhase.MEMBER and record.part is not None:
            self._resend_assignment(node.node_id, record.part)
        if node.node_id in state.awaited:
            self._on_uninformed_member(record, now)

    def _add_node(self, node: messages.NodeInfo, now: float) -> NodeRecord:
        state = self.state
        state.arrivals += 1
        record = state.nodes[node.node_id] = NodeRecord(node, state.arrivals, self._label(node))
        record.since = now
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

    def _label(self, node: messages.NodeInfo) -> str:
        """Return the node's display name, which stays the same under later coordinators."""
        state, labels = self.state, self.state.labels
        label, number = state.member_labels.get(node.node_id, ""), 1
        if not label or label in labels:
            label, kept = node.host, set(state.awaited.values())
            while label in labels or label in kept:
                number += 1
                label = f"{node.host} #{number}"
        labels[label] = node.node_id
        return label

    def _drop_colliding_generation(self, joined: messages.NodeJoined, now: float) -> messages.NodeJoined:
        """Treat a member of another generation with the current number as new.

        Numbers repeat after the state of all coordinators was lost once.
        """
        state = self.state
        is_other = joined.generation == state.generation > 0 and joined.store != state.store
        if not is_other or not joined.store or not state.store:
            return joined
        if joined.is_running or joined.has_succeeded:
            over = events.GenerationEnded(joined.generation, _LEFT_BEHIND)
            self._send(over, joined.node.node_id)
        if joined.is_running:
            self._await_stale(state.nodes[joined.node.node_id], now)
        return messages.NodeJoined(joined.node)

    def _is_over(self) -> bool:
        return self.state.phase is RunPhase.OVER

    def _send_verdict(self, joined: messages.NodeJoined, now: float) -> None:
        verdict = self.state.verdict
        assert verdict is not None
        if joined.generation:
            self._send(events.RunEnded(verdict, now), joined.node.node_id)
        else:
            self._send(events.JoinRefused(f"the run is over: {verdict.why}"), joined.node.node_id)

    def _refusal(self, node: messages.NodeInfo) -> str:
        settings = self.state.settings
        if (node.min_nodes, node.max_nodes) != (settings.min_nodes, settings.max_nodes):
            return (
                f"this node was started for {_span(node.min_nodes, node.max_nodes)} nodes, but the run is for "
                f"{_span(settings.min_nodes, settings.max_nodes)}; start every node with the same --nnodes"
            )
        if node.rank < 0:
            return ""
        if node.rank >= settings.max_nodes:
            return f"this node requests node rank {node.rank}, but the ranks are 0 to {settings.max_nodes - 1}"
        other = self.state.nodes.get(self.state.by_rank.get(node.rank, node.node_id))
        if other is not None and other.info.node_id != node.node_id and other.info.host != node.host:
            return f"this node requests node rank {node.rank}, which {other.label} has; give each node its own"
        return ""

    def _supersede(self, node: messages.NodeInfo, now: float) -> None:
        """Replace a connected node that has the same name, or the same rank on the same host, as the new one.

        Workers of the old one may be alive: then the generation ends, and the next waits until they have stopped (C2).
        """
        state = self.state
        # A dict, not a set: the order must be deterministic.
        same = dict.fromkeys((state.by_name.get(node.name), state.by_rank.get(node.rank)))
        for node_id in same:
            old = state.nodes.get(node_id) if node_id is not None else None
            if old is not None and old.info.node_id != node.node_id:
                self._send(events.JoinRefused(_SUPERSEDED_HERE), old.info.node_id)
                state.superseded = [*state.superseded[-_MAX_SUPERSEDED + 1 :], old.info.node_id]
                if old.info.name and old.last_rank >= 0:
                    state.ranks_by_name[old.info.name] = old.last_rank
                if old.phase is NodePhase.STALE:
                    old.is_superseded = True
                    self._release_names(old.info)
                elif old.phase is NodePhase.MEMBER:
                    self._wait_for_superseded(old, now)
                else:
                    self._on_gone(old.info.node_id, _SUPERSEDED, now, is_loss=True)

    def _claim_names(self, node: messages.NodeInfo) -> None:
        if node.name:
            self.state.by_name[node.name] = node.node_id
        if node.rank >= 0:
            self.state.by_rank[node.rank] = node.node_id

    def _release_names(self, node: messages.NodeInfo) -> None:
        state = self.state
        if state.by_name.get(node.name) == node.node_id:
            del state.by_name[node.name]
        if state.by_rank.get(node.rank) == node.node_id:
            del state.by_rank[node.rank]

    def _wait_for_superseded(self, old: NodeRecord, now: float) -> None:
        state = self.state
        old.is_superseded = True
        self._release_names(old.info)
        state.lost[old.label] = _SUPERSEDED
        if state.phase is RunPhase.RUNNING:
            self._end_generation(Ending.LOSS, f"{old.label} was lost: {_SUPERSEDED}", now)
        elif state.phase is RunPhase.RECOVERING:
            state.is_broken = True

    def _on_greater_generation(self, joined: messages.NodeJoined, now: float) -> None:
        """Continue after a generation of an earlier coordinator that this one did not know."""
        state = self.state
        if state.phase is RunPhase.RUNNING:
            self._end_generation(Ending.LOSS, "a node of an earlier coordinator reconnected", now)
        elif state.phase is RunPhase.RECOVERING:
            if state.is_recorded:
                self._recover_within(state.recover_s, now)
            self._discard_members("a later generation exists")
            state.is_renumbered = state.generation > 0
        elif state.phase is RunPhase.ENDING:
            state.is_uncharged = True  # later messages of its members are about an older generation and ignored (C8)
        else:
            state.members, state.done = {}, set()
        state.generation, state.store = joined.generation, joined.store
        state.gone.discard(joined.node.node_id)  # it referred, like the dead rank, to the previous generation
        state.dead_rank = -1

    def _on_at_work(self, record: NodeRecord, joined: messages.NodeJoined, now: float) -> None:
        """A node joined whose workers are running or have succeeded."""
        state, node_id = self.state, record.info.node_id
        is_current = joined.generation == state.generation and self._is_member(node_id)
        if is_current and state.phase is RunPhase.RUNNING:
            if joined.has_succeeded:
                self._on_succeeded(record, now)
            elif state.hang is not None and state.hang.report is not None:  # it may not have received the report
                self._send(events.HangFound(state.generation, state.hang.report), node_id)
            return
        if is_current and state.phase is RunPhase.ENDING:
            self._send(self._ended_event(state.generation), node_id)
            return
        others_work = state.phase is RunPhase.RUNNING
        self._send(events.GenerationEnded(joined.generation, _LEFT_BEHIND, is_late=others_work), node_id)
        if not joined.is_running:
            return
        if joined.generation == state.generation and not others_work:
            self._await_latecomer(record, joined.group_rank, now)
        else:
            self._await_stale(record, now)

    def _await_latecomer(self, record: NodeRecord, group_rank: int, now: float) -> None:
        """Wait for a member of the last generation that was unknown or counted as lost (C2)."""
        state, node_id = self.state, record.info.node_id
        if record.phase is NodePhase.READY:
            return
        record.phase = NodePhase.MEMBER
        state.members[node_id] = group_rank
        state.gone.discard(node_id)
        self._await_stop(record, now)

    def _await_stale(self, record: NodeRecord, now: float) -> None:
        """Wait, before the next generation, for a node that stops workers of another one (C2).

        The current generation keeps running.
        """
        if record.phase is NodePhase.JOINED:  # else it has reported to be clear since
            record.phase = NodePhase.STALE
            if self.state.phase not in (RunPhase.RUNNING, RunPhase.RECOVERING):
                self._await_stop(record, now)

    def _await_stop(self, record: NodeRecord, now: float) -> None:
        if self.state.phase is not RunPhase.ENDING:
            self._begin_ending(None, f"{record.label} reconnected with running workers", now)
        self.state.unstopped.add(record.info.node_id)

    def _resend_assignment(self, node_id: str, part: Assignment) -> None:
        """Send the assignment again: the link broke before the node received it."""
        self._send(events.GenerationFormed(part), node_id)
        if self.state.phase is RunPhase.ENDING:
            self._send(self._ended_event(part.generation), node_id)

    def _discard_members(self, why: str) -> None:
        """Drop the members found so far, because a later generation exists."""
        state = self.state
        at_work = (NodePhase.MEMBER, NodePhase.DONE)
        members = [each for each in state.members if each in state.nodes and state.nodes[each].phase in at_work]
        for node_id in members:
            record = state.nodes[node_id]
            record.phase = NodePhase.STALE if record.phase is NodePhase.MEMBER else NodePhase.JOINED
            record.last_rank = -1
        self._send(events.GenerationEnded(state.generation, why), *members)
        state.members, state.done, state.failures, state.stopped = {}, set(), [], []
        state.lost, state.drained, state.is_broken, state.is_uncharged = {}, [], False, False
        state.quiet, state.hang = {}, None
        state.awaited, state.is_recorded = {}, False

    # --- after an earlier coordinator ---------------------------------------------------------------------------------

    def _inherit(self, record: RunRecord) -> None:
        state = self.state
        state.settled, state.world_size, state.next_why = record.settled, record.world_size, record.next_why
        state.membership_changes, state.drains = record.membership_changes, record.drains
        state.requests = record.requests
        state.ledger.inherit(record.cost)
        state.earlier, state.longest_s, state.formed_at = list(record.earlier), record.longest_s, record.formed_at
        state.ranks_by_name = dict(record.ranks_by_name)

    def _await_recorded(self, record: RunRecord, opened: Opened, now: float) -> None:
        """Wait for the members of the recorded generation, which may be running without a connection (C2, C7)."""
        state = self.state
        state.phase, state.is_recorded = RunPhase.RECOVERING, True
        state.members = {member.node_id: member.rank for member in record.members}
        state.member_labels = {member.node_id: member.label for member in record.members}
        state.awaited = dict(state.member_labels)
        state.return_s, state.recover_s = opened.return_s, opened.recover_s
        is_one = len(state.awaited) == 1
        wait_s = state.recover_period_s = opened.alone_s if is_one else state.settings.join_timeout_s
        state.deadlines = {RunDeadline.RECOVER: now + wait_s}

    def _on_earlier_coordinator_gone(self, node_id: str, others: int, now: float) -> None:
        state = self.state
        if state.phase is not RunPhase.RECOVERING or not state.is_recorded:
            return
        if others == 0:
            state.is_deserted = True
            self._recover_within(state.recover_s, now)
        label = state.awaited.pop(node_id, "")
        if label:
            state.gone.add(node_id)
            state.lost[label] = "its agent died"
            state.is_broken = True
        self._recover_if_complete(now)

    def _recover_within(self, seconds: float, now: float) -> None:
        state = self.state
        if now + seconds < state.deadlines[RunDeadline.RECOVER]:
            state.deadlines[RunDeadline.RECOVER] = now + seconds
            state.recover_period_s = seconds

    def _on_uninformed_member(self, record: NodeRecord, now: float) -> None:
        """Handle a member that never received its assignment: the generation is incomplete, so its end is uncharged."""
        record.last_rank = self.state.members[record.info.node_id]
        self.state.is_broken = self.state.is_uncharged = True
        self._on_member_back(record.info.node_id, now)

    def _on_member_back(self, node_id: str, now: float) -> None:
        if self.state.is_recorded:
            self._recover_within(self.state.return_s, now)
            self.state.awaited.pop(node_id, None)
        self._recover_if_complete(now)

    def _recover_if_complete(self, now: float) -> None:
        state = self.state
        if state.is_recorded:
            if not state.awaited:
                self._end_recovery(now)
        elif state.is_renumbered:
            return  # members of the generation that was known before may still be at work
        elif len(state.members) + 1 >= state.expected:  # skips the sets below while most members are missing
            known = {*state.members.values(), state.dead_rank}
            if known >= set(range(state.expected)):
                self._end_recovery(now)

    def _on_recover_timeout(self, now: float) -> None:
        state = self.state
        is_unseen = len(state.awaited) == len(state.members) > 1
        if state.is_recorded and is_unseen and not state.is_deserted:
            self._refuse_all(now)
        else:
            self._end_recovery(now)

    def _refuse_all(self, now: float) -> None:
        """Reject all nodes: the generation may be running, with its coordinator, in another part of the network."""
        state, settings = self.state, self.state.settings
        state.deadlines[RunDeadline.RECOVER] = now + settings.join_timeout_s
        state.recover_period_s = settings.join_timeout_s
        reason = (
            f"generation {state.generation} of run {settings.run_id!r} may still be running on "
            f"{some_of(list(state.awaited.values()))}, not connected for {format_seconds(settings.join_timeout_s)}; "
            "check those hosts and their network, or start these nodes with another --rdzv-id"
        )
        self._send(events.JoinRefused(reason), *state.nodes)

    def _adopt(self, record: NodeRecord, joined: messages.NodeJoined, now: float) -> None:
        state, node_id = self.state, record.info.node_id
        state.expected = min(joined.group_world_size, state.settings.max_nodes)
        state.store = state.store or joined.store
        state.members[node_id] = record.last_rank = joined.group_rank
        state.gone.discard(node_id)
        if not state.is_recorded:
            state.formed_at = now
        if joined.has_succeeded:
            record.phase = NodePhase.DONE
            state.done.add(node_id)
        else:
            record.phase = record.phase if record.phase is NodePhase.READY else NodePhase.MEMBER
            state.is_broken |= not joined.is_running
        state.is_uncharged |= joined.is_uncharged
        self._on_member_back(node_id, now)

    def _end_recovery(self, now: float) -> None:
        """Continue with the members that are back, now that all are or the deadline has passed."""
        state = self.state
        state.deadlines.clear()
        if not state.members:
            stale = self._stale()
            for node_id in stale:
                self._await_stop(state.nodes[node_id], now)
            if not stale:
                self._gather(state.next_why, now)
            return
        state.phase, state.moved_at = RunPhase.RUNNING, now
        workers = sum(state.nodes[each].info.slots for each in state.members if each in state.nodes)
        state.ledger.found(state.generation, len(state.members), workers, now)
        missing = [f"node {rank}" for rank in sorted(set(range(state.expected)) - set(state.members.values()))]
        if state.is_recorded:
            missing = list(state.awaited.values())
            state.gone.update(state.awaited)
            state.awaited = {}
        for label in missing:
            state.lost[label] = "it did not reconnect after the coordinator was lost"
        if state.failures:
            self._end_generation(Ending.FAILURE, self._describe_first_cause(), now)
        elif missing or state.is_broken:
            why = "the generation is incomplete since the coordinator was lost"
            if state.is_recorded and state.lost:
                why = some_of([f"{host} was lost: {reason}" for host, reason in state.lost.items()])
            # If no member is missing, a worker may have failed without a coordinator; its failure is still to be sent.
            is_whole = state.is_recorded and not state.lost and not state.is_uncharged
            self._end_generation(Ending.FAILURE if is_whole else Ending.LOSS, why, now)
        elif state.done.issuperset(state.members):
            self._succeeded(now)
        else:
            for node_id in list(state.ready)[:1]:
                self._consider_newcomer(state.nodes[node_id], now)
            self._suspect_if_all_are_quiet(now)

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _on_ready(self, record: NodeRecord, ready: messages.NodeReady, now: float) -> None:
        state, node_id = self.state, record.info.node_id
        if state.phase is RunPhase.OVER or not record.generation <= ready.generation <= state.generation:
            return
        if record.is_superseded:
            self._on_gone(node_id, _SUPERSEDED, now, is_loss=True)
            return
        record.store_addr, record.store_port = ready.store_addr, ready.store_port
        record.is_agent_store = ready.is_agent_store
        record.addresses = ready.addresses
        if record.phase is NodePhase.READY:
            return
        is_member = self._is_member(node_id)
        record.phase, record.since = NodePhase.READY, now
        state.ready[node_id] = True
        match state.phase:
            case RunPhase.RUNNING if is_member:
                state.gone.add(node_id)
                state.lost[record.label] = _CUT_OFF
                self._end_generation(Ending.LOSS, f"{record.label} was lost: {_CUT_OFF}", now)
            case RunPhase.RUNNING:
                self._consider_newcomer(record, now)
            case RunPhase.ENDING:
                state.unstopped.discard(node_id)
                self._after_generation_if_stopped(now)
            case RunPhase.GATHERING:
                self._form_if_possible(now)
            case RunPhase.RECOVERING:
                state.is_broken |= is_member
        is_informed = any(isinstance(send.event, events.Waiting) and node_id in send.to for send in self._outbox)
        if node_id in state.ready and not is_informed and state.phase not in (RunPhase.ENDING, RunPhase.OVER):
            self._send(events.Waiting(self._describe_waiting(now)), node_id)

    def _consider_newcomer(self, record: NodeRecord, now: float) -> None:
        """End the generation to admit the node, if there is room and scaling up is allowed."""
        state = self.state
        if len(state.members) >= state.settings.max_nodes or state.done or not state.settings.scale_up:
            return
        self._end_generation(Ending.JOIN, f"{record.label} joined", now)

    def _gather(self, why: str, now: float) -> None:
        state = self.state
        state.phase = RunPhase.GATHERING
        state.next_why = why
        state.gathering_since = now
        state.deadlines = {
            RunDeadline.JOIN: now + state.settings.join_timeout_s,
            RunDeadline.WAITING: now + state.settings.waiting_every_s,
        }
        self._form_if_possible(now)
        if state.phase is RunPhase.GATHERING:
            self._send(events.Waiting(self._describe_waiting(now)), *state.ready)

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
        candidates = [self._candidate(node_id) for node_id in state.ready]
        arranged = arrange(choose(candidates, settings.max_nodes))
        assigned = assign_ranks(arranged)
        first = state.nodes[arranged[0].node_id]
        state.phase = RunPhase.RUNNING
        state.generation += 1
        state.world_size = sum(candidate.slots for candidate in arranged)
        state.members = {ranks.node_id: ranks.group_rank for ranks in assigned}
        state.member_labels = {node_id: state.nodes[node_id].label for node_id in state.members}
        state.store = f"{first.store_addr}:{first.store_port}"
        state.done, state.unstopped = set(), set()
        state.failures, state.stopped = [], []
        state.gone, state.lost, state.drained = set(), {}, []
        state.ended_by, state.ended_why = None, ""
        state.is_broken, state.is_uncharged, state.dead_rank, state.expected = False, False, -1, 0
        state.is_recorded, state.is_deserted, state.is_renumbered = False, False, False
        state.formed_at = state.moved_at = now
        state.quiet, state.hang = {}, None
        state.deadlines.clear()
        state.unstarted = set(state.members)
        state.ledger.formed(state.generation, state.next_why, len(state.members), state.world_size, now)
        for record in state.nodes.values():
            record.last_rank, record.pids, record.progress = -1, (), ()
        self._remember_ranks()
        coordinator_rank = state.members.get(settings.serving_node, -1)
        for ranks in assigned:
            record = state.nodes[ranks.node_id]
            record.phase, record.since = NodePhase.MEMBER, now
            record.is_draining = False
            record.last_rank = ranks.group_rank
            del state.ready[ranks.node_id]
            part = Assignment(
                generation=state.generation,
                group_rank=ranks.group_rank,
                group_world_size=len(assigned),
                first_global_rank=ranks.first_global_rank,
                world_size=state.world_size,
                first_role_rank=ranks.first_role_rank,
                role_world_size=ranks.role_world_size,
                master_addr=first.store_addr,
                master_port=first.store_port,
                use_agent_store=first.is_agent_store,
                restarts_used=state.restarts_used,
                why=state.next_why,
                coordinator_rank=coordinator_rank,
                store_peers=self._store_peers(first) if record is first and first.is_agent_store else (),
            )
            record.generation, record.part = part.generation, part
            self._outbox.append(Send((ranks.node_id,), events.GenerationFormed(part)))
        if state.ready:
            self._send(events.Waiting(self._describe_waiting(now)), *state.ready)

    def _store_peers(self, first: NodeRecord) -> tuple[str, ...]:
        """Return the addresses from which members other than the first may connect to its store."""
        others = [record for each in self.state.members if (record := self.state.nodes[each]) is not first]
        per_node = MAX_STORE_PEERS // max(1, len(others))
        return tuple(dict.fromkeys(address for record in others for address in record.addresses[:per_node]))

    def _remember_ranks(self) -> None:
        """Remember the last name of each rank, so that there are at most ``max_nodes`` entries."""
        state = self.state
        names = {rank: name for name, rank in state.ranks_by_name.items() if rank < state.settings.max_nodes}
        for node_id, rank in state.members.items():
            names[rank] = state.nodes[node_id].info.name
        state.ranks_by_name = {name: rank for rank, name in names.items() if name}

    def _candidate(self, node_id: str) -> Candidate:
        record = self.state.nodes[node_id]
        info = record.info
        return Candidate(node_id, record.arrival, record.last_rank, info.rank, info.order, info.slots, info.role)

    def describe_activity(self, now: float) -> str:
        """Describe what the run is doing, for display."""
        state = self.state
        if state.verdict is not None:
            return f"the run is over: {state.verdict.why}"
        if state.phase is not RunPhase.RUNNING:
            return self._describe_waiting(now)
        if state.unstarted:
            names = some_of([state.member_labels.get(each, each[:8]) for each in sorted(state.unstarted)])
            return f"generation {state.generation} is starting; waiting for the workers of {names}"
        done = f"; {_nodes(len(state.done))} of {len(state.members)} done" if state.done else ""
        if hang := self.describe_hang(now):
            return hang
        workers = "1 worker" if state.world_size == 1 else f"{state.world_size} workers"
        return f"generation {state.generation} is running, {workers} on {_nodes(len(state.members))}{done}"

    def describe_hang(self, now: float) -> str:
        """Describe the suspected hang, or return "" if there is none."""
        if self.state.hang is None:
            return ""
        from tenax._core.hang_suspicion import describe_hang

        return describe_hang(self.state, now)

    def _describe_waiting(self, now: float) -> str:
        state, settings = self.state, self.state.settings
        match state.phase:
            case RunPhase.RUNNING:
                is_full = len(state.members) >= settings.max_nodes
                spare = f"this node is a spare: the run has its maximum of {_nodes(settings.max_nodes)}"
                what = spare if is_full else "this node will join the next one"
                return f"generation {state.generation} is running; {what}"
            case RunPhase.ENDING:
                names = some_of([state.nodes[node_id].label for node_id in sorted(state.unstopped)])
                return f"generation {state.generation} is ending ({state.ended_why}); waiting for {names}"
            case RunPhase.PAUSED:
                return f"waiting before the restart: {state.next_why}"
            case RunPhase.RECOVERING:
                names = some_of(list(state.awaited.values())) or "the nodes of the earlier coordinator"
                left = state.seconds_left(RunDeadline.RECOVER, now)
                return f"the coordinator was replaced; waiting up to {format_duration(left)} for {names} to reconnect"
        count = len(state.ready)
        here = f"{count} of {_span(settings.min_nodes, settings.max_nodes)} nodes ready"
        if RunDeadline.LAST_CALL in state.deadlines:
            left = state.seconds_left(RunDeadline.LAST_CALL, now)
            return f"{here}; waiting {format_duration(left)} for more (--rdzv-conf last_call_timeout)"
        left = state.seconds_left(RunDeadline.JOIN, now)
        hosts = f" ({self._describe_hosts(state.ready)})" if state.ready else ""
        missing = settings.min_nodes - count
        return f"{here}{hosts}; waiting up to {format_duration(left)} for {missing} more{self._describe_lost()}"

    def _describe_hosts(self, node_ids: Collection[str]) -> str:
        """Name some hosts and count the others, because thousands of nodes may join one by one."""
        shown = [self.state.nodes[node_id].label for node_id in islice(node_ids, MAX_NAMES)]
        return some_of(shown, len(node_ids))

    def _describe_lost(self) -> str:
        lost = self.state.lost
        return f"; lost: {some_of([f'{host} ({why})' for host, why in lost.items()])}" if lost else ""

    # --- a running generation -----------------------------------------------------------------------------------------

    def _on_running(self, record: NodeRecord, pids: tuple[int, ...], now: float) -> None:
        record.pids = pids
        self._on_workers_started(record, now)

    def _on_workers_started(self, record: NodeRecord, now: float) -> None:
        self.state.unstarted.discard(record.info.node_id)
        if not self.state.unstarted and self.state.phase is RunPhase.RUNNING:
            self.state.ledger.running(now)

    def _on_progress(
        self, record: NodeRecord, workers: tuple[messages.WorkerProgress, ...], by_s: float, now: float
    ) -> None:
        record.progress = tuple(
            msgspec.structs.replace(each, first_at=each.first_at + by_s, last_at=each.last_at + by_s)
            for each in workers
        )
        if stepped := [each for each in record.progress if each.last_step >= 0]:  # others reported only a phase
            first = min(stepped, key=lambda each: each.first_step)
            last = max(stepped, key=lambda each: each.last_step)
            self.state.ledger.stepped(first.first_step, first.first_at, last.last_step, last.last_at, now)

    def _add_stopped(self, record: NodeRecord, stopped: tuple[Stopped, ...]) -> None:
        """Add stopped workers once: a node sends them again after it reconnects."""
        known = self._stopped_ranks.of(self.state.stopped)
        for each in stopped:
            if each.global_rank not in known and len(known) < _MAX_STOPPED:
                known[each.global_rank] = len(known)
                self.state.stopped.append(self._with_some_stacks(record, each))

    def _with_some_stacks(self, record: NodeRecord, stopped: Stopped) -> Stopped:
        """Keep the stacks of a limited number of workers, because the verdict must fit into one message."""
        if not stopped.stacks or sum(bool(each.stacks) for each in self.state.stopped) >= _MAX_STOPPED_WITH_STACKS:
            return stopped.brief()
        return msgspec.structs.replace(stopped, host=record.info.host)

    def _add_failures(self, record: NodeRecord, failures: tuple[Failure, ...], by_s: float, now: float) -> None:
        state = self.state
        known = self._failed_ranks.of(state.failures)
        for failure in failures:
            dated = msgspec.structs.replace(failure.shifted(by_s), host=record.info.host)
            if dated.global_rank in known and state.failures[known[dated.global_rank]].evidence.cause == HANG:
                continue  # its exit is a consequence of the hang
            if dated.global_rank in known:
                # The same failure, now with evidence. Of the two messages, the one with the shorter delay dates it.
                earlier_s = min(0.0, state.failures[known[dated.global_rank]].seen_at - dated.seen_at)
                state.failures[known[dated.global_rank]] = dated.shifted(earlier_s)
            else:
                known[dated.global_rank] = len(known)
                state.failures.append(dated)
        if state.phase is RunPhase.RUNNING and state.failures and not state.ended_by:
            self._end_generation(Ending.FAILURE, self._describe_first_cause(), now)

    def _describe_first_cause(self) -> str:
        first = min(self.state.failures, key=by_cause)
        return f"rank {first.global_rank} on {first.host} failed"

    def _on_succeeded(self, record: NodeRecord, now: float) -> None:
        state = self.state
        if state.phase not in (RunPhase.RUNNING, RunPhase.RECOVERING) or record.phase is NodePhase.READY:
            return
        record.phase, record.since = NodePhase.DONE, now
        self._on_workers_started(record, now)  # its message may have been lost with its link
        state.done.add(record.info.node_id)
        state.quiet.pop(record.info.node_id, None)
        if state.phase is RunPhase.RUNNING and len(state.done) == len(state.members):
            self._succeeded(now)
        elif state.phase is RunPhase.RUNNING:
            self._on_movement(now)

    def _succeeded(self, now: float) -> None:
        count = self.state.world_size
        why = "the worker succeeded" if count == 1 else f"all {count} workers succeeded" if count else "all succeeded"
        self._end_run(Outcome.SUCCEEDED, why, now)

    def _on_draining(self, record: NodeRecord, grace_s: float, why: str) -> None:
        """Forward the notice. The generation runs until the node leaves, so that all nodes can save a checkpoint."""
        if not record.is_draining:
            record.is_draining = True
            if record.label not in self.state.drained:  # it may have been lost and be back
                self.state.drained.append(record.label)
            self._forward_notice(record, why, grace_s)

    def _forward_notice(self, record: NodeRecord, why: str, in_s: float | None) -> None:
        state = self.state
        others = (each for each in state.members if each != record.info.node_id and each in state.nodes)
        self._send(events.LeaveNoticed(state.generation, record.label, why, in_s), *others)

    def _on_gone(self, node_id: str, why: str, now: float, *, is_loss: bool) -> None:
        state = self.state
        record = state.nodes.pop(node_id, None)
        if record is not None:
            del state.labels[record.label]
        if record is None:
            return
        self._release_names(record.info)
        state.ready.pop(node_id, None)
        was_stopping = node_id in state.unstopped
        state.unstopped.discard(node_id)
        if self._is_member(node_id) and node_id not in state.done:
            state.gone.add(node_id)
            is_drain = record.is_draining or not is_loss
            if is_drain and record.label not in state.drained:
                state.drained.append(record.label)
            elif not is_drain:
                state.lost[record.label] = why
            if state.phase is RunPhase.RUNNING:
                kind = Ending.DRAIN if is_drain else Ending.LOSS
                what = "was drained" if is_drain else f"was lost: {why}"
                self._end_generation(kind, f"{record.label} {what}", now)
            elif state.phase is RunPhase.RECOVERING:
                state.is_broken = True
        if was_stopping:
            self._after_generation_if_stopped(now)
        elif state.phase is RunPhase.GATHERING:
            self._form_if_possible(now)

    # --- a generation hangs (``hang_suspicion.py``) -------------------------------------------------------------------

    def _on_quiet(self, node_id: str, quiet: Quiet, now: float) -> None:
        if self.state.settings.on_hang != "off" and node_id not in self.state.done:
            self.state.quiet[node_id] = quiet
            self._suspect_if_all_are_quiet(now)

    def _on_movement(self, now: float) -> None:
        from tenax._core.hang_suspicion import end_suspicion

        self._outbox += end_suspicion(self.state, now)
        self._suspect_if_all_are_quiet(now)

    def _suspect_if_all_are_quiet(self, now: float) -> None:
        if self.state.quiet:
            from tenax._core.hang_suspicion import suspect

            self._outbox += suspect(self.state, now)

    def _on_stacks_taken(
        self, record: NodeRecord, number: int, locations: tuple[messages.StackLocation, ...], now: float
    ) -> None:
        from tenax._core.hang_suspicion import add_stacks

        if add_stacks(self.state, record, number, locations):
            self._report_hang(now)

    def _report_hang(self, now: float) -> None:
        from tenax._core.hang_suspicion import failure_by_hang, report_hang

        state = self.state
        self._outbox += report_hang(state, now)
        if state.settings.on_hang == "restart":
            failure = failure_by_hang(state)
            self._failed_ranks.of(state.failures)[failure.global_rank] = len(state.failures)
            state.failures.append(failure)
            state.ledger.hung(failure.seen_at, now)
            where = f" on {failure.host}" if failure.host else ""
            self._end_generation(Ending.FAILURE, f"rank {failure.global_rank}{where} hung", now)

    # --- a generation ends --------------------------------------------------------------------------------------------

    def _on_restart_requested(self, why: str, now: float) -> None:
        match self.state.phase:
            case RunPhase.RUNNING:
                self._end_generation(Ending.REQUEST, f"an operator restarted the run: {why}", now)
            case RunPhase.PAUSED:
                self._gather(self.state.next_why, now)

    def _end_generation(self, kind: Ending, why: str, now: float) -> None:
        state = self.state
        self._begin_ending(kind, why, now)
        state.unstopped = {
            node_id
            for node_id in state.members
            if node_id in state.nodes and state.nodes[node_id].phase in (NodePhase.MEMBER, NodePhase.DONE)
        }
        self._send(self._ended_event(state.generation), *sorted(state.unstopped))
        state.unstopped |= self._stale()
        self._after_generation_if_stopped(now)

    def _stale(self) -> set[str]:
        return {node_id for node_id, record in self.state.nodes.items() if record.phase is NodePhase.STALE}

    def _ended_event(self, generation: int) -> events.GenerationEnded:
        is_uncharged = self.state.ended_by is not Ending.FAILURE
        return events.GenerationEnded(generation, self.state.ended_why, is_uncharged=is_uncharged)

    def _begin_ending(self, kind: Ending | None, why: str, now: float) -> None:
        state = self.state
        state.phase = RunPhase.ENDING
        state.ended_by, state.ended_why, state.ended_at = kind, why, now
        began_at = min(map(failure_began_at, state.failures), default=None) if kind is Ending.FAILURE else None
        state.ledger.ended(kind.value if kind is not None else "latecomer", why, began_at, now)
        state.deadlines = {RunDeadline.WAITING: now + state.settings.waiting_every_s}
        state.quiet, state.hang = {}, None

    def _after_generation_if_stopped(self, now: float) -> None:
        if self.state.phase is RunPhase.ENDING and not self.state.unstopped:
            self._after_generation(now)

    def _after_generation(self, now: float) -> None:
        """Decide what follows, and what it is counted as, when every member has stopped or is gone."""
        state = self.state
        state.settled = state.generation
        state.ledger.settled(now)
        lived_s = state.ended_at - state.formed_at  # read before the next generation is formed below
        if state.ended_by is None:  # only a latecomer was awaited: not counted
            self._gather(state.ended_why, now)
            return
        if state.drained and not state.lost:
            state.drains += 1
            self._gather(f"{some_of(state.drained)} {_was(len(state.drained))} drained", now)
        elif state.ended_by is Ending.REQUEST and not state.lost:
            state.requests += 1
            self._gather(state.ended_why, now)
        elif state.lost or not state.failures or state.is_uncharged or state.ended_by in (Ending.JOIN, Ending.LOSS):
            state.membership_changes += 1
            # If a node was lost, that is the reason, even if a worker failed first.
            is_reason = state.ended_by is not Ending.FAILURE or not state.lost
            self._gather(
                state.ended_why if is_reason else f"{some_of(list(state.lost))} {_was(len(state.lost))} lost", now
            )
        else:
            self._after_failure(now)
        state.longest_s = max(state.longest_s, lived_s)

    def _after_failure(self, now: float) -> None:
        state = self.state
        state.failures = first_cause_first(state.failures, state.formed_at)
        first = state.failures[0]
        history = History(
            state.restarts_used,
            state.settings.max_restarts,
            tuple(state.earlier),
            tuple(state.failures),
            state.world_size,
            first.lived_s,
            state.longest_s,
        )
        decision = state.decision = self._ask_policy(first, history)
        if isinstance(decision, GiveUp):
            self._end_run(Outcome.FAILED, decision.why, now)
            return
        state.restarts_used += 1
        state.earlier = [*state.earlier[-MAX_EARLIER + 1 :], first.brief()]
        if isinstance(decision, Wait):
            state.phase = RunPhase.PAUSED
            state.next_why = decision.why
            state.deadlines = {RunDeadline.PAUSE: now + decision.seconds}
            why = f"waiting {format_seconds(decision.seconds)} before the restart: {decision.why}"
            self._send(events.Waiting(why), *state.nodes)
        else:
            self._gather(decision.why, now)

    def _ask_policy(self, failure: Failure, history: History) -> AnyDecision:
        return ask_policy(self._policy, failure, history)

    # --- deadlines, and the end of the run ----------------------------------------------------------------------------

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
                    self._send(events.Waiting(self._describe_waiting(now)), *state.ready)
                case RunDeadline.JOIN:
                    self._on_join_timeout(now)
                case RunDeadline.QUIET:
                    self._suspect_if_all_are_quiet(now)
                case RunDeadline.STACKS:
                    if state.hang is not None:
                        self._report_hang(now)

    def _on_resumed(self, now: float) -> None:
        """Give nodes a full period again: they could not reach this coordinator while it was suspended (C10)."""
        state, settings = self.state, self.state.settings
        if RunDeadline.QUIET in state.deadlines:
            state.moved_at = now
        periods = {
            RunDeadline.JOIN: settings.join_timeout_s,
            RunDeadline.LAST_CALL: settings.last_call_s,
            RunDeadline.RECOVER: state.recover_period_s,
            RunDeadline.QUIET: settings.hang_after_s,
            RunDeadline.STACKS: settings.stacks_timeout_s,
        }
        for deadline, at in state.deadlines.items():
            state.deadlines[deadline] = max(at, now + periods.get(deadline, 0.0))

    def _on_join_timeout(self, now: float) -> None:
        settings = self.state.settings
        if len(self.state.ready) >= settings.min_nodes:
            self._form(now)
            return
        self._end_run(
            Outcome.BROKEN,
            f"only {len(self.state.ready)} of at least {_nodes(settings.min_nodes)} joined within "
            f"{format_seconds(settings.join_timeout_s)}{self._describe_lost()}; start the missing nodes, or allow "
            "more time with --rdzv-conf join_timeout=SECONDS",
            now,
        )

    def _end_run(self, outcome: Outcome, why: str, now: float) -> None:
        state = self.state
        state.phase = RunPhase.OVER
        state.deadlines.clear()
        state.quiet, state.hang = {}, None
        state.ledger.over(outcome.value, why, now)
        failures = truncate_failures(sorted(state.failures, key=by_cause))
        failed = {failure.global_rank for failure in state.failures}
        stopped = tuple(each for each in state.stopped if each.global_rank not in failed)
        state.verdict = Verdict(
            outcome=outcome,
            why=why,
            failures=failures if outcome is not Outcome.SUCCEEDED else (),
            stopped=stopped if outcome is not Outcome.SUCCEEDED else (),
            restarts_used=state.restarts_used,
            generation=state.generation,
            earlier=tuple(state.earlier),
            membership_changes=state.membership_changes,
            drains=state.drains,
            requests=state.requests,
            goodput=state.ledger.goodput(now),
        )
        self._send(events.RunEnded(state.verdict, now), *state.nodes)


def _span(minimum: int, maximum: int) -> str:
    return str(minimum) if minimum == maximum else f"{minimum} to {maximum}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
