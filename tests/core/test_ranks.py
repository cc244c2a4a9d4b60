"""Ranks: R1-R4, for all small groups and for random ones."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.ranks import Candidate, arrange, assign_ranks, choose

CORE = settings.get_profile("core")


@st.composite
def groups(draw: st.DrawFn, ordered: bool | None = None) -> list[Candidate]:
    """Draw candidates with different times of arrival. Some were members before, with different ranks, and some request
    different ranks: the coordinator refuses a second request for the same rank."""
    count = draw(st.integers(1, 7))
    arrivals = draw(st.permutations(range(count)))
    last_ranks = draw(st.lists(st.integers(-1, 8), min_size=count, max_size=count).filter(_are_apart))
    requested_ranks = draw(st.lists(st.sampled_from([-1, -1, -1, 0, 1, 2, 6]), min_size=count, max_size=count))
    keys = st.text("ab-0129", min_size=1 if ordered else 0, max_size=4)
    return [
        Candidate(
            f"n{index}",
            arrivals[index],
            last_ranks[index],
            requested_ranks[index] if requested_ranks[index] not in requested_ranks[:index] else -1,
            draw(keys) if ordered is not False else "",
            draw(st.integers(1, 8)),
            draw(st.sampled_from(["trainer", "reader"])),
        )
        for index in range(count)
    ]


def _are_apart(ranks: list[int]) -> bool:
    known = [rank for rank in ranks if rank >= 0]
    return len(known) == len(set(known))


@given(group=groups())
@settings(CORE)
def test_every_node_gets_one_rank_and_every_worker_too(group: list[Candidate]) -> None:
    """R1: group ranks are 0 to n-1; global ranks are 0 to the world size, without gaps, and so are those of a role."""
    arranged = arrange(group)
    assigned = assign_ranks(arranged)
    assert sorted(c.node_id for c in arranged) == sorted(c.node_id for c in group)
    assert [ranks.group_rank for ranks in assigned] == list(range(len(group)))
    assert [ranks.node_id for ranks in assigned] == [c.node_id for c in arranged]
    nodes = list(zip(arranged, assigned, strict=True))
    global_ranks = [ranks.first_global_rank + local for c, ranks in nodes for local in range(c.slots)]
    assert global_ranks == list(range(sum(c.slots for c in group)))
    for role in {c.role for c in group}:
        of_role = [(c, ranks) for c, ranks in nodes if c.role == role]
        in_role = [ranks.first_role_rank + local for c, ranks in of_role for local in range(c.slots)]
        assert in_role == list(range(sum(c.slots for c, _ in of_role)))
        assert {ranks.role_world_size for _, ranks in of_role} == {len(in_role)}


@given(group=groups(ordered=False))
@settings(CORE)
def test_a_requested_rank_is_assigned(group: list[Candidate]) -> None:
    """R3: if the rank exists, and not all nodes have an order key."""
    arranged = arrange(group)
    for candidate in group:
        if 0 <= candidate.requested_rank < len(group):
            assert arranged[candidate.requested_rank] is candidate


@given(group=groups(ordered=False))
@settings(CORE)
def test_remaining_members_keep_their_ranks_and_new_nodes_fill_the_gaps(group: list[Candidate]) -> None:
    """R2: a rank changes only if it no longer exists or was requested by another; then old members come first."""
    arranged = arrange(group)
    taken = {c.requested_rank for c in group if 0 <= c.requested_rank < len(group)}
    for candidate in group:
        if candidate.requested_rank < 0 and 0 <= candidate.last_rank < len(group) and candidate.last_rank not in taken:
            assert arranged[candidate.last_rank] is candidate
    moved = [c for rank, c in enumerate(arranged) if rank not in (c.requested_rank, c.last_rank)]
    assert moved == sorted(moved, key=lambda c: (c.last_rank < 0, c.last_rank, c.arrival))


@given(group=groups(ordered=True))
@settings(CORE)
def test_order_keys_decide_if_all_nodes_have_one(group: list[Candidate]) -> None:
    """R4: nodes with equal keys keep their order."""
    arranged = arrange(group)
    keys = [_natural_key(c.order) for c in arranged]
    assert keys == sorted(keys)
    for one, next_one in itertools.pairwise(arranged):
        if _natural_key(one.order) == _natural_key(next_one.order) and one.last_rank >= 0:
            assert next_one.last_rank < 0 or one.last_rank < next_one.last_rank


def _natural_key(key: str) -> list[tuple[int, int, str]]:
    """Return a key in which digits are numbers, and numbers come before letters."""
    parts: list[tuple[int, int, str]] = []
    for is_number, part in itertools.groupby(key, str.isdigit):
        text = "".join(part)
        parts += [(0, int(text), "")] if is_number else [(1, 0, letter) for letter in text]
    return parts


def test_order_keys_are_sorted_naturally() -> None:
    """rack-2 comes before rack-10, and a number with leading zeros is the same number."""
    names = ["rack-10", "rack-2", "rack-1", "rack-002b", "2", "10"]
    arranged = arrange([Candidate(name, index, order=name) for index, name in enumerate(names)])
    assert [c.order for c in arranged] == ["2", "10", "rack-1", "rack-2", "rack-002b", "rack-10"]


def test_an_order_key_can_have_any_length_and_digits() -> None:
    """Keys with more digits than Python converts to a number, or with digits of other scripts, are sorted."""
    keys = ["9" * 10_000, "1" + "0" * 10_000, "٣", "²", "9" * 9_999]
    arranged = arrange([Candidate(str(index), index, order=key) for index, key in enumerate(keys)])
    assert [c.node_id for c in arranged][:3] == ["4", "0", "1"]


@given(group=groups(), max_nodes=st.integers(1, 7))
@settings(CORE)
def test_members_are_chosen_before_new_nodes_in_their_order_of_arrival(group: list[Candidate], max_nodes: int) -> None:
    """If there are too many: nodes with a requested rank, then members, then the others by arrival."""
    chosen = choose(group, max_nodes)
    assert len(chosen) == min(max_nodes, len(group))
    assert len({c.node_id for c in chosen}) == len(chosen)
    others = [c for c in group if c not in chosen]
    for chosen_one, other in itertools.product(chosen, others):
        if chosen_one.requested_rank < 0:
            assert other.requested_rank < 0
            assert (chosen_one.last_rank < 0, chosen_one.arrival) < (other.last_rank < 0, other.arrival)


def test_ranks_are_stable_for_every_loss_in_a_group_of_four() -> None:
    """Whichever of four nodes are lost, and however many replace them: the others keep their ranks if they exist."""
    for stay in itertools.product((False, True), repeat=4):
        for newcomers in range(5):
            group = [Candidate(f"old{rank}", rank, last_rank=rank) for rank in range(4) if stay[rank]]
            group += [Candidate(f"new{index}", 10 + index) for index in range(newcomers)]
            if not group:
                continue
            arranged = [c.node_id for c in arrange(choose(group, 4))]
            for rank, stays in enumerate(stay):
                if stays and rank < len(arranged):
                    assert arranged[rank] == f"old{rank}"
            assert [name for name in arranged if name.startswith("new")] == [f"new{i}" for i in range(4)][
                : len([name for name in arranged if name.startswith("new")])
            ]
