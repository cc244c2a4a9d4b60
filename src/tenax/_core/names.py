"""Names: which node has which display name, which name, and which requested rank. Part of the coordinator's state."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tenax._core.messages import NodeInfo

_MAX_SUPERSEDED = 100


class Names(msgspec.Struct):
    arrivals: int = 0  # number of nodes so far
    labels: dict[str, str] = {}  # node ids by display name
    by_name: dict[str, str] = {}  # ids of nodes that have a name, without superseded ones
    by_rank: dict[int, str] = {}  # ids of nodes that requested a rank
    superseded: list[str] = []  # ids of replaced nodes, which are rejected if they return
    ranks_by_name: dict[str, int] = {}  # the last group rank of nodes that have a name

    def label(self, node: NodeInfo, kept: str, reserved: Collection[str]) -> str:
        """Choose the node's display name: the one that an earlier coordinator gave it, or its host with a number."""
        label, number = kept, 1
        if not label or label in self.labels:
            label = node.where
            while label in self.labels or label in reserved:
                number += 1
                label = f"{node.where} #{number}"
        self.labels[label] = node.node_id
        return label

    def holders(self, node: NodeInfo) -> Iterable[str | None]:
        """Return the ids of nodes with the same name or rank; a dict, because the order must be deterministic."""
        return dict.fromkeys((self.by_name.get(node.name), self.by_rank.get(node.rank)))

    def claim(self, node: NodeInfo) -> None:
        if node.name:
            self.by_name[node.name] = node.node_id
        if node.rank >= 0:
            self.by_rank[node.rank] = node.node_id

    def release(self, node: NodeInfo) -> None:
        if self.by_name.get(node.name) == node.node_id:
            del self.by_name[node.name]
        if self.by_rank.get(node.rank) == node.node_id:
            del self.by_rank[node.rank]

    def supersede(self, node: NodeInfo, last_rank: int) -> None:
        self.superseded = [*self.superseded[-_MAX_SUPERSEDED + 1 :], node.node_id]
        if node.name and last_rank >= 0:
            self.ranks_by_name[node.name] = last_rank

    def remember_ranks(self, ranks: dict[int, str], max_nodes: int) -> None:
        """Remember the last name of each rank, so that there are at most ``max_nodes`` entries."""
        names = {rank: name for name, rank in self.ranks_by_name.items() if rank < max_nodes} | ranks
        self.ranks_by_name = {name: rank for rank, name in names.items() if name}
