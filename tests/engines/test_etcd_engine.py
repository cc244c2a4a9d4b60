"""``LeaderProbe``: what proves that a leader is dead, and what does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from kit.processes import TIMEOUT_S
from tenax._core.leadership.keys import LeaderAddress
from tenax._engines.etcd.leader_address import LeaderProbe, address_towards, this_machine
from tenax._io.endpoint import Endpoint
from tenax._io.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address_of(listener: socket.socket) -> LeaderAddress:
    return LeaderAddress("node", "host", "127.0.0.1", listener.getsockname()[1], this_machine())


def probe(loop: Loop, address: LeaderAddress) -> str:
    """Return the outcome."""
    outcomes: list[str] = []

    def opened(sock: socket.socket) -> None:
        sock.close()
        outcomes.append("opened")

    LeaderProbe(
        loop, address, opened, lambda: outcomes.append("dead"), lambda why: outcomes.append(f"away: {why}")
    ).start()
    assert not outcomes, "never called from start()"
    until = loop.now() + TIMEOUT_S
    while not outcomes:
        assert loop.now() < until
        tick = loop.now() + 0.05
        loop.next_event(lambda tick=tick: tick)  # type: ignore[misc]
    (outcome,) = outcomes
    return outcome


def test_a_listening_leader_is_alive(loop: Loop, listener: socket.socket) -> None:
    assert probe(loop, address_of(listener)) == "opened"


def test_a_leader_whose_port_refuses_connections_is_dead(loop: Loop, listener: socket.socket) -> None:
    """The port stays bound, so that no other process can listen there meanwhile."""
    listener.shutdown(socket.SHUT_RDWR)
    assert probe(loop, address_of(listener)) == "dead"


def test_a_loopback_address_of_another_machine_proves_nothing(loop: Loop, listener: socket.socket) -> None:
    """That address is the probing host's own."""
    listener.shutdown(socket.SHUT_RDWR)
    elsewhere = msgspec.structs.replace(address_of(listener), machine="another boot of another system")
    assert probe(loop, elsewhere).startswith("away: host listens at the loopback address 127.0.0.1,")


def test_an_unusable_address_does_not_prove_death(loop: Loop, listener: socket.socket) -> None:
    unusable = msgspec.structs.replace(address_of(listener), addr="fe80::1%no-such-device")
    assert probe(loop, unusable).startswith("away: 'fe80::1%no-such-device' is not an IP address")


def test_a_closed_probe_calls_nothing(loop: Loop, listener: socket.socket) -> None:
    outcomes: list[object] = []
    for address in (address_of(listener), msgspec.structs.replace(address_of(listener), machine="another")):
        unwanted = LeaderProbe(loop, address, outcomes.append, lambda: outcomes.append("dead"), outcomes.append)
        unwanted.start()
        unwanted.close()
    assert probe(loop, address_of(listener)) == "opened"
    assert not outcomes


def test_the_local_address_on_the_route_to_an_endpoint() -> None:
    assert address_towards(Endpoint("127.0.0.1", 1)) == "127.0.0.1"
    assert address_towards(Endpoint("a-name-that-is-looked-up-elsewhere", 1)) == ""
