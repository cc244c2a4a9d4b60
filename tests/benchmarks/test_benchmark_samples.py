"""Samples and their summary."""

from __future__ import annotations

from benchmarks.samples import Samples, Summary, summarize


def test_a_summary_is_median_extremes_and_number() -> None:
    """The median does not follow one wild sample; the extremes show it."""
    assert summarize([3.0, 1.0, 2.0, 100.0, 2.5]) == Summary(median=2.5, min=1.0, max=100.0, n=5)


def test_no_samples_have_no_summary() -> None:
    """A launcher that was not measured has no figure, rather than a zero."""
    assert summarize([]) is None
    assert Samples().summary("tenax", "launch") is None


def test_samples_are_kept_apart_and_in_order() -> None:
    """Who was measured and what of it name the samples; their order is the order they were taken in."""
    samples = Samples()
    samples.add("tenax", "launch", 2.0)
    samples.add("torchrun", "launch", 9.0)
    samples.add("tenax", "launch", 1.0)
    assert samples.all("tenax", "launch") == [2.0, 1.0]
    assert samples.all("torchrun", "exit") == []


def test_what_did_not_happen_is_kept_beside_what_did() -> None:
    """It was tried, and has no figure."""
    samples = Samples()
    samples.miss("torchrun", "join", "not within 20 s")
    assert samples.missed("torchrun", "join") == ["not within 20 s"]
    assert samples.has("torchrun", "join")
    assert not samples.has("tenax", "join")
    assert samples.summary("torchrun", "join") is None
