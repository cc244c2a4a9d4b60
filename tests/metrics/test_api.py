"""The parts of the API that TorchElastic does not have: the handler in use, fan-out, handlers from a text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenax import metrics
from tenax.metrics import FanOutMetricHandler, MetricData, MetricHandler, MetricsConfig, NullMetricHandler

DATA = MetricData(1.0, "g", "n", 1)


class Keep(MetricHandler):
    def __init__(self) -> None:
        self.kept: list[MetricData] = []
        self.is_closed = False

    def emit(self, metric_data: MetricData) -> None:
        self.kept.append(metric_data)

    def close(self) -> None:
        self.is_closed = True


class Broken(MetricHandler):
    def emit(self, metric_data: MetricData) -> None:
        raise OSError("full")

    def close(self) -> None:
        raise OSError("stuck")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of this process, restored after the test."""
    from tenax.metrics import api

    before = dict(api._handlers)
    yield
    api._handlers.clear()
    api._handlers.update(before)


@pytest.mark.usefixtures("handlers")
def test_no_handler_is_in_use_until_one_is_configured() -> None:
    """By default values are dropped, and handler_in_use() returns None."""
    assert metrics.handler_in_use("torchelastic") is None


@pytest.mark.usefixtures("handlers")
def test_the_handler_in_use_is_that_of_the_group_or_the_default() -> None:
    """Also when a group drops its values although the default does not."""
    default, own = Keep(), Keep()
    metrics.configure(default)
    metrics.configure(own, "mine")
    metrics.configure(NullMetricHandler(), "quiet")
    assert metrics.handler_in_use("torchelastic") is default
    assert metrics.handler_in_use("mine") is own
    assert metrics.handler_in_use("quiet") is None


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("wrong", ["x", None, Keep, print], ids=str)
def test_an_object_that_is_not_a_handler_is_rejected_at_once(wrong: object) -> None:
    """Not only by the next agent that uses it."""
    with pytest.raises(TypeError, match=r"is not a metric handler; expected an object with emit\(metric_data\)"):
        metrics.configure(wrong)  # type: ignore[arg-type]
    assert metrics.handler_in_use("torchelastic") is None


def test_a_fan_out_passes_each_value_to_all() -> None:
    """If one raises, the others still get it, and the exception reaches the caller."""
    first, last = Keep(), Keep()
    with pytest.raises(OSError, match="full"):
        FanOutMetricHandler([first, Broken(), last]).emit(DATA)
    assert first.kept == last.kept == [DATA]


def test_a_fan_out_closes_all() -> None:
    """Also handlers without close(), written for TorchElastic."""

    class Foreign:
        def emit(self, metric_data: MetricData) -> None: ...

    last = Keep()
    with pytest.raises(OSError, match="stuck"):
        FanOutMetricHandler([Broken(), Foreign(), last]).close()  # type: ignore[list-item]
    assert last.is_closed


@pytest.mark.usefixtures("handlers")
def test_initialize_metrics_creates_the_handlers_of_the_text(tmp_path: Path) -> None:
    """They serve all groups without their own handler."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    metrics.initialize_metrics(MetricsConfig({"handlers": f"jsonl:{first},jsonl:{second}"}))
    metrics.put_metric("n", 1, "mine")
    assert first.read_text() == second.read_text() != ""


@pytest.mark.usefixtures("handlers")
def test_initialize_metrics_closes_the_handlers_of_the_previous_call(tmp_path: Path) -> None:
    """So that the same text can be used twice, although a port can be bound once."""
    metrics.initialize_metrics(MetricsConfig({"handlers": "prometheus:0"}))
    before = metrics.handler_in_use("mine")
    assert isinstance(before, FanOutMetricHandler)
    page = before.handlers[0]
    assert isinstance(page, metrics.PrometheusMetricHandler)
    metrics.initialize_metrics(MetricsConfig({"handlers": f"prometheus:{page.port}"}))
    metrics.initialize_metrics(MetricsConfig({"handlers": f"jsonl:{tmp_path / 'm.jsonl'}"}))
    metrics.initialize_metrics(MetricsConfig({"handlers": "null"}))


@pytest.mark.usefixtures("handlers")
def test_initialize_metrics_that_fails_leaves_no_closed_handler_in_use(tmp_path: Path) -> None:
    """After an invalid text, values are dropped."""
    metrics.initialize_metrics(MetricsConfig({"handlers": f"jsonl:{tmp_path / 'm.jsonl'}"}))
    with pytest.raises(ValueError, match="unknown metric handler 'jasonl'"):
        metrics.initialize_metrics(MetricsConfig({"handlers": "jasonl"}))
    metrics.put_metric("n", 1, "mine")
    assert metrics.handler_in_use("mine") is None


@pytest.mark.process
def test_importing_the_package_imports_no_handler() -> None:
    """Neither sockets, threads nor SDKs."""
    program = (
        "import sys, tenax.metrics; "
        "heavy = {'socket', 'threading', 'opentelemetry', 'tenax.metrics._prometheus', 'http', 'inspect'}; "
        "print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    """Also those that are imported on first use."""
    assert [name for name in metrics.__all__ if not hasattr(metrics, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = metrics.nothing
