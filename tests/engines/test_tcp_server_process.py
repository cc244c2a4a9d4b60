"""The coordinator's server as a process: stopped, short of descriptors, and measured with many peers."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import time
from contextlib import suppress

import pytest

from kit.processes import on_linux, python, until
from kit.tcp import TIMEOUT_S, beating, server_process
from tenax._core.events import GenerationFormed, RunEnded
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import NodeSucceeded
from tenax._core.model import Outcome

pytestmark = [on_linux, pytest.mark.process]

TERMS = LeaseTerms(beat_s=0.1, lease_s=1.5)


def pause(seconds: float) -> None:
    """Wait. The pause is part of the test."""
    select.select([], [], [], seconds)


def test_a_server_that_was_stopped_loses_no_node() -> None:
    """It was stopped for two leases, while its members kept sending beats."""
    with server_process(terms=TERMS, nodes=(2, 2)) as server:
        members = [server.member(name, nodes=(2, 2)) for name in ("a", "b")]
        with beating(members[0]) as one, beating(members[1]) as other:
            until(lambda: one.answered > 2 and other.answered > 2, "beats")
            server.stop()
            pause(2 * TERMS.lease_s)
            server.resume()
            answered = one.answered, other.answered
            until(lambda: one.answered > answered[0] + 5 and other.answered > answered[1] + 5, "answers again")
            assert not one.was_closed
            assert not other.was_closed
            assert server.figures()["lost"] == []
            assert server.figures()["generation"] == 1
        for member in members:
            member.close()


def test_a_node_that_was_silent_while_the_server_was_stopped_gets_a_full_lease() -> None:
    """The time of the pause is not counted as silence."""
    with server_process(terms=TERMS) as server, server.member("quiet") as quiet:
        quiet.until(GenerationFormed)
        server.stop()
        pause(2 * TERMS.lease_s)
        server.resume()
        continued = time.monotonic()
        assert quiet.is_closed_by_server()
        assert time.monotonic() - continued >= 0.5 * TERMS.lease_s
        assert server.figures()["lost"] == ["quiet: no heartbeat for 1.5 s"]


def test_without_free_descriptors_members_keep_their_leases_and_new_nodes_wait() -> None:
    """A process with a low descriptor limit, and peers that use all of it."""
    with (
        server_process(terms=LeaseTerms(), handshake_timeout_s=0.5, max_descriptors=128) as server,
        server.member("honest") as honest,
        beating(honest) as beats,
    ):
        peers = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(250)]
        figures = server.figures()
        assert figures["descriptors"] <= 128 - 16, "some are reserved for files and workers"
        for peer in peers:
            with suppress(ConnectionResetError):  # evicted, to make room for the next one
                assert peer.recv(1) == b""
            peer.close()
        with server.client("newcomer") as newcomer:
            newcomer.greet()
        assert not beats.was_closed
        assert [lost for lost in server.figures()["lost"] if lost.startswith("honest")] == []


def test_two_thousand_connections_leak_no_descriptor_and_little_memory() -> None:
    with server_process(terms=TERMS, handshake_timeout_s=0.2) as server:

        def come_and_go(times: int) -> None:
            for number in range(times):
                with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as peer:
                    match number % 4:
                        case 0:
                            peer.sendall(os.urandom(2000))
                        case 1:
                            peer.sendall(b"\0\0\x0f\xff" + b"x" * 4000)  # the longest frame, never complete
                        case 2:
                            peer.sendall(wire.encode(wire.Hello(wire.VERSION, "run", f"node-{number}", b"n" * 16)))
                            peer.recv(1000)

        def settled() -> dict[str, int]:
            until(lambda: server.figures()["descriptors"] <= resting, "all of them to be closed")
            return server.figures()

        resting = server.figures()["descriptors"]
        come_and_go(200)
        before = settled()
        come_and_go(2000)
        after = settled()
        assert after["descriptors"] == before["descriptors"]
        assert after["rss_kb"] - before["rss_kb"] < 2048
        assert after["lost"] == []


def test_the_memory_for_unauthenticated_peers_is_bounded() -> None:
    """Each can make the server buffer one small frame."""
    with server_process(terms=TERMS, handshake_timeout_s=30.0) as server:
        before = server.figures()["rss_kb"]
        peers = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(1500)]
        for peer in peers:
            peer.sendall(b"\0\0\x0f\xff" + b"x" * 4000)
        with server.member("honest") as honest:
            honest.until(GenerationFormed)
            assert server.figures()["rss_kb"] - before < 40_000
            honest.send_message(NodeSucceeded(1))
            assert honest.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
        for peer in peers:
            peer.close()


SILENT = """
import resource, socket, sys

count, source, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for number in range(count):
    sock = socket.socket()
    sock.bind((source, 0))
    sock.connect(("127.0.0.1", port))
    held.append(sock)
    if number == count // 2:
        print("half", flush=True)
print("all", flush=True)
sys.stdin.read()
"""


def may_have_descriptors(count: int) -> bool:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= count


@on_linux
@pytest.mark.skipif(not may_have_descriptors(10_100), reason="needs 10,100 descriptors: ulimit -Hn")
@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"], ids=["another address", "the same address"])
def test_a_node_joins_within_a_second_during_ten_thousand_silent_connections(source: str) -> None:
    """While they connect and when all are connected; and their cost is bounded. The second is CPU time of the server:
    other load of this machine does not count."""
    with server_process(terms=LeaseTerms(), handshake_timeout_s=600.0) as server:
        before = server.figures()
        with subprocess.Popen(
            python(SILENT, 10_000, source, server.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as flood:
            assert flood.stdout is not None
            try:
                for expected in (b"half\n", b"all\n"):
                    assert flood.stdout.readline() == expected
                    begun = server.figures()["cpu_s"]
                    with server.client(expected.decode().strip()) as honest:
                        honest.greet()
                        assert server.figures()["cpu_s"] - begun < 1.0
                during = server.figures()
                assert during["rss_kb"] - before["rss_kb"] < 20_000
                assert during["descriptors"] - before["descriptors"] <= 2048 + 2
                assert during["refused"] >= 10_000 - 2048
            finally:
                flood.kill()
                flood.communicate()
