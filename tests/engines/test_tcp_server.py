"""The coordinator's server: who may speak, what strangers cost, and who is judged to be silent."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kit.processes import leaving_nothing, python, until
from kit.tcp import PATIENCE_S, SHORT, Certificates, Client, Served, beating, needs_openssl, served
from tenax._core.coordinator import CancelRequested, NodeLost, Opened, Received, Resumed
from tenax._core.events import GenerationEnded, GenerationFormed, JoinRefused, RunEnded, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.messages import FailureSeen, NodeInfo, NodeJoined, NodeLeft, NodeReady, NodeSucceeded
from tenax._core.model import Failure, Outcome
from tenax._engines.tcp import wire
from tenax._io.tls import TlsFiles

# --- the handshake ----------------------------------------------------------------------------------------------------


def test_a_node_with_the_secret_is_accepted_with_a_proof_and_the_terms() -> None:
    """The coordinator proves itself too, but only to a client that has proved itself."""
    with served(secret=b"secret", terms=LeaseTerms(0.5, 2.5)) as server, server.client() as client:
        challenge = client.challenge()
        expected = wire.prove(b"secret", "coordinator", client.hello, challenge.nonce)
        client.send(client.proof(challenge))
        assert client.until(wire.Accepted) == wire.Accepted(expected, 0.5, 2.5)


def test_an_unauthenticated_peer_gets_nothing_that_depends_on_the_secret_or_the_run() -> None:
    """Two coordinators with other secrets and other runs send the same bytes, but for a random number."""
    for run_id in ("run", "another"):
        answers = []
        for secret, served_run in ((b"one", "run"), (b"other", "of somebody else")):
            with served(secret=secret, run_id=served_run) as server, server.client(run_id=run_id) as client:
                challenge = client.challenge()
                assert challenge == wire.Challenge(challenge.nonce), "a random number, and nothing else"
                client.send(wire.Proof(b"guessed"))
                answers.append(refusal(client))
        assert answers == [wire.Refused("", True, wire.VERSION)] * 2


def refusal(client: Client) -> wire.Refused:
    refused: wire.Refused = client.until(wire.Refused)
    assert client.is_closed_by_server()
    return refused


def test_another_version_is_rejected_with_the_version_of_the_coordinator() -> None:
    """Nodes of version 1 show the reason; later ones the number."""
    with served() as server, server.client() as client:
        client.send(msgspec.structs.replace(client.hello, version=1))
        rejected = refusal(client)
        assert (rejected.is_final, rejected.version) == (True, wire.VERSION)
        assert f"protocol version is {wire.VERSION}; use the same tenax version on every node" in rejected.reason


def test_another_run_is_rejected_as_another_secret_is() -> None:
    """The peer cannot tell which of them was wrong; the console of the serving node can."""
    said: list[str] = []
    with served(secret=b"secret", run_id="ours", print_line=said.append) as server:
        with server.client(run_id="theirs") as client:
            client.send(client.proof(client.challenge()))
            wrong_run = refusal(client)
        with server.client(run_id="ours", secret=b"guess") as client:
            client.send(client.proof(client.challenge()))
            assert refusal(client) == wrong_run == wire.Refused("", True, wire.VERSION)
    assert said == ["rejected a node from 127.0.0.1: it belongs to the run 'theirs'"], "a flood prints one line"


def test_rejections_are_counted_between_two_lines_on_the_console() -> None:
    """At most one line in 10 s says who was rejected last, and how many were since the line before."""
    said: list[str] = []
    ahead = 0.0
    with served(secret=b"secret", print_line=said.append, clock=lambda: time.monotonic() + ahead) as server:
        for ahead in (0.0, 1.0, 2.0, 12.0):  # noqa: B007 - read by the clock
            with server.client(secret=b"guess") as client:
                client.send(client.proof(client.challenge()))
                refusal(client)
    assert said == [
        "rejected a node from 127.0.0.1: it has another secret",
        "rejected a node from 127.0.0.1: it has another secret (3 rejections since the last report)",
    ]


def test_without_a_secret_nodes_join_and_operators_are_rejected() -> None:
    """Anyone who reaches the endpoint of such a run could read and stop it otherwise."""
    with served(secret=b"") as server, server.member() as member, server.client("operator") as client:
        member.until(GenerationFormed)
        client.hello = msgspec.structs.replace(client.hello, is_operator=True)
        client.send(wire.Proof(wire.prove(b"", "operator", client.hello, client.challenge().nonce)))
        assert refusal(client) == wire.Refused(wire.NO_SECRET, True, wire.VERSION)


def test_a_run_that_is_over_refuses_another_run_for_now_only() -> None:
    """The next run on the same port may come while the last one is still leaving."""
    with served() as server:
        with server.member() as member:
            member.until(GenerationFormed)
            member.say(NodeSucceeded(1))
            member.until(RunEnded)
        with server.client(run_id="next") as client:
            client.send(client.proof(client.challenge()))
            assert not refusal(client).is_final


@pytest.mark.parametrize(("ours", "theirs"), [(b"right", b"wrong"), (b"right", b""), (b"", b"any")])
def test_another_secret_is_refused_and_the_secret_is_not_said(ours: bytes, theirs: bytes) -> None:
    """Whichever side has none."""
    with served(secret=ours) as server, server.client(secret=theirs) as client:
        client.send(client.proof(client.challenge()))
        assert refusal(client) == wire.Refused("", True, wire.VERSION)


def test_a_replayed_proof_is_refused() -> None:
    """Who has listened to a handshake cannot repeat it: the coordinator's nonce is another one."""
    with served(secret=b"secret") as server, server.client("node") as honest:
        challenge = honest.challenge()
        proof = honest.proof(challenge)
        honest.send(proof)
        honest.until(wire.Accepted)
        with server.client("node") as thief:
            thief.send(honest.hello)
            assert thief.until(wire.Challenge).nonce != challenge.nonce
            thief.send(proof)
            assert refusal(thief).is_final


def test_the_coordinators_own_proof_is_no_proof_of_an_agent() -> None:
    """Nothing can be reflected."""
    with served(secret=b"secret") as server, server.client(secret=b"") as client:
        challenge = client.challenge()
        client.send(wire.Proof(wire.prove(b"secret", "coordinator", client.hello, challenge.nonce)))
        assert refusal(client).is_final


OUT_OF_PLACE: dict[str, list[wire.FromAgent]] = {
    "a word before the greeting": [wire.Message(NodeLeft("bye"))],
    "a proof before the greeting": [wire.Proof(b"x")],
    "a beat before the greeting": [wire.Beat(1)],
    "a cancel before the greeting": [wire.Cancel("because")],
    "a word before the proof": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Message(NodeLeft("bye"))],
    "a cancel before the proof": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Cancel("because")],
    "two greetings": [wire.Hello(wire.VERSION, "run", "node", b"n" * 16)] * 2,
    "a short nonce": [wire.Hello(wire.VERSION, "run", "node", b"n")],
    "a node without a name": [wire.Hello(wire.VERSION, "run", "", b"n" * 16)],
    "a node with an endless name": [wire.Hello(wire.VERSION, "run", "n" * 65, b"n" * 16)],
}


@pytest.mark.parametrize("frames", OUT_OF_PLACE.values(), ids=OUT_OF_PLACE.keys())
def test_a_frame_out_of_its_place_costs_the_connection_and_changes_nothing(frames: list[wire.FromAgent]) -> None:
    with served() as server, server.client() as client:
        for frame in frames:
            client.send(frame)
        assert client.is_closed_by_server()
        assert server.thread.call(lambda: server.server.refused) == 1
        assert not server.facts(Received)
        assert not server.facts(CancelRequested)


def test_the_words_of_another_node_are_refused_and_its_life_goes_on() -> None:
    with served() as server, server.member("honest") as honest:
        honest.until(GenerationFormed)
        with server.client("liar") as liar:
            liar.greet()
            liar.say(NodeJoined(NodeInfo("honest", "elsewhere", min_nodes=1, max_nodes=4)))
            assert liar.is_closed_by_server()
        assert {event.node_id for event in server.facts(Received)} == {"honest"}
        honest.send(wire.Beat(1))
        assert honest.until(wire.BeatAnswer) == wire.BeatAnswer(1)


@pytest.mark.parametrize("frame", [wire.Hello(wire.VERSION, "run", "node", b"n" * 16), wire.Proof(b"x")])
def test_a_trusted_node_that_greets_again_is_closed_and_lost(frame: wire.FromAgent) -> None:
    """Not at once: that its link was closed, and by us, says nothing about its workers."""
    with served(terms=LeaseTerms(0.1, 0.5)) as server, server.member("node") as client:
        begun = time.monotonic()
        client.send(frame)
        assert client.is_closed_by_server()
        assert server.until_heard(NodeLost, node_id="node").why == "invalid data: unexpected frame"
        assert time.monotonic() - begun >= 0.5


def test_an_operator_with_the_secret_can_end_the_run_for_all() -> None:
    with served(secret=b"secret") as server, server.member() as member, server.client() as operator:
        member.until(GenerationFormed)
        operator.greet()
        operator.send(wire.Cancel("the budget of the project is spent"))
        verdict = member.until(RunEnded).verdict
        assert (verdict.outcome, verdict.why) == (Outcome.CANCELLED, "the budget of the project is spent")


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_that_connects_again_replaces_its_old_link_without_a_loss() -> None:
    with leaving_nothing(), served() as server, server.member("node") as old:
        old.until(GenerationFormed)
        with server.client("node") as new:
            new.greet()
            assert old.is_closed_by_server()
            new.say(NodeJoined(new.info(), generation=1, is_running=True, group_rank=0, group_world_size=1))
            new.say(NodeSucceeded(1))
            assert new.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert not server.facts(NodeLost)
            assert server.thread.call(lambda: server.server.others("")) == 1


def test_a_closed_link_is_a_node_lost_at_once() -> None:
    """Long before its lease is over."""
    terms = LeaseTerms(1000, 5000)
    with served(nodes=(2, 2), terms=terms) as server, server.member("stays", nodes=(2, 2)) as stays:
        with server.member("goes", nodes=(2, 2)) as goes:
            goes.until(GenerationFormed)
        assert stays.until(GenerationEnded).why == "host-goes was lost: connection closed"


def reset(client: Client) -> None:
    """Its connection ends without a farewell: a middle box, a cable, an agent that gave it up."""
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_reset_link_says_nothing_and_its_node_may_come_back() -> None:
    with served(nodes=(2, 2)) as server, server.member("stays", nodes=(2, 2)) as stays:
        cut = server.member("cut", nodes=(2, 2))
        stays.until(GenerationFormed)
        part = cut.until(GenerationFormed).assignment
        reset(cut)
        until(lambda: "cut" in server.thread.call(lambda: server.server._absent), "the reset")
        assert server.thread.call(lambda: server.server.others("stays")) == 1, "who serves must not leave it alone"
        with server.client("cut") as back:
            back.greet()
            back.say(
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
                member.say(NodeSucceeded(1))
            assert stays.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert back.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
            assert not server.facts(NodeLost)


def test_a_node_that_does_not_come_back_after_a_reset_is_lost_when_its_lease_is_over() -> None:
    with served(terms=LeaseTerms(0.1, 1.0)) as server:
        begun = time.monotonic()
        reset(server.member("cut"))
        assert server.until_heard(NodeLost, node_id="cut").why == "connection closed"
        assert time.monotonic() - begun >= 1.0
        assert server.thread.call(lambda: server.server.others("")) == 0


def test_a_refused_node_at_work_whose_link_is_reset_is_awaited_until_its_lease_is_over() -> None:
    """Its workers run until its keeper stops them."""
    with served(terms=LeaseTerms(0.1, 1.0), opened=Opened(5.0, generation=1)) as server, server.member("first", rank=1):
        refused = server.client("refused")
        refused.greet()
        refused.say(NodeJoined(refused.info(rank=1), 1, is_running=True, group_world_size=1))
        assert "rank 1" in refused.until(JoinRefused).reason
        begun = time.monotonic()
        reset(refused)
        assert server.until_heard(NodeLost, node_id="refused")
        assert time.monotonic() - begun >= 0.9, "its lease began with its last message"


def test_an_absence_of_the_server_neither_counts_against_who_was_reset_nor_protects_it() -> None:
    ahead = 0.0
    with served(terms=LeaseTerms(0.1, 1.0), clock=lambda: time.monotonic() + ahead) as server:
        cut = server.member("cut")
        cut.until(GenerationFormed)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0
            cut.send(wire.Beat(1))
            reset(cut)

        server.thread.call(sleep_and_wake)
        until(lambda: server.thread.call(lambda: server.server._tick_at) > ahead, "a look at the time")
        assert not server.facts(NodeLost)
        assert server.until_heard(NodeLost)


def test_a_word_that_was_long_under_way_is_dated_by_its_arrival() -> None:
    """A node's clock is another one; what its beats have shown of it is compared with when the word came."""
    theirs = 5_000_000.0
    failure = Failure(1, 0, 0, 1, 1, theirs - 7.0)
    with served() as server, server.member("node") as node:
        node.until(GenerationFormed)
        node.send(wire.Beat(1, theirs))
        node.until(wire.BeatAnswer)
        node.say(FailureSeen(1, failure, theirs - 6.0))  # sent six seconds before the beat, as it seems
        heard = server.until_heard(Received, kind_of_message=FailureSeen).message
        assert heard.failure == failure
        assert theirs <= heard.sent_at < theirs + PATIENCE_S


def test_a_silent_client_is_judged_when_its_lease_is_over_and_not_before() -> None:
    with served(terms=LeaseTerms(0.1, 1.5)) as server:
        begun = time.monotonic()
        with server.member("silent") as silent, server.member("honest") as honest, beating(honest, 0.05) as beats:
            assert server.until_heard(NodeLost, node_id="silent").why == "no heartbeat for 1.5 s"
            assert time.monotonic() - begun >= 1.5
            assert silent.is_closed_by_server()
            assert not beats.was_closed
        assert [lost.node_id for lost in server.facts(NodeLost)][:1] == ["silent"]


def test_a_long_absence_of_the_server_does_not_lengthen_a_later_judgement() -> None:
    """Its clock jumps, as that of a machine that slept, and it hears a last word before it looks at the time. Who is
    silent from then on is judged a lease later, not a lease and the absence."""
    ahead = 0.0
    terms = LeaseTerms(0.1, 1.5)
    with served(terms=terms, clock=lambda: time.monotonic() + ahead) as server, server.member("node") as node:
        node.until(GenerationFormed)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0
            node.send(wire.Beat(1))

        server.thread.call(sleep_and_wake)
        assert node.until(wire.BeatAnswer) == wire.BeatAnswer(1), "nobody is judged for the absence"
        assert node.is_closed_by_server()
        assert server.until_heard(NodeLost).why == "no heartbeat for 1.5 s"


def test_a_handshake_that_an_absence_interrupted_goes_on() -> None:
    """It was not the stranger who took that long."""
    ahead = 0.0
    with served(clock=lambda: time.monotonic() + ahead) as server, server.client("newcomer") as newcomer:
        challenge = newcomer.challenge()
        ahead = 100_000.0
        until(lambda: server.thread.call(lambda: server.server._tick_at) > ahead, "a look at the time")
        newcomer.send(newcomer.proof(challenge))
        newcomer.until(wire.Accepted)


def test_any_word_counts_as_a_sign_of_life() -> None:
    with served(terms=LeaseTerms(0.1, 1.5)) as server, server.member("talks") as talks:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            talks.say(NodeReady(0, "127.0.0.1", 1))
            talks.send(wire.Beat(1))
            talks.until(wire.BeatAnswer)
        assert not server.facts(NodeLost)


def test_what_arises_while_an_event_is_delivered_is_heard_after_it() -> None:
    """A link breaks while the fan-out writes to it. Who is told of the loss has heard of the cause before."""
    with served(nodes=(3, 3)) as server:
        members = {name: server.member(name, nodes=(3, 3)) for name in ("a", "b", "c")}
        for member in members.values():
            member.until(GenerationFormed)
        # The one in the middle does not read, and then there is no room for the next word to it.
        middle = server.thread.call(lambda: list(server.server._nodes.values())[1])

        def fill() -> None:
            middle.link._unsent += b"\0" * (16 << 20)

        server.thread.call(fill)
        operator = server.client("operator")
        operator.greet()
        operator.send(wire.Cancel("enough"))
        for name, member in members.items():
            if name != middle.node_id:
                assert member.until(RunEnded).verdict.why == "enough"
        lost = server.until_heard(NodeLost, node_id=middle.node_id)
        assert lost.why == "the peer does not read what it is sent"
        kinds = [type(event) for event, _ in server.record]
        assert kinds.index(CancelRequested) < kinds.index(NodeLost)
        for each in (*members.values(), operator):
            each.close()


def test_a_verdict_is_heard_by_all_before_the_server_has_closed() -> None:
    """Also by those that have not read anything for a while."""
    server = Served(nodes=(2, 2))
    one, other = server.member("one", nodes=(2, 2)), server.member("other", nodes=(2, 2))
    try:
        one.until(GenerationFormed)
        server.thread.call(lambda: server.server.cancel("the end"))
    finally:
        server.close()
    assert other.until(RunEnded).verdict.why == one.until(RunEnded).verdict.why == "the end"
    one.close()
    other.close()


def test_a_thousand_members_form_a_generation_and_hear_its_end() -> None:
    """Each gets its own part once; the end reaches all."""
    count = 1000
    with served(nodes=(count, count)) as server:
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


# --- strangers --------------------------------------------------------------------------------------------------------

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
def test_bytes_of_others_cost_their_sender_the_connection(garbage: bytes) -> None:
    with leaving_nothing(), served() as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as stranger:
            stranger.sendall(garbage)
            with suppress(ConnectionResetError):  # closed while more was on its way
                answer = stranger.recv(1 << 16)
                assert answer[:1] in (b"", b"\x15"), "nothing; a TLS alert at most"
        assert server.thread.call(lambda: server.server.refused) == 1
        assert server.thread.call(lambda: len(server.server._peers)) == 0


def test_a_slow_greeting_has_a_bounded_time() -> None:
    """One byte after the other: the time counts from the beginning, not from the last byte."""
    with served(handshake_timeout_s=0.4) as server, server.member("honest") as honest, beating(honest) as beats:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as slow:
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


def test_who_greets_but_never_proves_is_let_go_too() -> None:
    with served(terms=SHORT, handshake_timeout_s=0.2) as server, server.client() as client:
        client.challenge()
        assert client.is_closed_by_server()
        assert server.thread.call(lambda: server.server.refused) == 1


def test_a_thousand_silent_strangers_hurt_nobody_who_works() -> None:
    with leaving_nothing(), served(handshake_timeout_s=1.0) as server:
        with server.member("honest") as honest, beating(honest, 0.05) as beats:
            strangers = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(1000)]
            newcomer = server.member("newcomer")  # the places of strangers are many
            for stranger in strangers:
                assert stranger.recv(1) == b""
                stranger.close()
            assert not beats.was_closed
            assert beats.answered
            newcomer.close()
        assert server.thread.call(lambda: server.server.refused) == 1000
        assert server.thread.call(lambda: len(server.server._admission)) == 0, "their places are free again"
        assert not [lost for lost in server.facts(NodeLost) if lost.node_id == "honest"][1:]


FLOOD = """
import socket, sys, threading

def come_and_go():
    while True:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stranger:
            stranger.sendall(bytes([0, 0, 1, 0]) + b"x" * 40)

def shout():
    while True:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as stranger:
            try:
                while True:
                    stranger.sendall(bytes(1))
            except OSError:
                continue

for each in (come_and_go, shout, shout):
    threading.Thread(target=each, daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_strangers_that_never_stop_talking_do_not_hold_the_loop() -> None:
    """They connect, talk and go as fast as they can; the agent's other work, its timers among it, goes on."""
    with served(handshake_timeout_s=0.2) as server, server.member("honest") as honest:
        flood = subprocess.Popen(python(FLOOD, server.port), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert flood.stdout is not None
        flood.stdout.readline()
        try:
            with beating(honest, 0.05) as beats:
                before = server.thread.call(lambda: server.server.refused)
                while server.thread.call(lambda: server.server.refused) < before + 300:
                    assert not beats.was_closed
        finally:
            flood.kill()
            flood.communicate()


def test_a_door_that_is_never_quiet_does_not_hold_the_loop() -> None:
    """The extreme of the same: there is always something to hear. The others are still heard, and judged in time."""
    always_ready, other_end = socket.socketpair()
    other_end.send(b"!")
    with served(terms=LeaseTerms(0.1, 1.0), more_doors=[always_ready]) as server, server.member("silent") as silent:
        silent.until(GenerationFormed)
        assert silent.is_closed_by_server()
        assert server.until_heard(NodeLost).why == "no heartbeat for 1 s"
    other_end.close()


def test_honest_links_are_not_taken_for_strangers_when_they_are_many() -> None:
    """The bound is on those who have not proved themselves."""
    with served(nodes=(1, 400), terms=LeaseTerms(beat_s=1.0, lease_s=3600.0)) as server:  # they do not beat
        members = [server.member(str(number), nodes=(1, 400)) for number in range(300)]
        assert server.thread.call(lambda: len(server.server._admission)) == 0
        assert server.thread.call(lambda: server.server.others("")) == 300
        for member in members:
            member.close()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.process
@needs_openssl
def test_a_server_with_tls_serves_nodes_with_certificates_and_nobody_else(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    certificates = Certificates(tmp_path_factory.mktemp("tls"))
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    with leaving_nothing(), served(tls=files.for_server()) as server:
        with server.client() as plain:
            plain.send(plain.hello)
            assert plain.sock.recv(1 << 16)[:1] in (b"", b"\x15")  # closed, or a TLS alert
        with server.client("node") as client:
            client.sock = files.for_client().wrap_socket(client.sock, server_hostname="localhost")
            client.greet()
            client.join()
            client.until(GenerationFormed)


# --- refusals by the coordinator --------------------------------------------------------------------------------------


def test_a_node_for_another_number_of_nodes_is_told_so() -> None:
    with served(nodes=(1, 4)) as server, server.client() as client:
        client.greet()
        client.join(nodes=(2, 2))
        reason: Any = client.until(JoinRefused).reason
        assert "--nnodes" in reason


def test_a_server_that_was_frozen_while_it_recovered_waits_a_full_period() -> None:
    """Its deadline has passed, and a member may be alive: nothing is formed until it had the time to join."""
    ahead = 0.0
    terms = LeaseTerms(0.1, 1.5)
    opened = Opened(recover_s=1.5, generation=4)
    clock = lambda: time.monotonic() + ahead  # noqa: E731
    with served(terms=terms, clock=clock, opened=opened) as server, server.member("new") as new:
        new.until(Waiting)

        def sleep_and_wake() -> None:
            nonlocal ahead
            ahead = 100_000.0

        server.thread.call(sleep_and_wake)
        resumed = server.until_heard(Resumed)
        begun = time.monotonic()
        assert resumed.absent_s > 1000.0
        with beating(new, 0.05) as beats:
            until(lambda: any(isinstance(each, GenerationFormed) for each in beats.events), "a generation")
        (formed,) = (each for each in beats.events if isinstance(each, GenerationFormed))
        assert formed.assignment.generation == 5
        assert time.monotonic() - begun > 1.0
