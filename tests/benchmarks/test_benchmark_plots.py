"""The plots of a report: their contents, and that they are reproducible."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.plots import Dots, Lines, Taken, charts, draw
from benchmarks.report import Row, compared, megabytes, seconds
from benchmarks.samples import Samples


def samples_of() -> Taken:
    """Return a run of three cases: one with an additional launcher, one with a miss."""
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


def test_a_plot_shows_launchers_with_samples_of_the_larger_size() -> None:
    """Measures of tenax alone and of other units are left out."""
    launch, memory, joins = charts(samples_of())
    assert isinstance(launch, Dots)
    assert isinstance(memory, Dots)
    assert isinstance(joins, Lines)
    assert [name for name, _ in launch.groups] == ["start, 8 workers"]
    assert list(launch.groups[0][1]) == ["tenax", "torchrun", "accelerate"]
    assert [name for name, _ in memory.groups] == ["memory"]


def test_growth_has_a_line_for_each_launcher_and_marks_misses() -> None:
    """torchrun managed eight nodes, and not sixty-four."""
    *_, joins = charts(samples_of())
    assert isinstance(joins, Lines)
    assert {who: sorted(sizes) for who, sizes in joins.lines.items()} == {"tenax": [8, 64], "torchrun": [8]}
    assert joins.missed == {"torchrun": 64}


def test_without_samples_nothing_is_drawn() -> None:
    """No empty plots."""
    assert charts({"launch": ([], Samples()), "rendezvous": ([], Samples())}) == []


@pytest.mark.process  # matplotlib may run fc-list to find fonts
def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    """White background, no date; earlier plots are removed."""
    pytest.importorskip("matplotlib")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "old.svg").touch()
    titles = draw(samples_of(), tmp_path / "one")
    draw(samples_of(), tmp_path / "two")
    assert sorted(titles) == ["launch.svg", "memory.svg", "rendezvous.svg"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(titles)
    for name in titles:
        drawn = (tmp_path / "one" / name).read_bytes()
        assert drawn == (tmp_path / "two" / name).read_bytes()
        assert b"<dc:date>" not in drawn
        assert b"fill: #ffffff" in drawn
        assert b"tenax" in drawn
