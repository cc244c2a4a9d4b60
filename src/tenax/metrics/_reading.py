"""Converts metrics to counters, gauges and durations. Pure.

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
