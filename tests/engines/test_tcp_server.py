"""The coordinator's server: authentication, limits for unauthenticated peers, and when a node is lost."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kit.processes import leaving_nothing, python, until
from kit.tcp import SHORT, TIMEOUT_S, Certificates, Client, ServerThread, beating, needs_openssl, run_server
from tenax._core.coordinator import CancelRequested, NodeLost, Opened, Received, Resumed
from tenax._core.events import GenerationEnded, GenerationFormed, JoinRefused, RunEnded, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import FailureSeen, NodeInfo, NodeJoined, NodeLeft, NodeReady, NodeSucceeded
from tenax._core.model import Failure, Outcome
from tenax._io.tls import TlsFiles

# --- the handshake ----------------------------------------------------------------------------------------------------


def test_a_node_with_the_secret_is_accepted_with_a_proof_and_the_terms() -> None:
    """The coordinator proves itself too, but only to a client that has proved itself."""
    with run_server(secret=b"secret", terms=LeaseTerms(0.5, 2.5)) as server, server.client() as client:
        challenge = client.challenge()
        expected = wire.prove(b"secret", "coordinator", client.hello, challenge.nonce)
        client.send(client.proof(challenge))
        assert client.until(wire.Accepted) == wire.Accepted(expected, 0.5, 2.5)


def test_an_unauthenticated_peer_gets_nothing_that_depends_on_the_secret_or_the_run() -> None:
    """Two coordinators with different secrets and runs send the same bytes, except for the nonce."""
    for run_id in ("run", "another"):
        answers = []
        for secret, served_run in ((b"one", "run"), (b"other", "of another user")):
            with run_server(secret=secret, run_id=served_run) as server, server.client(run_id=run_id) as client:
                challenge = client.challenge()
                assert challenge == wire.Challenge(challenge.nonce), "only a nonce"
                client.send(wire.Proof(b"guessed"))
                answers.append(refusal(client))
        assert answers == [wire.Refused("", True, wire.VERSION)] * 2


def refusal(client: Client) -> wire.Refused:
    refused: wire.Refused = client.until(wire.Refused)
    assert client.is_closed_by_server()
    return refused


def test_another_version_is_rejected_with_the_version_of_the_coordinator() -> None:
    """Nodes of version 1 show the reason; later ones the number."""
    with run_server() as server, server.client() as client:
        client.send(msgspec.structs.replace(client.hello, version=1))
        rejected = refusal(client)
        assert (rejected.is_final, rejected.version) == (True, wire.VERSION)
        assert f"protocol version is {wire.VERSION}; use the same tenax version on every node" in rejected.reason


def test_another_run_is_rejected_as_another_secret_is() -> None:
    """The peer does not learn which of them was wrong; the console of the serving node shows it."""
    printed: list[str] = []
    with run_server(secret=b"secret", run_id="ours", print_line=printed.append) as server:
        with server.client(run_id="theirs") as client:
            client.send(client.proof(client.challenge()))
            wrong_run = refusal(client)
        with server.client(run_id="ours", secret=b"guess") as client:
            client.send(client.proof(client.challenge()))
            assert refusal(client) == wrong_run == wire.Refused("", True, wire.VERSION)
    assert printed == ["rejected a node from 127.0.0.1: it belongs to the run 'theirs'"], (
        "many rejections print one line"
    )


def test_rejections_between_two_console_lines_are_counted() -> None:
    """At most one line in 10 s shows the last rejection, and how many there were since the previous line."""
    printed: list[str] = []
    ahead = 0.0
    with run_server(secret=b"secret", print_line=printed.append, clock=lambda: time.monotonic() + ahead) as server:
        for ahead in (0.0, 1.0, 2.0, 12.0):  # noqa: B007 - read by the clock
            with server.client(secret=b"guess") as client:
                client.send(client.proof(client.challenge()))
                refusal(client)
    assert printed == [
        "rejected a node from 127.0.0.1: it has another secret",
        "rejected a node from 127.0.0.1: it has another secret (3 rejections since the last report)",
    ]


def test_without_a_secret_nodes_join_and_operators_are_rejected() -> None:
    """Otherwise any process that reaches the endpoint could read and stop the run."""
    with run_server(secret=b"") as server, server.member() as member, server.client("operator") as client:
        member.until(GenerationFormed)
        client.hello = msgspec.structs.replace(client.hello, is_operator=True)
        client.send(wire.Proof(wire.prove(b"", "operator", client.hello, client.challenge().nonce)))
        assert refusal(client) == wire.Refused(wire.NO_SECRET, True, wire.VERSION)


def test_a_run_that_is_over_rejects_another_run_only_for_now() -> None:
    """The next run on the same port may start while the last one is still ending."""
    with run_server() as server:
        with server.member() as member:
            member.until(GenerationFormed)
            member.send_message(NodeSucceeded(1))
            member.until(RunEnded)
        with server.client(run_id="next") as client:
            client.send(client.proof(client.challenge()))
            assert not refusal(client).is_final


@pytest.mark.parametrize(("ours", "theirs"), [(b"right", b"wrong"), (b"right", b""), (b"", b"any")])
def test_a_wrong_secret_is_rejected_without_revealing_the_right_one(ours: bytes, theirs: bytes) -> None:
    with run_server(secret=ours) as server, server.client(secret=theirs) as client:
        client.send(client.proof(client.challenge()))
        assert refusal(client) == wire.Refused("", True, wire.VERSION)


def test_a_replayed_proof_is_refused() -> None:
    """A recorded handshake cannot be repeated, because the coordinator's nonce differs."""
    with run_server(secret=b"secret") as server, server.client("node") as honest:
        challenge = honest.challenge()
        proof = honest.proof(challenge)
        honest.send(proof)
        honest.until(wire.Accepted)
        with server.client("node") as replayer:
            replayer.send(honest.hello)
            assert replayer.until(wire.Challenge).nonce != challenge.nonce
            replayer.send(proof)
            assert refusal(replayer).is_final


def test_the_coordinators_proof_is_not_valid_for_an_agent() -> None:
    """So it cannot be reflected."""
    with run_server(secret=b"secret") as server, server.client(secret=b"") as client:
        challenge = client.challenge()
        client.send(wire.Proof(wire.prove(b"secret", "coordinator", client.hello, challenge.nonce)))
        assert refusal(client).is_final


UNEXPECTED: dict[str, list[wire.FromAgent]] = {
    "a message before the hello": [wire.Message(NodeLeft("bye"))],
    "a proof before the hello": [wire.Proof(b"x")],
    "a beat before the hello": [wire.Beat(1)],
    "a cancel before the hello": [wire.Cancel("because")],
    "a message before the proof": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Message(NodeLeft("bye"))],
    "a cancel before the proof": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Cancel("because")],
    "two hellos": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16)] * 2,
    "a short nonce": [wire.Hello(wire.VERSION, "run", "node", b"n")],
    "an empty node id": [wire.Hello(wire.VERSION, "run", "", b"n" * 16)],
    "a node id that is too long": [wire.Hello(wire.VERSION, "run", "n" * 65, b"n" * 16)],
}


@pytest.mark.parametrize("frames", UNEXPECTED.values(), ids=UNEXPECTED.keys())
def test_an_unexpected_frame_closes_the_connection_and_changes_nothing(frames: list[wire.FromAgent]) -> None:
    with run_server() as server, server.client() as client:
        for frame in frames:
            client.send(frame)
        assert client.is_closed_by_server()
        assert server.thread.call(lambda: server.server.links.refused) == 1
        assert not server.events(Received)
        assert not server.events(CancelRequested)


def test_a_message_with_the_id_of_another_node_closes_only_the_senders_link() -> None:
    with run_server() as server, server.member("honest") as honest:
        honest.until(GenerationFormed)
        with server.client("impostor") as impostor:
            impostor.greet()
            impostor.send_message(NodeJoined(NodeInfo("honest", "elsewhere", min_nodes=1, max_nodes=4)))
            assert impostor.is_closed_by_server()
        assert {event.node_id for event in server.events(Received)} == {"honest"}
        honest.send(wire.Beat(1))
        assert honest.until(wire.BeatAnswer) == wire.BeatAnswer(1)


@pytest.mark.parametrize("frame", [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Proof(b"x")])
def test_a_second_hello_closes_the_link_and_the_node_is_lost_after_its_lease(frame: wire.FromAgent) -> None:
    """Not at once: its workers may still run, because this side closed the link."""
    with run_server(terms=LeaseTerms(0.1, 0.5)) as server, server.member("node") as client:
        begun = time.monotonic()
        client.send(frame)
        assert client.is_closed_by_server()
        assert server.until_event(NodeLost, node_id="node").why == "invalid data: unexpected frame"
        assert time.monotonic() - begun >= 0.5


def test_an_operator_with_the_secret_can_cancel_the_run() -> None:
    with run_server(secret=b"secret") as server, server.member() as member, server.client() as operator:
        member.until(GenerationFormed)
        operator.greet()
        operator.send(wire.Cancel("the budget of the project is spent"))
        verdict = member.until(RunEnded).verdict
        assert (verdict.outcome, verdict.why) == (Outcome.CANCELLED, "the budget of the project is spent")


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_that_reconnects_replaces_its_old_link_without_a_loss() -> None:
    with leaving_nothing(), run_server() as server, server.member("node") as old:
        old.until(GenerationFormed)
        with server.client("node") as new:
            new.greet()
            assert old.is_closed_by_server()
            new.send_message(NodeJoined(new.info(), generation=1, is_running=True, group_rank=0, group_world_size=1))
            new.send_message(NodeSucceeded(1))
            assert new.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert not server.events(NodeLost)
            assert server.thread.call(lambda: server.server.links.others("")) == 1


def test_a_node_that_closes_its_link_is_lost_at_once() -> None:
    """Long before its lease expires."""
    terms = LeaseTerms(1000, 5000)
    with run_server(nodes=(2, 2), terms=terms) as server, server.member("stays", nodes=(2, 2)) as stays:
        with server.member("goes", nodes=(2, 2)) as goes:
            goes.until(GenerationFormed)
        assert stays.until(GenerationEnded).why == "host-goes was lost: connection closed"


def test_a_closed_link_does_not_keep_the_server_busy() -> None:
    """Not even if another process has a copy of its descriptor, as a fork of the agent has."""
    with run_server() as server:
        links = server.server._connections
        with server.client() as client:
            client.challenge()
            copies = server.thread.call(lambda: [os.dup(link.descriptor) for link in links.values()])
        until(lambda: not links, "the server to close the link")
        poll = select.poll()
        poll.register(server.server.fileno(), select.POLLIN)
        until(lambda: not poll.poll(0), "the server to have nothing to do")
    for copy in copies:
        os.close(copy)


def reset(client: Client) -> None:
    """Close the connection with a reset."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_node_whose_link_was_reset_may_reconnect() -> None:
    with run_server(nodes=(2, 2)) as server, server.member("stays", nodes=(2, 2)) as stays:
        cut = server.member("cut", nodes=(2, 2))
        stays.until(GenerationFormed)
        part = cut.until(GenerationFormed).assignment
        reset(cut)
        until(lambda: "cut" in server.thread.call(lambda: server.server.links.absent), "the reset")
        assert server.thread.call(lambda: server.server.links.others("stays")) == 1, "the serving node must stay for it"
        with server.client("cut") as back:
            back.greet()
            back.send_message(
                NodeJoined(
                    back.info((2, 2)),
                    1,
                    is_running=True,
                    group_rank=part.group_rank,
                    group_world_size=2,
                    store=part.store,
                )
            )
            for member in (stays, back):
                member.send_message(NodeSucceeded(1))
            assert stays.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert back.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert not server.events(NodeLost)


def test_a_node_that_does_not_reconnect_after_a_reset_is_lost_when_its_lease_expires() -> None:
    with run_server(terms=LeaseTerms(0.1, 1.0)) as server:
        begun = time.monotonic()
        reset(server.member("cut"))
        assert server.until_event(NodeLost, node_id="cut").why == "connection closed"
        assert time.monotonic() - begun >= 1.0
        assert server.thread.call(lambda: server.server.links.others("")) == 0


def test_a_refused_node_with_workers_is_awaited_after_a_reset_until_its_lease_expires() -> None:
    """Its workers run until its keeper kills them."""
    with (
        run_server(terms=LeaseTerms(0.1, 1.0), opened=Opened(5.0, generation=1)) as server,
        server.client("first") as first,
    ):
        first.greet()
        first.send_message(NodeJoined(first.info(rank=1), 1, is_running=True, group_world_size=2))
        assert server.until_event(Received, node_id="first")
        refused = server.client("refused")
        refused.greet()
        refused.send_message(NodeJoined(refused.info(rank=1), 1, is_running=True, group_world_size=1))
        assert "rank 1" in refused.until(JoinRefused).reason
        begun = time.monotonic()
        reset(refused)
        assert server.until_event(NodeLost, node_id="refused")
        assert time.monotonic() - begun >= 0.9, "its lease began with its last message"


def test_a_pause_of_the_server_neither_shortens_nor_removes_the_lease_after_a_reset() -> None:
    ahead = 0.0
    with run_server(terms=LeaseTerms(0.1, 1.0), clock=lambda: time.monotonic() + ahead) as server:
        cut = server.member("cut")
        cut.until(GenerationFormed)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0
            cut.send(wire.Beat(1))
            reset(cut)

        server.thread.call(sleep_and_wake)
        until(lambda: server.thread.call(lambda: server.server.links.next_deadline()) > ahead, "a tick")
        assert not server.events(NodeLost)
        assert server.until_event(NodeLost)


def test_a_delayed_message_gets_the_time_of_its_arrival() -> None:
    """On the node's clock, which is estimated from its beats."""
    theirs = 5_000_000.0
    failure = Failure(1, 0, 0, 1, 1, theirs - 7.0)
    with run_server() as server, server.member("node") as node:
        node.until(GenerationFormed)
        node.send(wire.Beat(1, theirs))
        node.until(wire.BeatAnswer)
        node.send_message(FailureSeen(1, failure, theirs - 6.0))  # apparently sent 6 s before the beat
        message = server.until_event(Received, message_kind=FailureSeen).message
        assert message.failure == failure
        assert theirs <= message.sent_at < theirs + TIMEOUT_S


def test_a_silent_node_is_lost_when_its_lease_expires_and_not_before() -> None:
    with run_server(terms=LeaseTerms(0.1, 1.5)) as server:
        begun = time.monotonic()
        with server.member("silent") as silent, server.member("honest") as honest, beating(honest, 0.05) as beats:
            assert server.until_event(NodeLost, node_id="silent").why == "no heartbeat for 1.5 s"
            assert time.monotonic() - begun >= 1.5
            assert silent.is_closed_by_server()
            assert not beats.was_closed
        assert [lost.node_id for lost in server.events(NodeLost)][:1] == ["silent"]


def test_a_long_pause_of_the_server_does_not_extend_later_leases() -> None:
    """Its clock jumps, as after a suspend, and it receives a last beat before its next tick. A node that is silent from
    then on is lost one lease later, without the length of the pause."""
    ahead = 0.0
    terms = LeaseTerms(0.1, 1.5)
    with run_server(terms=terms, clock=lambda: time.monotonic() + ahead) as server, server.member("node") as node:
        node.until(GenerationFormed)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0
            node.send(wire.Beat(1))

        server.thread.call(sleep_and_wake)
        assert node.until(wire.BeatAnswer) == wire.BeatAnswer(1), "no node is lost because of the pause"
        assert node.is_closed_by_server()
        assert server.until_event(NodeLost).why == "no heartbeat for 1.5 s"


def test_a_handshake_continues_after_a_pause_of_the_server() -> None:
    """The peer did not cause the delay."""
    ahead = 0.0
    with run_server(clock=lambda: time.monotonic() + ahead) as server, server.client("newcomer") as newcomer:
        challenge = newcomer.challenge()
        ahead = 100_000.0
        until(lambda: server.thread.call(lambda: server.server.links.next_deadline()) > ahead, "a tick")
        newcomer.send(newcomer.proof(challenge))
        newcomer.until(wire.Accepted)


def test_every_message_renews_the_lease() -> None:
    with run_server(terms=LeaseTerms(0.1, 1.5)) as server, server.member("talks") as talks:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            talks.send_message(NodeReady(0, "127.0.0.1", 1))
            talks.send(wire.Beat(1))
            talks.until(wire.BeatAnswer)
        assert not server.events(NodeLost)


def test_an_event_raised_during_delivery_is_processed_after_it() -> None:
    """A link breaks while the server writes to it. The other nodes receive the cause before the loss."""
    with run_server(nodes=(3, 3)) as server:
        members = {name: server.member(name, nodes=(3, 3)) for name in ("a", "b", "c")}
        for member in members.values():
            member.until(GenerationFormed)
        # The middle one does not read, so its buffer is full.
        middle = server.thread.call(lambda: list(server.server._connections.values())[1])

        def fill() -> None:
            middle.link._unsent += b"\0" * (16 << 20)

        server.thread.call(fill)
        operator = server.client("operator")
        operator.greet()
        operator.send(wire.Cancel("enough"))
        for name, member in members.items():
            if name != middle.peer.node_id:
                assert member.until(RunEnded).verdict.why == "enough"
        lost = server.until_event(NodeLost, node_id=middle.peer.node_id)
        assert lost.why == "the peer does not read what it is sent"
        kinds = [type(event) for event, _ in server.record]
        assert kinds.index(CancelRequested) < kinds.index(NodeLost)
        for each in (*members.values(), operator):
            each.close()


def test_all_nodes_receive_the_verdict_before_the_server_closes() -> None:
    """Also nodes that have not read anything for a while."""
    server = ServerThread(nodes=(2, 2))
    one, other = server.member("one", nodes=(2, 2)), server.member("other", nodes=(2, 2))
    try:
        one.until(GenerationFormed)
        server.thread.call(lambda: server.server.coordinator.step(CancelRequested("the end")))
    finally:
        server.close()
    assert other.until(RunEnded).verdict.why == one.until(RunEnded).verdict.why == "the end"
    one.close()
    other.close()


def test_a_thousand_members_form_a_generation_and_receive_its_end() -> None:
    """Each gets its own assignment once; all get the end."""
    count = 1000
    with run_server(nodes=(count, count)) as server:
        members = [server.client(f"node-{number}") for number in range(count)]
        for member in members:
            member.send(member.hello)
        for member in members:
            member.send(member.proof(member.until(wire.Challenge)))
        for member in members:
            member.until(wire.Accepted)
            member.join(nodes=(count, count))
        parts = [member.until(GenerationFormed).assignment for member in members]
        assert sorted(part.group_rank for part in parts) == list(range(count))
        members[500].close()
        ends = [member.until(GenerationEnded) for number, member in enumerate(members) if number != 500]
        assert {end.why for end in ends} == {"host-node-500 was lost: connection closed"}
        for member in members:
            member.close()


# --- unauthenticated peers --------------------------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + os.urandom(200),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a giant length": b"\xff\xff\xff\xff",
    "zeros": b"\0" * 64,
    "random": os.urandom(4096),
    "a frame of nonsense": b"\0\0\0\x04true",
    "deep JSON": (4000).to_bytes(4, "big") + b"[" * 4000,
    "torch's store": b"\x09\xf0\xe7\x21\x3c" + os.urandom(8),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_bytes_of_other_protocols_close_the_connection(garbage: bytes) -> None:
    with leaving_nothing(), run_server() as server:
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as peer:
            peer.sendall(garbage)
            with suppress(ConnectionResetError):  # closed while more data was in flight
                answer = peer.recv(1 << 16)
                assert answer[:1] in (b"", b"\x15"), "nothing, or a TLS alert"
        assert server.thread.call(lambda: server.server.links.refused) == 1
        assert server.thread.call(lambda: len(server.server._connections)) == 0


def test_the_handshake_timeout_counts_from_the_start() -> None:
    """Also if single bytes keep arriving."""
    with run_server(handshake_timeout_s=0.4) as server, server.member("honest") as honest, beating(honest) as beats:
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as slow:
            begun = time.monotonic()
            slow.settimeout(0.01)
            data = iter(wire.encode(wire.Hello(wire.VERSION, "run", "n" * 64, b"n" * 16)) * 100)
            closed = False
            while not closed:
                slow.sendall(bytes([next(data)]) if time.monotonic() - begun < 0.3 else b"")
                try:
                    closed = slow.recv(1) == b""
                except TimeoutError:
                    pass
                except ConnectionResetError:
                    closed = True
            assert time.monotonic() - begun >= 0.4
        assert not beats.was_closed


def test_a_peer_that_never_sends_its_proof_is_disconnected() -> None:
    with run_server(terms=SHORT, handshake_timeout_s=0.2) as server, server.client() as client:
        client.challenge()
        assert client.is_closed_by_server()
        assert server.thread.call(lambda: server.server.links.refused) == 1


def test_a_thousand_silent_peers_do_not_affect_members() -> None:
    with leaving_nothing(), run_server(handshake_timeout_s=1.0) as server:
        with server.member("honest") as honest, beating(honest, 0.05) as beats:
            peers = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(1000)]
            newcomer = server.member("newcomer")  # there is room for it among them
            for peer in peers:
                assert peer.recv(1) == b""
                peer.close()
            assert not beats.was_closed
            assert beats.answered
            newcomer.close()
        assert server.thread.call(lambda: server.server.links.refused) == 1000
        assert server.thread.call(lambda: len(server.server.links._admission)) == 0, "their slots are free again"
        assert not [lost for lost in server.events(NodeLost) if lost.node_id == "honest"][1:]


FLOOD = """
import socket, sys, threading

def come_and_go():
    while True:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
            peer.sendall(bytes([0, 0, 1, 0]) + b"x" * 40)

def send_without_end():
    while True:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as peer:
            try:
                while True:
                    peer.sendall(bytes(1))
            except OSError:
                continue

for each in (come_and_go, send_without_end, send_without_end):
    threading.Thread(target=each, daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_peers_that_send_without_end_do_not_block_the_loop() -> None:
    """They connect, send and close as fast as they can; the agent's timers still fire."""
    with run_server(handshake_timeout_s=0.2) as server, server.member("honest") as honest:
        flood = subprocess.Popen(python(FLOOD, server.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert flood.stdout is not None
        flood.stdout.readline()
        try:
            with beating(honest, 0.05) as beats:
                before = server.thread.call(lambda: server.server.links.refused)
                while server.thread.call(lambda: server.server.links.refused) < before + 300:
                    assert not beats.was_closed
        finally:
            flood.kill()
            flood.communicate()


def test_a_listener_that_is_always_ready_does_not_block_the_loop() -> None:
    """Other peers are still served, and lost in time."""
    always_ready, other_end = socket.socketpair()
    other_end.send(b"!")
    with (
        run_server(terms=LeaseTerms(0.1, 1.0), more_listeners=[always_ready]) as server,
        server.member("silent") as silent,
    ):
        silent.until(GenerationFormed)
        assert silent.is_closed_by_server()
        assert server.until_event(NodeLost).why == "no heartbeat for 1 s"
    other_end.close()


def test_the_limit_for_unauthenticated_peers_does_not_count_members() -> None:
    with run_server(nodes=(1, 400), terms=LeaseTerms(beat_s=1.0, lease_s=3600.0)) as server:  # they send no beats
        members = [server.member(str(number), nodes=(1, 400)) for number in range(300)]
        assert server.thread.call(lambda: len(server.server.links._admission)) == 0
        assert server.thread.call(lambda: server.server.links.others("")) == 300
        for member in members:
            member.close()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.process
@needs_openssl
def test_a_server_with_tls_serves_only_nodes_with_certificates(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    with leaving_nothing(), run_server(tls=files.for_server()) as server:
        with server.client() as plain:
            plain.send(plain.hello)
            assert plain.sock.recv(1 << 16)[:1] in (b"", b"\x15")  # closed, or a TLS alert
        with server.client("node") as client:
            client.sock = files.for_client().wrap_socket(client.sock, server_hostname="localhost")
            client.greet()
            client.join()
            client.until(GenerationFormed)


# --- refusals by the coordinator --------------------------------------------------------------------------------------


def test_a_node_with_another_nnodes_is_refused() -> None:
    with run_server(nodes=(1, 4)) as server, server.client() as client:
        client.greet()
        client.join(nodes=(2, 2))
        reason: Any = client.until(JoinRefused).reason
        assert "--nnodes" in reason


def test_a_server_that_was_frozen_during_recovery_waits_a_full_period() -> None:
    """Its deadline has passed, but a member may be alive: no generation forms until it had time to join."""
    ahead = 0.0
    terms = LeaseTerms(0.1, 1.5)
    opened = Opened(recover_s=1.5, generation=4)
    clock = lambda: time.monotonic() + ahead  # noqa: E731
    with run_server(terms=terms, clock=clock, opened=opened) as server, server.member("new") as new:
        new.until(Waiting)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0

        server.thread.call(sleep_and_wake)
        resumed = server.until_event(Resumed)
        begun = time.monotonic()
        assert resumed.absent_s > 1000.0
        with beating(new, 0.05) as beats:
            until(lambda: any(isinstance(each, GenerationFormed) for each in beats.events), "a generation")
        (formed,) = (each for each in beats.events if isinstance(each, GenerationFormed))
        assert formed.assignment.generation == 5
        assert time.monotonic() - begun > 1.0
