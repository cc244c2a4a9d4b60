"""The record: a coordinator's decisions, from which a successor on another host continues.

It contains decisions only: the last generation and its members, what was charged, and the verdict. Nodes report their
own state to the successor. A coordinator that keeps its record in etcd sends a decision only after the record is
written; ``mark_of`` detects cheaply whether the record has changed.
"""

from __future__ import annotations

from typing import Annotated

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
from tenax._core.model import MAX_LEFT, Departure, Failures, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.coordinator import CoordinatorState

Mark = tuple[int, int, int, bool, int, str]


class RecordedMember(msgspec.Struct, frozen=True):
    node_id: NodeId
    rank: NodeRank
    label: Label  # its display name


class RunRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole record, always replaced as one value."""

    generation: OldGeneration = 0  # the last one formed
    members: tuple[RecordedMember, ...] = ()  # of that generation
    settled: OldGeneration = 0  # the last one that has stopped on every node and is accounted for
    world_size: WorldSize = 0
    store: Address = ""
    next_why: LongText = "first generation"
    # Counters.
    restarts_used: Count = 0
    membership_changes: Count = 0
    drains: Count = 0
    requests: Count = 0
    cost: Goodput = Goodput()  # how the time was spent, of settled generations
    earlier: Failures = ()
    left: Annotated[tuple[Departure, ...], msgspec.Meta(max_length=MAX_LEFT)] = ()
    longest_s: SumSeconds = 0.0
    formed_at: SumSeconds = 0.0  # when the generation was formed, on the clock of the failures' times
    ranks_by_name: dict[Name, NodeRank] = {}
    verdict: Verdict | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether workers of its generation may be running."""
        return self.generation > self.settled and self.verdict is None

    @property
    def mark(self) -> Mark:
        return mark_of(self)

    def shifted(self, by_s: float) -> RunRecord:
        """Return this record with its times shifted to another clock."""
        return msgspec.structs.replace(
            self,
            earlier=tuple(failure.shifted(by_s) for failure in self.earlier),
            left=tuple(each.shifted(by_s) for each in self.left),
            formed_at=self.formed_at + by_s,
            verdict=self.verdict.shifted(by_s) if self.verdict is not None else None,
        )

    def __post_init__(self) -> None:
        """Reject records that no coordinator writes."""
        if not 0 <= self.settled <= self.generation:
            raise ValueError("a generation has ended that was not formed")
        if len({member.node_id for member in self.members}) < len(self.members):
            raise ValueError("one node is a member twice")


def mark_of(state: CoordinatorState | RunRecord) -> Mark:
    """Return a value that changes whenever the record of the state changes."""
    count = len(state.members) if state.generation > state.settled else 0  # a successor finds members one by one
    return state.generation, state.settled, state.restarts_used, state.verdict is not None, count, state.store


def record_of(state: CoordinatorState) -> RunRecord:
    last = state.last
    members = tuple(
        RecordedMember(node_id, rank, last.labels.get(node_id, "")) for node_id, rank in last.members.items()
    )
    return RunRecord(
        generation=state.generation,
        members=members,
        settled=state.settled,
        world_size=last.world_size,
        store=state.store,
        next_why=state.next_why,
        restarts_used=state.restarts_used,
        membership_changes=state.membership_changes,
        drains=state.drains,
        requests=state.requests,
        cost=state.ledger.cost_so_far(),
        earlier=tuple(state.earlier),
        left=tuple(state.left.values()),
        longest_s=state.longest_s,
        formed_at=last.formed_at,
        ranks_by_name=dict(state.names.ranks_by_name),
        verdict=state.verdict,
    )
