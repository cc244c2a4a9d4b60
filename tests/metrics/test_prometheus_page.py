"""The page for Prometheus, over real connections. Misbehaving clients: ``tests/io/http_server``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax.metrics import MetricData, PrometheusMetricHandler


@pytest.fixture
def server() -> Iterator[PrometheusMetricHandler]:
    with leaving_nothing():
        made = PrometheusMetricHandler(0)
        made.emit(MetricData(0.0, "mine", "loss", 2.5))
        yield made
        made.close()
        made.close()


def request(server: PrometheusMetricHandler, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_served_at_its_path(server: PrometheusMetricHandler) -> None:
    """With or without a query string."""
    assert request(server) == (200, "# TYPE mine_loss gauge\nmine_loss 2.5\n")
    assert request(server, "/metrics?x=1") == (200, "# TYPE mine_loss gauge\nmine_loss 2.5\n")
    assert server.where == f"http://127.0.0.1:{server.port}/metrics"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/metricss", "GET", 404), ("/metrics", "POST", 405)]
)
def test_other_paths_and_methods_are_rejected(
    server: PrometheusMetricHandler, path: str, method: str, status: int
) -> None:
    assert request(server, path, method)[0] == status


def test_head_is_answered_without_a_body(server: PrometheusMetricHandler) -> None:
    assert request(server, method="HEAD") == (200, "")


def test_simultaneous_requests_each_get_the_whole_page() -> None:
    found = []
    with leaving_nothing():
        server = PrometheusMetricHandler(0)
        for number in range(9_000):
            server.emit(MetricData(0.0, "mine", f"loss_{number}", 2.5))
        page = server.page()
        threads = [threading.Thread(target=lambda: found.append(request(server) == (200, page))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
    assert found == [True] * 8


_LEFT_OPEN = """
from tenax.metrics import PrometheusMetricHandler
server = PrometheusMetricHandler(0)
print(server.port)
"""


@pytest.mark.process
def test_the_server_does_not_keep_a_process_alive() -> None:
    """A program that does not close it can exit."""
    done = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
