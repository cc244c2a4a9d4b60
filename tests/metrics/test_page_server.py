"""The page server, over real connections. Misbehaving readers: ``tests/io/http_server``."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from kit.processes import PATIENCE_S, leaving_nothing
from tenax.metrics._page_server import PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    with leaving_nothing():
        made = PageServer(lambda: "hello\n", path="/page", content_type="text/plain")
        yield made
        made.close()
        made.close()


def ask(server: PageServer, path: str = "/page", method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_served(server: PageServer) -> None:
    """To whoever asks for its path, with or without a question mark."""
    assert ask(server) == (200, "hello\n")
    assert ask(server, "/page?x=1") == (200, "hello\n")
    assert server.url == f"http://127.0.0.1:{server.port}/page"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/pages", "GET", 404), ("/page", "POST", 405)]
)
def test_nothing_else_is_served(server: PageServer, path: str, method: str, status: int) -> None:
    """Other paths are not there, and nobody can put anything."""
    assert ask(server, path, method)[0] == status


def test_head_is_answered_without_the_page(server: PageServer) -> None:
    """As HTTP wants it."""
    assert ask(server, method="HEAD") == (200, "")


def test_many_ask_at_once() -> None:
    """Each gets the whole page."""
    page = "line\n" * 100_000
    found = []
    with leaving_nothing():
        server = PageServer(lambda: page, path="/page", content_type="text/plain")
        threads = [threading.Thread(target=lambda: found.append(ask(server) == (200, page))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
    assert found == [True] * 8


_LEFT_OPEN = """
from tenax.metrics._page_server import PageServer
server = PageServer(lambda: "", path="/page", content_type="text/plain")
print(server.port)
"""


@pytest.mark.process
def test_it_does_not_keep_a_process_alive() -> None:
    """A program that ends without closing it ends."""
    done = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
