"""From samples to rows, and from rows to a report."""

from __future__ import annotations

import pytest
from benchmarks.report import (
    Row,
    cell,
    compared,
    limited,
    lines_per_second,
    other_lines,
    render,
    seconds,
    spread,
    table,
    times,
)
from benchmarks.samples import Samples, summarize


def samples_of(torchrun: list[float], tenax: list[float]) -> Samples:
    """Return samples of one measure named `x`."""
    samples = Samples()
    for who, values in (("torchrun", torchrun), ("tenax", tenax)):
        for value in values:
            samples.add(who, "x", value)
    return samples


@pytest.mark.parametrize(
    ("value", "text"), [(1.523, "1.52 s"), (0.1523, "152 ms"), (0.01523, "15.2 ms"), (0.001523, "1.52 ms")]
)
def test_a_duration_has_three_digits(value: float, text: str) -> None:
    """Seconds from one second on, milliseconds below, never more precise than the measurement."""
    assert seconds(value) == text


def test_a_spread_shows_the_extremes_and_the_number() -> None:
    """A median alone hides the noise."""
    assert spread(summarize([1.0, 2.0, 4.0]), seconds) == "2.00 s [1.00 s, 4.00 s] n=3"


def test_shorter_is_better_by_the_ratio_of_medians() -> None:
    """Twenty times faster passes a bar of fifteen."""
    row = compared(samples_of([1.0, 2.0, 3.0], [0.1, 0.1, 0.4]), "x", seconds, at_least=15)
    assert (row.ratio, row.bar, row.passed) == ("20.0×", "≥ 15×", True)


def test_a_ratio_below_its_bar_fails() -> None:
    """Just under the bar is under the bar."""
    assert compared(samples_of([1.49], [0.1]), "x", seconds, at_least=15).passed is False


def test_more_lines_per_second_is_better() -> None:
    """For a rate, tenax's is divided by torchrun's."""
    row = compared(samples_of([100e3], [600e3]), "x", lines_per_second, at_least=5, more_is_better=True)
    assert (row.ours, row.ratio, row.passed) == ("600k lines/s [600k lines/s, 600k lines/s] n=1", "6.0×", True)


def test_without_one_of_the_two_there_is_no_verdict() -> None:
    """Nothing was compared, so nothing passed and nothing failed."""
    row = compared(samples_of([1.0], []), "x", seconds, at_least=15)
    assert (row.ours, row.ratio, row.passed) == ("–", "", None)


@pytest.mark.parametrize(("ours", "passed"), [([0.004], True), ([0.005], False), ([], None)])
def test_a_limit_applies_to_tenax_only(ours: list[float], passed: bool | None) -> None:
    """Whatever torchrun needs, tenax must stay below the limit."""
    assert limited(samples_of([0.001], ours), "x", seconds, below=0.005).passed is passed


def test_a_miss_is_shown_in_the_cell() -> None:
    """With what was seen instead, and how often."""
    samples = samples_of([], [0.2])
    samples.miss("torchrun", "x", "not within 20 s")
    samples.miss("torchrun", "x", "not within 20 s")
    assert cell(samples, "torchrun", "x", seconds) == "did not happen in 2 of 2 tries (not within 20 s)"
    samples.add("torchrun", "x", 3.0)
    assert cell(samples, "torchrun", "x", seconds).startswith("3.00 s [3.00 s, 3.00 s] n=1; did not happen in 2 of 3")


def test_there_is_no_ratio_to_a_miss() -> None:
    """The limit still applies to tenax."""
    samples = samples_of([], [0.2])
    samples.miss("torchrun", "x", "not within 20 s")
    row = limited(samples, "x", seconds, below=1.0, with_ratio=True)
    assert (row.ratio, row.passed) == ("", True)


def test_a_miss_fails_the_bar() -> None:
    """One is enough, however fast the other tries were."""
    samples = samples_of([1.0], [0.001, 0.001])
    samples.miss("tenax", "x", "not within 20 s")
    assert limited(samples, "x", seconds, below=1.0).passed is False
    assert compared(samples, "x", seconds, at_least=15).passed is False


def test_a_ratio_below_one_has_two_decimals() -> None:
    """0.58 and 0.62 lie on two sides of a bar."""
    assert [times(ratio) for ratio in (0.583, 1.26, 126.4)] == ["0.58×", "1.3×", "126×"]


def test_the_table_is_markdown_with_one_line_per_row() -> None:
    """The ratio is the first figure; a failed bar is bold; a row without a bar has no verdict."""
    rows = [
        Row("launch", "1 s", "1 ms", "1000×", "≥ 15×", True),
        Row("exit", "1 s", "1 s", "1.0×", "≥ 15×", False),
        Row("threads", "4", "1"),
    ]
    assert table(rows).splitlines() == [
        "| measure | ratio | torchrun | tenax | bar | pass |",
        "| --- | --- | --- | --- | --- | --- |",
        "| launch | 1000× | 1 s | 1 ms | ≥ 15× | pass |",
        "| exit | 1.0× | 1 s | 1 s | ≥ 15× | **FAIL** |",
        "| threads |  | 4 | 1 |  |  |",
    ]


def test_the_report_counts_the_bars_and_lists_the_failures() -> None:
    """Nothing is left out; equal failures are listed once, with their number."""
    rows = [Row("a", "", "", bar=">", passed=True), Row("b", "", "", bar=">", passed=False), Row("c", "", "", bar=">")]
    text = render(machine="m", date="d", method="how", rows=rows, notes=[], failures=["tenax: fell\n  over"] * 2)
    assert "Bars passed: 1 of 3, not judged: 1." in text
    assert "- 2×: tenax: fell over\n" in text
    assert "## Notes" not in text


def test_other_launchers_have_columns_with_their_own_ratios() -> None:
    """A measure with two bars is listed once, one without other launchers is not; unsupported cases have the reason."""
    samples = samples_of([2.0], [0.5])
    samples.add("fast", "x", 0.1)
    samples.add("tenax", "y", 1.0)
    samples.unable["weak"] = "does not restart"
    rows = [
        compared(samples, "x", seconds, at_least=3),
        limited(samples, "x", seconds, measure="again", below=1.0),
        compared(samples, "y", seconds),
        Row("z", "", ""),
    ]
    assert other_lines(rows, samples, ["fast", "weak"]) == [
        (
            "x",
            "500 ms [500 ms, 500 ms] n=1",
            "**4.0×** 2.00 s [2.00 s, 2.00 s] n=1",
            "**0.20×** 100 ms [100 ms, 100 ms] n=1",
            "does not restart",
        )
    ]


def test_more_is_better_for_a_rate_also_with_other_launchers() -> None:
    """Half of the rate of tenax is a ratio of two."""
    samples = samples_of([], [600e3])
    samples.add("slow", "x", 300e3)
    rows = [compared(samples, "x", lines_per_second, more_is_better=True)]
    assert other_lines(rows, samples, ["slow"])[0][-1].startswith("**2.0×** 300k lines/s")


def test_plots_and_texts_have_their_sections() -> None:
    """Plots by their paths, texts verbatim; a text with a heading keeps it, and gets no second one."""
    text = render(
        machine="m",
        date="d",
        method="how",
        rows=[],
        notes=[],
        failures=[],
        others=[("x", "1", "2", "3")],
        names=["third"],
        others_notes=["fourth was not measured"],
        plots={"plots/x.svg": "an x"},
        sections={"Profiles": "two  words\n", "On a real GPU": "## On one GPU\n\nfast\n"},
    )
    assert "## Other launchers, the same work\n\n| measure | tenax | torchrun | third |\n" in text
    assert "- fourth was not measured\n" in text
    assert "## Plots\n\n![an x](plots/x.svg)\n" in text
    assert text.endswith("## Profiles\n\ntwo  words\n\n## On one GPU\n\nfast\n")
    assert "On a real GPU" not in text
