"""The HTTP server: no client can keep another one from being answered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from kit.http import TIMEOUT_S, kube_probe, raw, receive_response, until_closed
from kit.processes import forks_with_threads, leaving_nothing, on_linux, until
from tenax._io.http.message import Limits, Request, Response, text
from tenax._io.http.server import ClientLimits, HttpServer
from tenax._io.listen import listen

pytestmark = on_linux


def hello(_: Request) -> Response:
    return text(200, "hello")


class Served:
    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers. They are stopped after the test and leave nothing behind."""
    servers: list[HttpServer] = []

    def start(answer: Callable[[Request], Response] = hello, **options: object) -> Served:
        listener = listen("", 0)
        port = int(listener.getsockname()[1])
        servers.append(HttpServer(listener, answer, name="server", **options))  # type: ignore[arg-type]
        servers[-1].start()
        return Served(servers[-1], port)

    with leaving_nothing():
        yield start
        for server in servers:
            server.stop()


def test_it_answers_over_ipv4_and_ipv6(serve: Callable[..., Served]) -> None:
    served = serve()
    assert kube_probe(served.port).body == b"hello\n"
    if socket.has_dualstack_ipv6():
        assert kube_probe(served.port, host="::1").body == b"hello\n"


def test_a_request_may_arrive_byte_by_byte(serve: Callable[..., Served]) -> None:
    with serve().connect() as sock:
        for byte in b"GET / HTTP/1.1\r\nHost: h\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert receive_response(sock).status == 200


def test_the_response_is_not_lost_if_the_client_still_sends(serve: Callable[..., Served]) -> None:
    """An unread body does not reset the connection."""
    served = serve()
    for _ in range(20):
        assert (
            raw(served.port, b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60_000).status
            == 200
        )


def test_connecting_without_a_request_is_harmless(serve: Callable[..., Served]) -> None:
    """A TCP probe connects and closes, possibly with a reset."""
    served = serve()
    for _ in range(50):
        with served.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert kube_probe(served.port).status == 200


def test_silent_clients_do_not_block_new_ones(serve: Callable[..., Served]) -> None:
    """With far more than the maximum, the newest is accepted and the number of connections stays bounded."""
    served = serve(client_limits=ClientLimits(connections=8, request_s=TIMEOUT_S))
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(100)]
        for sock in silent:
            sock.sendall(b"GET / HTT")
        assert kube_probe(served.port).status == 200
        until(lambda: len(served.server._connections) <= 8, "the maximum number of connections")
        dropped = sum(_is_closed(sock) for sock in silent)
        assert dropped >= 92


def test_silent_connections_of_one_address_do_not_displace_another(serve: Callable[..., Served]) -> None:
    """A slow client keeps its connection while another address opens far more than the maximum."""
    served = serve(client_limits=ClientLimits(connections=8, request_s=TIMEOUT_S))
    with served.connect() as slow, ExitStack() as stack:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S, ("127.0.0.2", 0)))
        assert kube_probe(served.port).status == 200
        slow.sendall(b"Host: h\r\n\r\n")
        assert receive_response(slow).status == 200


def test_a_slow_client_gets_a_408_and_is_disconnected(serve: Callable[..., Served]) -> None:
    """A client that has sent nothing is only disconnected."""
    served = serve(client_limits=ClientLimits(request_s=0.05))
    with served.connect() as slow, served.connect() as silent:
        slow.sendall(b"GET / HTT")
        assert receive_response(slow).status == 408
        assert until_closed(silent) == b""


def test_a_client_that_sends_single_bytes_is_disconnected_in_time(serve: Callable[..., Served]) -> None:
    """The time limit applies to the whole request, not to each byte."""
    served = serve(client_limits=ClientLimits(request_s=0.2))
    with served.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        slow.settimeout(0.01)
        answer = b""
        until_s = time.monotonic() + TIMEOUT_S
        while not answer:
            assert time.monotonic() < until_s
            with suppress(TimeoutError):
                slow.sendall(b"a")
                answer = slow.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_is_disconnected(serve: Callable[..., Served]) -> None:
    """The response is larger than all buffers."""
    served = serve(lambda _: Response(body=bytes(32 << 20)), client_limits=ClientLimits(response_s=0.05))
    with served.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: not served.server._connections, "the connection to be dropped")


def test_a_client_that_never_stops_sending_is_disconnected(serve: Callable[..., Served]) -> None:
    """Without a request, and after its response."""
    served = serve(client_limits=ClientLimits(response_s=TIMEOUT_S))
    for beginning in (b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"):
        with served.connect() as sock:
            sock.sendall(beginning)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                send_endlessly(sock)
    assert kube_probe(served.port).status == 200


def test_garbage_gets_an_error_response(serve: Callable[..., Served]) -> None:
    """TLS, binary data, empty lines."""
    served = serve()
    for garbage in (b"\x16\x03\x01\0", b"\0" * 5000, b"\r\n" * 9000, b"GET / HTTP/9\r\n\r\n"):
        assert raw(served.port, garbage).status in (400, 431)
    assert kube_probe(served.port).status == 200


def test_an_exception_of_the_handler_becomes_a_500(serve: Callable[..., Served]) -> None:
    """With one line of text. The next request is answered."""

    def fail(_: Request) -> Response:
        raise RuntimeError("no\nsecond line")

    served = serve(fail)
    for _ in range(2):
        response = kube_probe(served.port)
        assert (response.status, response.body) == (500, b"RuntimeError: no\n")


def test_a_request_in_a_thread_does_not_block_others(serve: Callable[..., Served]) -> None:
    """At the maximum number of threads for a path, the next request for it is refused."""
    may_end = threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/slow":
            may_end.wait(TIMEOUT_S)
        return text(200, request.path)

    served = serve(
        answer, in_thread=lambda request: request.path == "/slow", client_limits=ClientLimits(threads_per_path=2)
    )
    with served.connect() as first, served.connect() as second:
        for sock in (first, second):
            sock.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: [path for path, _ in served.server._in_threads] == ["/slow"] * 2, "both to be running")
        assert kube_probe(served.port, "/quick").body == b"/quick\n"
        assert kube_probe(served.port, "/slow").status == 503
        may_end.set()
        assert receive_response(first).body == receive_response(second).body == b"/slow\n"


def test_a_client_may_disconnect_before_its_response_is_ready(serve: Callable[..., Served]) -> None:
    """The response is discarded, and the next request is answered."""
    may_end, entered = threading.Event(), threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/slow":
            entered.set()
            may_end.wait(TIMEOUT_S)
        return text(200, request.path)

    served = serve(answer, in_thread=lambda request: request.path == "/slow")
    with served.connect() as impatient:
        impatient.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        assert entered.wait(TIMEOUT_S)
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    may_end.set()
    until(lambda: not served.server._in_threads, "the handler to return")
    assert kube_probe(served.port, "/quick").body == b"/quick\n"
    assert kube_probe(served.port, "/slow").body == b"/slow\n"


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_exit_in_the_handler_becomes_a_500(serve: Callable[..., Served], in_thread: bool) -> None:
    """More often than there are slots: no slot is lost."""

    def exit_process(_: Request) -> Response:
        sys.exit(3)

    served = serve(exit_process, in_thread=lambda _: in_thread, client_limits=ClientLimits(threads_per_path=1))
    for _ in range(3):
        response = kube_probe(served.port)
        assert (response.status, response.body) == (500, b"SystemExit: 3\n")


def test_hanging_requests_of_one_path_do_not_block_other_paths(serve: Callable[..., Served]) -> None:
    """The limit is per path, and the error names the path and for how long it hangs."""
    may_end = threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/stuck":
            may_end.wait(TIMEOUT_S)
        return text(200, request.path)

    served = serve(answer, in_thread=lambda _: True, client_limits=ClientLimits(threads_per_path=2))
    with served.connect() as first, served.connect() as second:
        for sock in (first, second):
            sock.sendall(b"POST /stuck HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: [path for path, _ in served.server._in_threads] == ["/stuck"] * 2, "both to be running")
        response = kube_probe(served.port, "/stuck")
        assert response.status == 503
        assert response.body.startswith(b"2 requests for /stuck are unfinished, the oldest for ")
        assert kube_probe(served.port, "/other").body == b"/other\n"
        may_end.set()
        assert receive_response(first).body == receive_response(second).body == b"/stuck\n"


def test_a_body_is_read_up_to_its_limit(serve: Callable[..., Served]) -> None:
    """A larger one is refused."""
    served = serve(lambda request: Response(body=request.body[::-1]), limits=Limits(body_bytes=1 << 20))
    body = bytes(range(256)) * 4096
    assert (
        raw(served.port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body).body
        == body[::-1]
    )
    assert raw(served.port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1048577\r\n\r\n").status == 413


def test_stop_closes_all_connections(serve: Callable[..., Served]) -> None:
    """Including one in the middle of a request. A server that never started can be stopped."""
    served = serve()
    with served.connect() as sock:
        sock.sendall(b"GET / HT")
        served.server.stop()
        assert until_closed(sock) == b""
    with pytest.raises(ConnectionRefusedError):
        served.connect()
    HttpServer(listen("", 0), hello, name="never").stop()


@pytest.mark.process
@forks_with_threads
def test_a_forked_process_does_not_hold_the_port(serve: Callable[..., Served]) -> None:
    """The port is free when the server has stopped, even if a process was forked meanwhile."""
    served = serve()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.send(b"here")
        theirs.recv(1)
        os._exit(0)
    try:
        with ours, theirs:
            ours.recv(4)
            served.server.stop()
            listen("", served.port).close()
    finally:
        os.waitpid(pid, 0)


def send_endlessly(sock: socket.socket) -> None:
    """Send far more than all buffers hold."""
    for _ in range(4096):
        sock.sendall(b"A" * 65_536)


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


_NO_DESCRIPTOR = """
import os, resource, select, socket, time
from tenax._io.http.message import text
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen

listener = listen("127.0.0.1")
port = listener.getsockname()[1]
server = HttpServer(listener, lambda _: text(200, "hello"), name="server")
server.start()
client = socket.socket()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
used_up = max(map(int, os.listdir("/proc/self/fd")))  # that of the listing itself: the next free one
resource.setrlimit(resource.RLIMIT_NOFILE, (used_up, hard))
client.connect(("127.0.0.1", port))
client.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
used = time.process_time()
assert not select.select([client], [], [], 0.3)[0]
used = time.process_time() - used
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert select.select([client], [], [], 30)[0]
print(client.recv(1000).split()[-1].decode(), used < 0.15)
"""


@pytest.mark.process
def test_without_free_descriptors_it_waits_without_spinning() -> None:
    """A client is accepted once a descriptor is free, and the wait costs no CPU time."""
    done = subprocess.run(
        [sys.executable, "-c", _NO_DESCRIPTOR], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("hello True", 0), done.stderr
