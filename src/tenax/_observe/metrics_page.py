"""Renders a run's status for Prometheus. Pure.

An agent's own page (``tenax.metrics``) covers its node. This one covers the run, with names that begin with
``tenax_run_`` and ``tenax_node_``. Every line has the label ``run_id``.

Seconds are gauges, not counters: a script's progress reports can move seconds from ``training`` to ``lost``, and
Prometheus would take a counter that decreases for a restarted one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tenax._core.ledger import Mean
from tenax._view.status import FailureStatus, NodeStatus, RunStatus
from tenax.metrics._prometheus import escaped, in_text

PHASES = ("gathering", "recovering", "running", "ending", "paused", "over")
_PRESENT = ("joined", "waiting", "spare", "starting", "working", "stopping", "draining", "done")
STATES = (*_PRESENT, "drained", "left", "lost")
OUTCOMES = ("succeeded", "failed", "cancelled", "abandoned", "broken")
KINDS_OF_TIME = ("waiting", "starting", "training", "stopping", "hung", "lost")
MAX_NODES = 2000  # with lines of their own
_MAX_CAUSES = 50


def render(status: RunStatus) -> str:
    page = _Page(status.run_id)
    _add_run(page, status)
    _add_time(page, status)
    _add_failures(page, status)
    _add_nodes(page, status.nodes, status.left)
    return page.text()


class _Page:
    def __init__(self, run_id: str) -> None:
        self._run = f'run_id="{escaped(run_id)}"'
        self._lines: list[str] = []

    def family(self, name: str, kind: str, meaning: str) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]

    def value(self, name: str, value: float, **labels: str) -> None:
        pairs = "".join(f',{label}="{escaped(each)}"' for label, each in labels.items())
        self._lines.append(f"{name}{{{self._run}{pairs}}} {in_text(value)}")

    def values(self, name: str, found: Iterable[tuple[str, int]]) -> None:
        """Add many lines whose labels are already formatted."""
        self._lines += [f"{name}{{{self._run},{labels}}} {value}" for labels, value in found]

    def gauge(self, name: str, meaning: str, value: float | None, kind: str = "gauge") -> None:
        """Add a gauge or counter; None is unknown and adds no line."""
        if value is not None:
            self.family(name, kind, meaning)
            self.value(name, value)

    def counter(self, name: str, meaning: str, value: float) -> None:
        self.gauge(name, meaning, value, "counter")

    def one_of(self, name: str, label: str, names: Iterable[str], current: str, meaning: str) -> None:
        """Add a line per name: 1 for the current one, 0 for the others."""
        self.family(name, "gauge", meaning)
        for each in names:
            self.value(name, int(each == current), **{label: each})

    def summary(self, name: str, meaning: str, mean: Mean) -> None:
        self.family(name, "summary", meaning)
        self.value(f"{name}_sum", mean.sum_s)
        self.value(f"{name}_count", mean.count)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _add_run(page: _Page, status: RunStatus) -> None:
    page.family("tenax_run_info", "gauge", "Always 1; the labels contain the settings of the run.")
    limits = {"min_nodes": str(status.min_nodes), "max_nodes": str(status.max_nodes)}
    page.value("tenax_run_info", 1, **limits, max_restarts=str(status.max_restarts))
    page.one_of("tenax_run_phase", "phase", PHASES, status.phase, "1 for the current phase of the run.")
    page.one_of("tenax_run_outcome", "outcome", OUTCOMES, status.outcome, "1 for the outcome of the run, if it ended.")
    page.gauge("tenax_run_generation", "The number of the last generation.", status.generation)
    page.gauge("tenax_run_workers", "Workers of the last generation on all nodes.", status.world_size)
    page.gauge("tenax_run_restarts_used", "Restarts used up by failures.", status.restarts_used)
    left = max(0, status.max_restarts - status.restarts_used)
    page.gauge("tenax_run_restarts_left", "Restarts that are left.", left)
    ended = "Generations that ended because"
    page.counter("tenax_run_membership_changes_total", f"{ended} nodes joined or were lost.", status.membership_changes)
    page.counter("tenax_run_drains_total", f"{ended} a node was drained.", status.drains)
    page.counter("tenax_run_requests_total", f"{ended} an operator requested a restart.", status.requests)


def _add_time(page: _Page, status: RunStatus) -> None:
    goodput = status.goodput
    name = "tenax_run_spent_seconds"
    page.family(name, "gauge", "Seconds since the first node joined, by what they were spent on.")
    for kind in KINDS_OF_TIME:
        page.value(name, max(0.0, getattr(goodput.spent, f"{kind}_s")), on=kind)
    page.gauge("tenax_run_training_ratio", "The share of the time that was training, 0 to 1.", goodput.spent.ratio)
    detect = "From a failure until the coordinator ended its generation."
    page.summary("tenax_run_detect_seconds", detect, goodput.to_detect)
    recover = "From there until all workers of the next generation ran."
    page.summary("tenax_run_recover_seconds", recover, goodput.to_recover)
    steps = [step for node in status.nodes for step in node.steps if step >= 0]
    page.gauge("tenax_run_last_step", "The last step that any worker has reported.", max(steps, default=None))
    page.gauge("tenax_run_slowest_step", "The last step of the slowest worker.", min(steps, default=None))
    page.counter("tenax_run_lost_steps_total", "Steps that were repeated.", goodput.lost_steps)
    survivors = "Workers that kept their process in a new generation."
    page.counter("tenax_run_survivors_total", survivors, goodput.survivors)


def _add_failures(page: _Page, status: RunStatus) -> None:
    now = "Workers of the last generation that failed by themselves, by cause."
    _by_cause(page, "tenax_run_failed_workers", now, tuple(each for each in status.failures if each.is_own))
    followed = sum(not each.is_own for each in status.failures)
    page.gauge("tenax_run_consequences", "Workers of the last generation that failed as a consequence.", followed)
    page.gauge("tenax_run_stopped_workers", "Workers of the last generation that tenax stopped.", len(status.stopped))
    _by_cause(
        page,
        "tenax_run_failed_generations",
        "Generations that failed and were restarted, by first cause; the last 100.",
        status.earlier,
    )
    page.gauge("tenax_run_hang_suspected", "1 while workers seem to hang.", int(bool(status.hang)))


def _by_cause(page: _Page, name: str, meaning: str, failures: tuple[FailureStatus, ...]) -> None:
    counted: Counter[str] = Counter()
    for failure in failures:
        kind = failure.kind
        counted[kind if kind in counted or len(counted) < _MAX_CAUSES else "other"] += 1
    page.family(name, "gauge", meaning)
    for kind, count in sorted(counted.items()):
        page.value(name, count, cause=kind)


def _add_nodes(page: _Page, nodes: tuple[NodeStatus, ...], left: tuple[NodeStatus, ...]) -> None:
    counted = Counter(dict.fromkeys(STATES, 0))
    counted.update(node.state for node in (*nodes, *left))
    page.family("tenax_run_nodes", "gauge", "Nodes by state.")
    for state, count in counted.items():
        page.value("tenax_run_nodes", count, state=state)
    # Up to MAX_NODES lines per family, on every scrape: format the labels once.
    shown = [(node, f'node="{escaped(node.name)}",host="{escaped(node.host)}"') for node in nodes[:MAX_NODES]]
    page.family("tenax_node_state", "gauge", f"Always 1; a label contains the state. At most {MAX_NODES} nodes.")
    page.values("tenax_node_state", ((f'{labels},state="{node.state}"', 1) for node, labels in shown))
    page.family("tenax_node_step", "gauge", "The last step that any worker of the node has reported.")
    steps = ((labels, max(node.steps)) for node, labels in shown if node.steps)
    page.values("tenax_node_step", ((labels, step) for labels, step in steps if step >= 0))
    page.family("tenax_node_failed_workers", "gauge", "Workers of the node that failed in this generation, if any.")
    failed = ((labels, len(node.failed)) for node, labels in shown if node.failed)
    page.values("tenax_node_failed_workers", failed)
