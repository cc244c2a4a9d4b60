"""The timeline of one run as an HTML page: nodes, workers, generations, failures, goodput."""

from __future__ import annotations

from typing import Any

import msgspec

from tenax._core.text import format_duration
from tenax._view.chrome_trace import phases_of
from tenax._view.history import NodeHistory, RunHistory, WorkerSpan
from tenax._view.html import page as html
from tenax._view.html import plots
from tenax._view.status import FailureStatus, GenerationStatus
from tenax._view.text import cause_text, end_text, exit_summary, format_goodput, format_moment, percent

# Colours of the states of nodes and workers. The state is also shown as text.
_COLOURS = {
    "joined": "idle",
    "spare": "idle",
    "working": "training",
    "succeeded": "training",
    "failed": "failed",
    "stopped": "stopping",
}
_ROLES = {"first": "first cause", "same": "the same cause", "consequence": "a consequence"}
_MAX_LANES = 20_000
_MAX_MARKS = 1000  # of failures, in the lane of the run
_MAX_ROWS = 500  # of one table
_MAX_TRACEBACKS = 20
_MAX_HANGS = 20  # as text; the lanes show all
_MAX_TRACEBACK = 20_000  # characters
_MAX_WORKERS_UNFOLDED = 64


def timeline_page(history: RunHistory) -> str:
    origin = ", ".join(each for each in (history.entrypoint, history.folder and f"in {history.folder}") if each)
    parts = [
        f"<h1>Run {html.text(history.run_id)} {html.badge(history.outcome)}</h1>",
        f"<p>Why: {html.text(history.why.removesuffix('.'))}.</p>" if history.why else "",
        _first_cause(history),
        f'<p class="muted">Began {format_moment(history.began_at)}, took {format_duration(history.duration_s)}.</p>',
        f'<p class="muted">{html.text(origin)}</p>' if origin else "",
        html.notes((*history.missing, *(each.text for each in history.hangs[:_MAX_HANGS]))),
        _facts(history),
        _spent(history),
        _lanes(history),
        _generations(history),
        _failures(history),
        _nodes(history),
        "<footer>Made by tenax from the journals of the run. This file needs nothing else.</footer>",
    ]
    style, script = html.read_asset("timeline.css"), html.read_asset("timeline.js")
    return html.page(f"tenax: run {history.run_id}", "\n".join(parts), style=style, script=script)


def _first_cause(history: RunHistory) -> str:
    first = history.first_cause
    if first is None:
        return ""
    unknown = " The cause is unknown: it only lost a peer or timed out." if first.is_consequence else ""
    lines = [f"{first.text}.{unknown}", f"Next: {first.next_step}" if first.next_step else ""]
    return "".join(f"<p>{html.text(line)}</p>" for line in lines if line)


def _facts(history: RunHistory) -> str:
    pairs = [("duration", format_duration(history.duration_s))]
    goodput = history.goodput
    if goodput is not None and goodput.spent.total_s > 0:
        pairs.append(("training", percent(goodput.spent.training_s, goodput.spent.total_s)))
    pairs.append(("nodes", str(len(history.nodes))))
    if history.generations:
        pairs.append(("workers", str(max(each.workers for each in history.generations))))
        pairs.append(("generations", str(len(history.generations))))
    if history.max_restarts:
        pairs.append(("restarts", f"{history.restarts_used} of {history.max_restarts}"))
    followed = len(history.failures) - history.failed
    pairs.append(("failed workers", f"{history.failed}{f' and {followed} as a consequence' if followed else ''}"))
    if left := sum(each.gone_at is not None for each in history.nodes):
        pairs.append(("nodes that left", str(left)))
    if goodput is not None and goodput.lost_steps:
        pairs.append(("steps repeated", f"{goodput.lost_steps:,}"))
    return html.facts(pairs)


def _spent(history: RunHistory) -> str:
    if history.goodput is None or not history.goodput.spent.total_s > 0:
        return ""
    line = format_goodput(history.goodput)
    strip = plots.strip(history, f"The run from its beginning to its end: {len(history.generations)} generations")
    return (
        f"<h2>Time</h2><p>{html.text(line)}.</p>{plots.time_spent(history.goodput.spent)}"
        f"<figure><figcaption>From left to right; &#9660; is a failure.</figcaption>{strip}</figure>"
    )


def _lanes(history: RunHistory) -> str:
    lanes, is_cut = lanes_of(history)
    workers = sum(1 for lane in lanes if "w" in lane)
    checked = " checked" if 0 < workers <= _MAX_WORKERS_UNFOLDED else ""
    hidden = "" if workers else " hidden"
    encoded = msgspec.json.encode({"span": round(history.duration_s, 6), "lanes": lanes})
    kept = html.notes([f"Only the first {len(lanes)} lanes are drawn; the trace file has all."]) if is_cut else ""
    return (
        "<h2>Timeline</h2>"
        '<div class="tools"><button id="zoom-in" aria-label="zoom in">+</button>'
        '<button id="zoom-out" aria-label="zoom out">&#8722;</button><button id="zoom-all">everything</button>'
        f'<label{hidden}><input type="checkbox" id="with-workers"{checked}> workers</label>'
        '<span class="muted">Drag to move; Ctrl and the wheel, or + and &#8722;, to zoom.</span></div>'
        f'{kept}<div id="lanes"></div><p id="description" class="muted" aria-live="polite"></p>'
        '<noscript><p class="note">Without JavaScript there are no lanes; the tables have the same.</p></noscript>'
        + html.data(encoded, "lanes-data")
    )


def lanes_of(history: RunHistory) -> tuple[list[dict[str, Any]], bool]:
    """Return the lanes for the script, and whether some were left out.

    Keys: ``n`` name, ``s`` spans (colour, start, end, text), ``f`` failures (time, text), ``w`` the lane of a worker.
    """
    began_at = history.began_at

    def t(at: float) -> float:
        return round(max(0.0, at - began_at), 6)

    lanes: list[dict[str, Any]] = []
    if history.generations:
        phases = [[kind, t(since), t(until), _doing(kind, number)] for since, until, kind, number in phases_of(history)]
        causes = [each for each in history.failures if each.is_own][:_MAX_MARKS]
        lanes.append({"n": "run", "s": phases, "f": [[t(each.at), _failure_text(each)] for each in causes]})
    if history.hangs:
        spans = [["hung", t(each.since), t(each.until), each.text] for each in history.hangs]
        lanes.append({"n": "no activity", "s": spans})
    failed = {(each.generation, each.rank): each for each in history.failures}
    for node in history.nodes:
        if len(lanes) >= _MAX_LANES:
            return lanes, True
        spans = [
            [_COLOURS.get(span.what, span.what), t(span.since), t(span.until), _doing(span.what, span.generation)]
            for span in node.spans
        ]
        lane: dict[str, Any] = {"n": node.name, "s": spans}
        if node.gone_at is not None and node.gone_how == "lost":  # a drained node has not failed
            lane["f"] = [[t(node.gone_at), f"{node.gone_how}: {node.gone_why}" if node.gone_why else node.gone_how]]
        lanes.append(lane)
        by_rank: dict[int, list[WorkerSpan]] = {}
        for worker in node.workers:
            by_rank.setdefault(worker.local_rank, []).append(worker)
        for local_rank, workers in sorted(by_rank.items()):
            lane = {"n": f"worker {local_rank}", "w": 1, "s": [_worker(each, t) for each in workers]}
            known = [failed[key] for each in workers if (key := (each.generation, each.rank)) in failed]
            if known:
                lane["f"] = [[t(each.at), _failure_text(each)] for each in known]
            lanes.append(lane)
    return lanes, False


def _failure_text(failure: FailureStatus) -> str:
    return failure.text[:300] + (" (a consequence)" if not failure.is_own else "")


def _doing(what: str, generation: int) -> str:
    return f"{what}, generation {generation}" if generation else what


def _worker(each: WorkerSpan, t: Any) -> list[Any]:
    ended = f" {each.ended}" if each.ended else ", end not known"
    code = f" ({exit_summary(each.exit_code)})" if each.exit_code else ""
    text = f"rank {each.rank}{ended}{code}, generation {each.generation}, pid {each.pid}"
    return [_COLOURS.get(each.ended, "idle"), t(each.since), t(each.until), text]


def _after(history: RunHistory, at: float | None) -> str:
    return "" if at is None else format_duration(at - history.began_at)


def _generations(history: RunHistory) -> str:
    if not history.generations:
        return ""
    heads = ("generation", "after", "nodes", "workers", "starting", "training", "hung", "lost", "steps", "why", "ended")
    rows = [_generation(history, each) for each in history.generations[:_MAX_ROWS]]
    return f"<h2>Generations</h2>{html.table('Generations', heads, rows)}{_more(history.generations)}"


def _generation(history: RunHistory, each: GenerationStatus) -> list[str]:
    spent = each.spent
    steps = "" if each.last_step < 0 else f"{each.first_step:,} to {each.last_step:,}"
    hung, lost = (format_duration(seconds) if seconds > 0 else "" for seconds in (spent.hung_s, spent.lost_s))
    return [
        *html.cells(each.number, _after(history, each.formed_at), each.nodes, each.workers),
        *html.cells(format_duration(spent.starting_s), format_duration(spent.training_s), hung, lost, steps),
        html.cell(each.why, "text"),
        html.cell(each.ended_why or end_text(each.ended_by), "text"),
    ]


def _failures(history: RunHistory) -> str:
    if not history.failures:
        return ""
    rows = []
    for index, each in enumerate(history.failures[:_MAX_ROWS]):
        traceback = each.traceback[-_MAX_TRACEBACK:] if index < _MAX_TRACEBACKS else ""
        kept = f"<pre>{html.text(traceback)}</pre>" if traceback else ""
        what = html.text(each.what)
        if (role := _ROLES.get(each.role, "")) and len(history.failures) > 1:
            what += f' <span class="muted">({role})</span>'
        elif each.is_consequence:
            what += ' <span class="muted">(the cause is unknown)</span>'
        shown = f"<details><summary>{what}</summary>{kept}</details>" if kept else what
        known = html.cells(each.generation, _after(history, each.at), each.rank, each.host, cause_text(each.cause))
        rows.append([*known, f'<td class="text">{shown}</td>'])
    heads = ("generation", "after", "rank", "host", "cause", "what")
    return f"<h2>Failures</h2>{html.table('Failures', heads, rows)}{_more(history.failures)}"


def _nodes(history: RunHistory) -> str:
    heads = ("node", "host", "workers", "joined after", "time running", "left")
    rows = [_node(history, each) for each in history.nodes[:_MAX_ROWS]]
    return f"<h2>Nodes</h2>{html.table('Nodes', heads, rows)}{_more(history.nodes)}"


def _node(history: RunHistory, each: NodeHistory) -> list[str]:
    worked_s = sum(span.until - span.since for span in each.spans if span.what in ("working", "draining"))
    left = ""
    if each.gone_at is not None:
        why = f": {each.gone_why}" if each.gone_why else ""
        left = f"{each.gone_how} after {_after(history, each.gone_at)}{why}"
    known = html.cells(each.name, each.host, each.slots, _after(history, each.came_at), format_duration(worked_s))
    return [*known, html.cell(left, "text")]


def _more(rows: tuple[Any, ...]) -> str:
    more = len(rows) - _MAX_ROWS
    return f'<p class="muted">and {more:,} more</p>' if more > 0 else ""
