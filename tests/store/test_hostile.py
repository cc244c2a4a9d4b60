"""Invalid, slow and many clients: each costs no more than its own connection.

In each test a valid client is served meanwhile. Memory is that of the server's process.
"""

from __future__ import annotations

import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kit.processes import on_linux, until
from store import requests as ask
from store.requests import Peer
from store.servers import our_server, torch_client

pytestmark = [on_linux, pytest.mark.process]

MIB = 1 << 20
IP_BIND_ADDRESS_NO_PORT = 24  # Linux: a port is chosen when it connects, so that addresses have ports enough


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's limit of open files to the maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_served(peer: Peer) -> bool:
    peer.send(ask.set_(b"/honest", b"value") + ask.get(b"/honest"))
    return peer.answers() == ask.text(b"value")


def test_clients_without_the_greeting_are_closed_at_once(resources: ExitStack) -> None:
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    noise = random.Random(7)
    for number in range(300):
        with Peer(server.port, greets=False) as peer:
            peer.send(noise.choice([b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01", noise.randbytes(50)]) + b"\xff" * 5)
            assert peer.is_closed_by_the_server()
        if number % 50 == 0:
            assert is_served(honest)
    assert server.counted("no_greeting") == 300
    assert is_served(honest)


def test_noise_after_a_valid_greeting_closes_only_that_connection(resources: ExitStack) -> None:
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    before = server.peak_memory()
    noise = random.Random(8)
    for _ in range(300):
        with Peer(server.port) as liar:
            liar.send(noise.randbytes(noise.randrange(1, 2000)))
            liar.sock.shutdown(socket.SHUT_WR)
            assert liar.is_closed_by_the_server()
    assert is_served(honest)
    assert server.peak_memory() - before < 32 * MIB


@pytest.mark.parametrize("length", [(8 << 20) + 1, 1 << 31, 1 << 40, (1 << 64) - 1])
def test_a_giant_length_is_refused_before_memory_is_used(length: int, resources: ExitStack) -> None:
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    before = server.peak_memory()
    size = length.to_bytes(8, "little")
    for command in (b"\x01", b"\x01" + ask.text(b"/k"), b"\x02" + ask.text(b"/k"), b"\x03", b"\x05", b"\x06", b"\x0b"):
        with Peer(server.port) as liar:
            liar.send(command + size)
            assert liar.is_closed_by_the_server()
    assert is_served(honest)
    assert server.peak_memory() - before < 8 * MIB


def test_incomplete_requests_do_not_delay_other_clients(resources: ExitStack) -> None:
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    request = ask.multi_set((b"/a", b"x" * 1000), (b"/b", b"y" * 1000))
    for at in range(1, len(request), 97):
        half = resources.enter_context(Peer(server.port))
        half.send(request[:at])
        assert is_served(honest)
    honest.send(ask.check(b"/a"))
    assert honest.answers() == b"\x01"


def test_a_client_without_a_greeting_is_closed_and_one_with_it_may_be_idle(resources: ExitStack) -> None:
    server = resources.enter_context(our_server(handshake_s=0.2))
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    silent = [resources.enter_context(Peer(server.port, greets=False)) for _ in range(20)]
    for number, slow in enumerate(silent):
        slow.send(ask.GREETING[: number % 5])
    assert all(slow.is_closed_by_the_server() for slow in silent)
    assert server.counted("no_greeting") == 20
    assert is_served(honest)


@pytest.mark.usefixtures("many_files")
def test_a_thousand_clients_are_served(resources: ExitStack) -> None:
    """Each sets a key, waits for all keys and reads them, as at the start of a large job."""
    server = resources.enter_context(our_server())
    count = 1000
    peers = [resources.enter_context(Peer(server.port)) for _ in range(count)]
    keys = [b"/%d" % number for number in range(count)]
    for number, peer in enumerate(peers):
        peer.send(ask.add(b"/arrived", 1))
        assert peer.receive(8) == ask.number(number + 1)
    for peer in peers[:50]:
        peer.send(ask.wait(*keys))
    for peer, key in zip(peers, keys, strict=True):
        peer.send(ask.set_(key, key))
    for peer in peers[:50]:
        assert peer.receive(1) == b"\x00"
    expected = b"".join(map(ask.text, keys))
    for peer in peers[:50]:
        peer.send(ask.multi_get(*keys))
        assert peer.receive(len(expected)) == expected
    for peer in peers:
        peer.send(ask.barrier(b"/end", count))
    assert all(peer.receive(1) == b"\x00" for peer in peers)


def test_without_free_descriptors_connected_clients_are_served_and_others_wait(resources: ExitStack) -> None:
    """The server does not spin: accepting in every round would fail thousands of times here."""
    server = resources.enter_context(our_server(descriptors=40))
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    crowd = []
    for _ in range(80):
        crowd.append(resources.enter_context(Peer(server.port, greets=False)))
        crowd[-1].send(ask.GREETING + ask.set_(b"/key", b"value"))  # with a request none of them may be evicted
    until(lambda: server.counted("out_of_room") > 0, "the server to run out of descriptors")
    for _ in range(500):
        assert is_served(honest)
    assert server.counted("out_of_room") < 100
    assert server.counted("accepted") < 40
    for peer in crowd[:-1]:
        peer.close()
    assert is_served(crowd[-1])


def test_a_client_beyond_the_connection_limit_is_served_when_one_closes(resources: ExitStack) -> None:
    server = resources.enter_context(our_server(connections=3))
    first, second, third = (resources.enter_context(Peer(server.port)) for _ in range(3))
    assert all(is_served(peer) for peer in (first, second, third))
    waiting = resources.enter_context(Peer(server.port))
    waiting.send(ask.add(b"/n", 1))
    assert is_served(first)
    assert server.counted("accepted") == 3
    second.close()
    assert waiting.receive(8) == ask.number(1)


def test_requests_of_a_client_that_reads_no_answers_are_not_read(resources: ExitStack) -> None:
    """100 MiB of unread answers; when the client reads, it gets every byte."""
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    slow = resources.enter_context(Peer(server.port))
    value = random.Random(9).randbytes(MIB)
    honest.send(ask.set_(b"/big", value))
    assert is_served(honest)
    before = server.peak_memory()
    slow.send(ask.get(b"/big") * 100)
    for _ in range(100):
        assert is_served(honest)
    assert server.peak_memory() - before < 24 * MIB
    for _ in range(100):
        assert slow.receive(8 + MIB) == ask.text(value)
    assert slow.answers() == b""


def test_the_largest_holder_is_dropped_at_the_memory_limit(resources: ExitStack) -> None:
    server = resources.enter_context(our_server(held_bytes=40 * MIB, value_bytes=16 * MIB))
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    small = resources.enter_context(Peer(server.port))
    small.send(ask.set_(b"/k", b"x" * MIB)[:-1])
    hogs = [resources.enter_context(Peer(server.port)) for _ in range(8)]
    before = server.peak_memory()
    for hog in hogs:
        try:
            hog.send(ask.set_(b"/k", b"x" * (12 * MIB))[:-1])
        except (ConnectionResetError, BrokenPipeError):
            continue
    until(lambda: server.counted("dropped_for_memory") >= 5, "the server to drop a client")
    assert is_served(honest)
    small.send(b"x")
    assert small.answers() == b""
    assert server.peak_memory() - before < 160 * MIB


def test_a_full_store_refuses_the_writer_and_serves_the_readers(resources: ExitStack) -> None:
    server = resources.enter_context(our_server(total_bytes=4 * MIB))
    honest = resources.enter_context(Peer(server.port))
    assert is_served(honest)
    with Peer(server.port) as greedy:
        with suppress(ConnectionResetError, BrokenPipeError):
            for number in range(10):
                greedy.send(ask.set_(b"/%d" % number, b"x" * MIB))
        assert greedy.is_closed_by_the_server()
    honest.send(ask.get(b"/honest"))
    assert honest.answers() == ask.text(b"value")
    honest.send(ask.delete(b"/0"))
    assert honest.answers() == ask.number(1)
    assert is_served(honest)


# --- floods -----------------------------------------------------------------------------------------------------------

CALLERS = [f"127.0.0.{number}" for number in range(1, 201)]


def flood(port: int, count: int, resources: ExitStack, sent: bytes = b"") -> list[socket.socket]:
    """Open ``count`` connections from several addresses of this host without waiting for the server."""
    made = []
    for number in range(count):
        sock = resources.enter_context(socket.socket())
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((CALLERS[number % len(CALLERS)], 0))
        with suppress(BlockingIOError):
            sock.connect(("127.0.0.1", port))
        if sent:
            with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
                sock.send(sent)
        made.append(sock)
    return made


def seconds_to_serve_a_torch_client(port: int) -> float:
    """Return how long torch's client takes to connect, set and get, without its import."""
    import torch.distributed  # noqa: F401

    begin = time.monotonic()
    store = torch_client(port)
    store.set("new client", "value")
    assert store.get("new client") == b"value"
    return time.monotonic() - begin


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("sent", [b"", ask.GREETING + ask.ping(b"abcd")], ids=["silent", "greeted"])
def test_ten_thousand_silent_connections_do_not_keep_others_out(sent: bytes, resources: ExitStack) -> None:
    """Connected clients and a new one are served, and memory is bounded."""
    server = resources.enter_context(our_server())
    honest = resources.enter_context(Peer(server.port))
    idle = resources.enter_context(Peer(server.port))  # as a worker's spare connection: used hours later
    assert is_served(honest)
    assert idle.answers() == b""
    before = server.peak_memory()
    for _ in range(10):
        flood(server.port, 1000, resources, sent)
        assert is_served(honest)
    until(lambda: server.counted("accepted") > 10_000, "all of them to be accepted")
    assert seconds_to_serve_a_torch_client(server.port) < 1.0
    assert is_served(honest)
    assert is_served(idle)
    assert server.peak_memory() - before < 64 * MIB
    assert server.counted("evicted_idle" if sent else "evicted_silent") > 5000


def test_idle_connections_are_closed_for_new_ones(resources: ExitStack) -> None:
    """Only those that have sent no request."""
    server = resources.enter_context(our_server(descriptors=300))
    workers = [resources.enter_context(Peer(server.port)) for _ in range(50)]
    assert all(is_served(worker) for worker in workers)
    flood(server.port, 600, resources, ask.GREETING)
    assert seconds_to_serve_a_torch_client(server.port) < 1.0
    assert all(is_served(worker) for worker in workers)
    assert server.counted("evicted_idle") > 300
    assert server.counted("out_of_room") == 0


def test_of_too_many_idle_connections_the_middle_ones_are_closed(resources: ExitStack) -> None:
    """The first stay, because workers keep spare connections, and so do the latest."""
    server = resources.enter_context(our_server(idle_per_address=4))
    made = []
    for _ in range(10):
        made.append(resources.enter_context(Peer(server.port)))
        assert made[-1].answers() == b""
    assert [peer.answers() for peer in made] == [b"", b"", *[None] * 6, b"", b""]
    assert server.counted("evicted_idle") == 6
