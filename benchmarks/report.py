"""The report: turns samples into rows, and rows into tables. Pure.

The main table compares two launchers; all others that have samples of the same measure are in a second table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.samples import Samples, Summary

BASELINE = "torchrun"
OURS = "tenax"
NOTHING = "–"

Format = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One measure of both launchers, and whether tenax passes its bar (None: no bar, or no samples).

    `what` and `unit` identify the samples of the row, for the table of other launchers and the plots; a row that
    combines several measures has none.
    """

    measure: str
    baseline: str
    ours: str
    ratio: str = ""
    bar: str = ""
    passed: bool | None = None
    what: str = ""
    unit: Format | None = None
    more_is_better: bool = False


def seconds(value: float) -> str:
    """Format a duration in a readable unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.{0 if value >= 0.1 else 1 if value >= 0.01 else 2}f} ms"


def megabytes(value: float) -> str:
    """Format an amount of memory."""
    return f"{value:.1f} MB"


def per_second(value: float) -> str:
    """Format a low rate."""
    return f"{value:.1f}/s"


def lines_per_second(value: float) -> str:
    """Format a high rate."""
    return f"{value / 1e3:.0f}k lines/s"


def operations_per_second(value: float) -> str:
    """Format a very high rate."""
    return f"{value / 1e3:.1f}k op/s"


def count(value: float) -> str:
    """Format a count."""
    return f"{value:g}"


def spread(summary: Summary | None, unit: Format) -> str:
    """Format median, smallest, largest and number of samples."""
    if summary is None:
        return NOTHING
    return f"{unit(summary.median)} [{unit(summary.min)}, {unit(summary.max)}] n={summary.n}"


def cell(samples: Samples, who: str, what: str, unit: Format) -> str:
    """Format the spread of the samples, and how often the measured event did not happen."""
    summary, misses = samples.summary(who, what), samples.missed(who, what)
    text = [spread(summary, unit)] if summary or not misses else []
    if misses:
        tries = len(misses) + (summary.n if summary else 0)
        instead = "; ".join(dict.fromkeys(misses))
        text.append(f"did not happen in {len(misses)} of {tries} tries ({instead})")
    return "; ".join(text)


def times(ratio: float) -> str:
    """Format how many times better."""
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
    """Compare `what` of both launchers by how many times better tenax is."""
    row = Row(
        measure or what,
        cell(samples, BASELINE, what, unit),
        cell(samples, OURS, what, unit),
        bar=f"≥ {at_least:g}×" if at_least else "",
        what=what,
        unit=unit,
        more_is_better=more_is_better,
    )
    if samples.missed(OURS, what):
        return replace(row, passed=None if at_least is None else False)
    ratio = better(samples, what, more_is_better=more_is_better)
    if ratio is None:
        return row
    return replace(row, ratio=times(ratio), passed=None if at_least is None else ratio >= at_least)


def better(samples: Samples, what: str, *, more_is_better: bool = False, than: str = BASELINE) -> float | None:
    """Return how many times better tenax's median is; None without two medians, or if either did not always happen."""
    theirs, ours = samples.summary(than, what), samples.summary(OURS, what)
    if samples.missed(than, what) or samples.missed(OURS, what):
        return None
    if theirs is None or ours is None or not theirs.median or not ours.median:
        return None
    return ours.median / theirs.median if more_is_better else theirs.median / ours.median


def limited(
    samples: Samples, what: str, unit: Format, *, measure: str = "", below: float, with_ratio: bool = False
) -> Row:
    """Compare `what` of both launchers by whether tenax's median is below a limit."""
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
        what=what,
        unit=unit,
    )


def verdict(passed: bool | None) -> str:
    """Return the last cell of a row."""
    return {True: "pass", False: "**FAIL**", None: ""}[passed]


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table, the ratio first."""
    head = ("measure", "ratio", BASELINE, OURS, "bar", "pass")
    return markdown(
        head, [(row.measure, row.ratio, row.baseline, row.ours, row.bar, verdict(row.passed)) for row in rows]
    )


def other_lines(rows: Sequence[Row], samples: Samples, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the cells of each measure that other launchers share: name, tenax, baseline, each other launcher."""
    found: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if row.unit and any(samples.has(name, row.what) for name in names):
            ours = cell(samples, OURS, row.what, row.unit)
            # A measure with two bars has two rows, but one here.
            found[row.what] = (row.what, ours, *(beside(row, samples, name) for name in (BASELINE, *names)))
    return list(found.values())


def beside(row: Row, samples: Samples, name: str) -> str:
    """Return one launcher's figures of a measure after how many times better tenax is; or why it has none."""
    assert row.unit
    if name in samples.unable:
        return samples.unable[name]
    ratio = better(samples, row.what, more_is_better=row.more_is_better, than=name)
    text = cell(samples, name, row.what, row.unit)
    return f"**{times(ratio)}** {text}" if ratio else text


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def render(
    *,
    machine: str,
    date: str,
    method: str,
    rows: Sequence[Row],
    notes: Sequence[str],
    failures: Sequence[str],
    others: Sequence[Sequence[str]] = (),
    names: Sequence[str] = (),
    others_notes: Sequence[str] = (),
    plots: Mapping[str, str] | None = None,
    sections: Mapping[str, str] | None = None,
) -> str:
    """Return the whole report as Markdown.

    `others`: lines of the table of the other launchers, `names`. `plots`: titles by file. `sections`: texts by heading,
    copied verbatim; a text with its own heading keeps it.
    """
    barred = [row for row in rows if row.bar]
    passed, unjudged = sum(row.passed is True for row in barred), sum(row.passed is None for row in barred)
    parts = [
        f"# {OURS} and {BASELINE}, measured",
        "Generated by `./dev bench`; do not edit.",
        f"{machine}. {date}.",
        method,
        table(rows),
        f"Bars passed: {passed} of {len(barred)}{f', not judged: {unjudged}' if unjudged else ''}.",
    ]
    if others or others_notes:
        parts.append("## Other launchers, the same work")
    if others:
        parts.append(markdown(("measure", OURS, BASELINE, *names), others))
    if others_notes:
        parts.append(bullets(others_notes))
    if plots:
        parts += ["## Plots", *(f"![{title}]({address})" for address, title in plots.items())]
    if notes:
        parts += ["## Notes", bullets(notes)]
    if failures:
        counted = [f"{number}×: {failure}" for failure, number in Counter(failures).items()]
        parts += ["## Launches that failed", bullets(counted)]
    for heading, text in (sections or {}).items():
        parts += [text.strip()] if text.lstrip().startswith("#") else [f"## {heading}", text.strip()]
    return "\n\n".join(parts) + "\n"


def bullets(lines: Sequence[str]) -> str:
    """Format a Markdown list, one line each."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)
