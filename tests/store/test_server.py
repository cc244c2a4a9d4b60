"""The server: stop, close, notices, addresses."""

from __future__ import annotations

import socket
import threading

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from store import requests as ask
from store.requests import Peer
from tenax._io.listen import listen
from tenax.store import StoreServer, TCPStore
from tenax.store._server import NOTICE_EVERY_S


def test_a_server_in_a_thread_leaves_nothing_behind() -> None:
    with leaving_nothing():
        with StoreServer.in_thread() as server, TCPStore(server.host, server.port, timeout=60) as store:
            store.set("key", "value")
            assert store.get("key") == b"value"
        server.close()  # once more does no harm


def test_closing_the_server_resets_all_connections() -> None:
    with StoreServer.in_thread() as server:
        peer = Peer(server.port)
        peer.send(ask.wait(b"/never"))
        assert peer.answers() == b""
    with pytest.raises(ConnectionResetError):
        peer.sock.recv(1)
    with pytest.raises(ConnectionRefusedError):
        Peer(server.port)
    peer.close()


def test_a_listener_shut_down_by_another_process_is_no_longer_watched() -> None:
    """Connected clients are still served, and the server does not spin."""
    listener = listen("127.0.0.1")
    copy = socket.socket(fileno=socket.dup(listener.fileno()))
    server = StoreServer(listener)
    serving = threading.Thread(target=server.serve)
    serving.start()
    with Peer(copy.getsockname()[1]) as peer:
        assert peer.answers() == b""
        copy.shutdown(socket.SHUT_RDWR)
        for _ in range(100):
            assert peer.answers() == b""
        assert server.counters.out_of_room == 1
    server.stop()
    serving.join(TIMEOUT_S)
    server.close()
    copy.close()


def test_rejected_connections_are_reported_in_one_line_at_most_once_per_interval() -> None:
    now = [1000.0]
    notices: list[str] = []
    listener = listen("127.0.0.1")
    server = StoreServer(listener, on_notice=notices.append, clock=lambda: now[0])
    serving = threading.Thread(target=server.serve)
    serving.start()
    port = listener.getsockname()[1]

    def send_garbage(count: int) -> None:
        for _ in range(count):
            with Peer(port, greets=False) as peer:
                peer.send(b"hello, is this a store?")
                assert peer.is_closed_by_the_server()

    send_garbage(10)
    assert len(notices) == 1
    now[0] += NOTICE_EVERY_S
    send_garbage(5)
    server.stop()
    serving.join(TIMEOUT_S)
    server.close()
    assert notices == [
        "the workers' store closed one connection, the last because it did not send the greeting of a store client",
        "the workers' store closed 10 connections, the last because it did not send the greeting of a store client",
    ]


@pytest.mark.parametrize(
    ("host", "callers"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("localhost", ["localhost"]),
        ("::1", ["::1"]),
        ("", ["127.0.0.1", "::1", "localhost"]),
    ],
)
def test_a_server_is_reached_at_the_address_it_was_bound_to(host: str, callers: list[str]) -> None:
    if not socket.has_dualstack_ipv6() and ":" in "".join([host, *callers]):
        pytest.skip("there is no IPv6 here")
    with StoreServer.in_thread(host) as server:
        for caller in callers:
            with TCPStore(caller, server.port, timeout=60) as store:
                assert store.add("n", 0) == 0


def test_a_port_that_is_taken_is_an_error() -> None:
    with StoreServer.in_thread() as server, pytest.raises(OSError, match="in use"):
        StoreServer.in_thread(port=server.port)
