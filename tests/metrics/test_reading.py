"""Readings: the kind of a value follows from its name."""

from __future__ import annotations

import pytest

from tenax.metrics import MetricData
from tenax.metrics._reading import Reading, number, read


@pytest.mark.parametrize(
    ("group", "name", "reading"),
    [
        ("mine", "Bar.baz.success", Reading("counter", "calls", {"function": "Bar.baz", "result": "success"}, 1500)),
        ("mine", "m.f.failure", Reading("counter", "calls", {"function": "m.f", "result": "failure"}, 1500)),
        ("mine", "m.f.duration.ms", Reading("duration", "call", {"function": "m.f"}, 1.5, "seconds")),
        ("mine", "step_ms", Reading("duration", "step", {}, 1.5, "seconds")),
        ("mine", "step.ms", Reading("duration", "step", {}, 1.5, "seconds")),
        ("mine", "steps_total", Reading("counter", "steps", {}, 1500)),
        ("mine", "steps.total", Reading("counter", "steps", {}, 1500)),
        ("mine", "loss", Reading("gauge", "loss", {}, 1500)),
        ("mine", "success", Reading("gauge", "success", {}, 1500)),
        ("mine", "_ms", Reading("gauge", "_ms", {}, 1500)),
        ("mine", "workers.a.flakiness", Reading("gauge", "workers.a.flakiness", {}, 1500)),
        ("mine", "running_s", Reading("gauge", "running_s", {}, 1500)),
        ("torchelastic", "workers.a.b.flakiness", Reading("gauge", "workers_flakiness", {"role": "a.b"}, 1500)),
        ("torchelastic", "workers.a.stopped",
         Reading("gauge", "workers_state", {"role": "a", "state": "stopped"}, 1500)),
        ("torchelastic", "workers.a.run_total", Reading("counter", "workers_run", {"role": "a"}, 1500)),
        ("tenax", "worker_failures.signal", Reading("counter", "worker_failures", {"kind": "signal"}, 1500)),
        ("tenax", "running_s", Reading("counter", "running", {}, 1500, "seconds")),
    ],
)  # fmt: skip
def test_the_kind_of_a_value_follows_from_its_name(group: str, name: str, reading: Reading) -> None:
    """Counters, gauges and durations; variable parts become labels."""
    assert read(MetricData(0.0, group, name, 1500)) == reading


def test_a_value_may_be_any_kind_of_number() -> None:
    """An int stays an int; everything else is converted to float."""

    class Scalar:
        def __float__(self) -> float:
            return 0.25

    assert repr(number(MetricData(0.0, "g", "n", 2))) == "2"
    assert number(MetricData(0.0, "g", "n", Scalar())) == 0.25  # type: ignore[arg-type]
    assert number(MetricData(0.0, "g", "n", True)) == 1


@pytest.mark.parametrize("value", ["many", None, [1]])
def test_a_value_that_is_not_a_number_is_rejected(value: object) -> None:
    """The message names the metric."""
    with pytest.raises(ValueError, match=r"the metric 'n' of the group 'g' has the value .*; expected a number"):
        read(MetricData(0.0, "g", "n", value))  # type: ignore[arg-type]
