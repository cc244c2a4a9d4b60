"""Converts metrics to counters, gauges and durations, and lists those of the agent. Pure.

A ``MetricData`` is a name and a number; its kind follows from the name. The first matching rule applies:

- ``X.success``, ``X.failure``: a counter ``calls`` of function X, with the result.
- ``X.duration.ms``: a duration ``call`` of function X.
- ``workers.ROLE.…`` of the group torchelastic: ``run_…`` are counters, ``remaining_restarts`` and ``flakiness`` gauges,
  and everything else is a state of the workers: a gauge that is 1 or 0.
- of the group tenax: ``worker_failures.KIND``, ``run_ended.OUTCOME`` and ``running_s`` are counters.
- ``…_ms``, ``….ms``: a duration. ``…_total``, ``….total``: a counter, to which the value is added. Everything else is a
  gauge.
"""

from __future__ import annotations

from typing import NamedTuple

from tenax.metrics.api import MetricData

COUNTER, GAUGE, DURATION = "counter", "gauge", "duration"

_GROUP_GAUGES = ("remaining_restarts", "flakiness")
_LABELLED = {"worker_failures": "kind", "run_ended": "outcome"}  # of the group tenax: NAME.VALUE, with this label


class Reading(NamedTuple):
    """One value with its kind. The name has no unit and no ``_total``."""

    kind: str
    name: str
    labels: dict[str, str]
    value: float  # of a duration: seconds
    unit: str = ""


def read(data: MetricData) -> Reading:
    """Return the reading of a value. Raises ValueError if it is not a number."""
    value = number(data)
    name = data.name
    function, _, result = name.rpartition(".")
    if function and result in ("success", "failure"):
        return Reading(COUNTER, "calls", {"function": function, "result": result}, value)
    if name.endswith(".duration.ms"):
        return Reading(DURATION, "call", {"function": name.removesuffix(".duration.ms")}, value / 1000, "seconds")
    if data.group_name == "torchelastic" and name.startswith("workers."):
        return _of_workers(name.removeprefix("workers."), value)
    if data.group_name == "tenax":
        if function in _LABELLED:
            return Reading(COUNTER, function, {_LABELLED[function]: result}, value)
        if name == "running_s":
            return Reading(COUNTER, "running", {}, value, "seconds")
    return _of_any(name, value)


def _of_workers(name: str, value: float) -> Reading:
    role, _, what = name.rpartition(".")
    labels = {"role": role}
    if what.startswith("run_"):
        return Reading(COUNTER, f"workers_{what.removesuffix('_total')}", labels, value)
    if what in _GROUP_GAUGES:
        return Reading(GAUGE, f"workers_{what}", labels, value)
    return Reading(GAUGE, "workers_state", {**labels, "state": what}, value)


def _of_any(name: str, value: float) -> Reading:
    base = name[:-3]
    if base and name.endswith(("_ms", ".ms")):
        return Reading(DURATION, base, {}, value / 1000, "seconds")
    base = name[:-6]
    if base and name.endswith(("_total", ".total")):
        return Reading(COUNTER, base, {}, value)
    return Reading(GAUGE, name, {}, value)


def number(data: MetricData) -> float:
    """Return the value as an int or float; other types are converted to float. Raises ValueError."""
    value = data.value
    if type(value) is int or type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the metric {data.name!r} of the group {data.group_name!r} has the value {value!r}; expected a number"
        ) from error


class Measured(NamedTuple):
    """A row of the table of the agent's metrics, for handlers and the guide. ``{…}`` in a name is a placeholder."""

    group: str
    name: str
    kind: str
    meaning: str


# TorchElastic's names are functions of its agent. These are the equivalent periods of time.
CALLS = {
    "SimpleElasticAgent.run": "The whole run of this node. A run whose workers failed is a success of the agent.",
    "SimpleElasticAgent._rendezvous": "From being ready until a generation was formed.",
    "SimpleElasticAgent._assign_worker_ranks": "Ranks come with the generation, so it takes 0 ms.",
    "SimpleElasticAgent._initialize_workers": "From being ready until all workers of the generation were started.",
    "SimpleElasticAgent._restart_workers": "From the stop command until all workers of the next one were started.",
    "LocalElasticAgent._start_workers": "From the start command until all workers were started.",
    "LocalElasticAgent._stop_workers": "From the stop command until no process of the workers was left.",
    "LocalElasticAgent._monitor_workers": "How long the workers of a generation were watched; once per generation.",
}

_OF_TORCHELASTIC = (
    ("workers.{role}.remaining_restarts", GAUGE, "Restarts that are left of the run's budget."),
    ("workers.{role}.{state}", GAUGE, "1 for the state that this node's workers are in, 0 for the one they left."),
    ("workers.{role}.flakiness", GAUGE, "At the end: the share of the budget that was used, in percent; failed: 100."),
    ("workers.{role}.run_total", COUNTER, "1 at the end of a run that succeeded or failed."),
    ("workers.{role}.run_success_with_retries", COUNTER, "1 if it succeeded after a restart, else 0."),
    ("workers.{role}.run_success_no_retries", COUNTER, "1 if it succeeded without a restart, else 0."),
    ("workers.{role}.run_failed_with_retries", COUNTER, "1 if it failed after a restart, else 0."),
    ("workers.{role}.run_failed_no_retries", COUNTER, "1 if it failed without a restart, else 0."),
)

_OF_TENAX = (
    ("generation", GAUGE, "The number of the generation."),
    ("world_size", GAUGE, "Workers of the generation on all nodes."),
    ("nodes", GAUGE, "Nodes of the generation."),
    ("restarts_used", GAUGE, "Restarts that the whole run has used."),
    ("running", GAUGE, "1 while this node's workers all run; 0 before that, and from the end of their generation on."),
    ("running_s", COUNTER, "Seconds that the workers of a generation ran, reported when it ends."),
    ("forming_ms", DURATION, "From being ready until a generation was formed."),
    ("recovery_ms", DURATION, "From the first failure until workers run again, over as many attempts as it took."),
    ("membership_change_ms", DURATION, "The same for a generation that ended because a node came or went."),
    ("worker_failures.{kind}", COUNTER, "Workers of this node that failed by themselves, by cause."),
    ("run_ended.{outcome}", COUNTER, "1 when the run is over for this node."),
)

STATES = ("healthy", "failed", "stopped", "succeeded", "unknown")

MEASURED = (
    *(
        Measured("torchelastic", f"{call}.{what}", kind, meaning)
        for call, meaning in CALLS.items()
        for what, kind in (("success", COUNTER), ("failure", COUNTER), ("duration.ms", DURATION))
    ),
    *(Measured("torchelastic", *row) for row in _OF_TORCHELASTIC),
    *(Measured("tenax", *row) for row in _OF_TENAX),
)
