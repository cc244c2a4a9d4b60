"""A run in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

The run is the first process, with its generations and how their time was spent. Every node is a process; its first
thread is the node itself, the others are its workers. Failures and lost nodes are instants; a hang that was only
reported is a span of the run. Times are microseconds since the start of the run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tenax._view.history import NodeHistory, RunHistory
from tenax._view.text import cause_text, end_text, fields_of

_RUN_PID = 1
_MAX_S = 1e12  # a damaged journal may contain any number; JSON readers must be able to represent the microseconds
_ROUNDED_S = 1e-6
_COLOURS = {  # reserved names of the format
    "waiting": "yellow",
    "starting": "thread_state_runnable",
    "training": "good",
    "working": "good",
    "stopping": "thread_state_iowait",
    "lost": "bad",
    "hung": "bad",
    "hang": "bad",
    "draining": "thread_state_iowait",
    "failed": "terrible",
}
_SUFFIXES = {"failed": " failed", "": ", end not known"}  # of a worker's name, by how it ended


def trace_of(history: RunHistory) -> dict[str, Any]:
    """Return the trace as values that JSON can represent."""
    trace = _Trace(history)
    trace.run()
    for pid, node in enumerate(history.nodes, _RUN_PID + 1):
        trace.node(pid, node)
    trace.failures()
    return {
        "traceEvents": trace.events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run_id": history.run_id,
            "began_at": str(history.began_at),
            "outcome": history.outcome,
            "why": history.why,
        },
    }


def trace_in_text(history: RunHistory) -> bytes:
    return msgspec.json.encode(trace_of(history))


class _Trace:
    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self.events: list[dict[str, Any]] = []

    def _us(self, at: float) -> int:
        return round(min(max(0.0, at - self._history.began_at), _MAX_S) * 1e6)

    def _name(self, pid: int, tid: int, thread: str, process: str = "") -> None:
        if process:
            self._meta("process_name", pid, tid, name=process)
            self._meta("process_sort_index", pid, tid, sort_index=pid)
        self._meta("thread_name", pid, tid, name=thread)
        self._meta("thread_sort_index", pid, tid, sort_index=tid)

    def _meta(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self.events.append({"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})

    def _add(
        self, name: str, kind: str, pid: int, tid: int, at: float, until: float | None, scope: str = "", **args: Any
    ) -> None:
        """Add a span, or an instant if it has no end. ``scope``: of an instant."""
        kept = {key: value for key, value in args.items() if value not in ("", None)}
        event = {"name": name, "cat": kind, "ts": self._us(at), "pid": pid, "tid": tid, "args": kept}
        if until is None:
            self.events.append(event | {"ph": "i", "s": scope})
            return
        colour = {"cname": _COLOURS[kind]} if kind in _COLOURS else {}
        self.events.append(event | {"ph": "X", "dur": max(0, self._us(until) - self._us(at))} | colour)

    def run(self) -> None:
        history = self._history
        self._name(_RUN_PID, 0, "run", f"run {history.run_id}")
        self._name(_RUN_PID, 1, "generations")
        self._name(_RUN_PID, 2, "time spent on")
        details = fields_of(history, "outcome", "why", "restarts_used")
        self._add(f"run {history.run_id}", "run", _RUN_PID, 0, history.began_at, history.ended_at, **details)
        for each in history.generations:
            self._add(
                f"generation {each.number}",
                "generation",
                _RUN_PID,
                1,
                each.formed_at,
                each.settled_at or each.ended_at or history.ended_at,
                **fields_of(each, "why", "nodes", "workers"),
                ended_by=end_text(each.ended_by),
                ended_why=each.ended_why,
                first_step=each.first_step if each.first_step >= 0 else None,
                last_step=each.last_step if each.last_step >= 0 else None,
                lost_steps=each.lost_steps or None,
            )
        for since, until, kind, number in phases_of(history):
            self._add(kind, kind, _RUN_PID, 2, since, until, generation=number or None)
        if history.hangs:
            self._name(_RUN_PID, 3, "no activity")
        for hang in history.hangs:
            details = {"generation": hang.generation, "who": hang.who}
            self._add("no activity", "hang", _RUN_PID, 3, hang.since, hang.until, **details)

    def node(self, pid: int, node: NodeHistory) -> None:
        self._name(pid, 0, "node", node.name)
        for span in node.spans:
            self._add(span.what, span.what, pid, 0, span.since, span.until, generation=span.generation or None)
        if node.gone_at is not None:
            name = f"{node.name} {node.gone_how}"
            self._add(name, node.gone_how, pid, 0, node.gone_at, None, "p", why=node.gone_why)
        for local_rank in sorted({worker.local_rank for worker in node.workers}):
            self._name(pid, 1 + local_rank, f"worker {local_rank}")
        for worker in node.workers:
            self._add(
                f"rank {worker.rank}{_SUFFIXES.get(worker.ended, '')}",
                worker.ended or "worker",
                pid,
                1 + worker.local_rank,
                worker.since,
                worker.until,
                generation=worker.generation,
                process=worker.pid,
                exit_code=worker.exit_code,
                ended=worker.ended,
            )

    def failures(self) -> None:
        of_workers = {
            (worker.generation, worker.rank): pid
            for pid, node in enumerate(self._history.nodes, _RUN_PID + 1)
            for worker in node.workers
        }
        of_hosts = {node.host: pid for pid, node in enumerate(self._history.nodes, _RUN_PID + 1)}
        for failure in self._history.failures:
            pid = of_workers.get((failure.generation, failure.rank)) or of_hosts.get(failure.host, _RUN_PID)
            self._add(
                f"rank {failure.rank} failed",
                "failure",
                pid,
                1 + failure.local_rank if pid != _RUN_PID else 0,
                failure.at,
                None,
                "g" if failure.is_own else "t",
                what=failure.what,
                cause=cause_text(failure.cause),
                **fields_of(failure, "role", "host", "generation"),
            )


def phases_of(history: RunHistory) -> list[tuple[float, float, str, int]]:
    """Return start, end, kind and generation of every phase of the run, without gaps.

    Lost time is placed at the end of its generation's training, hung time where it was.
    """
    found: list[tuple[float, float, str, int]] = []
    at = history.began_at
    end = history.ended_at if history.sums_until is None else history.sums_until

    def advance(moment: float, kind: str, number: int = 0) -> None:
        nonlocal at
        moment = min(max(moment, at), end)
        if moment > at:
            found.append((at, moment, kind, number))
        at = moment

    for each in history.generations:
        advance(each.formed_at, "waiting")
        ended = each.ended_at if each.ended_at is not None else end
        left_s = [each.spent.starting_s, each.spent.training_s, each.spent.lost_s]
        for since, until in (*each.hangs, (ended, ended)):
            for index, kind in enumerate(("starting", "training", "lost")):
                moment = min(at + left_s[index], since)
                left_s[index] -= max(0.0, moment - at)
                advance(moment, kind, each.number)
            advance(ended if until is None else until, "hung", each.number)
        if ended - at > _ROUNDED_S:
            advance(ended, "training", each.number)
        if each.ended_at is not None:
            advance(each.settled_at if each.settled_at is not None else end, "stopping", each.number)
    if history.generations or history.goodput is not None:
        advance(end, "waiting")
    return found
