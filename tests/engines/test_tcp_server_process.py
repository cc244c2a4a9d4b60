"""The coordinator's server as a process: stopped, starved of descriptors, and measured while strangers come."""

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
from kit.tcp import PATIENCE_S, beating, server_process
from tenax._core.events import GenerationFormed, RunEnded
from tenax._core.lease import LeaseTerms
from tenax._core.messages import NodeSucceeded
from tenax._core.model import Outcome
from tenax._engines.tcp import wire

pytestmark = [on_linux, pytest.mark.process]

TERMS = LeaseTerms(beat_s=0.1, lease_s=1.5)


def let_pass(seconds: float) -> None:
    """The pause itself is what is tested: nothing can announce that a stopped process did nothing."""
    select.select([], [], [], seconds)


def test_a_server_that_was_stopped_judges_nobody() -> None:
    """It stood still for two leases. Its members beat on, and so it hears; nobody was silent but itself."""
    with server_process(terms=TERMS, nodes=(2, 2)) as server:
        members = [server.member(name, nodes=(2, 2)) for name in ("a", "b")]
        with beating(members[0]) as one, beating(members[1]) as other:
            until(lambda: one.answered > 2 and other.answered > 2, "beats")
            server.stop()
            let_pass(2 * TERMS.lease_s)
            server.go_on()
            heard = one.answered, other.answered
            until(lambda: one.answered > heard[0] + 5 and other.answered > heard[1] + 5, "answers again")
            assert not one.was_closed
            assert not other.was_closed
            assert server.facts()["lost"] == []
            assert server.facts()["generation"] == 1
        for member in members:
            member.close()


def test_who_was_silent_while_the_server_stood_still_has_its_whole_lease_afterwards() -> None:
    """Nobody knows whether it would have been heard; the time of the pause is not counted against it."""
    with server_process(terms=TERMS) as server, server.member("quiet") as quiet:
        quiet.until(GenerationFormed)
        server.stop()
        let_pass(2 * TERMS.lease_s)
        server.go_on()
        continued = time.monotonic()
        assert quiet.is_closed_by_server()
        assert time.monotonic() - continued >= 0.5 * TERMS.lease_s
        assert server.facts()["lost"] == ["quiet: no heartbeat for 1.5 s"]


def test_without_descriptors_members_keep_their_leases_and_newcomers_wait_their_turn() -> None:
    """A process that may have few descriptors, and strangers that take all it can give."""
    with (
        server_process(terms=LeaseTerms(), handshake_timeout_s=0.5, most_descriptors=128) as server,
        server.member("honest") as honest,
        beating(honest) as beats,
    ):
        strangers = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(250)]
        facts = server.facts()
        assert facts["descriptors"] <= 128 - 16, "there is a rest for files and workers"
        for stranger in strangers:
            with suppress(ConnectionResetError):  # evicted, to make room for the next one
                assert stranger.recv(1) == b""
            stranger.close()
        with server.client("newcomer") as newcomer:
            newcomer.greet()
        assert not beats.was_closed
        assert [lost for lost in server.facts()["lost"] if lost.startswith("honest")] == []


def test_two_thousand_connections_leave_no_descriptor_and_little_memory() -> None:
    with server_process(terms=TERMS, handshake_timeout_s=0.2) as server:

        def come_and_go(times: int) -> None:
            for number in range(times):
                with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as stranger:
                    match number % 4:
                        case 0:
                            stranger.sendall(os.urandom(2000))
                        case 1:
                            stranger.sendall(b"\0\0\x0f\xff" + b"x" * 4000)  # all that may be kept, never whole
                        case 2:
                            stranger.sendall(wire.encode(wire.Hello(wire.VERSION, "run", f"node-{number}", b"n" * 16)))
                            stranger.recv(1000)

        def settled() -> dict[str, int]:
            until(lambda: server.facts()["descriptors"] <= resting, "the last of them to be gone")
            return server.facts()

        resting = server.facts()["descriptors"]
        come_and_go(200)
        before = settled()
        come_and_go(2000)
        after = settled()
        assert after["descriptors"] == before["descriptors"]
        assert after["rss_kb"] - before["rss_kb"] < 2048
        assert after["lost"] == []


def test_strangers_that_send_as_much_as_they_may_cost_a_bounded_amount_of_memory() -> None:
    """Each may make us keep one small frame; two thousand of them, less than a photograph."""
    with server_process(terms=TERMS, handshake_timeout_s=30.0) as server:
        before = server.facts()["rss_kb"]
        strangers = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(1500)]
        for stranger in strangers:
            stranger.sendall(b"\0\0\x0f\xff" + b"x" * 4000)
        with server.member("honest") as honest:
            honest.until(GenerationFormed)
            assert server.facts()["rss_kb"] - before < 40_000
            honest.say(NodeSucceeded(1))
            assert honest.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
        for stranger in strangers:
            stranger.close()


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
def test_during_ten_thousand_silent_connections_an_honest_node_joins_within_a_second(source: str) -> None:
    """While they come and when all are there; and what they cost is limited, however many they are. The second is one
    of the server's own time, so that other programs of this machine do not count."""
    with server_process(terms=LeaseTerms(), handshake_timeout_s=600.0) as server:
        before = server.facts()
        with subprocess.Popen(
            python(SILENT, 10_000, source, server.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as flood:
            assert flood.stdout is not None
            try:
                for expected in (b"half\n", b"all\n"):
                    assert flood.stdout.readline() == expected
                    begun = server.facts()["cpu_s"]
                    with server.client(expected.decode().strip()) as honest:
                        honest.greet()
                        assert server.facts()["cpu_s"] - begun < 1.0
                during = server.facts()
                assert during["rss_kb"] - before["rss_kb"] < 20_000
                assert during["descriptors"] - before["descriptors"] <= 2048 + 2
                assert during["refused"] >= 10_000 - 2048
            finally:
                flood.kill()
                flood.communicate()
