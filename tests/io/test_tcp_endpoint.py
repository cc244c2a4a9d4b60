"""The endpoint: parsing, name lookup, and listeners."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import leaving_nothing, needs_root
from kit.tcp import own_endpoint, wait_readable
from tenax._io.endpoint import DEFAULT_PORT, Address, Endpoint, Lookup
from tenax._io.listen import open_listeners
from tenax._io.loop import Loop

GOOD = [
    ("host", "host", DEFAULT_PORT),
    ("host:1", "host", 1),
    ("host:65535", "host", 65535),
    ("host:", "host", DEFAULT_PORT),
    (" host:80 ", "host", 80),
    ("a.b-c.example:80", "a.b-c.example", 80),
    ("1.2.3.4", "1.2.3.4", DEFAULT_PORT),
    ("1.2.3.4:80", "1.2.3.4", 80),
    ("::1", "::1", DEFAULT_PORT),
    ("fe80::1%eth0", "fe80::1%eth0", DEFAULT_PORT),
    ("[::1]", "::1", DEFAULT_PORT),
    ("[::1]:80", "::1", 80),
    ("[2001:db8::7]:80", "2001:db8::7", 80),
]


@pytest.mark.parametrize(("text", "host", "port"), GOOD, ids=[case[0] for case in GOOD])
def test_endpoints_are_parsed(text: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse(text)
    assert (endpoint.host, endpoint.port) == (host, port)
    again = Endpoint.parse(str(endpoint))
    assert (again.host, again.port) == (host, port), "str() can be parsed again"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ":", ":80", "host:0", "host:65536", "host:x", "host:-1", "host:1.5", "host: 80", "host:８０"),
        *("[]", "[]:80", "[::1", "[::1]80", "[::1]:x", "[::1]:0", "host:80:90", "host:" + "9" * 5000),
    ],
    ids=repr,
)
def test_an_invalid_endpoint_raises_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the rendezvous endpoint is .*; expected HOST or HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("host", "is_address", "is_loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.9.9.9", True, True),
        ("::1", True, True),
        ("localhost", False, True),
        ("10.0.0.1", True, False),
        ("2001:db8::1", True, False),
        ("node0", False, False),
        ("127.0.0.1.example", False, False),
    ],
)
def test_addresses_and_loopback_are_recognized(host: str, is_address: bool, is_loopback: bool) -> None:
    endpoint = Endpoint(host, 80)
    assert (endpoint.is_address, endpoint.is_loopback) == (is_address, is_loopback)


# --- looking up -------------------------------------------------------------------------------------------------------


class Answer:
    def __init__(self, endpoint: str) -> None:
        self.loop = Loop()
        self.found: list[Address] = []
        self.failed = ""
        self.lookup = Lookup(self.loop, Endpoint.parse(endpoint), self.found.extend, self._on_failed)
        self.lookup.start()

    def _on_failed(self, why: str) -> None:
        self.failed = why

    def wait(self) -> Answer:
        until = self.loop.now() + 30
        self.loop.next_event(lambda: 0.0 if self.found or self.failed else until)
        self.loop.close()
        return self


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:80", "10.1.2.3"])
def test_an_address_needs_no_lookup(text: str) -> None:
    with leaving_nothing():
        answer = Answer(text)
        assert [address[0] for _, address in answer.found] == [Endpoint.parse(text).host]
        answer.loop.close()


def test_a_name_is_looked_up_in_the_background() -> None:
    answer = Answer("localhost:80")
    assert not answer.found
    answer.wait()
    assert {str(address[0]) for _, address in answer.found} <= {"127.0.0.1", "::1"}
    assert answer.found


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 70 + ".invalid", "a..b", "\udc80"])
def test_a_failed_lookup_is_reported_with_a_reason(name: str) -> None:
    answer = Answer(f"{name}:80").wait()
    assert answer.failed
    assert not answer.found


def test_the_answer_of_a_closed_lookup_is_dropped() -> None:
    import threading

    before = set(threading.enumerate())
    with leaving_nothing():
        answer = Answer("localhost:80")
        answer.lookup.close()
        answer.lookup.close()
        for thread in set(threading.enumerate()) - before:
            thread.join()
        answer.loop.run_calls()
        answer.loop.close()
    assert not answer.found


# --- listeners --------------------------------------------------------------------------------------------------------


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for sock in opened:
        sock.close()


def addresses(*hosts: str, port: int = 0) -> list[Address]:
    return [(socket.AF_INET6, (host, port, 0, 0)) if ":" in host else (socket.AF_INET, (host, port)) for host in hosts]


def names(sockets: list[socket.socket]) -> list[str]:
    return [sock.getsockname()[0] for sock in sockets]


def test_it_listens_at_the_addresses_of_this_host(listeners: list[socket.socket]) -> None:
    listeners += open_listeners(Endpoint("127.0.0.1", 80), addresses("127.0.0.1"))
    assert names(listeners) == ["127.0.0.1"]
    with socket.create_connection(listeners[0].getsockname()):
        assert wait_readable(listeners[0])


def test_it_does_not_listen_at_addresses_of_other_hosts() -> None:
    with leaving_nothing():
        assert open_listeners(Endpoint("192.0.2.1", 80), addresses("192.0.2.1")) == []
        assert open_listeners(Endpoint("2001:db8::1", 80), addresses("2001:db8::1")) == []


def test_it_listens_only_at_those_addresses_that_belong_to_this_host(listeners: list[socket.socket]) -> None:
    listeners += open_listeners(Endpoint("node", 80), addresses("192.0.2.1", "127.0.0.1"))
    assert names(listeners) == ["127.0.0.1"]


def test_it_listens_nowhere_if_one_address_is_in_use() -> None:
    """Not even at the other addresses of the name: another process serves this endpoint."""
    host, _, port = own_endpoint().rpartition(":")
    with leaving_nothing(), socket.socket() as other:
        other.bind((host, int(port)))
        other.listen()
        both = [*addresses("127.0.0.1"), *addresses(host, port=int(port))]
        assert open_listeners(Endpoint("node", int(port)), both) == []


def test_a_port_can_be_reused_at_once() -> None:
    """Even while old connections are in TIME_WAIT."""
    host, _, port = own_endpoint().rpartition(":")
    for _ in range(3):
        (listener,) = open_listeners(Endpoint(host, int(port)), addresses(host, port=int(port)))
        client = socket.create_connection((host, int(port)))
        listener.accept()[0].close()
        listener.close()
        client.close()


def test_a_name_that_resolves_to_loopback_means_all_interfaces(listeners: list[socket.socket]) -> None:
    """Debian maps the host's own name to 127.0.1.1 in /etc/hosts."""
    listeners += open_listeners(Endpoint("node0", 0), addresses("127.0.1.1"))
    assert set(names(listeners)) <= {"0.0.0.0", "::"}
    assert "0.0.0.0" in names(listeners)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_explicit_loopback_endpoint_stays_on_loopback(listeners: list[socket.socket], host: str) -> None:
    listeners += open_listeners(Endpoint(host, 0), addresses("127.0.0.1"))
    assert names(listeners) == ["127.0.0.1"]


def test_it_listens_at_ipv6_and_ipv4_of_one_name(listeners: list[socket.socket]) -> None:
    if not Path("/proc/net/if_inet6").exists() or "00000001" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this host has no IPv6 loopback")
    listeners += open_listeners(Endpoint("localhost", 0), addresses("127.0.0.1", "::1"))
    assert sorted(names(listeners)) == ["127.0.0.1", "::1"]


@needs_root
def test_a_forbidden_port_raises_and_leaves_nothing_open() -> None:
    """The node reports it: this is the right host, but it cannot serve."""
    low = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if low <= 1:
        pytest.skip("this host has no privileged ports")
    os.seteuid(65534)
    try:
        with leaving_nothing(), pytest.raises(PermissionError):
            open_listeners(Endpoint("127.0.0.1", 1), [*addresses("127.0.0.1"), *addresses("127.0.0.1", port=1)])
    finally:
        os.seteuid(0)
