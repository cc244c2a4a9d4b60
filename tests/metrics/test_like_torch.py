"""The metrics API against the installed torch's: the same names, calls, lines and warnings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython

pytestmark = [pytest.mark.process, needs_torch]

# Run once with torch's package and once with tenax; the output must be the same.
_PROGRAM = '''
import importlib, inspect, json, sys, warnings

root = sys.argv[1]
metrics, api = importlib.import_module(root), importlib.import_module(root + ".api")
seen = []

class Keep(metrics.MetricHandler):
    def __init__(self, name):
        self.name = name
    def emit(self, metric_data):
        at, group, name, value = metric_data
        assert metric_data.timestamp == at > 1e9 and metric_data.group_name == group
        value = "some" if name.endswith(".duration.ms") and type(value) is int else value
        seen.append([self.name, group, name, value])

metrics.put_metric("dropped", 1)
metrics.configure(Keep("default"))
metrics.configure(Keep("own"), "mine")
metrics.put_metric("a", 1)
metrics.put_metric("b", 2, "mine")
metrics.put_metric("c", 3, "other")
metrics.put_metric(metric_name="d", metric_value=4, metric_group="mine")
metrics.getStream("mine").add_value("e", 5)
metrics.getStream("mine").add_value(metric_name="f", metric_value=6)
api.MetricStream("g", Keep("given")).add_value("h", 7)
metrics.configure(metrics.NullMetricHandler(), group="mine")
metrics.put_metric("gone", 1, "mine")

@metrics.prof
def bare(x, y=1):
    """Its docstring."""
    return x + y

@metrics.prof(group="other")
def in_group():
    raise KeyError("no")

class Thing:
    @metrics.prof
    def method(self):
        raise SystemExit(3)

    class Inner:
        @metrics.prof()
        def method(self):
            return "inner"

seen += [bare(1, y=2), bare.__name__, bare.__doc__, Thing.Inner().method()]
for call in (in_group, Thing().method):
    try:
        call()
    except (KeyError, SystemExit) as error:
        seen.append(repr(error))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    metrics.publish_metric("mine2", "old", 1)
    metrics.publish_metric(metric_group="mine2", metric_name="old", metric_value=2)
    seen.append([one.category.__name__ for one in caught])
    del caught[:]
    old = metrics.profile("mine2")
    older = metrics.profile()
    seen.append([one.category.__name__ for one in caught])
    def plain():
        return "plain"
    seen.append(old(plain)())
    seen.append(older(plain)())

class Breaks(metrics.MetricHandler):
    def emit(self, metric_data):
        raise OSError("full")

metrics.configure(Breaks(), "broken")
try:
    metrics.put_metric("x", 1, "broken")
except OSError as error:
    seen.append(repr(error))
try:
    metrics.MetricHandler()
except TypeError:
    seen.append("abstract")

metrics.ConsoleMetricHandler().emit(metrics.MetricData(1.5, "g", "n", 2))
seen.append([metrics.MetricsConfig().params, metrics.MetricsConfig({"a": "b"}).params])
seen.append([metrics.initialize_metrics(), metrics.initialize_metrics(metrics.MetricsConfig()),
             metrics.initialize_metrics(cfg=metrics.MetricsConfig({"of": "others"}))])
seen.append(metrics.get_elapsed_time_ms(start_time_in_seconds=__import__("time").time() - 5) // 1000)
seen.append([tuple(metrics.MetricData._fields), metrics.MetricData(1, 2, 3, 4) == (1, 2, 3, 4)])
seen.append({
    name: [(p.name, p.kind.name, repr(p.default)) for p in inspect.signature(getattr(api, name)).parameters.values()]
    for name in ("configure", "getStream", "prof", "profile", "put_metric", "publish_metric", "get_elapsed_time_ms",
                 "MetricsConfig", "MetricStream", "MetricData")
})
json.dump(seen, sys.stdout)
'''


def run(root: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, root], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def theirs(torch_python: TorchPython) -> list[str]:
    done = torch_python.run("-c", _PROGRAM, "torch.distributed.elastic.metrics")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_same_program_prints_the_same(theirs: list[str]) -> None:
    """Every public call: groups, defaults, names of measured functions, warnings, errors, the line on the console."""
    ours = run("tenax.metrics")
    assert ours[0] == theirs[0] == "[1.5][g]: n=2"
    assert json.loads(ours[1]) == json.loads(theirs[1])
