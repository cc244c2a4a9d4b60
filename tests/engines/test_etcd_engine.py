"""A knock at a leader's door (``_engines/etcd/leader_address.py``): what proves its death, and what does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from tenax._engines.etcd.leader_address import LeaderAddress, LeaderProbe, address_towards, this_machine
from tenax._io.endpoint import Endpoint
from tenax._io.loop import Loop

PATIENCE_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def place_of(door: socket.socket) -> LeaderAddress:
    return LeaderAddress("node", "host", "127.0.0.1", door.getsockname()[1], this_machine())


def knock(loop: Loop, place: LeaderAddress) -> str:
    """What came of it."""
    outcomes: list[str] = []

    def opened(sock: socket.socket) -> None:
        sock.close()
        outcomes.append("opened")

    LeaderProbe(
        loop, place, opened, lambda: outcomes.append("dead"), lambda why: outcomes.append(f"away: {why}")
    ).start()
    assert not outcomes, "never from within"
    until = loop.now() + PATIENCE_S
    while not outcomes:
        assert loop.now() < until
        tick = loop.now() + 0.05
        loop.next_event(lambda tick=tick: tick)  # type: ignore[misc]
    (outcome,) = outcomes
    return outcome


def test_somebody_listens(loop: Loop, door: socket.socket) -> None:
    assert knock(loop, place_of(door)) == "opened"


def test_nobody_listens_any_more(loop: Loop, door: socket.socket) -> None:
    """The port stays taken, so that nobody else can open it meanwhile."""
    door.shutdown(socket.SHUT_RDWR)
    assert knock(loop, place_of(door)) == "dead"


def test_a_loopback_address_of_another_machine_proves_nothing(loop: Loop, door: socket.socket) -> None:
    """Whoever knocks there knocks at its own door."""
    door.shutdown(socket.SHUT_RDWR)
    elsewhere = msgspec.structs.replace(place_of(door), machine="another boot of another system")
    assert knock(loop, elsewhere).startswith("away: host listens at the loopback address 127.0.0.1,")


def test_an_address_that_is_none_is_no_death(loop: Loop, door: socket.socket) -> None:
    strange = msgspec.structs.replace(place_of(door), addr="fe80::1%no-such-device")
    assert knock(loop, strange).startswith("away: 'fe80::1%no-such-device' is not an IP address")


def test_a_knock_that_is_not_wanted_any_more_says_nothing(loop: Loop, door: socket.socket) -> None:
    outcomes: list[object] = []
    for place in (place_of(door), msgspec.structs.replace(place_of(door), machine="another")):
        unwanted = LeaderProbe(loop, place, outcomes.append, lambda: outcomes.append("dead"), outcomes.append)
        unwanted.start()
        unwanted.close()
    assert knock(loop, place_of(door)) == "opened"
    assert not outcomes


def test_the_address_on_the_way_to_an_endpoint() -> None:
    assert address_towards(Endpoint("127.0.0.1", 1)) == "127.0.0.1"
    assert address_towards(Endpoint("a-name-that-is-looked-up-elsewhere", 1)) == ""
