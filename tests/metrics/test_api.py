"""What is ours in the API: which handler is in use, several at once, handlers from a text."""

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
    """The process's handlers, as they were before the test."""
    from tenax.metrics import api

    before = dict(api._handlers)
    yield
    api._handlers.clear()
    api._handlers.update(before)


@pytest.mark.usefixtures("handlers")
def test_nobody_is_in_use_until_somebody_is_configured() -> None:
    """By default values are thrown away, and whoever asks is told so."""
    assert metrics.handler_in_use("torchelastic") is None


@pytest.mark.usefixtures("handlers")
def test_the_handler_in_use_is_the_group_s_or_the_default() -> None:
    """Also when a group throws its values away although the default keeps them."""
    default, own = Keep(), Keep()
    metrics.configure(default)
    metrics.configure(own, "mine")
    metrics.configure(NullMetricHandler(), "quiet")
    assert metrics.handler_in_use("torchelastic") is default
    assert metrics.handler_in_use("mine") is own
    assert metrics.handler_in_use("quiet") is None


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("wrong", ["x", None, Keep, print], ids=str)
def test_what_is_no_handler_is_refused_at_once(wrong: object) -> None:
    """And not by the next agent that wants to use it."""
    with pytest.raises(TypeError, match=r"is no metric handler; expected an object with emit\(metric_data\)"):
        metrics.configure(wrong)  # type: ignore[arg-type]
    assert metrics.handler_in_use("torchelastic") is None


def test_a_fan_out_gives_each_value_to_all() -> None:
    """One that raises costs the others nothing, and the caller hears of it."""
    first, last = Keep(), Keep()
    with pytest.raises(OSError, match="full"):
        FanOutMetricHandler([first, Broken(), last]).emit(DATA)
    assert first.kept == last.kept == [DATA]


def test_a_fan_out_closes_all() -> None:
    """Also one that has no close of its own, as handlers written for TorchElastic."""

    class Foreign:
        def emit(self, metric_data: MetricData) -> None: ...

    last = Keep()
    with pytest.raises(OSError, match="stuck"):
        FanOutMetricHandler([Broken(), Foreign(), last]).close()  # type: ignore[list-item]
    assert last.is_closed


@pytest.mark.usefixtures("handlers")
def test_initialize_metrics_makes_what_the_text_names(tmp_path: Path) -> None:
    """All groups without a handler of their own are served by them."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    metrics.initialize_metrics(MetricsConfig({"handlers": f"jsonl:{first},jsonl:{second}"}))
    metrics.put_metric("n", 1, "mine")
    assert first.read_text() == second.read_text() != ""


@pytest.mark.usefixtures("handlers")
def test_initialize_metrics_again_closes_what_it_made(tmp_path: Path) -> None:
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
    """After a text that cannot be used, values are thrown away again."""
    metrics.initialize_metrics(MetricsConfig({"handlers": f"jsonl:{tmp_path / 'm.jsonl'}"}))
    with pytest.raises(ValueError, match="unknown metric handler 'jasonl'"):
        metrics.initialize_metrics(MetricsConfig({"handlers": "jasonl"}))
    metrics.put_metric("n", 1, "mine")
    assert metrics.handler_in_use("mine") is None


@pytest.mark.process
def test_importing_the_package_imports_no_handler() -> None:
    """Sockets, threads and SDKs are for those who use them."""
    program = (
        "import sys, tenax.metrics; "
        "heavy = {'socket', 'threading', 'opentelemetry', 'tenax.metrics._prometheus', 'http', 'inspect'}; "
        "print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    """Also those that are imported when they are asked for."""
    assert [name for name in metrics.__all__ if not hasattr(metrics, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = metrics.nothing
