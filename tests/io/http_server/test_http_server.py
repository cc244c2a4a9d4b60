"""The HTTP server: whoever hangs around, who asks is answered."""

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

from kit.http import PATIENCE_S, heard_from, kube_probe, raw, until_closed
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
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers; they are stopped after the test, and leave nothing."""
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


def test_it_answers_on_both_protocols(serve: Callable[..., Served]) -> None:
    """IPv4 and, where the machine has it, IPv6."""
    served = serve()
    assert kube_probe(served.port).body == b"hello\n"
    if socket.has_dualstack_ipv6():
        assert kube_probe(served.port, host="::1").body == b"hello\n"


def test_a_request_may_come_byte_by_byte(serve: Callable[..., Served]) -> None:
    """And is answered when it is whole."""
    with serve().connect() as sock:
        for byte in b"GET / HTTP/1.1\r\nHost: h\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert heard_from(sock).status == 200


def test_an_answer_is_not_lost_to_what_the_client_still_sends(serve: Callable[..., Served]) -> None:
    """A body that nobody reads does not turn the answer into a reset."""
    served = serve()
    for _ in range(20):
        assert (
            raw(served.port, b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 60000\r\n\r\n" + b"x" * 60_000).status
            == 200
        )


def test_who_only_connects_is_no_trouble(serve: Callable[..., Served]) -> None:
    """A TCP probe connects and leaves, or leaves with a reset."""
    served = serve()
    for _ in range(50):
        with served.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert kube_probe(served.port).status == 200


def test_silent_clients_do_not_keep_others_out(serve: Callable[..., Served]) -> None:
    """Far more than there is room for: the newest is always let in, and the number of connections stays bounded."""
    served = serve(client_limits=ClientLimits(connections=8, request_s=PATIENCE_S))
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(100)]
        for sock in silent:
            sock.sendall(b"GET / HTT")
        assert kube_probe(served.port).status == 200
        until(lambda: len(served.server._connections) <= 8, "room")
        dropped = sum(_is_closed(sock) for sock in silent)
        assert dropped >= 92


def test_silent_connections_of_one_address_do_not_push_out_another(serve: Callable[..., Served]) -> None:
    """A slow client keeps its connection while another address opens far more than there is room for."""
    served = serve(client_limits=ClientLimits(connections=8, request_s=PATIENCE_S))
    with served.connect() as slow, ExitStack() as stack:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE_S, ("127.0.0.2", 0)))
        assert kube_probe(served.port).status == 200
        slow.sendall(b"Host: h\r\n\r\n")
        assert heard_from(slow).status == 200


def test_a_slow_client_is_told_so_and_dropped(serve: Callable[..., Served]) -> None:
    """One that has begun to ask is told; one that has not is just dropped."""
    served = serve(client_limits=ClientLimits(request_s=0.05))
    with served.connect() as slow, served.connect() as silent:
        slow.sendall(b"GET / HTT")
        assert heard_from(slow).status == 408
        assert until_closed(silent) == b""


def test_a_client_that_sends_a_byte_now_and_then_is_dropped_in_time(serve: Callable[..., Served]) -> None:
    """The time limit is for the whole request, not for each of its bytes."""
    served = serve(client_limits=ClientLimits(request_s=0.2))
    with served.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        slow.settimeout(0.01)
        answer = b""
        until_s = time.monotonic() + PATIENCE_S
        while not answer:
            assert time.monotonic() < until_s
            with suppress(TimeoutError):
                slow.sendall(b"a")
                answer = slow.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_is_dropped(serve: Callable[..., Served]) -> None:
    """The answer is longer than all buffers; nobody takes it."""
    served = serve(lambda _: Response(body=bytes(32 << 20)), client_limits=ClientLimits(response_s=0.05))
    with served.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: not served.server._connections, "the connection to be dropped")


def test_a_client_that_never_stops_sending_is_dropped(serve: Callable[..., Served]) -> None:
    """Without a request, and after its answer."""
    served = serve(client_limits=ClientLimits(response_s=PATIENCE_S))
    for beginning in (b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"):
        with served.connect() as sock:
            sock.sendall(beginning)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                pour(sock)
    assert kube_probe(served.port).status == 200


def test_garbage_is_answered_and_forgotten(serve: Callable[..., Served]) -> None:
    """TLS, binary, a page of nothing."""
    served = serve()
    for garbage in (b"\x16\x03\x01\0", b"\0" * 5000, b"\r\n" * 9000, b"GET / HTTP/9\r\n\r\n"):
        assert raw(served.port, garbage).status in (400, 431)
    assert kube_probe(served.port).status == 200


def test_an_answer_that_raises_is_an_answer(serve: Callable[..., Served]) -> None:
    """500 and one line; the next one is served."""

    def fail(_: Request) -> Response:
        raise RuntimeError("no\nsecond line")

    served = serve(fail)
    for _ in range(2):
        heard = kube_probe(served.port)
        assert (heard.status, heard.body) == (500, b"RuntimeError: no\n")


def test_an_answer_made_apart_holds_up_nobody(serve: Callable[..., Served]) -> None:
    """Others are answered meanwhile; when too many are being made, the next is refused."""
    go_on = threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/slow":
            go_on.wait(PATIENCE_S)
        return text(200, request.path)

    served = serve(
        answer, in_thread=lambda request: request.path == "/slow", client_limits=ClientLimits(threads_per_path=2)
    )
    with served.connect() as first, served.connect() as second:
        for sock in (first, second):
            sock.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: len(served.server._in_threads.get("/slow", ())) == 2, "both to be on their way")
        assert kube_probe(served.port, "/quick").body == b"/quick\n"
        assert kube_probe(served.port, "/slow").status == 503
        go_on.set()
        assert heard_from(first).body == heard_from(second).body == b"/slow\n"


def test_who_asked_may_be_gone_when_the_answer_comes(serve: Callable[..., Served]) -> None:
    """An answer made apart that nobody waits for is thrown away, and the next one is answered."""
    go_on, here = threading.Event(), threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/slow":
            here.set()
            go_on.wait(PATIENCE_S)
        return text(200, request.path)

    served = serve(answer, in_thread=lambda request: request.path == "/slow")
    with served.connect() as impatient:
        impatient.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        assert here.wait(PATIENCE_S)
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    go_on.set()
    until(lambda: not served.server._in_threads, "the answer to be made")
    assert kube_probe(served.port, "/quick").body == b"/quick\n"
    assert kube_probe(served.port, "/slow").body == b"/slow\n"


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_answer_that_wants_to_exit_is_an_answer(serve: Callable[..., Served], in_thread: bool) -> None:
    """More often than there are slots: none of them is lost."""

    def leave(_: Request) -> Response:
        sys.exit(3)

    served = serve(leave, in_thread=lambda _: in_thread, client_limits=ClientLimits(threads_per_path=1))
    for _ in range(3):
        heard = kube_probe(served.port)
        assert (heard.status, heard.body) == (500, b"SystemExit: 3\n")


def test_answers_that_hang_keep_nobody_from_asking_for_another(serve: Callable[..., Served]) -> None:
    """The limit is for each path, and who is refused is told which one, and for how long."""
    go_on = threading.Event()

    def answer(request: Request) -> Response:
        if request.path == "/stuck":
            go_on.wait(PATIENCE_S)
        return text(200, request.path)

    served = serve(answer, in_thread=lambda _: True, client_limits=ClientLimits(threads_per_path=2))
    with served.connect() as first, served.connect() as second:
        for sock in (first, second):
            sock.sendall(b"POST /stuck HTTP/1.1\r\nHost: h\r\n\r\n")
        until(lambda: len(served.server._in_threads.get("/stuck", ())) == 2, "both to be on their way")
        heard = kube_probe(served.port, "/stuck")
        assert heard.status == 503
        assert heard.body.startswith(b"2 requests for /stuck are unfinished, the oldest for ")
        assert kube_probe(served.port, "/other").body == b"/other\n"
        go_on.set()
        assert heard_from(first).body == heard_from(second).body == b"/stuck\n"


def test_a_body_is_read_up_to_its_limit(serve: Callable[..., Served]) -> None:
    """Whole if it fits, refused if not."""
    served = serve(lambda request: Response(body=request.body[::-1]), limits=Limits(body_bytes=1 << 20))
    body = bytes(range(256)) * 4096
    assert (
        raw(served.port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body).body
        == body[::-1]
    )
    assert raw(served.port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1048577\r\n\r\n").status == 413


def test_stopping_closes_what_is_open(serve: Callable[..., Served]) -> None:
    """Also a connection in the middle of a request; and a server that never started can be stopped."""
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
    """When the server has stopped, the port is free, whoever was forked meanwhile."""
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


def pour(sock: socket.socket) -> None:
    """Far more than all buffers hold."""
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
def test_without_a_descriptor_it_waits_and_does_not_spin() -> None:
    """A client who cannot be let in now is let in when there is room, and the processor has a rest meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", _NO_DESCRIPTOR], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("hello True", 0), done.stderr
