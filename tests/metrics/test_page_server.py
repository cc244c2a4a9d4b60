"""The page server, over real connections: good readers, bad ones, and too many."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import pytest

from tenax.metrics.page_server import PageServer
from watching import PATIENCE_S, leaving_nothing, until


@pytest.fixture
def server() -> Iterator[PageServer]:
    with leaving_nothing():
        made = PageServer(
            lambda: "hello\n", path="/page", content_type="text/plain", most_readers=2, most_seconds=10 * PATIENCE_S
        )
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


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def all_of(connection: socket.socket) -> bytes:
    """Everything until the other side hangs up."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:  # we had said more than it had read
        pass
    return found


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


def test_a_question_may_come_in_pieces(server: PageServer) -> None:
    """Byte by byte, as over a bad line."""
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for each in b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n":
            connection.send(bytes([each]))
        assert all_of(connection).endswith(b"\r\n\r\nhello\n")


@pytest.mark.parametrize("question", [b"\x16\x03\x01 tls?\n\n", b"\n\n", b"GET /page\n\n"])
def test_what_is_not_http_is_told_so(server: PageServer, question: bytes) -> None:
    """And costs nothing."""
    with connect(server) as connection:
        connection.sendall(question)
        assert all_of(connection).startswith(b"HTTP/1.1 400 ")
    assert ask(server)[0] == 200


def test_a_question_without_end_is_hung_up_on(server: PageServer) -> None:
    """After a few kilobytes nobody wants to know how it goes on."""
    with connect(server) as connection:
        connection.sendall(b"GET /page HTTP/1.1\r\nX: " + b"x" * 8192)
        assert all_of(connection) == b""
    assert ask(server)[0] == 200


def test_too_many_readers_are_hung_up_on(server: PageServer) -> None:
    """The third of two; when one has gone, there is room again."""
    with connect(server) as first, connect(server) as second:
        with connect(server) as third:
            assert all_of(third) == b""
        second.sendall(b"GET /page HTTP/1.0\r\n\r\n")
        assert all_of(second).endswith(b"hello\n")
        first.close()
        until(lambda: _status(server) == 200, "room for another")


def _status(server: PageServer, path: str = "/page") -> int:
    """What is answered; 0 if we are hung up on."""
    try:
        return ask(server, path)[0]
    except (ConnectionError, HTTPException):
        return 0


def test_a_slow_reader_is_hung_up_on() -> None:
    """Whoever says nothing, or takes nothing, is gone after a while, and others are served meanwhile."""
    big = "x" * (64 << 20)  # more than the system keeps for anybody
    with leaving_nothing():
        server = PageServer(lambda: big, path="/page", content_type="text/plain", most_seconds=0.3)
        try:
            with connect(server) as silent, connect(server) as lazy:
                lazy.sendall(b"GET /page HTTP/1.1\r\n\r\n")
                until(lambda: _status(server, "/other") == 404, "an answer for somebody else")
                assert all_of(silent) == b""
                assert len(all_of(lazy)) < len(big)
        finally:
            server.close()


def test_closing_hangs_up_on_everybody() -> None:
    """Also on those who are still being served."""
    with leaving_nothing():
        server = PageServer(lambda: "", path="/page", content_type="text/plain")
        with connect(server) as connection:
            assert ask(server)[0] == 200
            server.close()
            assert all_of(connection) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(server)


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
from tenax.metrics.page_server import PageServer
server = PageServer(lambda: "", path="/page", content_type="text/plain")
print(server.port)
"""


def test_it_does_not_keep_a_process_alive() -> None:
    """A program that ends without closing it ends."""
    done = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


_NO_DESCRIPTOR = """
import os, resource, select, socket, time
from tenax.metrics.page_server import PageServer

server = PageServer(lambda: "hello", path="/page", content_type="text/plain")
client = socket.socket()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
client.connect(("127.0.0.1", server.port))
client.sendall(b"GET /page HTTP/1.0\\r\\n\\r\\n")
used = time.process_time()
assert not select.select([client], [], [], 0.3)[0]
used = time.process_time() - used
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert select.select([client], [], [], 30)[0]
print(client.recv(1000)[-5:].decode(), used < 0.15)
"""


def test_without_a_descriptor_it_waits_and_does_not_spin() -> None:
    """A reader who cannot be let in now is let in when there is room, and the processor has a rest meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", _NO_DESCRIPTOR], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("hello True", 0), done.stderr


def test_descriptors_are_not_inherited(server: PageServer) -> None:
    """A worker that the process starts does not hold the port."""
    assert not server._socket.get_inheritable()
    assert select.select([server._socket], [], [], 0)[0] == []
