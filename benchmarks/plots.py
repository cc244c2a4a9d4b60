"""Plots: rows and their samples as SVG pictures. The content of a picture is pure; only `draw` needs matplotlib.

The same samples give the same bytes: no dates, ids from a fixed salt, and text stays text. The background is white and
opaque, for light and dark pages. Every scale is logarithmic, since the launchers are far apart; a dot is a median, and
the line through it spans the smallest to the largest sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import BASELINE, OURS, Format, Row, megabytes, seconds
from benchmarks.samples import Samples, Summary

ORDER = (OURS, BASELINE, "ft_launcher", "accelerate", "subprocess")
COLOURS = dict(zip(ORDER, ("#0072b2", "#d55e00", "#009e73", "#8e4585", "#666666"), strict=True))
JOIN = re.compile(r"(\d+) nodes join:")
LARGEST = "8 workers"
WIDTH = 9.0


class Undrawn(Exception):
    """No pictures can be drawn; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Dots:
    """A picture of some measures, each with the launchers below each other."""

    name: str
    title: str
    axis: str
    unit: Format
    groups: tuple[tuple[str, Mapping[str, Summary]], ...]


@dataclass(frozen=True)
class Lines:
    """A picture of one measure by a size, a line for each launcher; with the sizes at which it failed."""

    name: str
    title: str
    axis: str
    lines: Mapping[str, Mapping[int, Summary]]
    missed: Mapping[str, int]


Chart = Dots | Lines
Taken = Mapping[str, tuple[Sequence[Row], Samples]]  # by the name of the case


def charts(taken: Taken) -> list[Chart]:
    """Return every picture that has samples."""
    found: list[Chart] = []
    for case, title in (
        ("launch", "Launch and exit, instant workers"),
        ("restart", "Restart, instant workers"),
        ("torch_workers", "Workers that import torch"),
    ):
        if case in taken:
            groups = _groups(*taken[case], seconds)
            groups = [group for group in groups if LARGEST in group[0]] or groups
            if groups:
                found.append(Dots(case, title, "seconds", seconds, tuple(groups)))
    groups = [group for case in ("idle", "memory") if case in taken for group in _groups(*taken[case], megabytes)]
    if groups:
        found.append(Dots("memory", "Memory", "megabytes", megabytes, tuple(groups)))
    if "rendezvous" in taken:
        joins = _joins(*taken["rendezvous"])
        if joins.lines:
            found.append(joins)
    return found


def _groups(rows: Sequence[Row], samples: Samples, unit: Format) -> list[tuple[str, Mapping[str, Summary]]]:
    """Return the measures in this unit, by launcher; a measure with only one launcher is left out."""
    found = {}
    for row in rows:
        summaries = {who: samples.summary(who, row.what) for who in ORDER}
        there = {who: summary for who, summary in summaries.items() if summary and summary.min > 0}
        if row.unit is unit and len(there) > 1:
            found[row.what] = there
    return list(found.items())


def _joins(rows: Sequence[Row], samples: Samples) -> Lines:
    lines: dict[str, dict[int, Summary]] = {}
    missed: dict[str, int] = {}
    for row in rows:
        size = JOIN.match(row.what)
        for who in (OURS, BASELINE):
            summary = samples.summary(who, row.what)
            if size and summary:
                lines.setdefault(who, {})[int(size[1])] = summary
            elif size and samples.missed(who, row.what):
                missed[who] = int(size[1])
    return Lines("rendezvous", "Nodes that join at once", "nodes", lines, missed)


def draw(taken: Taken, folder: Path) -> dict[str, str]:
    """Draw every picture into a folder, which is emptied first. Return their titles by file name."""
    wanted = charts(taken)
    try:
        import matplotlib as mpl
    except ImportError:
        raise Undrawn("Plots were not drawn: matplotlib is not installed here (`./dev bench` installs it).") from None
    mpl.use("svg")
    from matplotlib import pyplot

    settings: dict[str, Any] = {
        "svg.hashsalt": OURS,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": "#222222",
        "axes.edgecolor": "#999999",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    with mpl.rc_context(settings):
        for chart in wanted:
            figure = _dots(pyplot, chart) if isinstance(chart, Dots) else _lines(pyplot, chart)
            path = folder / f"{chart.name}.svg"
            figure.savefig(path, facecolor="white", transparent=False, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
    return {f"{chart.name}.svg": chart.title for chart in wanted}


def _dots(pyplot: Any, chart: Dots) -> Any:
    """Return one line of the picture for each launcher of each measure, under the name of the measure."""
    lines = sum(1.35 + len(summaries) for _, summaries in chart.groups)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.24 * lines + 1.0), layout="constrained")
    ticks, names = [], []
    at = 0.0
    largest = max(summary.max for _, summaries in chart.groups for summary in summaries.values())
    smallest = min(summary.min for _, summaries in chart.groups for summary in summaries.values())
    for measure, summaries in chart.groups:
        label = measure.replace("`", "")
        axes.text(0.008, at, label, transform=axes.get_yaxis_transform(), va="center", weight="bold", in_layout=False)
        for who, summary in summaries.items():
            at += 1
            colour = COLOURS[who]
            axes.plot([summary.min, summary.max], [at, at], color=colour, linewidth=2.5, solid_capstyle="round")
            axes.plot([summary.median], [at], "o", color=colour, markersize=7)
            axes.annotate(
                f"{chart.unit(summary.median)}{_times(who, summaries)}",
                (summary.max, at),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=colour,
            )
            ticks.append(at)
            names.append(who)
        at += 1.35
    axes.set_xscale("log")
    axes.set_xlim(smallest / 1.6, largest * (largest / smallest) ** 0.28)  # room for the text at the right
    axes.set_ylim(at - 0.6, -0.8)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="x")
    axes.set_xlabel(f"{chart.axis}, logarithmic; less is better")
    axes.set_title(chart.title, loc="left", weight="bold", fontsize=12)
    return figure


def _times(who: str, summaries: Mapping[str, Summary]) -> str:
    """Return its value as a multiple of tenax's."""
    if who == OURS or OURS not in summaries:
        return ""
    ratio = summaries[who].median / summaries[OURS].median
    return f"  ({ratio:.{0 if ratio >= 10 else 1 if ratio >= 1 else 2}f}×)"


def _lines(pyplot: Any, chart: Lines) -> Any:
    """Draw with both axes logarithmic: a power of the size is a straight line."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 4.6), layout="constrained")
    for who, sizes in chart.lines.items():
        at, colour = sorted(sizes), COLOURS[who]
        medians = [sizes[size].median for size in at]
        axes.plot(at, medians, "o-", color=colour, linewidth=1.8, markersize=6)
        axes.vlines(at, [sizes[size].min for size in at], [sizes[size].max for size in at], color=colour, linewidth=2.5)
        label = who if who not in chart.missed else f"{who} (not with {chart.missed[who]})"
        axes.annotate(
            label, (at[-1], medians[-1]), xytext=(9, 0), textcoords="offset points", va="center", color=colour
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    every = sorted({size for sizes in chart.lines.values() for size in sizes})
    axes.set_xticks(every, [str(size) for size in every])
    axes.minorticks_off()
    axes.set_xlim(every[0] / 1.2, every[-1] * 2.2)
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value).replace(".00", "").replace(".0", ""))
    axes.grid()
    axes.set_xlabel(f"{chart.axis}, logarithmic")
    axes.set_ylabel("until the last has its assignment, logarithmic")
    axes.set_title(chart.title, loc="left", weight="bold", fontsize=12)
    return figure
