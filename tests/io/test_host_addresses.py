"""The addresses that a node announces: those from which its workers may connect to other hosts."""

from __future__ import annotations

import socket

import msgspec
import pytest

from kit.processes import on_linux
from tenax._core.link.server import with_seen_address
from tenax._core.messages import MAX_HOST_ADDRESSES, NodeReady
from tenax._io.host_addresses import host_addresses


def test_the_address_of_the_link_comes_first_without_its_interface() -> None:
    """It may be link-local if the endpoint is. Each address appears once."""
    found = host_addresses("fe80::7%eth0", 16)
    assert found[0] == "fe80::7"
    assert host_addresses("fe80::7", 1) == ("fe80::7",)
    assert len(set(found)) == len(found)


@on_linux
def test_loopback_and_link_local_addresses_are_not_announced() -> None:
    """Other hosts cannot reach them, or would reach another host."""
    for first in ("", "127.0.0.1", "::1"):
        found = host_addresses(first, 16)
        assert not [each for each in found if each.startswith(("127.", "fe80:", "169.254.")) or each == "::1"]


@on_linux
def test_the_default_source_address_is_announced() -> None:
    """The kernel returns it without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no route to other hosts")
        assert probe.getsockname()[0] in host_addresses("", 16)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ("192.0.2.9", ("192.0.2.9", "10.1.2.3")),
        ("10.1.2.3", ("10.1.2.3",)),
        ("127.0.0.1", ("10.1.2.3",)),
        ("", ("10.1.2.3",)),
    ],
)
def test_the_coordinator_adds_the_peer_address_of_the_link(seen: str, expected: tuple[str, ...]) -> None:
    """Behind NAT the node does not know it. A loopback address is not added."""
    ready = NodeReady(0, "here", 1, True, ("10.1.2.3",))
    assert with_seen_address(ready, seen) == msgspec.structs.replace(ready, addresses=expected)


def test_added_addresses_stay_within_the_limits_of_the_wire() -> None:
    """They are written to journals, which are read back with the same limits."""
    many = NodeReady(0, addresses=tuple(f"10.0.0.{number}" for number in range(MAX_HOST_ADDRESSES)))
    for ready in (many, msgspec.structs.replace(many, addresses=(*many.addresses, "10.9.9.9"))):
        added = with_seen_address(ready, "192.0.2.9")
        assert msgspec.json.decode(msgspec.json.encode(added), type=NodeReady) == added
    too_many = msgspec.structs.replace(many, addresses=many.addresses * 2)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(too_many), type=NodeReady)
