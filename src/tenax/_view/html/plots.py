"""Plots as SVG. They fit any width without a script: positions are percentages, the font size is fixed.

Each plot has a text alternative, and colour never carries information on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tenax._core.ledger import Spent
from tenax._core.text import format_duration
from tenax._view.chrome_trace import phases_of
from tenax._view.history import RunHistory
from tenax._view.html.page import text
from tenax._view.text import percent

KINDS = ("training", "starting", "waiting", "stopping", "hung", "lost")
_MEANINGS = {"lost": "lost: done again"}
_MAX_MARKS = 200
_EDGES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


def time_spent(spent: Spent) -> str:
    """Return one bar with the total time by kind."""
    total_s = spent.total_s
    if not total_s > 0:
        return ""
    parts, left = [], 0.0
    shares = [(kind, getattr(spent, f"{kind}_s")) for kind in KINDS]
    for kind, seconds in shares:
        width = 100 * seconds / total_s
        title = f"{_MEANINGS.get(kind, kind)}: {format_duration(seconds)}, {percent(seconds, total_s)}"
        parts.append(_rect(left, width, 0, 26, kind, title))
        left += width
    label = "Time spent: " + "; ".join(f"{kind} {percent(seconds, total_s)}" for kind, seconds in shares if seconds > 0)
    items = "".join(
        f'<li><i style="background:var(--{kind})"></i>{_MEANINGS.get(kind, kind)} '
        f'<b>{percent(seconds, total_s)}</b> <span class="muted">{format_duration(seconds)}</span></li>'
        for kind, seconds in shares
        if seconds > 0
    )
    return f'{_svg(26, label, "".join(parts))}<ul class="legend">{items}</ul>'


def strip(history: RunHistory, label: str) -> str:
    """Return the run from left to right, with a mark at each failure; empty if its phases are not known."""
    phases = phases_of(history)
    if not phases:
        return ""
    began_at, span_s = history.began_at, max(history.ended_at - history.began_at, 1e-9)
    failures = [each.at for each in history.failures if each.is_own][:_MAX_MARKS]
    parts = []
    for since, until, kind, _ in phases:
        title = f"{_MEANINGS.get(kind, kind)}, {format_duration(until - since)}"
        parts.append(_rect(100 * (since - began_at) / span_s, 100 * (until - since) / span_s, 12, 24, kind, title))
    for at in failures:
        x = min(max(100 * (at - began_at) / span_s, 0), 100)
        parts.append(f'<text x="{x:.3f}%" y="10" text-anchor="middle" style="fill:var(--failed)">&#9660;</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        label_text = format_duration(share * span_s) if share else "0"
        parts.append(f'<text class="quiet" x="{100 * share:g}%" y="52" text-anchor="{anchor}">{label_text}</text>')
    return _svg(56, label, "".join(parts))


def bars(rows: Sequence[tuple[str, float, str]], kind: str, label: str) -> str:
    """Return one horizontal bar per row: name, value, and the value as text."""
    most = max((value for _, value, _ in rows), default=0) or 1
    parts = []
    for index, (name, value, value_text) in enumerate(rows):
        y = index * 38
        shown = name if len(name) <= 46 else f"{name[:43]}..."
        parts.append(f'<text x="0" y="{y + 14}">{text(shown)}<title>{text(name)}</title></text>')
        parts.append(f'<text x="100%" y="{y + 14}" text-anchor="end">{text(value_text)}</text>')
        parts.append(_rect(0, max(100 * value / most, 0.5), y + 19, 10, kind, f"{name}: {value_text}"))
    return _svg(len(rows) * 38, label, "".join(parts)) if rows else ""


def histogram(seconds: Sequence[float], kind: str, label: str) -> str:
    """Return a histogram of durations, on a scale from milliseconds to hours."""
    if not seconds:
        return ""
    counts = [0] * (len(_EDGES_S) + 1)
    for each in seconds:
        counts[next((index for index, edge in enumerate(_EDGES_S) if each <= edge), len(_EDGES_S))] += 1
    used = [index for index, count in enumerate(counts) if count]
    shown = range(max(0, used[0] - 1), min(len(counts), used[-1] + 2))
    most, width = max(counts), 100 / len(shown)
    parts = []
    for column, index in enumerate(shown):
        height = math.ceil(90 * counts[index] / most)
        left = column * width
        is_last = index == len(_EDGES_S)
        name = f"{'&gt;' if is_last else '&#8804;'} {format_duration(_EDGES_S[index - is_last])}"
        middle = f'x="{left + width / 2:.3f}%" text-anchor="middle"'
        if counts[index]:
            parts.append(_rect(left + width * 0.1, width * 0.8, 110 - height, height, kind, f"{name}: {counts[index]}"))
            parts.append(f'<text {middle} y="{104 - height}">{counts[index]}</text>')
        parts.append(f'<text class="quiet" {middle} y="127">{name}</text>')
    parts.append('<line x1="0" x2="100%" y1="110.5" y2="110.5" style="stroke:var(--line)"/>')
    return _svg(134, label, "".join(parts))


def _rect(x: float, width: float, y: float, height: float, kind: str, title: str) -> str:
    return (
        f'<rect x="{x:.3f}%" y="{y:g}" width="{max(width, 0):.3f}%" height="{height:g}" style="fill:var(--{kind})">'
        f"<title>{text(title)}</title></rect>"
    )


def _svg(height: int, label: str, inner: str) -> str:
    return f'<svg role="img" height="{height}" aria-label="{text(label)}">{inner}</svg>'
