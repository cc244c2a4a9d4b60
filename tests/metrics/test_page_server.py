"""The page server, over real connections. Misbehaving clients: ``tests/io/http_server``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax.metrics._prometheus import PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    with leaving_nothing():
        made = PageServer(lambda: "hello\n", path="/page", content_type="text/plain")
        yield made
        made.close()
        made.close()


def request(server: PageServer, path: str = "/page", method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_served_at_its_path(server: PageServer) -> None:
    """With or without a query string."""
    assert request(server) == (200, "hello\n")
    assert request(server, "/page?x=1") == (200, "hello\n")
    assert server.url == f"http://127.0.0.1:{server.port}/page"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/pages", "GET", 404), ("/page", "POST", 405)]
)
def test_other_paths_and_methods_are_rejected(server: PageServer, path: str, method: str, status: int) -> None:
    assert request(server, path, method)[0] == status


def test_head_is_answered_without_a_body(server: PageServer) -> None:
    assert request(server, method="HEAD") == (200, "")


def test_simultaneous_requests_each_get_the_whole_page() -> None:
    page = "line\n" * 100_000
    found = []
    with leaving_nothing():
        server = PageServer(lambda: page, path="/page", content_type="text/plain")
        threads = [threading.Thread(target=lambda: found.append(request(server) == (200, page))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
    assert found == [True] * 8


_LEFT_OPEN = """
from tenax.metrics._prometheus import PageServer
server = PageServer(lambda: "", path="/page", content_type="text/plain")
print(server.port)
"""


@pytest.mark.process
def test_the_server_does_not_keep_a_process_alive() -> None:
    """A program that does not close it can exit."""
    done = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
