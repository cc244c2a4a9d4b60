"""Stacks of many workers as one report (``_core/hang_report.py``): the odd one out first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tenax._core import events
from tenax._core.hang_report import (
    LocalStacks,
    describe_location,
    format_ranks,
    format_report,
    frames_in,
    last_dump,
    make_report,
    merged,
    places_of,
    reason_of,
)
from tenax._core.link import wire
from tenax._core.messages import HangReport, StackLocation

MAIN = 'Current thread 0x00007f01 (most recent call first):\n  File "/job/train.py", line {line} in {where}\n'
OTHER = "Thread 0x00007f{number:02x} [{name}] (most recent call first):\n"
OTHER += '  File "/lib/python3.11/queue.py", line 171 in get\n'


def dump(where: str = "all_reduce", line: int = 12, thread: int = 2, name: str = "pin") -> str:
    return f"{OTHER.format(number=thread, name=name)}\n{MAIN.format(line=line, where=where)}"


def report(locations: list[StackLocation]) -> HangReport:
    return make_report(locations, generation=1, nodes=2, quiet_s=300.0, why="no step", what_follows="nothing")


def test_only_the_last_dump_counts() -> None:
    """A worker appends its dumps to one file."""
    assert last_dump(dump("old") + "\n" + dump("new")) == dump("new").strip()
    alone = 'Stack (most recent call first):\n  File "/job/train.py", line 9 in main\n'
    many = alone + OTHER.format(number=7, name="x") + "...\n"
    assert last_dump(dump("old") + many).startswith("Stack")
    assert last_dump(dump("old")) == dump("old").strip()
    assert last_dump("") == ""


def test_the_main_thread_is_the_location() -> None:
    assert frames_in(dump("load")) == (("/job/train.py:12 in load",), ("/lib/python3.11/queue.py:171 in get",))
    alone = 'Stack (most recent call first):\n  File "/job/train.py", line 9 in main\n' + OTHER.format(
        number=7, name="x"
    )
    assert frames_in(alone)[0] == ("/job/train.py:9 in main",)
    assert frames_in("nonsense") == ((), ())


def test_thread_names_are_ignored_and_the_rare_location_is_first() -> None:
    """H9."""
    stacks = [LocalStacks(rank, rank, 100 + rank, dump(thread=rank + 2, name=f"t{rank}"), "") for rank in range(7)]
    odd = LocalStacks(7, 7, 107, dump("load"), "")
    result = report(list(places_of([*stacks[:3], odd, *stacks[3:]])))
    assert [location.ranks for location in result.locations] == [(7,), tuple(range(7))]
    assert result.is_odd
    assert result.locations[0].pid == 107
    assert "only this rank is at /job/train.py:12 in load" in reason_of(result)
    lines = format_report(result)
    assert lines[2:] == ["  rank 7 (pid 107): at /job/train.py:12 in load", lines[3], "nothing"]
    assert lines[3] == "  ranks 0 to 6: at /job/train.py:12 in all_reduce"


def test_of_two_workers_the_one_outside_a_collective_is_odd() -> None:
    result = report(
        list(places_of([LocalStacks(0, 0, 1, dump("all_reduce"), ""), LocalStacks(1, 1, 2, dump("load"), "")]))
    )
    assert result.locations[0].ranks == (1,)
    assert result.is_odd
    apart = report([StackLocation((rank,), (f"/job/train.py:{rank} in f",)) for rank in range(4)])
    assert not apart.is_odd
    assert "no rank stands out" in reason_of(apart)


TORCH = "/venv/lib/python3.11/site-packages/torch"
BACKWARD = (f"{TORCH}/autograd/graph.py:865 in _engine_run_backward", f"{TORCH}/_tensor.py:630 in backward")
ALL_REDUCE = (f"{TORCH}/distributed/distributed_c10d.py:3252 in all_reduce",)
LOADER = (
    "/usr/lib/python3.11/multiprocessing/connection.py:395 in _recv",
    f"{TORCH}/utils/data/dataloader.py:9 in next",
)
SCRIPT = ("/job/train.py:9 in load",)


def test_the_worker_that_does_not_wait_for_others_is_odd() -> None:
    """Where DDP waits (the backward pass), beside another collective, and if it waits for its own loader process."""
    for waiting, odd in (
        ([BACKWARD], SCRIPT),
        ([ALL_REDUCE], LOADER),
        ([BACKWARD, BACKWARD, BACKWARD], SCRIPT),
        ([BACKWARD, BACKWARD, ALL_REDUCE], SCRIPT),
        ([ALL_REDUCE, BACKWARD, BACKWARD], LOADER),
    ):
        found = [StackLocation((rank,), frames) for rank, frames in enumerate([*waiting, odd])]
        result = report(found)
        assert (result.is_odd, result.locations[0].ranks) == (True, (len(waiting),)), waiting


def test_no_worker_is_odd_if_the_few_wait_and_the_many_do_not() -> None:
    """Two of five wait in a collective, the others are at different places."""
    others = [StackLocation((rank,), (f"/job/train.py:{rank} in f{rank}",)) for rank in range(3)]
    result = report([*others, StackLocation((3,), ALL_REDUCE), StackLocation((4,), BACKWARD)])
    assert not result.is_odd


def test_lines_are_compared_only_if_all_calls_are_equal() -> None:
    spinning = [
        StackLocation((rank,), (f"/job/train.py:{rank % 3} in poll", "/job/train.py:40 in main")) for rank in range(5)
    ]
    odd = StackLocation((5,), ("/job/train.py:9 in load", "/job/train.py:41 in main"))
    assert [location.ranks for location in report([*spinning, odd]).locations] == [(5,), (0, 1, 2, 3, 4)]
    blocked = [StackLocation((rank,), (f"/job/train.py:{7 if rank == 2 else 8} in main",)) for rank in range(5)]
    assert [location.ranks for location in report(blocked).locations] == [(2,), (0, 1, 3, 4)]


def test_equal_main_threads_are_distinguished_by_other_threads() -> None:
    """The main thread of each waits for a thread that trains."""
    main = ("/job/train.py:1 in join",)
    locations = [StackLocation((rank,), main, ("loop.py:5 in all_reduce",)) for rank in range(3)]
    result = report([*locations, StackLocation((3,), main, ("data.py:9 in read",))])
    assert result.locations[0].ranks == (3,)
    alike = report(locations)
    assert len(alike.locations) == 1
    assert "all ranks are at the same location, at /job/train.py:1 in join" in reason_of(alike)


def test_an_unknown_location_is_reported_with_its_reason() -> None:
    """H10."""
    result = report(list(places_of([LocalStacks(0, 0, 1, dump(), ""), LocalStacks(1, 1, 2, "", "it is stopped")])))
    assert result.locations[0].why == "it is stopped"
    assert describe_location(result.locations[0]) == "not known: it is stopped"
    assert "location not known: it is stopped" in reason_of(result)


def test_library_code_is_shown_after_the_line_that_called_it() -> None:
    frames = ("/usr/lib/python3.11/threading.py:327 in wait", "/job/train.py:9 in load", "/job/train.py:20 in main")
    assert describe_location(StackLocation((0,), frames)) == "at /job/train.py:9 in load, in threading.py:327 in wait"


def test_ranks_are_formatted_as_ranges() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0 to 2, 5"
    assert format_ranks(list(range(0, 100, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 42 more"


locations = st.builds(
    StackLocation,
    st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True).map(lambda ranks: tuple(sorted(ranks))),
    st.sampled_from([(), ("a.py:1 in f",), ("a.py:2 in g", "a.py:1 in f")]),
)


@given(st.lists(locations, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_answers_does_not_matter(found: list[StackLocation], chance: random.Random) -> None:
    """H9, H10: merging in any order and in any grouping gives the same locations."""
    shuffled = chance.sample(found, len(found))
    once = merged(found)
    assert {(location.frames, location.ranks) for location in merged(shuffled)} == {
        (location.frames, location.ranks) for location in once
    }
    half = len(shuffled) // 2
    assert {(p.frames, p.ranks) for p in merged((*merged(shuffled[:half]), *shuffled[half:]))} == {
        (location.frames, location.ranks) for location in once
    }
    assert [len(location.ranks) for location in once] == sorted(len(location.ranks) for location in once)


def test_a_report_of_thousands_of_workers_fits_into_a_message() -> None:
    """H11: even if each has another location and a long dump."""
    padding = "x" * 10_000
    workers = [LocalStacks(rank % 8, rank, rank, dump("f", line=rank) + padding, "") for rank in range(4_000)]
    found: tuple[StackLocation, ...] = ()
    for first in range(0, 4_000, 8):
        found = merged((*found, *places_of(workers[first : first + 8])))
    result = report(list(found))
    assert sum(len(location.ranks) for location in result.locations) == 4_000
    assert len(wire.encode(wire.Event(events.HangFound(1, result)))) < wire.MAX_BYTES // 4
