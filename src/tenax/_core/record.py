"""The record: what a coordinator has decided, so that a successor on another host can go on.

It holds decisions only: which generation was formed of whom, what was charged, and the verdict. What nodes are doing
they say themselves to whoever leads next. A coordinator whose record is kept elsewhere (etcd) lets nobody hear of a
decision before it is written; ``mark_of`` tells cheaply whether there is a new one. Pure.
"""

from __future__ import annotations

import msgspec

from tenax._core.bounds import (
    Address,
    Count,
    Label,
    LongText,
    Name,
    NodeId,
    NodeRank,
    OldGeneration,
    SumSeconds,
    WorldSize,
)
from tenax._core.ledger import Goodput
from tenax._core.model import Failures, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.coordinator import CoordinatorState

Mark = tuple[int, int, int, bool, int, str]


class RecordedMember(msgspec.Struct, frozen=True):
    node_id: NodeId
    rank: NodeRank
    label: Label  # what people call it


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value, replaced as a whole."""

    generation: OldGeneration = 0  # the last that was formed
    members: tuple[RecordedMember, ...] = ()  # of that one
    settled: OldGeneration = 0  # the last one that has ended everywhere, and was charged or not
    world_size: WorldSize = 0
    store: Address = ""
    next_why: LongText = "first generation"
    # The ledger.
    restarts_used: Count = 0
    membership_changes: Count = 0
    drains: Count = 0
    requests: Count = 0
    cost: Goodput = Goodput()  # what the time was spent on, as far as generations have settled
    earlier: Failures = ()
    longest_s: SumSeconds = 0.0
    ranks_by_name: dict[Name, NodeRank] = {}
    verdict: Verdict | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether some member of its generation may be at work."""
        return self.generation > self.settled and self.verdict is None

    @property
    def mark(self) -> Mark:
        """As ``mark_of`` of a state that has this record."""
        count = len(self.members) if self.generation > self.settled else 0
        return self.generation, self.settled, self.restarts_used, self.verdict is not None, count, self.store

    def __post_init__(self) -> None:
        """Reject what no coordinator writes: others may have written the record that is read."""
        if not 0 <= self.settled <= self.generation:
            raise ValueError("a generation has ended that was not formed")
        if len({member.node_id for member in self.members}) < len(self.members):
            raise ValueError("one node is a member twice")


def mark_of(state: CoordinatorState) -> Mark:
    """Two states with the same mark have the same record."""
    count = len(state.members) if state.generation > state.settled else 0  # they may be found one after the other
    return state.generation, state.settled, state.restarts_used, state.verdict is not None, count, state.store


def record_of(state: CoordinatorState) -> RunRecord:
    members = tuple(
        RecordedMember(node_id, rank, state.member_labels.get(node_id, "")) for node_id, rank in state.members.items()
    )
    return RunRecord(
        generation=state.generation,
        members=members,
        settled=state.settled,
        world_size=state.world_size,
        store=state.store,
        next_why=state.next_why,
        restarts_used=state.restarts_used,
        membership_changes=state.membership_changes,
        drains=state.drains,
        requests=state.requests,
        cost=state.ledger.cost_so_far(),
        earlier=tuple(state.earlier),
        longest_s=state.longest_s,
        ranks_by_name=dict(state.ranks_by_name),
        verdict=state.verdict,
    )
