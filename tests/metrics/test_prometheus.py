"""The page for Prometheus: fetched over HTTP, parsed by Prometheus' own parser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax._core import events
from tenax._core.agent import AgentMachine
from tenax._core.model import AgentSettings, Assignment, Outcome, Verdict
from tenax.metrics import MetricData, PrometheusMetricHandler
from tenax.metrics._view import MetricView

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")


@pytest.fixture
def handler() -> Iterator[PrometheusMetricHandler]:
    with leaving_nothing():
        made = PrometheusMetricHandler(port=0)
        yield made
        made.close()


def scrape(handler: PrometheusMetricHandler) -> dict[str, tuple[str, dict[str, float]]]:
    """Return by family: its type, and its samples by name and labels."""
    with urlopen(handler.where, timeout=TIMEOUT_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    found = {}
    for family in parser.text_string_to_metric_families(text):
        samples = {
            sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
            for sample in family.samples
        }
        assert family.name not in found
        found[family.name] = (family.type, samples)
    return found


def put(handler: PrometheusMetricHandler, name: str, value: float, group: str = "mine") -> None:
    handler.emit(MetricData(1.0, group, name, value))


def test_counters_gauges_and_durations_are_shown(handler: PrometheusMetricHandler) -> None:
    """A counter is a sum, a gauge its last value, a duration a sum and a count, in seconds."""
    for value in (1, 2.5):
        put(handler, "steps_total", value)
        put(handler, "loss", value)
        put(handler, "step.ms", 1000 * value)
    assert scrape(handler) == {
        "mine_steps": ("counter", {"mine_steps_total": 3.5}),
        "mine_loss": ("gauge", {"mine_loss": 2.5}),
        "mine_step_seconds": ("summary", {"mine_step_seconds_sum": 3.5, "mine_step_seconds_count": 2.0}),
    }


def test_measured_functions_share_a_name(handler: PrometheusMetricHandler) -> None:
    """The function and the result are labels, so that one query covers all."""
    put(handler, "Bar.baz.success", 1)
    put(handler, "Bar.baz.duration.ms", 250)
    put(handler, "m.f.failure", 1)
    assert scrape(handler) == {
        "mine_calls": (
            "counter",
            {
                "mine_calls_total function=Bar.baz result=success": 1.0,
                "mine_calls_total function=m.f result=failure": 1.0,
            },
        ),
        "mine_call_seconds": (
            "summary",
            {"mine_call_seconds_sum function=Bar.baz": 0.25, "mine_call_seconds_count function=Bar.baz": 1.0},
        ),
    }


def test_any_name_and_any_label_can_be_written() -> None:
    """Characters that Prometheus does not allow in a name become underscores; a label may contain anything."""
    strange = 'a "b"\\\n{c},d=é'
    with leaving_nothing():
        handler = PrometheusMetricHandler(port=0, labels={"run-id": strange})
        put(handler, strange, 1, group="9 lives")
        put(handler, f"{strange}.success", 1, group="")
        found = scrape(handler)
        handler.close()
    assert found == {
        "_9_lives_a__b____c__d__": ("gauge", {f"_9_lives_a__b____c__d__ run_id={strange}": 1.0}),
        "_calls": ("counter", {f"_calls_total function={strange} result=success run_id={strange}": 1.0}),
    }


def test_numbers_that_are_not_finite_are_shown(handler: PrometheusMetricHandler) -> None:
    for name, value in (("nan", math.nan), ("up", math.inf), ("down", -math.inf), ("tiny", 5e-324), ("big", 1e300)):
        put(handler, name, value)
    found = {name: next(iter(samples.values())) for name, (_, samples) in scrape(handler).items()}
    assert math.isnan(found.pop("mine_nan"))
    assert found == {"mine_up": math.inf, "mine_down": -math.inf, "mine_tiny": 5e-324, "mine_big": 1e300}


def test_the_metrics_of_a_run_can_be_scraped() -> None:
    """Every line has the run id, and every known name its meaning."""
    settings = AgentSettings("run", "trainer", 1, 3)
    machine, view = AgentMachine(settings), MetricView(settings, 1e9)
    with leaving_nothing():
        handler = PrometheusMetricHandler(port=0, labels={"run_id": "r7"})
        for at, event in enumerate(
            [
                events.RunRequested(),
                events.GenerationFormed(Assignment(1, group_world_size=2, world_size=2)),
                events.WorkerStarted(1, 0, 100),
                events.WorkerExited(1, 0, 0),
                events.NodeCleared(1),
                events.RunEnded(Verdict(Outcome.SUCCEEDED, "all succeeded"), 5.0),
            ]
        ):
            for data in view.take(at, event, machine.step(event, at), machine.state):
                handler.emit(data)
        found = scrape(handler)
        page = handler.page()
        handler.close()
    run = "run_id=r7"
    state = "torchelastic_workers_state role=trainer run_id=r7 state="
    assert found["tenax_generation"] == ("gauge", {f"tenax_generation {run}": 1.0})
    assert found["tenax_world_size"][1] == {f"tenax_world_size {run}": 2.0}
    assert found["tenax_running_seconds"] == ("counter", {f"tenax_running_seconds_total {run}": 2.0})
    assert found["tenax_forming_seconds"][1] == {
        f"tenax_forming_seconds_sum {run}": 1.0,
        f"tenax_forming_seconds_count {run}": 1.0,
    }
    assert found["tenax_run_ended"][1] == {"tenax_run_ended_total outcome=succeeded run_id=r7": 1.0}
    assert found["torchelastic_workers_state"][1] == {f"{state}healthy": 0.0, f"{state}succeeded": 1.0}
    assert found["torchelastic_workers_run"][1] == {f"torchelastic_workers_run_total role=trainer {run}": 1.0}
    key = "torchelastic_calls_total function=SimpleElasticAgent.run result=success run_id=r7"
    assert found["torchelastic_calls"][1][key] == 1.0
    assert "# HELP tenax_nodes Nodes of the generation.\n# TYPE tenax_nodes gauge\n" in page
    explained = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP ")}
    typed = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    assert typed == explained


def test_a_name_has_one_type(handler: PrometheusMetricHandler) -> None:
    """If two names become the same one, their kinds must be equal; the second is rejected."""
    put(handler, "call_seconds", 1)
    with pytest.raises(ValueError, match="is a duration, but 'mine_call_seconds' is already a gauge; choose another"):
        put(handler, "f.duration.ms", 1)
    assert scrape(handler)["mine_call_seconds"] == ("gauge", {"mine_call_seconds": 1.0})


@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_counter_rejects_values_that_would_decrease_it(handler: PrometheusMetricHandler, value: float) -> None:
    """And NaN."""
    put(handler, "steps_total", 3)
    with pytest.raises(ValueError, match=r"the value of a counter cannot be .*; expected a number of at least 0"):
        put(handler, "steps_total", value)
    assert scrape(handler)["mine_steps"][1] == {"mine_steps_total": 3.0}


def test_the_number_of_series_is_limited(handler: PrometheusMetricHandler) -> None:
    """A number in a name would fill the memory of the agent, and of the Prometheus server."""
    for step in range(10_000):
        put(handler, f"loss_at_{step}", 1)
    with pytest.raises(ValueError, match="would exceed the maximum of 10000 series"):
        put(handler, "one_more", 1)
    put(handler, "loss_at_1", 2)
    assert len(scrape(handler)) == 10_000
