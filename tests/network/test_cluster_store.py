"""Which clients the store of a multi-host run accepts: workers, from any address of their hosts."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from store import requests as ask
from store.users import CLIENT, UNPRIVILEGED_UID

from .cluster import Cluster, in_one_line
from .lab import Family, Host, Lab, requires_ipv6, requires_netns

pytestmark = requires_netns
STORE_PORT = 23456


def is_served(host: Host, address: str, source: str = "") -> bool:
    """Return True if the store there answers a process of root on this host."""

    def call() -> bool:
        origin = (source, 0) if source else None
        with socket.create_connection((address, STORE_PORT), 30, source_address=origin) as sock:
            with suppress(ConnectionResetError, BrokenPipeError):
                sock.sendall(ask.GREETING + ask.ping(b"abcd"))
                return sock.recv(4) == b"abcd"
            return False

    return host.inside(call)


@pytest.mark.parametrize("family", ["v4", pytest.param("v6", marks=requires_ipv6)])
def test_only_members_can_use_the_store(make_lab: Callable[..., Lab], family: Family) -> None:
    """From each of their addresses. Another host, and another user of rank 0's host, are rejected, and the console of
    rank 0 prints the option that would accept them."""
    lab = make_lab(3, family=family)
    first, second, outsider = lab.hosts
    base, separator, _ = second.address.rpartition(":" if family == "v6" else ".")
    other = f"{base}{separator}77"
    second.network.ip(f"addr add {other}/{'64 nodad' if family == 'v6' else '24'} dev eth0")
    cluster = Cluster(lab, 2, conf={"store_port": STORE_PORT})
    (agent,) = cluster.start(first, conf={"rank": 0})
    cluster.start(second, conf={"rank": 1})
    generation = cluster.until_at_work(2)
    assert is_served(first, first.address)
    assert is_served(second, first.address, second.address)
    assert is_served(second, first.address, other)
    assert not is_served(outsider, first.address)
    cluster.until_printed(agent, "is not an address of a node of this generation")
    assert f"store_allow={outsider.address}" in in_one_line(agent.err)
    request = ask.GREETING + ask.ping(b"abcd")
    command = [sys.executable, "-S", "-c", CLIENT, first.address, str(STORE_PORT), str(UNPRIVILEGED_UID), request.hex()]
    assert first.run(command).wait().out.strip() == ""
    cluster.until_worked_for(generation, 0.1)
    cluster.finish()


def test_store_allow_accepts_other_hosts(lab: Lab) -> None:
    """By their network, although they are not members."""
    first, second, outsider = lab.hosts
    network = f"{first.address.rpartition('.')[0]}.0/24"
    cluster = Cluster(lab, 2, conf={"store_port": STORE_PORT, "store_allow": f"192.168.0.0/16+{network}"})
    cluster.start(first, conf={"rank": 0})
    cluster.start(second, conf={"rank": 1})
    cluster.until_at_work(2)
    assert is_served(outsider, first.address)
    cluster.finish()
