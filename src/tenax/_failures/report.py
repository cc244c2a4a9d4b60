"""The final report of a run, as text for people and as JSON.

Every node prints it once, at the end; it names the host of every failure. Workers that tenax stopped are listed as
stopped, never as failed. If every failed worker only lost a peer, the report states that the cause is unknown.
Pure, except for ``wall_clock_of``: a value in, text out. Conveys nothing by colour alone.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.hang_report import format_ranks
from tenax._core.model import AWAITED, Assignment, Failure, Outcome, Verdict, assert_never, failure_began_at
from tenax._core.text import counted, encodable, format_duration, harmless, shortened
from tenax._failures.exit_codes import exit_code_for
from tenax._view.cause import cause_of, related, what_happened
from tenax._view.exit_text import describe_exit, describe_signal, signal_name
from tenax._view.text import fields_of, format_goodput, format_local_moment

_VERSION = 3
_MIN_WIDTH, _MAX_WIDTH = 40, 100
_HEAD_OF_TRACEBACK, _TAIL_OF_TRACEBACK = 8, 52  # lines
_MAX_LINE = 500
_MAX_SUMMARY = 300
_MAX_OWN_TEXT = 2000  # tenax's own text is rarely cut
_HEAD_OF_STACKS, _TAIL_OF_STACKS = 4, 20  # lines
_MAX_LOCATIONS = 4
_MAX_OTHERS = 8
_MAX_HISTORY = 8
_MAX_SPANS = 24
_KEY_WIDTH = 11
_CONSEQUENCES = {  # what a victim did; follows its name
    "peer_lost": "lost the connection to a peer",
    "jax_peer_lost": "was ended by JAX's coordination service",
    "collective_timeout": "timed out in a collective operation",
    "store_timeout": "timed out waiting for the store",
}
_REPORTED = "reported the failure of another rank"
_UNKNOWN_CAUSE = "Unknown: every failed worker lost a peer or timed out waiting for one."
_NOT_THE_CAUSE = " (a consequence; the cause is unknown)"
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[0m"


class WallClock(msgspec.Struct, frozen=True):
    """Converts the agent's monotonic clock to dates and times of day."""

    offset_s: float  # seconds since the epoch minus the agent's clock
    zone_s: int = 0  # offset of the host's time zone from UTC
    began_at: float | None = None  # start of the agent on its own clock; None: unknown

    def moment(self, at: float) -> str:
        return format_local_moment(at + self.offset_s, self.zone_s)


class _Header(msgspec.Struct):
    """The fields used from the first line of a journal."""

    wall_time: float
    at: float


def wall_clock_of(journal: str) -> WallClock:
    """Read the clock from the journal, so that report and replay show the same times; otherwise use the current one."""
    zone_s = time.localtime().tm_gmtoff
    try:
        with open(journal, "rb") as file:
            header = msgspec.json.decode(file.readline(), type=_Header)
    except (OSError, *DECODE_ERRORS):
        return WallClock(time.time() - time.monotonic(), zone_s)
    return WallClock(header.wall_time - header.at, zone_s, header.at)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    entrypoint: str  # "train.py"
    host: str  # where this report is made
    run_id: str = ""
    role: str = ""
    max_restarts: int = 0
    log_dir: str = ""
    journal: str = ""
    clock: WallClock | None = None  # None: the time of day is unknown


def summary(failure: Failure, here: str = "") -> str:
    """Return one failure in one line, as in the history of a report; with its host, unless that is ``here``."""
    process = f", pid {failure.pid}" if failure.pid > 0 else ""
    where = f" on {failure.host}" if failure.host not in ("", here) else ""
    worker = f"rank {failure.global_rank} (local rank {failure.local_rank}{process}){where}"
    return _line(f"{worker} {what_happened(failure)}")


def headline(report: Report) -> str:
    verdict, name = report.verdict, report.entrypoint
    restarts = "" if verdict.restarts_used == 0 else f" after {_restarts(report)}"
    match verdict.outcome:
        case Outcome.SUCCEEDED:
            text = f"{name} succeeded{restarts}"
        case Outcome.FAILED if (first := verdict.first) is not None:
            where = first.host or report.host
            text = f"{name} failed: rank {first.global_rank} on {where} {what_happened(first)}"
            if cause_of(first).is_consequence:
                return _line(text, _MAX_SUMMARY - len(_NOT_THE_CAUSE)) + _NOT_THE_CAUSE
        case Outcome.FAILED:
            text = f"{name} failed on {report.host}: {verdict.why}"
        case Outcome.CANCELLED:
            if verdict.signal or not verdict.why:
                by = f" by {describe_signal(verdict.signal)}" if verdict.signal else ""
                text = f"{name} was cancelled{by}{restarts}"
            else:
                text = f"{name} was cancelled{restarts}: {verdict.why}"
        case Outcome.ABANDONED:
            pids = ", ".join(map(str, verdict.stuck_pids)) or "unknown"
            text = f"{name} was abandoned: processes on {report.host} survived SIGKILL: {pids}"
        case Outcome.BROKEN:
            text = f"{name} could not be run: {verdict.why}"
            return _line(text, _MAX_OWN_TEXT)  # it ends with the next step
        case _:
            assert_never(verdict.outcome)
    return _line(text)


# --- text -------------------------------------------------------------------------------------------------------------


def render(report: Report, colour: bool = False, width: int = 80) -> str:
    """Return the report as text, with a final newline; one line for a successful run."""
    width = min(max(width, _MIN_WIDTH), _MAX_WIDTH)

    def paint(style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if colour else text

    verdict = report.verdict
    if verdict.outcome is Outcome.SUCCEEDED:
        goodput = format_goodput(verdict.goodput)
        return headline(report) + (f": {goodput}\n" if goodput else "\n")
    title = _RED if verdict.outcome in (Outcome.FAILED, Outcome.ABANDONED, Outcome.BROKEN) else _BOLD
    lines = ["=" * width, *(paint(title, line) for line in _wrapped(headline(report), width)), "-" * width]
    sections: list[list[str]] = []
    if (first := verdict.first) is not None:
        caption = "First cause" if verdict.outcome is Outcome.FAILED else "A worker had failed"
        sections.append([paint(_BOLD, caption), *_first_cause(report, first, width)])
    if verdict.failures:
        sections += _others(report, paint, width)
    if stopped := [worker.global_rank for worker in verdict.stopped]:
        sections.append(_wrapped(f"Stopped by tenax, not failed: {_ranks(stopped)}", width))
    sections += [
        _left(verdict, width),
        _other_stacks(report, paint, width),
        [paint(_BOLD, "Outcome"), *_outcome(report, width)],
        _where_to_look(report, width),
    ]
    for section in sections:
        if section:
            lines += [*section, ""]
    lines[-1] = "=" * width
    return "\n".join(lines) + "\n"


def is_in_full(verdict: Verdict, part: Assignment | None, slots: int) -> bool:
    """Whether the node with this part prints the whole report: that of the first cause, and that of rank 0."""
    if part is None or part.group_rank == 0 or part.generation != verdict.generation or verdict.goodput is None:
        return True  # the last two: the verdict is this node's own
    first = verdict.first
    return first is not None and 0 <= first.global_rank - part.first_global_rank < slots


def brief(report: Report) -> str:
    """Return the report as one line, for the console of a node that does not print it in full."""
    first, members = report.verdict.first, report.verdict.members
    hosts = dict.fromkeys([*([first.host] if first is not None else []), *(each.host for each in members[:1])])
    where = f"; report on {' and '.join(hosts)}" if hosts else ""
    return f"tenax: {headline(report)}{where}; logs of this node: {harmless(report.log_dir) or 'none'}\n"


def _first_cause(report: Report, failure: Failure, width: int) -> list[str]:
    evidence = failure.evidence
    cause = cause_of(failure)
    worker = f"{failure.global_rank} (local rank {failure.local_rank}) on {failure.host or report.host}"
    there = f" (on {failure.host})" if failure.host not in ("", report.host) else ""
    of = evidence.last_lines_of
    fields = {
        "rank": worker + (f", pid {failure.pid}" if failure.pid > 0 else ""),
        "ended": _how_and_why(failure),
        "when": _when(report, failure),
        "error": shortened(evidence.message, _MAX_LINE),
        "memory": evidence.out_of_memory,
    }
    paths = {
        f"{of} log": evidence.log_file and evidence.log_file + there,
        "error file": evidence.error_file and evidence.error_file + there,
    }
    is_shown = cause.proof in {*fields.values(), failure.reason} or (
        cause.proof.endswith("...") and evidence.message.startswith(cause.proof.removesuffix("..."))
    )
    same, awaited = related(report.verdict).same, [each.global_rank for each in report.verdict.stopped]
    alike = f"{_ranks(each.global_rank for each in same)}{_elsewhere(same, failure.host)}"
    # The others may have waited for a rank that the diagnosis does not name.
    missing = f"possibly {_ranks(awaited)}: still running when tenax stopped the workers"
    classified = {
        "cause": _UNKNOWN_CAUSE if cause.is_consequence else cause.meaning,
        "missing": missing if cause.is_consequence and awaited else "",
        "proof": "" if is_shown else cause.proof,
        "next": cause.next_step,
        "also": f"{alike} failed for the same reason" if same else "",
    }
    texts = {**classified, **fields}
    lines = [line for key, value in texts.items() if value for line in _wrapped_field(key, value, width)]
    lines += [_field(key, value) for key, value in paths.items() if value]
    if evidence.stacks:
        late = "" if cause.kind in AWAITED else " when it was late"
        lines += ["", f"  Stacks of its threads{late}, innermost call first:"]
        lines += _indented(_without_middle(_safe_lines(evidence.stacks), report.journal), "    ")
    if evidence.traceback:
        full_text_in = evidence.error_file or evidence.log_file
        full_text_in = full_text_in + there if full_text_in else report.journal
        lines += ["", *_indented(_without_middle(_safe_lines(evidence.traceback), full_text_in))]
    elif evidence.last_lines:
        shown = _safe_lines("\n".join(evidence.last_lines))
        which = "Last line" if len(shown) == 1 else f"Last {len(shown)} lines"
        lines += ["", f"  {which} of its {of}:", *_indented(shown, "    ")]
    elif failure.pid > 0 and not evidence.stacks and cause.kind not in AWAITED:
        lines += ["", f"  It wrote nothing to {'stderr' if of == 'stderr' else 'its output'}."]
    return lines


def _when(report: Report, failure: Failure) -> str:
    if report.clock is None:
        return ""
    at, began_at = failure_began_at(failure), report.clock.began_at
    after = "" if began_at is None else f", {format_duration(at - began_at)} after the start"
    return report.clock.moment(at) + after


def _others(report: Report, paint: Any, width: int) -> list[list[str]]:
    """List the victims, then the independent failures. Workers with the same text share a line."""
    groups = related(report.verdict)
    first = groups.first or report.verdict.failures[0]
    by_kind: dict[str, list[Failure]] = {}
    for failure in groups.victims:
        by_kind.setdefault(cause_of(failure).kind, []).append(failure)
    victims = {
        f"{_CONSEQUENCES.get(kind, _REPORTED)}; {what_happened(each[0])}": each for kind, each in by_kind.items()
    }
    independent: dict[str, list[Failure]] = {}
    for failure in groups.others:
        independent.setdefault(what_happened(failure), []).append(failure)
    return [
        _format_groups(paint(_BOLD, "Failed as a consequence"), victims, first, width),
        _format_groups(paint(_BOLD, "Also failed"), independent, first, width),
    ]


def _format_groups(caption: str, groups: dict[str, list[Failure]], first: Failure, width: int) -> list[str]:
    if not groups:
        return []
    lines = [caption]
    for what, group in list(groups.items())[:_MAX_OTHERS]:
        later_s = min(failure.seen_at for failure in group) - first.seen_at
        when = f", {format_duration(later_s)} later" if later_s > 0 else ""
        where = _elsewhere(group, first.host)
        lines += _wrapped(_line(f"{_ranks(f.global_rank for f in group)}{where}{when}: {what}"), width, "  ")
    if len(groups) > _MAX_OTHERS:
        lines.append(f"  and {len(groups) - _MAX_OTHERS} more in the journal")
    return lines


def _elsewhere(group: list[Failure], here: str) -> str:
    """Return where they failed, if not on the first one's host."""
    hosts = {failure.host for failure in group}
    if hosts <= {"", here}:
        return ""
    return f" on {hosts.pop()}" if len(hosts) == 1 else f" on {len(hosts)} hosts"


def _left(verdict: Verdict, width: int) -> list[str]:
    """List the nodes that left the last generation: never as failed."""
    lines = []
    for each in verdict.left[:_MAX_OTHERS]:
        lines += _wrapped(_line(f"Left: {each.label} was {each.how}{f' ({each.why})' if each.why else ''}"), width)
    more = len(verdict.left) - _MAX_OTHERS
    return [*lines, f"Left: {more} more"] if more > 0 else lines


class _WaitingWorker(NamedTuple):
    """A worker with known stacks that is not the first cause."""

    rank: int
    host: str
    is_late: bool
    stacks: str


def _other_stacks(report: Report, paint: Any, width: int) -> list[str]:
    """Show where the other workers were when one hung. Workers at the same location share an entry; rare ones first."""
    verdict = report.verdict
    failed, stopped = verdict.failures[1:], verdict.stopped
    workers = [_WaitingWorker(each.global_rank, each.host, each.was_late, each.evidence.stacks) for each in failed]
    workers += [_WaitingWorker(each.global_rank, each.host, False, each.stacks) for each in stopped]

    def location(stacks: str) -> str:
        """Return a key that is equal for workers at the same lines, whatever their thread ids."""
        return re.sub(r"0x[0-9a-f]+", "", stacks)

    locations: dict[str, list[_WaitingWorker]] = {}
    for worker in workers:
        if worker.stacks:
            locations.setdefault(location(worker.stacks), []).append(worker)
    if not locations or not verdict.failures:
        return []
    first = verdict.failures[0]
    here = first.host or report.host
    caption = "Stacks of the other workers"
    if first.was_late:
        caption += f" (rank {first.global_rank} may have been waiting for one of them)"
    lines = [paint(_BOLD, line) for line in _wrapped(caption, width)]
    beside_it = locations.pop(location(first.evidence.stacks), [])
    rare_first = sorted(locations.values(), key=lambda group: (len(group), group[0].rank))
    for group in rare_first[:_MAX_LOCATIONS]:
        lines.append(f"  {_describe_workers(group, here)}:")
        shown = _safe_lines(group[0].stacks)
        lines += _indented(_without_middle(shown, "", _HEAD_OF_STACKS, _TAIL_OF_STACKS), "    ")
    left_out = sum(map(len, rare_first[_MAX_LOCATIONS:]))
    if left_out:
        lines.append(f"  and {left_out} more in other calls")
    if beside_it:
        lines.append(f"  {_describe_workers(beside_it, here)}: the same as rank {first.global_rank}")
    if report.log_dir:
        lines.append(
            f"  All stacks are in stacks.txt, next to each error file, below {harmless(report.log_dir)} on each host."
        )
    return lines


def _describe_workers(group: list[_WaitingWorker], here: str) -> str:
    hosts = {worker.host for worker in group} - {"", here}
    where = f" on {hosts.pop()}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    late = {worker.is_late for worker in group}
    lateness = "" if len(late) > 1 else ", also late" if late == {True} else ", not late"
    return harmless(f"{_ranks(worker.rank for worker in group)}{where}{lateness}")


def _outcome(report: Report, width: int) -> list[str]:
    verdict = report.verdict
    lines = _wrapped(_line(_restarted(report)), width, "  ")
    is_abandoned = verdict.outcome is Outcome.ABANDONED
    if verdict.why and (is_abandoned or (verdict.outcome is Outcome.CANCELLED and verdict.signal)):
        lines += _wrapped(_line(f"Ended: {verdict.why}."), width, "  ")
    lines += _wrapped(_uncharged_restarts(verdict), width, "  ")
    if is_abandoned:
        pids = " ".join(map(str, verdict.stuck_pids))
        stuck = "They are stuck in the kernel and hold their devices."
        lines += _wrapped(f"{stuck} Check /proc/PID/stack of {pids}, then reboot the host.", width, "  ")
    if verdict.earlier:
        lines.append("  Earlier failures, each followed by a restart:")
        shown = verdict.earlier[-_MAX_HISTORY:]
        left_out = max(verdict.restarts_used, len(verdict.earlier)) - len(shown)
        if left_out > 0:
            lines.append(f"    ({counted(left_out, 'older one')} in the journal)")
        for failure in shown:
            first, *more = _wrapped(summary(failure, report.host), width - 6)
            lines += ["    " + first, *_indented(more, "      ")]
    return lines


def _uncharged_restarts(verdict: Verdict) -> str:
    """Count the restarts that were not caused by a failure."""
    counts = (
        (verdict.membership_changes, "because nodes joined or were lost"),
        (verdict.drains, "because a node was drained"),
        (verdict.requests, "requested by an operator"),
    )
    parts = [f"{count} {why}" for count, why in counts if count]
    return f"Uncharged restarts: {', '.join(parts)}." if parts else ""


def _where_to_look(report: Report, width: int) -> list[str]:
    clock = report.clock
    began = f"began {clock.moment(clock.began_at)}" if clock is not None and clock.began_at is not None else ""
    fields = {
        "run": ", ".join(each for each in (report.run_id, report.role and f"role {report.role}", began) if each),
        "logs": report.log_dir,
        "journal": report.journal,
        "replay": f"tenax replay {shlex.quote(report.journal)}" if report.journal else "",
    }
    goodput = format_goodput(report.verdict.goodput)
    spent = _wrapped_field("time", goodput, width) if goodput else []
    return [*spent, *(_field(key, value) for key, value in fields.items() if value)]


# --- JSON -------------------------------------------------------------------------------------------------------------


def to_dict(report: Report) -> dict[str, Any]:
    verdict, clock = report.verdict, report.clock
    failures = [_failure_to_dict(failure, report.host) for failure in verdict.failures]
    first, same, victims, _ = related(verdict)
    cause = cause_of(first) if first is not None else None
    began_at = clock.began_at if clock is not None else None
    values: dict[str, Any] = {
        "version": _VERSION,
        "outcome": verdict.outcome.value,
        "exit_code": exit_code_for(verdict),
        "summary": headline(report),
        "why": verdict.why,
        **fields_of(report, "entrypoint", "host", "run_id", "role"),
        **fields_of(verdict, "generation", "restarts_used", "membership_changes", "drains"),
        "max_restarts": report.max_restarts,
        "signal": signal_name(verdict.signal) if verdict.signal else None,
        "cause": cause.kind if cause is not None else None,
        "cause_is_known": cause is not None and not cause.is_consequence,
        "cause_meaning": cause.meaning if cause is not None else "",
        "proof": cause.proof if cause is not None else "",
        "next_step": cause.next_step if cause is not None else "",
        "same_cause": [each.global_rank for each in same],
        "victims": [each.global_rank for each in victims],
        "first_cause": failures[0] if first is not None else None,
        "other_failures": failures if first is None else failures[1:],
        "nodes": msgspec.to_builtins(verdict.members),
        "left": [{"node": each.label, "how": each.how, "why": each.why} for each in verdict.left],
        "stopped": [
            {"rank": each.global_rank, **fields_of(each, "local_rank", "pid", "exit_code", "stacks")}
            for each in verdict.stopped
        ],
        "stuck_pids": verdict.stuck_pids,
        "history": [summary(failure, report.host) for failure in verdict.earlier],
        **fields_of(report, "log_dir", "journal"),
        "began_at": _since_epoch(clock, began_at),
        "failed_at": _since_epoch(clock, failure_began_at(first) if first is not None else None),
    }
    found: dict[str, Any] = encodable(values)
    return found


def to_json(report: Report) -> bytes:
    return msgspec.json.encode(to_dict(report))


def _since_epoch(clock: WallClock | None, at: float | None) -> float | None:
    return None if clock is None or at is None else round(at + clock.offset_s, 3)


def _failure_to_dict(failure: Failure, host: str) -> dict[str, Any]:
    cause = cause_of(failure)
    texts = ("error_type", "message", "traceback", "last_lines", "stacks", "out_of_memory", "last_lines_of")
    return {
        "rank": failure.global_rank,
        "local_rank": failure.local_rank,
        "host": failure.host or host,
        **fields_of(failure, "pid", "generation", "exit_code"),
        "signal": signal_name(-failure.exit_code) if failure.exit_code < 0 else None,
        "ended": _how_it_ended(failure.exit_code),
        "reason": failure.reason,
        "cause": cause.kind,
        **fields_of(cause, "is_consequence", "proof"),
        **fields_of(failure.evidence, *texts, "log_file", "error_file"),
    }


# --- phrases and lines ------------------------------------------------------------------------------------------------


def _how_and_why(failure: Failure) -> str:
    ended = _how_it_ended(failure.exit_code)
    if failure.reason and (failure.exit_code < 0 or failure.was_late):
        by = " (stopped by tenax)" if failure.was_stopped else ""
        return f"{ended}{by}: {failure.reason}"
    return failure.reason or ended


def _how_it_ended(exit_code: int) -> str:
    return describe_exit(exit_code).removeprefix("was ")


def _restarts(report: Report) -> str:
    return f"{report.verdict.restarts_used} of {counted(report.max_restarts, 'restart')}"


def _restarted(report: Report) -> str:
    verdict = report.verdict
    why = f": {verdict.why}." if verdict.why else "."
    if verdict.outcome is not Outcome.FAILED:  # restarts are not why it ended
        return f"{_restarts(report)} used." if report.max_restarts else "Not restarted."
    if verdict.restarts_used == 0:
        return f"Not restarted{why}"
    return f"Gave up after {_restarts(report)}{why}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2, 4-7``."""
    return format_ranks(sorted(set(ranks)), "-", _MAX_SPANS)


def _field(key: str, value: str) -> str:
    return f"  {key:<{_KEY_WIDTH}}{harmless(value).replace(chr(10), ' ')}"


def _wrapped_field(key: str, value: str, width: int) -> list[str]:
    first, *more = _wrapped(harmless(" ".join(value.split())), width - _KEY_WIDTH - 2) or [""]
    return [f"  {key:<{_KEY_WIDTH}}{first}", *(" " * (_KEY_WIDTH + 2) + line for line in more)]


def _line(text: str, max_length: int = _MAX_SUMMARY) -> str:
    return shortened(harmless(" ".join(text.split())), max_length)


def _safe_lines(text: str) -> list[str]:
    return [shortened(line, _MAX_LINE) for line in harmless(text).rstrip("\n").split("\n")]


def _without_middle(
    lines: list[str], full_text_in: str, head: int = _HEAD_OF_TRACEBACK, tail: int = _TAIL_OF_TRACEBACK
) -> list[str]:
    left_out = len(lines) - head - tail
    if left_out <= 1:
        return lines
    where = f"; full text in {harmless(full_text_in)}" if full_text_in else ""
    return [*lines[:head], f"[... {counted(left_out, 'line')} omitted{where} ...]", *lines[-tail:]]


def _indented(lines: Iterable[str], indent: str = "  ") -> list[str]:
    return [indent + line if line else "" for line in lines]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    # Paths and words longer than the line stay whole, so that they can be copied.
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
