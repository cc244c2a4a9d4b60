"""OpenTelemetry: a small collector decodes the real OTLP that arrives over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing, until
from tenax.metrics import MetricData, OpenTelemetryMetricHandler

pytest.importorskip("opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed")
service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")


class Collector:
    """Receives OTLP requests in a thread."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = service.ExportMetricsServiceRequest()
                request.ParseFromString(body)
                collector.requests.append((self.path, request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(TIMEOUT_S)
        self._server.server_close()

    def metrics(self) -> dict[str, Any]:
        """The last request's, by name."""
        (resource,) = self.requests[-1][1].resource_metrics
        (scope,) = resource.scope_metrics
        assert scope.scope.name == "tenax"
        return {metric.name: metric for metric in scope.metrics}


@contextmanager
def collecting() -> Iterator[Collector]:
    with leaving_nothing():
        collector = Collector()
        try:
            yield collector
        finally:
            collector.close()


def attributes(point: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def test_values_arrive_at_the_endpoint() -> None:
    """A counter as a sum, a gauge as its last value, a duration as a histogram in seconds; labels are attributes."""
    with collecting() as collector:
        handler = OpenTelemetryMetricHandler(collector.endpoint, {"run_id": "r7"})
        for value in (1, 2.5):
            handler.emit(MetricData(1.0, "mine", "steps_total", value))
            handler.emit(MetricData(1.0, "mine", "loss", value))
            handler.emit(MetricData(1.0, "mine", "Bar.baz.duration.ms", 1000 * value))
        handler.emit(MetricData(1.0, "torchelastic", "workers.trainer.healthy", 1))
        handler.close()
        handler.close()
    assert [path for path, _ in collector.requests] == ["/v1/metrics"]
    found = collector.metrics()
    assert set(found) == {"mine.steps", "mine.loss", "mine.call", "torchelastic.workers_state"}
    (steps,) = found["mine.steps"].sum.data_points
    assert (steps.as_double, found["mine.steps"].sum.is_monotonic, attributes(steps)) == (3.5, True, {"run_id": "r7"})
    (loss,) = found["mine.loss"].gauge.data_points
    assert loss.as_double == 2.5
    (call,) = found["mine.call"].histogram.data_points
    assert (call.sum, call.count, found["mine.call"].unit) == (3.5, 2, "s")
    assert attributes(call) == {"function": "Bar.baz", "run_id": "r7"}
    (state,) = found["torchelastic.workers_state"].gauge.data_points
    assert attributes(state) == {"role": "trainer", "run_id": "r7", "state": "healthy"}


def test_the_service_has_a_name() -> None:
    """Without one, a back end shows an unknown service."""
    with collecting() as collector:
        handler = OpenTelemetryMetricHandler(collector.endpoint)
        handler.emit(MetricData(1.0, "mine", "loss", 1))
        handler.close()
    (resource,) = collector.requests[0][1].resource_metrics
    assert {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"] == "tenax"


def test_any_name_can_be_sent() -> None:
    """Characters that OpenTelemetry does not allow become underscores."""
    with collecting() as collector:
        handler = OpenTelemetryMetricHandler(f"{collector.endpoint}/v1/metrics")
        handler.emit(MetricData(1.0, "9 lives", "é" * 300, 1))
        handler.close()
    assert set(collector.metrics()) == {f"m_9_lives.{'_' * 300}"[:255]}


def test_closing_without_a_collector_times_out() -> None:
    """The process continues, and the SDK's thread ends a moment later at most."""
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
    threads = set(threading.enumerate())
    with leaving_nothing():
        handler = OpenTelemetryMetricHandler(f"http://127.0.0.1:{port}", timeout_s=0.1)
        handler.emit(MetricData(1.0, "mine", "loss", 1))
        handler.close()
        until(lambda: not set(threading.enumerate()) - threads, "the end of the SDK's thread")


def test_closing_with_a_silent_collector_times_out() -> None:
    """The SDK's thread ends a moment later."""
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        handler = OpenTelemetryMetricHandler(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        handler.emit(MetricData(1.0, "mine", "loss", 1))
        handler.close()
    until(lambda: not set(threading.enumerate()) - threads, "the end of the SDK's thread")


_GLOBAL = """
import json
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tenax.metrics import MetricData, OpenTelemetryMetricHandler

handler = OpenTelemetryMetricHandler()
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
handler.emit(MetricData(1.0, "mine", "loss", 2))
handler.close()
handler.emit(MetricData(1.0, "mine", "loss", 3))
data = json.loads(reader.get_metrics_data().to_json())
metric = data["resource_metrics"][0]["scope_metrics"][0]["metrics"][0]
print(json.dumps([metric["name"], metric["data"]["data_points"][0]["value"]]))
"""


@pytest.mark.process
def test_without_an_endpoint_the_global_provider_is_used() -> None:
    """Whenever it is set; closing the handler does not close it."""
    done = subprocess.run(
        [sys.executable, "-c", _GLOBAL], capture_output=True, text=True, check=False, env={**os.environ}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["mine.loss", 3]


_BY_NAME = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from tenax.metrics import make_handlers

def show():
    try:
        (handler,) = make_handlers("otel", env={})
        print(handler.where)
    except ValueError as error:
        print(str(error).partition(';')[0])

show()
metrics.set_meter_provider(PROVIDER)
show()
"""


@pytest.mark.process
@pytest.mark.parametrize(("provider", "is_good"), [("MeterProvider()", True), ("metrics.NoOpMeterProvider()", False)])
def test_by_name_a_global_provider_must_be_set_first(provider: str, is_good: bool) -> None:
    """The default and a no-op provider are rejected, because values would be dropped silently."""
    command = [sys.executable, "-c", _BY_NAME.replace("PROVIDER", provider)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    rejected = "could not create the metric handler 'otel': no endpoint is set"
    assert done.stdout.splitlines() == [rejected, "the global meter provider" if is_good else rejected]
