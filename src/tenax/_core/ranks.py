"""Ranks: who is in the next generation, and as which number.

Pure. The laws:

R1  The group ranks of a generation are 0 to n-1, each once; global and role ranks follow from them in that order.
R2  A node that stays keeps its group rank where that is possible; newcomers fill the holes.
R3  A rank that was asked for is given to the node that asked.
R4  Where every node says where it belongs (an order key), that order decides instead.
"""

from __future__ import annotations

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """A node that could be in."""

    node_id: str
    arrival: int  # the order in which nodes came
    last_rank: int = -1  # in the generation before; -1: it was not in it
    asked_rank: int = -1
    order: str = ""
    slots: int = 1
    role: str = "default"


class Place(msgspec.Struct, frozen=True):
    """One node's numbers."""

    node_id: str
    group_rank: int
    first_global_rank: int
    first_role_rank: int
    role_world_size: int


def choose(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Those who are in if not all can be: members before strangers, then first come, first served."""
    asked = [c for c in candidates if c.asked_rank >= 0]
    free = sorted((c for c in candidates if c.asked_rank < 0), key=lambda c: (c.last_rank < 0, c.arrival))
    return [*asked[:most], *free[: max(0, most - len(asked))]]


def arrange(chosen: list[Candidate]) -> list[Candidate]:
    """The chosen in the order of their group ranks."""
    if chosen and all(c.order for c in chosen):
        return sorted(chosen, key=lambda c: (_natural(c.order), c.last_rank < 0, c.last_rank, c.arrival))
    count = len(chosen)
    places: list[Candidate | None] = [None] * count
    wishes = [(c.asked_rank, c) for c in chosen if c.asked_rank >= 0]
    wishes += [(c.last_rank, c) for c in chosen if c.asked_rank < 0]
    left: list[Candidate] = []
    for rank, candidate in wishes:
        if 0 <= rank < count and places[rank] is None:
            places[rank] = candidate
        else:
            left.append(candidate)
    left.sort(key=lambda c: (c.last_rank < 0, c.last_rank, c.arrival))
    waiting = iter(left)
    return [candidate if candidate is not None else next(waiting) for candidate in places]


def number(arranged: list[Candidate]) -> list[Place]:
    """Global ranks are counted over all nodes in the order of group ranks, role ranks over those of the same role."""
    role_sizes: dict[str, int] = {}
    for candidate in arranged:
        role_sizes[candidate.role] = role_sizes.get(candidate.role, 0) + candidate.slots
    places = []
    first = 0
    first_in_role: dict[str, int] = {}
    for group_rank, candidate in enumerate(arranged):
        role = candidate.role
        places.append(Place(candidate.node_id, group_rank, first, first_in_role.get(role, 0), role_sizes[role]))
        first += candidate.slots
        first_in_role[role] = first_in_role.get(role, 0) + candidate.slots
    return places


def _natural(key: str) -> tuple[tuple[int, int, str], ...]:
    """rack-2 before rack-10. A number is compared by its length and then its digits, so it may have any length."""
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
