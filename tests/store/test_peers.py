"""Allowed clients: this user and root on this host, and the given addresses on other hosts.

A rejected connection is closed at once, nothing is sent, and its requests have no effect.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from kit.processes import TIMEOUT_S, on_linux, until
from store import requests as ask
from store.requests import Peer
from store.servers import our_server
from store.users import CLIENT, UNPRIVILEGED_UID, answer_to
from tenax._io.listen import listen
from tenax.store._peers import CLOSED, ELSEWHERE, GONE, THIS_HOST, UNKNOWN, PeerRules, SocketOwners
from tenax.store._server import StoreServer

pytestmark = [on_linux, pytest.mark.process]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root to be started")


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@as_root
@pytest.mark.parametrize(
    ("host", "callers"), [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("", ["127.0.0.1", "::1"])]
)
def test_another_user_of_the_host_is_rejected(host: str, callers: list[str], resources: ExitStack) -> None:
    """Over IPv4, IPv6, and IPv4 at a dual-stack socket; root and the run's user are served."""
    if not socket.has_dualstack_ipv6() and ":" in "".join([host, *callers]):
        pytest.skip("there is no IPv6 here")
    server = resources.enter_context(our_server(host))
    for caller in callers:
        assert answer_to(caller, server.port, UNPRIVILEGED_UID) == b""
        assert answer_to(caller, server.port, 0) == b"abcd"
        with Peer(server.port, host=caller) as honest:
            honest.send(ask.get(b"/key"))
            assert honest.answers() == ask.text(b"0")
    assert server.counted("refused_peers") == len(callers)


@as_root
def test_an_allowed_address_is_served_whatever_its_user(resources: ExitStack) -> None:
    """An address, a network, or any; other addresses are still checked by user."""
    for allow in (["any"], ["127.0.0.1"], ["10.0.0.0/8", "127.0.0.0/30"]):
        server = resources.enter_context(our_server("", peers={"hosts": [], "allow": allow}))
        assert answer_to("127.0.0.1", server.port, UNPRIVILEGED_UID) == b"abcd"
        if allow != ["any"] and socket.has_dualstack_ipv6():
            assert answer_to("::1", server.port, UNPRIVILEGED_UID) == b""


@as_root
@pytest.mark.parametrize("uses_netlink", [True, False])
def test_a_socket_that_its_process_has_closed_is_rejected(uses_netlink: bool) -> None:
    """The kernel reports uid 0 for it, so its request would be taken for one of root."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    leave = CLIENT.replace("print(sock.recv(4).hex())", "pass")
    asked = (ask.GREETING + ask.set_(b"/key", b"forged")).hex()
    subprocess.run(
        [sys.executable, "-S", "-c", leave, "127.0.0.1", str(port), str(UNPRIVILEGED_UID), asked], check=True
    )
    with closing(SocketOwners(uses_netlink=uses_netlink)) as owners, closing(listener):
        accepted, address = listener.accept()
        with accepted:
            assert owners.find(accepted.getsockname(), address) in (GONE, ELSEWHERE)
            group, why_not = PeerRules([], owners=owners).judge(accepted, address)
            assert (group, why_not) == (THIS_HOST, CLOSED)


@pytest.mark.parametrize("uses_netlink", [True, False])
@pytest.mark.parametrize(
    ("host", "caller"), [("127.0.0.1", "127.0.0.1"), ("", "127.0.0.1"), ("", "::1"), ("::1", "::1")]
)
def test_the_owner_of_a_peer_socket_is_found(uses_netlink: bool, host: str, caller: str) -> None:
    """With netlink, or with the tables in /proc; unconnected addresses have no owner."""
    if not socket.has_dualstack_ipv6() and ":" in host + caller:
        pytest.skip("there is no IPv6 here")
    with closing(listen(host)) as listener, closing(SocketOwners(uses_netlink=uses_netlink)) as owners:
        port = listener.getsockname()[1]
        with socket.create_connection((caller, port), TIMEOUT_S):
            accepted, address = listener.accept()
            with accepted:
                ours = accepted.getsockname()
                assert owners.find(ours, address) == os.geteuid()
                other = (address[0], address[1] ^ 1, *address[2:])
                assert owners.find(ours, other) == ELSEWHERE
                # A peer on another host may have the number of a port at which this host listens.
                assert owners.find(ours, (address[0], port, *address[2:])) == ELSEWHERE


def test_a_dual_stack_socket_connected_to_an_ipv4_address_is_found() -> None:
    """The kernel lists it as IPv6."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    for uses_netlink in (True, False):
        with closing(listen("127.0.0.1")) as listener, socket.socket(socket.AF_INET6) as caller:
            caller.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
            accepted, address = listener.accept()
            with accepted, closing(SocketOwners(uses_netlink=uses_netlink)) as owners:
                assert owners.find(accepted.getsockname(), address) == os.geteuid()


def test_a_socket_bound_to_an_interface_is_found() -> None:
    """Otherwise a process could hide its user and be taken for another host."""
    with closing(listen("127.0.0.1")) as listener, socket.socket() as caller:
        try:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        except PermissionError:
            pytest.skip("binding to an interface needs a newer kernel, or root")
        caller.connect(listener.getsockname())
        accepted, address = listener.accept()
        with accepted, closing(SocketOwners()) as owners:
            assert owners.find(accepted.getsockname(), address) == os.geteuid()


def test_without_kernel_tables_only_addresses_are_checked() -> None:
    """Without netlink and /proc, as on macOS: a loopback peer is served, and so is one with our own address."""
    with closing(listen("127.0.0.1")) as listener:
        with socket.create_connection(listener.getsockname(), TIMEOUT_S):
            accepted, address = listener.accept()
        with accepted, closing(SocketOwners(uses_netlink=False, tables=["/nothing"])) as owners:
            assert owners.find(accepted.getsockname(), address) == UNKNOWN
            rules = PeerRules(["10.1.2.3"], owners=owners)
            assert rules.judge(accepted, address) == (THIS_HOST, "")
            assert rules.judge(accepted, ("10.1.2.3", 4)) == ("10.1.2.3", "")
            assert "10.9.9.9 is not an address of a node" in rules.judge(accepted, ("10.9.9.9", 4))[1]


class NoOwners(SocketOwners):
    """Every peer is on another host."""

    def find(self, ours: object, theirs: object) -> int:
        return ELSEWHERE


@pytest.mark.parametrize(
    ("peer", "is_served"),
    [
        ("10.0.0.2", True),
        ("::ffff:10.0.0.2", True),
        ("10.0.0.3", False),
        ("fd00::2", True),
        ("fe80::2%eth0", True),
        ("fe80::3%eth0", False),
        ("192.168.7.9", True),
        ("127.0.0.1", False),
    ],
)
def test_a_peer_on_another_host_is_served_by_its_address(peer: str, is_served: bool) -> None:
    """In any notation and from any interface; other hosts cannot have loopback addresses."""
    rules = PeerRules(["10.0.0.2", "fd00::2", "fe80::2%eth1"], ["192.168.0.0/16"], NoOwners())
    with socket.socket() as sock:
        _, why_not = rules.judge(sock, (peer, 4242))
    assert (why_not == "") == is_served
    assert is_served or peer == "127.0.0.1" or "store_allow=" + peer.partition("%")[0] in why_not


def test_without_a_list_every_other_host_is_served() -> None:
    """For a store created by user code, whose clients are unknown."""
    with socket.socket() as sock:
        assert PeerRules(owners=NoOwners()).judge(sock, ("10.0.0.3", 4242)) == ("10.0.0.3", "")


@as_root
def test_a_rejection_is_reported_with_the_address_the_reason_and_the_option() -> None:
    """So a wrongly rejected worker can be allowed."""
    notices: list[str] = []
    listener = listen("127.0.0.1")
    server = StoreServer(listener, peers=PeerRules([]), on_notice=notices.append)
    serving = threading.Thread(target=server.serve)
    serving.start()
    assert answer_to("127.0.0.1", listener.getsockname()[1], UNPRIVILEGED_UID) == b""
    until(lambda: bool(notices), "the notice")
    server.stop()
    serving.join(TIMEOUT_S)
    server.close()
    assert notices == [
        "the workers' store closed one connection, the last because 127.0.0.1 is a process of uid "
        f"{UNPRIVILEGED_UID}, but the run belongs to uid 0; if it belongs to this run, start every node with "
        "--rdzv-conf store_allow=127.0.0.1"
    ]


@pytest.mark.parametrize("make", [lambda: struct.pack("ii", 1, 0), lambda: None])
def test_a_peer_that_disconnects_before_accept_is_rejected(make: Callable[[], bytes | None]) -> None:
    """It closes or resets after the kernel's handshake."""
    linger = make()
    with closing(listen("127.0.0.1")) as listener, closing(SocketOwners()) as owners:
        for _ in range(3):
            caller = socket.create_connection(listener.getsockname(), TIMEOUT_S)
            if linger is not None:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            caller.close()
            accepted, address = listener.accept()
            with accepted:
                assert PeerRules([], owners=owners).judge(accepted, address) == (THIS_HOST, CLOSED)
