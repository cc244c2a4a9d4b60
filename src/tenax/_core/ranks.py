"""Ranks: which nodes are in the next generation, and with which ranks.

Invariants (tests cite the numbers):

R1  The group ranks of a generation are 0 to n-1, each once; global and role ranks follow from them in that order.
R2  A node that stays keeps its group rank where possible; new nodes fill the gaps.
R3  A node that requests a rank gets it.
R4  If every node has an order key, the keys decide instead.
"""

from __future__ import annotations

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """A node that is ready for the next generation."""

    node_id: str
    arrival: int  # the order in which nodes joined
    last_rank: int = -1  # in the previous generation; -1: it was not a member
    requested_rank: int = -1
    order: str = ""
    slots: int = 1
    role: str = "default"


class NodeRanks(msgspec.Struct, frozen=True):
    """The ranks of one node and its workers."""

    node_id: str
    group_rank: int
    first_global_rank: int
    first_role_rank: int
    role_world_size: int


def choose(candidates: list[Candidate], max_nodes: int) -> list[Candidate]:
    """Return at most ``max_nodes`` candidates: those that request a rank, then previous members, then by arrival."""
    requesting = [c for c in candidates if c.requested_rank >= 0]
    others = sorted((c for c in candidates if c.requested_rank < 0), key=lambda c: (c.last_rank < 0, c.arrival))
    return [*requesting[:max_nodes], *others[: max(0, max_nodes - len(requesting))]]


def arrange(chosen: list[Candidate]) -> list[Candidate]:
    """Return the candidates in the order of their group ranks."""
    if chosen and all(c.order for c in chosen):
        return sorted(chosen, key=lambda c: (_natural(c.order), c.last_rank < 0, c.last_rank, c.arrival))
    count = len(chosen)
    by_rank: list[Candidate | None] = [None] * count
    preferred = [(c.requested_rank, c) for c in chosen if c.requested_rank >= 0]
    preferred += [(c.last_rank, c) for c in chosen if c.requested_rank < 0]
    unplaced: list[Candidate] = []
    for rank, candidate in preferred:
        if 0 <= rank < count and by_rank[rank] is None:
            by_rank[rank] = candidate
        else:
            unplaced.append(candidate)
    unplaced.sort(key=lambda c: (c.last_rank < 0, c.last_rank, c.arrival))
    remaining = iter(unplaced)
    return [candidate if candidate is not None else next(remaining) for candidate in by_rank]


def assign_ranks(arranged: list[Candidate]) -> list[NodeRanks]:
    """Number global ranks across all nodes in the order of group ranks, and role ranks across nodes of one role."""
    role_sizes: dict[str, int] = {}
    for candidate in arranged:
        role_sizes[candidate.role] = role_sizes.get(candidate.role, 0) + candidate.slots
    ranks = []
    first = 0
    first_in_role: dict[str, int] = {}
    for group_rank, candidate in enumerate(arranged):
        role = candidate.role
        ranks.append(NodeRanks(candidate.node_id, group_rank, first, first_in_role.get(role, 0), role_sizes[role]))
        first += candidate.slots
        first_in_role[role] = first_in_role.get(role, 0) + candidate.slots
    return ranks


def _natural(key: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts rack-2 before rack-10. Numbers may have any length: length first, then digits."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for letter in [*key, ""]:
        if letter.isascii() and letter.isdigit():
            digits += letter
            continue
        if digits:
            number = digits.lstrip("0")
            parts.append((0, len(number), number))
            digits = ""
        if letter:
            parts.append((1, 0, letter))
    return tuple(parts)
