"""Deferred responses and streams: they do not block other clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kit.http import TIMEOUT_S, kube_probe, receive_response, until_closed
from kit.processes import leaving_nothing, on_linux, until
from tenax._io.http.message import Request, Response, text
from tenax._io.http.server import ClientLimits, DeferredResponse, HttpServer, Stream, event
from tenax._io.listen import listen

pytestmark = on_linux


class Served:
    """A server with a stream at /stream, a deferred response at /later, and an immediate one elsewhere."""

    def __init__(self, **options: Any) -> None:
        listener = listen("127.0.0.1", 0)
        self.port = int(listener.getsockname()[1])
        self.deferred: list[DeferredResponse] = []
        self.streams: list[Stream] = []
        self.ended: list[Stream] = []
        self.server = HttpServer(listener, self._answer, name="server", **options)
        self.server.start()

    def _answer(self, request: Request) -> Response | DeferredResponse | Stream:
        if request.path == "/later":
            self.deferred.append(DeferredResponse(float(request.params.get("within", TIMEOUT_S))))
            return self.deferred[-1]
        if request.path == "/stream":
            self.streams.append(Stream(self.ended.append, headers={"X-Ours": "yes"}))
            self.streams[-1].send(b"first\n")
            return self.streams[-1]
        if request.path == "/known":
            known = DeferredResponse(TIMEOUT_S)
            known.respond(text(200, "known already"))
            return known
        return text(200, "at once")

    def request(self, path: str, method: str = "GET") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        return sock

    def watch(self) -> socket.socket:
        """Return the socket of an open stream."""
        number = len(self.streams)
        sock = self.request("/stream")
        until(lambda: len(self.streams) > number, "the stream")
        return sock

    def send(self, number: int, data: bytes) -> None:
        self.server.soon(lambda: self.streams[number].send(data))


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers. They are stopped after the test and leave nothing behind."""
    started: list[Served] = []

    def start(**options: Any) -> Served:
        started.append(Served(**options))
        return started[-1]

    with leaving_nothing():
        yield start
        for each in started:
            each.server.stop()


def receive_until(sock: socket.socket, part: bytes) -> bytes:
    data = bytearray()
    while part not in data[-len(part) - 65_536 :]:
        piece = sock.recv(65_536)
        assert piece, f"it ended after {len(data)} bytes, before {part!r}"
        data += piece
    return bytes(data)


def test_a_deferred_response_is_sent_when_it_is_set(serve: Callable[..., Served]) -> None:
    """From any thread; other clients are answered meanwhile; only the first response counts."""
    served = serve()
    with served.request("/later") as sock:
        until(lambda: served.deferred, "the request")
        assert kube_probe(served.port).body == b"at once\n"
        thread = threading.Thread(
            target=lambda: [served.deferred[0].respond(text(200, each)) for each in ("one", "two")]
        )
        thread.start()
        assert receive_response(sock).body == b"one\n"
        thread.join()
    assert kube_probe(served.port, "/known").body == b"known already\n"


def test_a_head_request_gets_no_body(serve: Callable[..., Served]) -> None:
    """But the headers of a GET, also of a deferred response. No stream is opened."""
    served = serve()
    for path, header in (
        ("/", b"Content-Length: 8\r\n"),
        ("/known", b"Content-Length: 14\r\n"),
        ("/stream", b"X-Ours: yes"),
    ):
        with served.request(path, "HEAD") as sock:
            data = b"".join(iter(lambda: sock.recv(65_536), b""))
        assert data.endswith(b"\r\n\r\n"), path
        assert header in data
    assert served.ended == served.streams


def test_a_deferred_response_that_is_never_set_times_out(serve: Callable[..., Served]) -> None:
    """The error contains the time. A response after that is discarded."""
    served = serve()
    response = kube_probe(served.port, "/later?within=0.05")
    assert (response.status, response.body) == (503, b"no response within 0.05 s; retry\n")
    served.deferred[0].respond(text(200, "too late"))
    assert kube_probe(served.port).status == 200


def test_a_waiting_client_may_disconnect(serve: Callable[..., Served]) -> None:
    """Its slot is free at once, and its response is discarded."""
    served = serve(client_limits=ClientLimits(deferred=1))
    with served.request("/later"):
        until(lambda: served.deferred, "the request")
        assert kube_probe(served.port, "/later").status == 503
    until(lambda: not served.server._connections, "the connection to be closed")
    served.deferred[0].respond(text(200, "discarded"))
    with served.request("/later") as sock:
        until(lambda: len(served.deferred) == 3, "the request")
        served.deferred[2].respond(text(200, "sent"))
        assert receive_response(sock).body == b"sent\n"


def test_a_stream_sends_until_the_server_ends_it(serve: Callable[..., Served]) -> None:
    """Data from before the stream was open comes first."""
    served = serve()
    with served.watch() as sock:
        head = receive_until(sock, b"first\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Ours: yes\r\n")
        assert b"Content-Length" not in head
        served.send(0, event("change", b"{}"))
        receive_until(sock, b"event: change\ndata: {}\n\n")
        served.server.soon(lambda: served.streams[0].end())
        assert until_closed(sock) == b""
    until(lambda: served.ended == served.streams, "the end to be reported")


def test_a_silent_stream_sends_heartbeats(serve: Callable[..., Served]) -> None:
    served = serve(client_limits=ClientLimits(heartbeat_s=0.02))
    with served.watch() as sock:
        receive_until(sock, b":\n\n:\n\n:\n\n")


def test_a_client_that_leaves_ends_its_stream(serve: Callable[..., Served]) -> None:
    """Without data to send. With a normal close, and with a reset."""
    served = serve()
    for number, lingers in enumerate((b"\0\0\0\0\0\0\0\0", b"\1\0\0\0\0\0\0\0")):
        with served.watch() as sock:
            receive_until(sock, b"first\n")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers)
        until(lambda number=number: len(served.ended) == number + 1, "the end to be reported")  # type: ignore[misc]
    served.send(0, b"discarded")
    assert kube_probe(served.port).status == 200


def test_a_client_that_reads_nothing_is_disconnected_at_the_size_limit(serve: Callable[..., Served]) -> None:
    """Other clients receive everything meanwhile."""
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 16))
    with served.watch() as stuck, served.watch() as reader:
        receive_until(reader, b"first\n")
        piece = b"x" * 32_767 + b"\n"
        sent = 0
        while not served.ended:
            served.send(0, piece)
            served.send(1, piece)
            size = 0
            while size < len(piece):
                size += len(reader.recv(len(piece) - size))
            sent += 1
            assert sent < 4096, "the client is still connected"
        assert served.ended == [served.streams[0]]
        served.send(1, b"still here")
        receive_until(reader, b"still here")
        assert stuck.fileno() >= 0


def test_a_client_that_stops_reading_is_disconnected_at_the_time_limit(serve: Callable[..., Served]) -> None:
    """The unsent data is below the size limit."""
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 30, response_s=0.1))
    with served.watch():
        served.send(0, bytes(32 << 20))
        until(lambda: served.ended, "the end to be reported")


def test_a_slow_client_that_keeps_reading_keeps_its_stream(serve: Callable[..., Served]) -> None:
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 30, response_s=TIMEOUT_S))
    with served.watch() as sock:
        receive_until(sock, b"first\n")
        served.send(0, bytes(8 << 20) + b"end")
        receive_until(sock, b"end")
        assert not served.ended


def test_streams_leave_connections_for_other_requests(serve: Callable[..., Served]) -> None:
    """At the maximum number of streams the next one is refused, and short requests are answered."""
    served = serve(client_limits=ClientLimits(connections=8, streams=4))
    with ExitStack() as stack:
        watching = [stack.enter_context(served.watch()) for _ in range(4)]
        for sock in watching:
            receive_until(sock, b"first\n")
        refused = kube_probe(served.port, "/stream")
        assert (refused.status, b"too many open streams (4)" in refused.body) == (503, True)
        until(lambda: len(served.ended) == 1, "the end of the refused stream to be reported")
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(30)]
        assert kube_probe(served.port).status == 200
        assert len(silent) == 30
        for number, sock in enumerate(watching):
            served.send(number, b"again\n")
            receive_until(sock, b"again\n")


def test_a_handler_in_a_thread_cannot_return_a_stream(serve: Callable[..., Served]) -> None:
    """Only a response."""
    served = serve(in_thread=lambda request: request.path == "/stream")
    assert kube_probe(served.port, "/stream").status == 500


def test_data_sent_before_stop_is_delivered(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.watch() as sock:
        receive_until(sock, b"first\n")
        served.send(0, b"farewell")
        served.server.stop()
        assert until_closed(sock) == b"farewell"
