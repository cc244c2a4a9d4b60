"""The summary of one or many runs: outcomes, failures, hosts, goodput. Pure.

One value for the page, the terminal and JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce

from tenax._core.ledger import Goodput
from tenax._core.text import format_duration, one_line
from tenax._view.history import RunHistory, plus
from tenax._view.status import Value
from tenax._view.text import EARLY_ENDS, cause_text, fields_of, format_goodput, format_moment, outcome_label, percent

_MAX_SHOWN = 10
_MAX_RUNS = 20  # on the terminal
_MAX_HANGS = 3  # of one run, on the terminal


class Count(Value, frozen=True):
    name: str
    count: int


class RunLine(Value, frozen=True):
    run_id: str
    began_at: float
    duration_s: float
    outcome: str  # empty: unknown
    why: str
    nodes: int
    workers: int
    generations: int
    restarts_used: int
    goodput: Goodput | None
    cause: str = ""  # kind of the last failure's first cause
    first_cause: str = ""  # the last failure's first cause as a message
    is_cause_known: bool = True  # False: first_cause is only the first worker that lost a peer
    next_step: str = ""
    failed: int = 0  # workers that failed by themselves, in all generations
    consequences: int = 0  # workers that failed as a consequence
    stopped: int = 0  # workers that tenax stopped
    left: tuple[str, ...] = ()  # nodes that left before the end, and how: "host2 was drained"
    hangs: tuple[str, ...] = ()  # messages about hangs that were only reported
    entrypoint: str = ""
    folder: str = ""
    missing: tuple[str, ...] = ()

    @property
    def failure_text(self) -> str:
        """The first cause, or the first victim where the cause is unknown; empty if nothing failed."""
        if not self.first_cause:
            return ""
        # A run that was stopped or succeeded did not end because of an earlier failure.
        if self.outcome == "failed":
            return f"{'first cause' if self.is_cause_known else 'cause not known; first victim'}: {self.first_cause}"
        return f"last failure{'' if self.is_cause_known else ', cause not known; first victim'}: {self.first_cause}"

    @property
    def workers_text(self) -> str:
        """How many workers failed, and how many of them by themselves; empty if none did."""
        counts = (
            (self.failed, "failed"),
            (self.consequences, "failed as a consequence"),
            (self.stopped, "stopped by tenax"),
        )
        shown = [f"{count} {what}" for count, what in counts if count]
        return f"workers: {', '.join(shown)}" if self.failed or self.consequences else ""

    @property
    def origin_text(self) -> str:
        parts = (self.entrypoint, f"began {format_moment(self.began_at)}", self.folder and f"in {self.folder}")
        return ", ".join(each for each in parts if each)


class Summary(Value, frozen=True):
    runs: tuple[RunLine, ...]  # oldest first
    outcomes: tuple[Count, ...]
    ends: tuple[Count, ...]  # why generations ended before their run, most frequent first
    hosts: tuple[Count, ...]  # of first causes, most frequent first
    recoveries_s: tuple[float, ...]  # from the end of a failed generation until all workers of the next ran
    goodput: Goodput  # of all runs together


def summary_of(histories: Sequence[RunHistory]) -> Summary:
    return Summary(
        runs=tuple(_line(history) for history in histories),
        outcomes=_counts(history.outcome or "no end known" for history in histories),
        ends=_counts(name for history in histories for name in _ends_of(history)),
        hosts=_counts(host for history in histories for host in _failed_hosts(history)),
        recoveries_s=tuple(seconds for history in histories for seconds in _recoveries_of(history)),
        goodput=reduce(plus, (each.goodput for each in histories if each.goodput is not None), Goodput()),
    )


def format_summary(summary: Summary, more_lines: Sequence[str] = ()) -> str:
    """Return the summary for a terminal. ``more_lines``: lines that refer to the page."""
    lines = []
    if len(summary.runs) > _MAX_RUNS:
        lines.append(f"the last {_MAX_RUNS} of {len(summary.runs)} runs:")
    for run in summary.runs[-_MAX_RUNS:]:
        lines.append(
            f"{run.run_id}: {outcome_label(run.outcome) or 'no end known'}{f' ({run.why})' if run.why else ''}"
        )
        lines.append(f"  {run.origin_text}")
        if run.goodput is not None and (cost := format_goodput(run.goodput)):
            lines.append(f"  {cost}")
        lines += [f"  {each}" for each in run.hangs[:_MAX_HANGS]]
        if (more := len(run.hangs) - _MAX_HANGS) > 0:
            lines.append(f"  no activity {more} more {'time' if more == 1 else 'times'}; tenax timeline shows when")
        if run.failure_text:
            lines.append(f"  {run.failure_text}")
            lines += [f"  next: {run.next_step}"] if run.next_step else []
        lines += [f"  {each}" for each in (run.workers_text, *run.left[:_MAX_SHOWN]) if each]
        lines += [f"  note: {each}" for each in run.missing]
    if len(summary.runs) != 1:
        lines += ["", _format_total(summary)]
    for title, counts in (("generations ended early", summary.ends), ("hosts with failures", summary.hosts)):
        if counts:
            shown = ", ".join(f"{each.name} ({each.count})" for each in counts[:_MAX_SHOWN])
            more = len(counts) - _MAX_SHOWN
            lines.append(f"{title}: {shown}{f' and {more} more' if more > 0 else ''}")
    return "\n".join(map(one_line, [*lines, *more_lines])) + "\n"


def _format_total(summary: Summary) -> str:
    count = len(summary.runs)
    ended = ", ".join(f"{each.count} {outcome_label(each.name)}" for each in summary.outcomes)
    spent = summary.goodput.spent
    took = format_duration(spent.total_s)
    trained = f"; {percent(spent.training_s, spent.total_s)} of {took} was training" if spent.total_s > 0 else ""
    return f"{count} runs: {ended}{trained}" if count else "no runs"


def _line(history: RunHistory) -> RunLine:
    first = history.first_cause
    return RunLine(
        **fields_of(history, "run_id", "began_at", "duration_s", "outcome", "why", "restarts_used", "goodput"),
        **fields_of(history, "failed", "stopped", "entrypoint", "folder", "missing"),
        nodes=len(history.nodes),
        workers=max((each.workers for each in history.generations), default=sum(n.slots for n in history.nodes)),
        generations=len(history.generations),
        cause=first.kind if first is not None else "",
        first_cause=first.text if first is not None else "",
        is_cause_known=first is None or not first.is_consequence,
        next_step=first.next_step if first is not None else "",
        consequences=len(history.failures) - history.failed,
        left=tuple(each.left_text for each in history.nodes if each.gone_at is not None),
        hangs=tuple(each.text for each in history.hangs),
    )


def _ends_of(history: RunHistory) -> list[str]:
    causes = {each.generation: cause_text(each.kind) for each in history.first_causes}
    found = []
    for each in history.generations:
        if each.ended_by == "failure" or (each.ended_by == "failed" and each.number in causes):
            found.append(causes.get(each.number) or EARLY_ENDS["failure"])
        elif each.ended_by in EARLY_ENDS:
            found.append(EARLY_ENDS[each.ended_by])
    return found


def _failed_hosts(history: RunHistory) -> list[str]:
    """Return the host of each generation's first cause, and each lost host."""
    firsts = [each.host for each in history.first_causes if not each.is_consequence]
    return [*firsts, *(node.host for node in history.nodes for _ in range(node.times_lost))]


def _recoveries_of(history: RunHistory) -> list[float]:
    found = []
    for earlier, later in zip(history.generations, history.generations[1:], strict=False):
        if earlier.ended_by in ("failure", "loss") and earlier.ended_at is not None and later.running_at is not None:
            found.append(max(0.0, later.running_at - earlier.ended_at))
    return found


def _counts(names: Iterable[str]) -> tuple[Count, ...]:
    counted = Counter(names)
    return tuple(Count(name, counted[name]) for name in sorted(counted, key=lambda name: (-counted[name], name)))
