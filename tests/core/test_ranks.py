"""Ranks: R1-R4, for every small group and for random ones."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.ranks import Candidate, arrange, assign_ranks, choose

CORE = settings.get_profile("core")


@st.composite
def groups(draw: st.DrawFn, ordered: bool | None = None) -> list[Candidate]:
    """Nodes that want to be in: each came at its own time, some were in before, no two with the same rank; no two ask
    for the same rank, because the coordinator refuses the second."""
    count = draw(st.integers(1, 7))
    arrivals = draw(st.permutations(range(count)))
    last_ranks = draw(st.lists(st.integers(-1, 8), min_size=count, max_size=count).filter(_are_apart))
    asked_ranks = draw(st.lists(st.sampled_from([-1, -1, -1, 0, 1, 2, 6]), min_size=count, max_size=count))
    keys = st.text("ab-0129", min_size=1 if ordered else 0, max_size=4)
    return [
        Candidate(
            f"n{index}",
            arrivals[index],
            last_ranks[index],
            asked_ranks[index] if asked_ranks[index] not in asked_ranks[:index] else -1,
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
    locations = assign_ranks(arranged)
    assert sorted(c.node_id for c in arranged) == sorted(c.node_id for c in group)
    assert [place.group_rank for place in locations] == list(range(len(group)))
    assert [place.node_id for place in locations] == [c.node_id for c in arranged]
    nodes = list(zip(arranged, locations, strict=True))
    ranks = [place.first_global_rank + local for c, place in nodes for local in range(c.slots)]
    assert ranks == list(range(sum(c.slots for c in group)))
    for role in {c.role for c in group}:
        mine = [(c, place) for c, place in nodes if c.role == role]
        in_role = [place.first_role_rank + local for c, place in mine for local in range(c.slots)]
        assert in_role == list(range(sum(c.slots for c, _ in mine)))
        assert {place.role_world_size for _, place in mine} == {len(in_role)}


@given(group=groups(ordered=False))
@settings(CORE)
def test_a_rank_that_was_asked_for_is_given(group: list[Candidate]) -> None:
    """R3: if there is such a rank, and the nodes do not all send where they belong."""
    arranged = arrange(group)
    for candidate in group:
        if 0 <= candidate.requested_rank < len(group):
            assert arranged[candidate.requested_rank] is candidate


@given(group=groups(ordered=False))
@settings(CORE)
def test_who_stays_keeps_its_rank_and_newcomers_fill_the_holes(group: list[Candidate]) -> None:
    """R2: a rank moves only if it does not exist any more or was asked for by another; then old members go first."""
    arranged = arrange(group)
    taken = {c.requested_rank for c in group if 0 <= c.requested_rank < len(group)}
    for candidate in group:
        if candidate.requested_rank < 0 and 0 <= candidate.last_rank < len(group) and candidate.last_rank not in taken:
            assert arranged[candidate.last_rank] is candidate
    moved = [c for rank, c in enumerate(arranged) if rank not in (c.requested_rank, c.last_rank)]
    assert moved == sorted(moved, key=lambda c: (c.last_rank < 0, c.last_rank, c.arrival))


@given(group=groups(ordered=True))
@settings(CORE)
def test_where_all_say_where_they_belong_that_order_decides(group: list[Candidate]) -> None:
    """R4: instead of everything else; who sends the same stays in the order that there was."""
    arranged = arrange(group)
    keys = [_as_people_count(c.order) for c in arranged]
    assert keys == sorted(keys)
    for one, next_one in itertools.pairwise(arranged):
        if _as_people_count(one.order) == _as_people_count(next_one.order) and one.last_rank >= 0:
            assert next_one.last_rank < 0 or one.last_rank < next_one.last_rank


def _as_people_count(key: str) -> list[tuple[int, int, str]]:
    """The digits of a key are numbers; numbers come before letters."""
    parts: list[tuple[int, int, str]] = []
    for is_number, part in itertools.groupby(key, str.isdigit):
        text = "".join(part)
        parts += [(0, int(text), "")] if is_number else [(1, 0, letter) for letter in text]
    return parts


def test_racks_are_counted_as_people_count() -> None:
    """rack-2 comes before rack-10, and a number with leading zeros is the same number."""
    names = ["rack-10", "rack-2", "rack-1", "rack-002b", "2", "10"]
    arranged = arrange([Candidate(name, index, order=name) for index, name in enumerate(names)])
    assert [c.order for c in arranged] == ["2", "10", "rack-1", "rack-2", "rack-002b", "rack-10"]


def test_an_order_key_may_be_as_long_as_anybody_likes() -> None:
    """More digits than Python turns into a number, and those of other alphabets, are somebody's idea of a key."""
    keys = ["9" * 10_000, "1" + "0" * 10_000, "٣", "²", "9" * 9_999]
    arranged = arrange([Candidate(str(index), index, order=key) for index, key in enumerate(keys)])
    assert [c.node_id for c in arranged][:3] == ["4", "0", "1"]


@given(group=groups(), most=st.integers(1, 7))
@settings(CORE)
def test_members_are_chosen_before_strangers_and_those_in_the_order_they_came(
    group: list[Candidate], most: int
) -> None:
    """If not all can be in: those who asked for a rank, then members, then first come, first served."""
    chosen = choose(group, most)
    assert len(chosen) == min(most, len(group))
    assert len({c.node_id for c in chosen}) == len(chosen)
    left_out = [c for c in group if c not in chosen]
    for inside, outside in itertools.product(chosen, left_out):
        if inside.requested_rank < 0:
            assert outside.requested_rank < 0
            assert (inside.last_rank < 0, inside.arrival) < (outside.last_rank < 0, outside.arrival)


def test_stable_ranks_for_every_group_of_four() -> None:
    """Whoever of four nodes is lost, and however many replace them: those who stay keep what they can."""
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
