"""The addresses that a node announces: those from which other hosts may see its workers."""

from __future__ import annotations

import socket

import pytest

from tenax.host_addresses import host_addresses
from watching import on_linux


def test_the_address_of_the_link_comes_first_and_without_its_interface() -> None:
    """It is the most likely one, and may be link-local if the endpoint is; each address appears once."""
    found = host_addresses("fe80::7%eth0", 16)
    assert found[0] == "fe80::7"
    assert host_addresses("fe80::7", 1) == ("fe80::7",)
    assert len(set(found)) == len(found)


@on_linux
def test_loopback_and_link_local_addresses_are_not_announced() -> None:
    """Other hosts do not see them, or see another host's."""
    for first in ("", "127.0.0.1", "::1"):
        found = host_addresses(first, 16)
        assert not [each for each in found if each.startswith(("127.", "fe80:", "169.254.")) or each == "::1"]


@on_linux
def test_the_address_from_which_this_host_reaches_others_is_among_them() -> None:
    """Asked of the kernel, without a packet being sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no way to others")
        assert probe.getsockname()[0] in host_addresses("", 16)
