"""The report on one or many runs as an HTML page: outcomes, failures, hosts, goodput. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tenax._core.ledger import Spent
from tenax._core.text import format_duration
from tenax._view.history import RunHistory
from tenax._view.html import page as html
from tenax._view.html import plots
from tenax._view.summary import Count, RunLine, Summary
from tenax._view.text import format_goodput, format_moment, outcome_label, percent

_STYLE = """
tbody tr:nth-child(odd) > * { border-bottom: 0; padding-bottom: 0; } tbody th { color: var(--fg); }
td.below { color: var(--muted); padding-top: 0; }
td.below div { position: sticky; left: 0; width: min(100%, calc(100vw - 44px)); overflow-wrap: anywhere; }
"""
_MAX_STRIPS = 40
_MAX_ROWS = 2000
_MAX_BARS = 12
_MAX_HANGS = 20  # of one run


def report_page(summary: Summary, histories: Sequence[RunHistory], troubles: Sequence[str] = ()) -> str:
    """Return the whole HTML file. ``troubles``: messages about journals that could not be read."""
    count = len(summary.runs)
    title = f"{count} runs" if count != 1 else f"Run {summary.runs[0].run_id}"
    outcome = f" {html.badge(summary.runs[0].outcome)}" if count == 1 else ""
    line = format_goodput(summary.goodput)
    parts = [
        f"<h1>{html.text(title)}{outcome}</h1>",
        f'<p class="muted">{html.text(_when(summary))}</p>',
        html.notes(troubles),
        _facts(summary),
        f"<h2>Time</h2><p>{html.text(line)}.</p>{plots.time_spent(summary.goodput.spent)}" if line else "",
        _runs(summary),
        _plots(summary),
        _strips(histories),
        "<footer>Made by tenax from the journals of the runs. This file needs nothing else.</footer>",
    ]
    return html.page(f"tenax: {title}", "\n".join(parts), style=_STYLE)


def _when(summary: Summary) -> str:
    if not summary.runs:
        return "No journal could be read."
    first = min(run.began_at for run in summary.runs)
    last = max(run.began_at + run.duration_s for run in summary.runs)
    return f"From {format_moment(first)} to {format_moment(last)}."


def _facts(summary: Summary) -> str:
    pairs = [("runs", str(len(summary.runs)))]
    pairs += [(outcome_label(each.name), str(each.count)) for each in summary.outcomes]
    spent = summary.goodput.spent
    if spent.total_s > 0:
        pairs += [("time", format_duration(spent.total_s)), ("training", percent(spent.training_s, spent.total_s))]
    pairs.append(("restarts", str(sum(run.restarts_used for run in summary.runs))))
    if summary.goodput.lost_steps:
        pairs.append(("steps repeated", f"{summary.goodput.lost_steps:,}"))
    return html.facts(pairs)


def _runs(summary: Summary) -> str:
    heads = ("run", "outcome", "duration", "training", "hung", "lost", "restarts", "nodes", "workers", "began")
    shown = summary.runs[-_MAX_ROWS:]
    rows = [row for each in reversed(shown) for row in _run(each)]
    more = len(summary.runs) - len(shown)
    left_out = f'<p class="muted">and {more:,} that began earlier</p>' if more else ""
    return f"<h2>Runs</h2>{html.table('Runs, newest first', heads, rows)}{left_out}"


def _run(run: RunLine) -> list[list[str]]:
    """Return a row of figures and a row of text below it."""
    spent = run.goodput.spent if run.goodput is not None else Spent()
    trained = percent(spent.training_s, spent.total_s) if spent.total_s > 0 else ""
    hung, lost = (format_duration(seconds) if seconds > 0 else "" for seconds in (spent.hung_s, spent.lost_s))
    figures = [
        f'<th scope="row">{html.text(run.run_id)}</th>',
        f'<td class="n">{html.badge(run.outcome)}</td>',
        *html.cells(format_duration(run.duration_s), trained, hung, lost, run.restarts_used, run.nodes, run.workers),
        html.cell(format_moment(run.began_at)),
    ]
    has_cause = run.outcome == "failed" and run.first_cause  # more specific than why the run ended
    lines = [run.why] if run.why and not has_cause else []
    lines += [run.failure_text] if run.first_cause else []
    lines += run.hangs[:_MAX_HANGS]
    lines += run.missing
    lines.append(run.origin_text)
    below = "<br>".join(html.text(each) for each in lines)
    return [figures, [f'<td class="below" colspan="{len(figures)}"><div>{below}</div></td>']]


def _plots(summary: Summary) -> str:
    figures = [
        _figure("Why generations ended early", _bars(summary.ends, "lost", "Why generations ended early")),
        _figure("Hosts that fail often", _bars(summary.hosts, "failed", "Hosts with first causes of failures")),
        _figure(
            "Recovery: from the end of a generation that failed until all workers ran again",
            plots.histogram(summary.recoveries_s, "stopping", _format_recoveries(summary)),
        ),
        _figure("Time that was not training, by run", _not_training(summary)),
    ]
    inner = "".join(figures)
    return f'<h2>Failures and their cost</h2><div class="two">{inner}</div>' if inner else ""


def _figure(caption: str, inner: str) -> str:
    return f"<figure><figcaption>{html.text(caption)}</figcaption>{inner}</figure>" if inner else ""


def _bars(counts: tuple[Count, ...], kind: str, label: str) -> str:
    rows = [(each.name, float(each.count), str(each.count)) for each in counts[:_MAX_BARS]]
    more = counts[_MAX_BARS:]
    if more:
        rest = sum(each.count for each in more)
        rows.append((f"{len(more)} others", float(rest), str(rest)))
    values = ", ".join(f"{name}: {value}" for name, _, value in rows)
    return plots.bars(rows, kind, f"{label}: {values}")


def _format_recoveries(summary: Summary) -> str:
    times = sorted(summary.recoveries_s)
    if not times:
        return ""
    middle = format_duration(times[len(times) // 2])
    return f"{len(times)} recoveries, half of them within {middle}, the longest {format_duration(times[-1])}"


def _not_training(summary: Summary) -> str:
    rows = []
    for run in summary.runs:
        if run.goodput is not None:
            spent = run.goodput.spent
            seconds = spent.total_s - spent.training_s
            if seconds > 0:
                rows.append((run.run_id, seconds, f"{format_duration(seconds)}, {percent(seconds, spent.total_s)}"))
    rows.sort(key=lambda each: -each[1])
    values = ", ".join(f"{name} {value}" for name, _, value in rows[:_MAX_BARS])
    return plots.bars(rows[:_MAX_BARS], "starting", f"Time that was not training: {values}")


def _strips(histories: Sequence[RunHistory]) -> str:
    drawn = []
    for history in histories[-_MAX_STRIPS:][::-1]:
        label = f"Run {history.run_id}, {len(history.generations)} generations"
        drawn.append(_figure(history.run_id, plots.strip(history, label)))
    kept = f"; the last {_MAX_STRIPS} runs" if len(histories) > _MAX_STRIPS else ""
    if not any(drawn):
        return ""
    return (
        f'<h2>Timelines</h2><p class="muted">Each from its beginning to its end; &#9660; is a failure{kept}. '
        f"Colours as above. More of one run: <code>tenax timeline</code>.</p>{''.join(drawn)}"
    )
