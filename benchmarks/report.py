"""The report: samples become rows, rows become a table. Pure; of the launchers it knows only the two names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.samples import Samples, Summary

BASELINE = "torchrun"
OURS = "tenax"
NOTHING = "–"

Format = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One measure of both launchers, and whether ours is over its bar (None: there is no bar, or nothing to judge)."""

    measure: str
    baseline: str
    ours: str
    ratio: str = ""
    bar: str = ""
    passed: bool | None = None


def seconds(value: float) -> str:
    """A duration in the unit a person would choose."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.{0 if value >= 0.1 else 1 if value >= 0.01 else 2}f} ms"


def megabytes(value: float) -> str:
    """An amount of memory."""
    return f"{value:.1f} MB"


def per_second(value: float) -> str:
    """A rate of rare things."""
    return f"{value:.1f}/s"


def lines_per_second(value: float) -> str:
    """A rate of many things."""
    return f"{value / 1e3:.0f}k lines/s"


def operations_per_second(value: float) -> str:
    """A rate of many small things."""
    return f"{value / 1e3:.1f}k op/s"


def count(value: float) -> str:
    """A number of things."""
    return f"{value:g}"


def spread(summary: Summary | None, unit: Format) -> str:
    """Median, smallest, largest and number of samples."""
    if summary is None:
        return NOTHING
    return f"{unit(summary.median)} [{unit(summary.min)}, {unit(summary.max)}] n={summary.n}"


def cell(samples: Samples, who: str, what: str, unit: Format) -> str:
    """The spread of what was measured, and how often it did not happen at all."""
    summary, misses = samples.summary(who, what), samples.missed(who, what)
    told = [spread(summary, unit)] if summary or not misses else []
    if misses:
        tries = len(misses) + (summary.n if summary else 0)
        instead = "; ".join(dict.fromkeys(misses))
        told.append(f"did not happen in {len(misses)} of {tries} tries ({instead})")
    return "; ".join(told)


def times(ratio: float) -> str:
    """How many times better."""
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 1 else 2}f}×"


def compared(
    samples: Samples,
    what: str,
    unit: Format,
    *,
    measure: str = "",
    at_least: float | None = None,
    more_is_better: bool = False,
) -> Row:
    """Both launchers' `what`, judged by how many times better ours is."""
    row = Row(
        measure or what,
        cell(samples, BASELINE, what, unit),
        cell(samples, OURS, what, unit),
        bar=f"≥ {at_least:g}×" if at_least else "",
    )
    if samples.missed(OURS, what):
        return replace(row, passed=None if at_least is None else False)
    ratio = better(samples, what, more_is_better=more_is_better)
    if ratio is None:
        return row
    return replace(row, ratio=times(ratio), passed=None if at_least is None else ratio >= at_least)


def better(samples: Samples, what: str, *, more_is_better: bool = False) -> float | None:
    """How many times better our median is; None without two medians, or where either did not always happen."""
    baseline, ours = samples.summary(BASELINE, what), samples.summary(OURS, what)
    if samples.missed(BASELINE, what) or samples.missed(OURS, what):
        return None
    if baseline is None or ours is None or not baseline.median or not ours.median:
        return None
    return ours.median / baseline.median if more_is_better else baseline.median / ours.median


def limited(
    samples: Samples, what: str, unit: Format, *, measure: str = "", below: float, with_ratio: bool = False
) -> Row:
    """Both launchers' `what`, judged by whether the median of ours is below a limit."""
    ours = samples.summary(OURS, what)
    passed = False if samples.missed(OURS, what) else None if ours is None else ours.median < below
    ratio = better(samples, what) if with_ratio else None
    return Row(
        measure or what,
        cell(samples, BASELINE, what, unit),
        cell(samples, OURS, what, unit),
        times(ratio) if ratio else "",
        bar=f"< {unit(below)}",
        passed=passed,
    )


def verdict(passed: bool | None) -> str:
    """The last word of a row."""
    return {True: "pass", False: "**FAIL**", None: ""}[passed]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [f"| measure | {BASELINE} | {OURS} | ratio | bar | pass |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = (row.measure, row.baseline, row.ours, row.ratio, row.bar, verdict(row.passed))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render(
    *, machine: str, date: str, method: str, rows: Sequence[Row], notes: Sequence[str], failures: Sequence[str]
) -> str:
    """The whole report as Markdown."""
    barred = [row for row in rows if row.bar]
    passed, unjudged = sum(row.passed is True for row in barred), sum(row.passed is None for row in barred)
    parts = [
        f"# {OURS} beside {BASELINE}, measured",
        "Generated by `./dev bench`; do not edit.",
        f"{machine}. {date}.",
        method,
        table(rows),
        f"Bars passed: {passed} of {len(barred)}{f', not judged: {unjudged}' if unjudged else ''}.",
    ]
    if notes:
        parts += ["## Beside the table", bullets(notes)]
    if failures:
        counted = [f"{number}×: {failure}" for failure, number in Counter(failures).items()]
        parts += ["## Launches that failed", bullets(counted)]
    return "\n\n".join(parts) + "\n"


def bullets(sentences: Sequence[str]) -> str:
    """A Markdown list, one line each."""
    return "\n".join(f"- {' '.join(sentence.split())}" for sentence in sentences)
