"""What is in the pictures of a report, and that they are drawn the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plots import Dots, Lines, Taken, charts, draw
from benchmarks.report import Row, compared, megabytes, seconds
from benchmarks.samples import Samples


def taken() -> Taken:
    """A run of three cases: one of them with a launcher more, one in which something did not happen."""
    launch, idle, joins = Samples(), Samples(), Samples()
    for who, value in (("tenax", 0.1), ("torchrun", 2.0), ("accelerate", 3.0)):
        for size in (2, 8):
            launch.add(who, f"start, {size} workers", value * size)
            launch.add(who, f"start, {size} workers", value)
    launch.add("tenax", "only ours, 8 workers", 1.0)
    for who, value in (("tenax", 10.0), ("torchrun", 200.0)):
        idle.add(who, "memory", value)
        idle.add(who, "time", value)
    for nodes in (8, 64):
        joins.add("tenax", f"{nodes} nodes join: until all have", nodes / 1000)
    joins.add("torchrun", "8 nodes join: until all have", 1.0)
    joins.miss("torchrun", "64 nodes join: until all have", "not within 20 s")
    names = ["start, 2 workers", "start, 8 workers", "only ours, 8 workers"]
    return {
        "launch": ([*(compared(launch, name, seconds) for name in names), Row("made up", "1", "2")], launch),
        "idle": ([compared(idle, "memory", megabytes), compared(idle, "time", seconds)], idle),
        "rendezvous": ([compared(joins, f"{n} nodes join: until all have", seconds) for n in (8, 64)], joins),
    }


def test_a_picture_shows_whoever_has_samples_of_the_larger_size() -> None:
    """A measure of tenax alone would show nothing, and one in another unit does not fit."""
    launch, memory, joins = charts(taken())
    assert isinstance(launch, Dots)
    assert isinstance(memory, Dots)
    assert isinstance(joins, Lines)
    assert [name for name, _ in launch.groups] == ["start, 8 workers"]
    assert list(launch.groups[0][1]) == ["tenax", "torchrun", "accelerate"]
    assert [name for name, _ in memory.groups] == ["memory"]


def test_growth_is_a_line_for_each_and_says_what_did_not_happen() -> None:
    """torchrun managed eight, and not sixty-four."""
    *_, joins = charts(taken())
    assert isinstance(joins, Lines)
    assert {who: sorted(sizes) for who, sizes in joins.lines.items()} == {"tenax": [8, 64], "torchrun": [8]}
    assert joins.missed == {"torchrun": 64}


def test_nothing_measured_is_nothing_drawn() -> None:
    """No empty pictures."""
    assert charts({"launch": ([], Samples()), "rendezvous": ([], Samples())}) == []


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    """White behind everything, no date, and what was drawn before is gone."""
    pytest.importorskip("matplotlib")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "old.svg").touch()
    titles = draw(taken(), tmp_path / "one")
    draw(taken(), tmp_path / "two")
    assert sorted(titles) == ["launch.svg", "memory.svg", "rendezvous.svg"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(titles)
    for name in titles:
        drawn = (tmp_path / "one" / name).read_bytes()
        assert drawn == (tmp_path / "two" / name).read_bytes()
        assert b"<dc:date>" not in drawn
        assert b"fill: #ffffff" in drawn
        assert b"tenax" in drawn
