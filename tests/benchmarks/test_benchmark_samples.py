"""Samples and their summary."""

from __future__ import annotations

from benchmarks.samples import Samples, Summary, summarize


def test_a_summary_has_median_extremes_and_number() -> None:
    """The median does not follow one outlier; the extremes show it."""
    assert summarize([3.0, 1.0, 2.0, 100.0, 2.5]) == Summary(median=2.5, min=1.0, max=100.0, n=5)


def test_without_samples_there_is_no_summary() -> None:
    """A launcher that was not measured has no figure, rather than a zero."""
    assert summarize([]) is None
    assert Samples().summary("tenax", "launch") is None


def test_samples_are_kept_by_launcher_and_measure() -> None:
    """In the order in which they were taken."""
    samples = Samples()
    samples.add("tenax", "launch", 2.0)
    samples.add("torchrun", "launch", 9.0)
    samples.add("tenax", "launch", 1.0)
    assert samples.all("tenax", "launch") == [2.0, 1.0]
    assert samples.all("torchrun", "exit") == []


def test_misses_are_kept_beside_samples() -> None:
    """It was tried, and has no figure."""
    samples = Samples()
    samples.miss("torchrun", "join", "not within 20 s")
    assert samples.missed("torchrun", "join") == ["not within 20 s"]
    assert samples.has("torchrun", "join")
    assert not samples.has("tenax", "join")
    assert samples.summary("torchrun", "join") is None
