"""Decisions of one node in a dynamic rendezvous: from the shared state and its view of the others to its next action.

Pure: no reads, writes, waits or clocks. The caller reads the state, gets a decision and writes the new state; if
another node has written in between, it starts again. So every decision must be right for the state it was given.

Invariants (tests cite the numbers):

D1  A round completes once, with at least ``min_nodes`` and at most ``max_nodes`` members.
D2  Rounds only grow, even if the state was lost and a node remembers a later round.
D3  Former members come before new nodes. Members keep the order of their ranks; new nodes get the ranks of members that
    left.
D4  Known members form the next round as soon as all of them that are alive have joined. The last call is only for new
    nodes.
D5  A node that does not fit in waits as a spare: without a deadline, and without disturbing the group.
D6  A group must be formed again if a member died, or if a node waits that fits in: see ``pending``.
"""

from __future__ import annotations

import msgspec

from tenax._core.text import format_seconds
from tenax.rendezvous._dynamic.state import Node, Standing, State, first_names
from tenax.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous.dynamic_rendezvous import RendezvousSettings

# A member may have to stop its workers first; their default grace period is as long as a last call.
_MEMBER_LAST_CALLS = 2


class View(msgspec.Struct, frozen=True):
    """The conclusions of a watch from all readings so far."""

    dead: frozenset[str] = frozenset()
    gathering_s: float = 0.0  # how long the current round has been gathering
    enough_s: float = 0.0  # how long it has had at least ``min_nodes``


class Watch:
    """What one node has observed of the others, measured on its own clock: call ``look`` with every reading.

    Clocks of two hosts are never compared. A node is silent while its heartbeat counter does not change. Silence counts
    only while the observer itself was reading, so an observer that was stopped or slow does not declare others dead.
    """

    def __init__(self, keep_alive_s: float, max_attempts: int) -> None:
        self._keep_alive_s = keep_alive_s
        self._silence_limit_s = keep_alive_s * max_attempts
        self._last_look: float | None = None
        self._silence: dict[str, tuple[int, float]] = {}  # id -> its counter, and how long it has not changed
        self._round = 0
        self._gathering_s = self._enough_s = 0.0
        self._had_enough = False

    def look(self, state: State | None, now: float) -> View:
        # A gap longer than a heartbeat interval is the observer's own lag, not silence.
        elapsed = 0.0 if self._last_look is None else min(max(now - self._last_look, 0.0), self._keep_alive_s)
        self._last_look = now
        if state is None:
            self._silence, self._round = {}, 0
            return View()
        self._silence = {node.id: (node.beat, self._silence_of(node.id, node.beat, elapsed)) for node in state.nodes}
        dead = frozenset(each for each, (_, silent_s) in self._silence.items() if silent_s >= self._silence_limit_s)
        if state.complete:
            self._round = 0
            return View(dead)
        self._time_gathering(state, dead, elapsed)
        return View(dead, self._gathering_s, self._enough_s)

    def _silence_of(self, node_id: str, beat: int, elapsed: float) -> float:
        known_beat, silent_s = self._silence.get(node_id, (None, 0.0))
        return silent_s + elapsed if known_beat == beat else 0.0

    def _time_gathering(self, state: State, dead: frozenset[str], elapsed: float) -> None:
        if self._round != state.round:
            self._round, self._gathering_s, self._enough_s, elapsed = state.round, 0.0, 0.0, 0.0
            self._had_enough = False
        self._gathering_s += elapsed
        has_enough = sum(node.id not in dead for node in state.with_standing(Standing.JOINED)) >= state.min_nodes
        self._enough_s = self._enough_s + elapsed if has_enough and self._had_enough else 0.0
        self._had_enough = has_enough


class Put(msgspec.Struct, frozen=True):
    """Replace the state that was read by this one, then decide again."""

    state: State


class Wait(msgspec.Struct, frozen=True):
    """Read again later."""

    why: str
    is_spare: bool = False


class Done(msgspec.Struct, frozen=True):
    """This node is in the round."""

    round: int
    rank: int
    world_size: int


class Refused(msgspec.Struct, frozen=True):
    """This node cannot join."""

    error: RendezvousError


Decision = Put | Wait | Done | Refused


class Joiner:
    """One attempt of a node to join a round after ``last_round``, the last one it was in."""

    def __init__(self, node_id: str, addr: str, settings: RendezvousSettings, last_round: int, now: float) -> None:
        self.last_round = last_round
        self._id = node_id
        self._addr = addr
        self._settings = settings
        self._join_s = settings.timeout.join.total_seconds()
        self._waiting_since = now
        self._is_spare = False

    def decide(self, state: State | None, view: View, now: float) -> Decision:
        known = self._without_lost_rounds(state, view)
        decision = self._decide(known, view)
        if isinstance(decision, Wait):
            self._is_spare = decision.is_spare
            if self._is_spare:
                self._waiting_since = now
        if isinstance(decision, (Put, Wait)) and now - self._waiting_since >= self._join_s:
            return Refused(RendezvousTimeoutError(self._too_late(known)))
        return decision

    def _without_lost_rounds(self, state: State | None, view: View) -> State:
        """Return the state without dead nodes, and with a round after every round this node was in (D2)."""
        ours = self._settings
        if state is None:
            return State(ours.run_id, ours.min_nodes, ours.max_nodes, round=self.last_round + 1)
        state = without(state, view.dead - {self._id})
        if all(node.id == self._id for node in state.nodes):  # no other node has agreed on these terms
            state = msgspec.structs.replace(state, min_nodes=ours.min_nodes, max_nodes=ours.max_nodes)
        if state.round < self.last_round or (state.round == self.last_round and not state.complete):
            # The state was lost and recreated by other nodes.
            return msgspec.structs.replace(state, round=self.last_round + 1, complete=False)
        return state

    def _decide(self, state: State, view: View) -> Decision:
        if state.closed:
            return self._on_closed(state)
        ours = self._settings
        if (ours.min_nodes, ours.max_nodes) != (state.min_nodes, state.max_nodes):
            return Refused(
                RendezvousStateError(
                    f"this node is configured for {ours.min_nodes} to {ours.max_nodes} nodes, but the run "
                    f"{state.run_id!r} for {state.min_nodes} to {state.max_nodes}; use the same numbers on every node, "
                    "or another run id"
                )
            )
        if not state.complete:
            return self._on_gathering(state, view)
        return self._on_complete(state)

    def _on_closed(self, state: State) -> Refused:
        if self._is_spare:
            return Refused(RendezvousGracefulExitError(f"this spare node was not needed: {state.closed}"))
        return Refused(RendezvousClosedError(f"the run {state.run_id!r} is over: {state.closed}"))

    def _on_complete(self, state: State) -> Decision:
        present = [node for node in state.nodes if node.id in state.members]
        if self._id in state.members:
            if state.round > self.last_round and any(node.id == self._id for node in present):
                return Done(state.round, state.members[self._id], len(state.members))
            return self._open(state)  # a member of the last round has returned
        if not present:  # D6, for a new node: no member is left to notice
            return self._open(state)
        if not self._stands(state, Standing.WAITING):
            return Put(self._standing(state, Standing.WAITING))
        if len(present) >= state.max_nodes:
            return Wait(f"the round is full with {len(present)} nodes; this node is a spare", is_spare=True)
        return Wait(f"waiting for the {len(present)} nodes of round {state.round} to admit this node")

    def _open(self, state: State) -> Put:
        """Open the next round and join it."""
        opened = msgspec.structs.replace(state, round=state.round + 1, complete=False)
        return Put(self._completed_if_ready(self._standing(opened, Standing.JOINED), View()))

    def _on_gathering(self, state: State, view: View) -> Decision:
        if self._stands(state, Standing.JOINED):
            missing = _missing(state, view, self._settings)
            return Wait(missing) if missing else Put(complete(state))
        if self._id in state.members or _room(state, view, self._settings) > 0:
            return Put(self._completed_if_ready(self._standing(state, Standing.JOINED), view))
        if not self._stands(state, Standing.WAITING):
            return Put(self._standing(state, Standing.WAITING))
        return Wait("the round is full or reserved for members; this node is a spare", is_spare=True)

    def _completed_if_ready(self, state: State, view: View) -> State:
        """Complete the round in the same write if this node is the last one awaited."""
        return state if _missing(state, view, self._settings) else complete(state)

    def _stands(self, state: State, standing: Standing) -> bool:
        node = state.node(self._id)
        return node is not None and node.standing is standing

    def _standing(self, state: State, standing: Standing) -> State:
        node = state.node(self._id)
        if node is not None:
            return _with_beat(state, node, standing)
        return msgspec.structs.replace(state, nodes=(*state.nodes, Node(self._id, self._addr, standing)))

    def _too_late(self, state: State) -> str:
        if state.complete:
            return (
                f"the run {state.run_id!r} did not admit this node within {format_seconds(self._join_s)}; check "
                "that the agents of its nodes poll num_nodes_waiting()"
            )
        joined = state.with_standing(Standing.JOINED)
        return (
            f"only {len(joined)} of at least {state.min_nodes} nodes joined round {state.round} of the run "
            f"{state.run_id!r} within {format_seconds(self._join_s)}: {_names(joined)}; start the missing nodes, "
            "or allow fewer"
        )


# --- queries of a state -----------------------------------------------------------------------------------------------


def _awaited_members(state: State, view: View, settings: RendezvousSettings) -> list[Node]:
    """Return members of the last round that are alive but have not joined. They have priority for a while (D3)."""
    wait_s = _MEMBER_LAST_CALLS * settings.timeout.last_call.total_seconds()
    return state.with_standing(Standing.RUNNING) if view.gathering_s < wait_s else []


def _room(state: State, view: View, settings: RendezvousSettings) -> int:
    """Return how many new nodes can still join the gathering round."""
    kept = len(_awaited_members(state, view, settings))
    return state.max_nodes - kept - len(state.with_standing(Standing.JOINED))


def _missing(state: State, view: View, settings: RendezvousSettings) -> str:
    """Return what a gathering round still waits for; empty: complete it now. ``state`` contains no dead nodes."""
    joined = state.with_standing(Standing.JOINED)
    if len(joined) >= state.max_nodes:
        return ""
    if len(joined) < state.min_nodes:
        return f"{len(joined)} of at least {state.min_nodes} nodes have joined: {_names(joined)}"
    awaited = _awaited_members(state, view, settings)
    if awaited:
        return f"waiting for members of the last round: {_names(awaited)}"
    last_call_s = settings.timeout.last_call.total_seconds()
    if view.enough_s >= last_call_s:
        return ""
    waiting = state.with_standing(Standing.WAITING)
    if waiting:
        return f"waiting for nodes of the wait list: {_names(waiting)}"
    if any(node.id in state.members for node in joined):  # D4
        return ""
    return f"{len(joined)} nodes have joined; waiting {format_seconds(last_call_s)} for more (last call)"


def _names(nodes: list[Node]) -> str:
    return first_names([node.addr or node.id[:8] for node in nodes]) or "none"


def pending(state: State | None, view: View, node_id: str, round_: int) -> int:
    """Return how many changes of the group are pending: the result of ``num_nodes_waiting`` (D6).

    Counts waiting nodes that fit in, members that died, and, if the other nodes have moved on to another round, the
    nodes that gather there. Spares do not count: they could not join. After the run was closed nothing counts: no group
    can form any more. ``round_`` is the node's round; with 0 (none) all waiting nodes count.
    """
    if state is None:
        return 1 if round_ else 0
    if state.closed:
        return 0
    alive = [node for node in state.nodes if node.id not in view.dead or node.id == node_id]
    waiting = sum(node.standing is Standing.WAITING for node in alive)
    if not round_:
        return waiting
    present = {node.id for node in alive if node.id in state.members}
    if not state.complete or state.round != round_ or node_id not in present:
        return max(1, sum(node.standing is Standing.JOINED for node in alive))
    lost = len(state.members) - len(present)
    return lost + min(waiting, max(0, state.max_nodes - len(present)))


def ends_with(state: State | None, round_: int) -> bool:
    """Return whether the run ends with the work of this round: no later group has formed."""
    return state is not None and round_ > 0 and round_ == (state.round if state.complete else state.round - 1)


# --- changes of a state -----------------------------------------------------------------------------------------------


def complete(state: State) -> State:
    """Complete the round with the joined nodes, up to ``max_nodes``; the others wait."""
    joined = state.with_standing(Standing.JOINED)
    survivors = sorted((node for node in joined if node.id in state.members), key=lambda node: state.members[node.id])
    newcomers = [node for node in joined if node.id not in state.members]
    chosen = [node.id for node in (survivors + newcomers)[: state.max_nodes]]
    members = ranks(state.members, chosen)
    nodes = tuple(
        msgspec.structs.replace(node, standing=Standing.RUNNING if node.id in members else Standing.WAITING)
        for node in state.nodes
        if node.standing is not Standing.RUNNING  # of an older round: it did not join, and will notice
    )
    return msgspec.structs.replace(state, complete=True, members=members, nodes=nodes)


def ranks(before: dict[str, int], chosen: list[str]) -> dict[str, int]:
    """Assign ranks to the chosen nodes, given in order of preference (D3).

    Former members keep their order. New nodes get the ranks of members that left, lowest first, then the highest ranks.
    """
    order = {each: before[each] for each in chosen if each in before}
    free = sorted(set(range(len(before) + len(chosen))) - set(order.values()))
    order |= zip([each for each in chosen if each not in before], free, strict=False)
    return {each: rank for rank, each in enumerate(sorted(order, key=order.__getitem__))}


def without(state: State, gone: frozenset[str] | set[str]) -> State:
    """Return the state without these nodes. ``members`` stays: it is what the last round agreed on."""
    if not any(node.id in gone for node in state.nodes):
        return state
    return msgspec.structs.replace(state, nodes=tuple(node for node in state.nodes if node.id not in gone))


def with_heartbeat(state: State, node_id: str) -> State | None:
    """Return the state with one more heartbeat of this node; None if the node is not in it."""
    node = state.node(node_id)
    return None if node is None else _with_beat(state, node, node.standing)


def _with_beat(state: State, node: Node, standing: Standing) -> State:
    newer = msgspec.structs.replace(node, standing=standing, beat=node.beat + 1)
    return msgspec.structs.replace(state, nodes=tuple(newer if each is node else each for each in state.nodes))


def closed(state: State, why: str) -> State:
    return state if state.closed else msgspec.structs.replace(state, closed=why)
