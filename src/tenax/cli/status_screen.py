"""Renders a run's status as one screen of a terminal. Pure.

Fits every width of at least 40 cells, and a height if one is given. Nodes with problems come first; nodes that do not
fit are counted. Colour never carries information on its own, and untrusted text cannot control the terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from tenax._core.text import counted, format_duration, harmless
from tenax._view.status import EventStatus, FailureStatus, NodeStatus, RunStatus
from tenax._view.text import STATED_BY_EXIT, cause_text, format_goodput, outcome_label
from tenax.cli.terminal_table import Column, cut, plain, table, wrapped

MIN_WIDTH = 40
_BOLD, _RED, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
# In display order; unknown states come first.
_STATES = (
    *("draining", "stopping", "joined", "starting", "waiting", "spare", "working", "done"),
    *("drained", "left", "lost"),
)
_MAX_LEFT = 5  # nodes that left
_INDENT = "  "
_LABEL_CELLS = 12
_COLUMNS = (
    Column("RANK", 5, is_right=True),
    Column("NODE", 9, min_width=10),
    Column("STATE", 8),
    Column("FOR", 1, is_right=True),
    Column("WORKERS", 4),
    Column("STEP", 6, is_right=True),
)
_NUMBERS = (("LAST OUTPUT", 6), ("STEP", 7), ("LAST STEP", 8), ("PER STEP", 5), ("CPU", 3), ("GPU", 3))
_WORKER_COLUMNS = (
    Column("RANK", 9, is_right=True),
    Column("NODE", 4, min_width=10),
    *(Column(title, priority, is_right=True) for title, priority in _NUMBERS),
)
# Maximum numbers of nodes (or workers), events and failures.
_DEFAULT_LIMITS = (16, 8, 4)
# Tried in this order until the screen fits the height.
_LIMITS_TO_FIT = ((200, 12, 8), (64, 12, 8), (32, 10, 6), (16, 8, 4), (8, 6, 3), (4, 4, 2), (3, 2, 1), (2, 0, 1))


def render(status: RunStatus, width: int = 80, height: int | None = None, *, colour: bool = False) -> str:
    """Return the screen as text. ``height``: maximum number of lines; None: no limit."""
    lines: list[str] = []
    for limits in (_DEFAULT_LIMITS,) if height is None else _LIMITS_TO_FIT:
        lines = _lines(status, max(MIN_WIDTH, width), *limits)
        if height is None or len(lines) <= height:
            break
    text = "".join(f"{line}\n" for line in lines[: None if height is None else max(1, height)])
    return text if colour else harmless(text)  # which removes colours


def event_lines(status: RunStatus, since: float) -> list[str]:
    """Return the events after ``since``, one line each, for output to a pipe."""
    return [_event(event) for event in status.events if event.at > since]


def _paint(colour: str, text: str) -> str:
    return f"{colour}{text}{_PLAIN}" if text else ""


def _lines(status: RunStatus, width: int, max_nodes: int, max_events: int, max_failures: int) -> list[str]:
    phase = plain(outcome_label(status.outcome) if status.outcome else status.phase)
    if not status.outcome and (since := _since(status)) is not None:
        phase += f" for {_age(status, since)}"
    lines = [_paint(_BOLD, cut(f"run {plain(status.run_id)}: {phase}", width)), ""]
    for label, text in _summary(status):
        labelled = _labelled(label, text, width)
        lines += [_paint(_RED, line) for line in labelled] if label == "hang" else labelled
    lines += ["", *_nodes(status, width, max_nodes)]
    lines += _workers_table(status, width, max_nodes)
    lines += _failures(status, width, max_failures)
    if max_events and status.events:
        lines += ["", _paint(_BOLD, "last events")]
        lines += [cut(_INDENT + _event(event), width) for event in status.events[-max_events:]]
    return lines


# --- run --------------------------------------------------------------------------------------------------------------


def _since(status: RunStatus) -> float | None:
    """Return when the current phase began; None if unknown."""
    if not status.generations:
        return None
    last = status.generations[-1]
    match status.phase:
        case "running":
            return last.formed_at if last.running_at is None else last.running_at
        case "ending":
            return last.ended_at
        case "gathering" | "paused":
            return last.settled_at
    return None


def _age(status: RunStatus, since: float) -> str:
    return format_duration(max(0.0, status.now - since))


def _summary(status: RunStatus) -> list[tuple[str, str]]:
    entries = [("hang", plain(status.hang)) if status.hang else ("now", plain(status.doing))]
    if status.generations:
        last = status.generations[-1]
        began = f"{last.number}, formed {_age(status, last.formed_at)} ago"
        entries.append(("generation", f"{began}: {plain(last.why)}" if last.why else began))
        if last.ended_why:
            entries.append(("ended", plain(last.ended_why)))
    entries += [("slow", plain(each)) for each in status.slow]
    used, most = status.restarts_used, status.max_restarts
    budget = f"{used} of {most} used, {max(0, most - used)} left"
    parts = [budget if used or most else "none allowed (--max-restarts 0)"]
    uncharged = {
        "membership change": status.membership_changes,
        "drain": status.drains,
        "operator restart": status.requests,
    }
    parts += [counted(count, what) for what, count in uncharged.items() if count]
    entries.append(("restarts", "; ".join(parts)))
    if line := format_goodput(status.goodput):
        entries.append(("time", line))
    return entries


def _labelled(label: str, text: str, width: int) -> list[str]:
    first, *others = wrapped(text, width - len(_INDENT) - _LABEL_CELLS, 4) or [""]
    head = f"{_INDENT}{label.ljust(_LABEL_CELLS)}{first}"
    return [head.rstrip(), *(f"{_INDENT}{' ' * _LABEL_CELLS}{line}" for line in others)]


# --- nodes ------------------------------------------------------------------------------------------------------------


def _nodes(status: RunStatus, width: int, most: int) -> list[str]:
    nodes = sorted(status.nodes, key=_sort_key)
    is_fixed = status.min_nodes == status.max_nodes
    span = str(status.max_nodes) if is_fixed else f"{status.min_nodes} to {status.max_nodes}"
    states = f": {_states((*status.nodes, *status.left))}" if status.nodes or status.left else ""
    lines = [_paint(_BOLD, cut(f"nodes, {len(nodes)} of {span}{states}", width))]
    shown = nodes[:most] if len(nodes) > most + 1 else nodes  # "and 1 more" takes as many lines as that node
    if not shown:
        return lines
    titles, *rows = table(_COLUMNS, [_row(status, node) for node in shown], width - len(_INDENT))
    lines.append(_INDENT + titles)
    lines += [_paint(_colour(node), _INDENT + row) for node, row in zip(shown, rows, strict=True)]
    if len(shown) < len(nodes):
        left = nodes[len(shown) :]
        lines.append(cut(f"{_INDENT}and {len(left)} more: {_states(left)}", width))
    for node in status.left[-_MAX_LEFT:]:
        how = node.state if node.state == "left" else f"was {node.state}"
        why = f": {plain(node.why)}" if node.why else ""
        lines.append(cut(f"{_INDENT}{plain(node.name)} {plain(how)} {_age(status, node.since)} ago{why}", width))
    if any(node.is_coordinator for node in shown) and len(nodes) > 1:
        lines.append(f"{_INDENT}* serves the coordinator")
    return lines


def _states(nodes: Sequence[NodeStatus]) -> str:
    counts = Counter(plain(node.state) for node in sorted(nodes, key=_sort_key))
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _sort_key(node: NodeStatus) -> tuple[bool, int, int, str]:
    position = _STATES.index(node.state) if node.state in _STATES else -1
    return not node.failed, position, node.rank if node.rank >= 0 else 1 << 30, node.name


def _colour(node: NodeStatus) -> str:
    if node.failed:
        return _RED
    return _GREEN if node.state in ("working", "done") else _YELLOW


def _row(status: RunStatus, node: NodeStatus) -> tuple[str, ...]:
    name = plain(node.name) + (" *" if node.is_coordinator and len(status.nodes) > 1 else "")
    rank = str(node.rank) if node.rank >= 0 else "-"
    state = plain(node.state) + (f", {len(node.failed)} failed" if node.failed else "")
    last = node.first_rank + node.slots - 1
    workers = f"rank {last}" if node.slots == 1 else f"ranks {node.first_rank}-{last}"
    workers = counted(node.slots, "worker") if node.first_rank < 0 else workers
    steps = [step for step in node.steps if step >= 0]
    phases = sorted({plain(phase) for phase in node.phases if phase})
    span = "" if not steps else str(steps[0]) if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}"
    progress = " ".join(filter(None, (span, *(cut(phase, 12) for phase in phases[:2]))))
    return rank, name, state, _age(status, node.since), workers, progress


# --- workers ----------------------------------------------------------------------------------------------------------


def _workers_table(status: RunStatus, width: int, most: int) -> list[str]:
    """Return what each worker did last, those first that did nothing for the longest time."""
    if status.outcome:
        return []
    rows = [
        (max(_at(node.outputs, local), _at(node.stepped, local)), node, local)
        for node in status.nodes
        if node.first_rank >= 0 and (node.outputs or node.stepped or node.cpus)
        for local in range(node.slots)
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: (round(row[0]), row[1].first_rank + row[2]))
    shown = rows[:most] if len(rows) > most + 1 else rows
    titles, *lines = table(_WORKER_COLUMNS, [_worker(status, *row[1:]) for row in shown], width - len(_INDENT))
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown)} more, which did something later")
    return ["", _paint(_BOLD, "workers"), *(cut(_INDENT + line, width) for line in (titles, *lines))]


def _worker(status: RunStatus, node: NodeStatus, local: int) -> tuple[str, ...]:
    output_at, step_at, step_s = _at(node.outputs, local), _at(node.stepped, local), _at(node.step_s, local)
    return (
        str(node.first_rank + local),
        plain(node.name),
        f"{_age(status, output_at)} ago" if output_at else "none" if node.outputs else "",
        f"{node.steps[local]:,}" if step_at else "",
        f"{_age(status, step_at)} ago" if step_at else "",
        format_duration(step_s) if step_s else "",
        _share(_at(node.cpus, local, -1.0)),
        _share(_at(node.gpus, local, -1.0)),
    )


def _share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0 else ""


def _at(values: Sequence[float], local: int, default: float = 0.0) -> float:
    return values[local] if local < len(values) else default


# --- failures and events ----------------------------------------------------------------------------------------------


def _failures(status: RunStatus, width: int, most: int) -> list[str]:
    lines: list[str] = []
    own = [each for each in status.failures if each.is_own]
    followed = len(status.failures) - len(own)
    if status.failures:
        lines += ["", _paint(_RED if own else _BOLD, f"failures of generation {status.failures[0].generation}")]
        for failure in own[:most]:
            lines += _failure(status, failure, width)
        if len(own) > most:
            lines.append(f"{_INDENT}and {len(own) - most} more")
        if own and own[0].next_step and most > 1:
            lines += [f"{_INDENT}{line}" for line in wrapped(f"next: {plain(own[0].next_step)}", width - 4, 3)]
        if followed:
            lines.append(f"{_INDENT}{counted(followed, 'worker')} failed as a consequence")
    earlier = status.earlier[-most:]
    if earlier:
        lines += ["", _paint(_BOLD, "failures of earlier generations")]
        for failure in reversed(earlier):
            lines += _failure(status, failure, width, is_earlier=True)
        if len(status.earlier) > most:
            lines.append(f"{_INDENT}and {len(status.earlier) - most} earlier")
    return lines


def _failure(status: RunStatus, failure: FailureStatus, width: int, *, is_earlier: bool = False) -> list[str]:
    which = f"generation {failure.generation}" if is_earlier else ""
    unknown = "the cause is unknown" if failure.is_consequence else ""
    cause = "" if failure.cause in STATED_BY_EXIT else cause_text(plain(failure.cause))
    about = (which, f"{_age(status, failure.at)} ago", cause, unknown)
    first, *others = wrapped(f"{plain(failure.text)} ({', '.join(filter(None, about))})", width - 4, 3)
    return [_INDENT + first, *(f"{_INDENT}  {line}" for line in others)]


def _event(event: EventStatus) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {plain(event.text)}"
