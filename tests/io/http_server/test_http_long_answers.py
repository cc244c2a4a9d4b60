"""Answers that take long: ones that others find out, and ones without an end. They hold up nobody."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kit.http import PATIENCE_S, heard_from, kube_probe, until_closed
from kit.processes import leaving_nothing, on_linux, until
from tenax._io.http.deferred import DeferredResponse
from tenax._io.http.message import Request, Response, text
from tenax._io.http.server import ClientLimits, HttpServer
from tenax._io.http.stream import Stream, event
from tenax._io.listen import listen

pytestmark = on_linux


class Served:
    """A server with a stream at /stream, an answer that comes later at /later, and one that is there at once."""

    def __init__(self, **options: Any) -> None:
        listener = listen("127.0.0.1", 0)
        self.port = int(listener.getsockname()[1])
        self.laters: list[DeferredResponse] = []
        self.streams: list[Stream] = []
        self.ended: list[Stream] = []
        self.server = HttpServer(listener, self._answer, name="server", **options)
        self.server.start()

    def _answer(self, request: Request) -> Response | DeferredResponse | Stream:
        if request.path == "/later":
            self.laters.append(DeferredResponse(float(request.params.get("within", PATIENCE_S))))
            return self.laters[-1]
        if request.path == "/stream":
            self.streams.append(Stream(self.ended.append, headers={"X-Ours": "yes"}))
            self.streams[-1].send(b"first\n")
            return self.streams[-1]
        if request.path == "/known":
            known = DeferredResponse(PATIENCE_S)
            known.respond(text(200, "known already"))
            return known
        return text(200, "at once")

    def ask(self, path: str, method: str = "GET") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        return sock

    def watch(self) -> socket.socket:
        """A stream that has been opened."""
        number = len(self.streams)
        sock = self.ask("/stream")
        until(lambda: len(self.streams) > number, "the stream")
        return sock

    def say(self, number: int, data: bytes) -> None:
        self.server.soon(lambda: self.streams[number].send(data))


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers; they are stopped after the test, and leave nothing."""
    made: list[Served] = []

    def start(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    with leaving_nothing():
        yield start
        for each in made:
            each.server.stop()


def heard_until(sock: socket.socket, part: bytes) -> bytes:
    data = bytearray()
    while part not in data[-len(part) - 65_536 :]:
        piece = sock.recv(65_536)
        assert piece, f"it ended after {len(data)} bytes, before {part!r}"
        data += piece
    return bytes(data)


def test_what_others_find_out_is_answered_when_they_have(serve: Callable[..., Served]) -> None:
    """From whatever thread; others are answered meanwhile; only the first answer counts."""
    served = serve()
    with served.ask("/later") as sock:
        until(lambda: served.laters, "the request")
        assert kube_probe(served.port).body == b"at once\n"
        giver = threading.Thread(target=lambda: [served.laters[0].respond(text(200, each)) for each in ("one", "two")])
        giver.start()
        assert heard_from(sock).body == b"one\n"
        giver.join()
    assert kube_probe(served.port, "/known").body == b"known already\n"


def test_a_head_has_no_body_however_late_the_answer_comes(serve: Callable[..., Served]) -> None:
    """But what a GET would be told of it. A stream is not opened for it."""
    served = serve()
    for path, told in (
        ("/", b"Content-Length: 8\r\n"),
        ("/known", b"Content-Length: 14\r\n"),
        ("/stream", b"X-Ours: yes"),
    ):
        with served.ask(path, "HEAD") as sock:
            data = b"".join(iter(lambda: sock.recv(65_536), b""))
        assert data.endswith(b"\r\n\r\n"), path
        assert told in data
    assert served.ended == served.streams


def test_an_answer_that_nobody_finds_is_not_waited_for_forever(serve: Callable[..., Served]) -> None:
    """Who asked is told how long it was; what comes after that is nobody's."""
    served = serve()
    heard = kube_probe(served.port, "/later?within=0.05")
    assert (heard.status, heard.body) == (503, b"no response within 0.05 s; retry\n")
    served.laters[0].respond(text(200, "too late"))
    assert kube_probe(served.port).status == 200


def test_who_waits_may_leave(serve: Callable[..., Served]) -> None:
    """Its place is free at once, and the answer is thrown away."""
    served = serve(client_limits=ClientLimits(deferred=1))
    with served.ask("/later"):
        until(lambda: served.laters, "the request")
        assert kube_probe(served.port, "/later").status == 503
    until(lambda: not served.server._connections, "the place to be free")
    served.laters[0].respond(text(200, "nobody"))
    with served.ask("/later") as sock:
        until(lambda: len(served.laters) == 3, "the request")
        served.laters[2].respond(text(200, "somebody"))
        assert heard_from(sock).body == b"somebody\n"


def test_a_stream_goes_on(serve: Callable[..., Served]) -> None:
    """What was said before it was open comes first; an event is a line; it ends when the server wants."""
    served = serve()
    with served.watch() as sock:
        head = heard_until(sock, b"first\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Ours: yes\r\n")
        assert b"Content-Length" not in head
        served.say(0, event("change", b"{}"))
        heard_until(sock, b"event: change\ndata: {}\n\n")
        served.server.soon(lambda: served.streams[0].end())
        assert until_closed(sock) == b""
    until(lambda: served.ended == served.streams, "the end to be told")


def test_a_silent_stream_shows_that_it_lives(serve: Callable[..., Served]) -> None:
    """More than once."""
    served = serve(client_limits=ClientLimits(heartbeat_s=0.02))
    with served.watch() as sock:
        heard_until(sock, b":\n\n:\n\n:\n\n")


def test_a_client_that_leaves_ends_its_stream(serve: Callable[..., Served]) -> None:
    """With nothing said: the closed connection alone is enough. With a reset, and by the book."""
    served = serve()
    for number, lingers in enumerate((b"\0\0\0\0\0\0\0\0", b"\1\0\0\0\0\0\0\0")):
        with served.watch() as sock:
            heard_until(sock, b"first\n")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers)
        until(lambda number=number: len(served.ended) == number + 1, "the end to be told")  # type: ignore[misc]
    served.say(0, b"to nobody")
    assert kube_probe(served.port).status == 200


def test_a_client_that_takes_nothing_loses_its_stream(serve: Callable[..., Served]) -> None:
    """By the number of bytes that it left; the others hear everything meanwhile."""
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 16))
    with served.watch() as stuck, served.watch() as reader:
        heard_until(reader, b"first\n")
        piece = b"x" * 32_767 + b"\n"
        said = 0
        while not served.ended:
            served.say(0, piece)
            served.say(1, piece)
            heard = 0
            while heard < len(piece):
                heard += len(reader.recv(len(piece) - heard))
            said += 1
            assert said < 4096, "it is kept although it takes nothing"
        assert served.ended == [served.streams[0]]
        served.say(1, b"still here")
        heard_until(reader, b"still here")
        assert stuck.fileno() >= 0


def test_a_client_that_stops_taking_loses_its_stream_after_a_while(serve: Callable[..., Served]) -> None:
    """By the time: what it left is not much, but does not move."""
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 30, response_s=0.1))
    with served.watch():
        served.say(0, bytes(32 << 20))
        until(lambda: served.ended, "the end to be told")


def test_a_slow_client_that_takes_on_keeps_its_stream(serve: Callable[..., Served]) -> None:
    """Little by little, for longer than one may be stuck."""
    served = serve(client_limits=ClientLimits(stream_bytes=1 << 30, response_s=PATIENCE_S))
    with served.watch() as sock:
        heard_until(sock, b"first\n")
        served.say(0, bytes(8 << 20) + b"end")
        heard_until(sock, b"end")
        assert not served.ended


def test_streams_leave_room_for_others(serve: Callable[..., Served]) -> None:
    """As many as may are let in, the next is told so, and whoever asks for something short is answered."""
    served = serve(client_limits=ClientLimits(connections=8, streams=4))
    with ExitStack() as stack:
        watching = [stack.enter_context(served.watch()) for _ in range(4)]
        for sock in watching:
            heard_until(sock, b"first\n")
        refused = kube_probe(served.port, "/stream")
        assert (refused.status, b"too many open streams (4)" in refused.body) == (503, True)
        until(lambda: len(served.ended) == 1, "the refused one to be told")
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(30)]
        assert kube_probe(served.port).status == 200
        assert len(silent) == 30
        for number, sock in enumerate(watching):
            served.say(number, b"again\n")
            heard_until(sock, b"again\n")


def test_a_stream_that_is_made_apart_is_refused(serve: Callable[..., Served]) -> None:
    """A thread of its own can only give a response."""
    served = serve(in_thread=lambda request: request.path == "/stream")
    assert kube_probe(served.port, "/stream").status == 500


def test_what_is_asked_for_before_the_end_is_done(serve: Callable[..., Served]) -> None:
    """A last word reaches who watches."""
    served = serve()
    with served.watch() as sock:
        heard_until(sock, b"first\n")
        served.say(0, b"farewell")
        served.server.stop()
        assert until_closed(sock) == b"farewell"
