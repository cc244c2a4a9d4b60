"""A node's way to the coordinator: finding it, believing it, losing it, doing without it, and taking its place."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit.processes import leaving_nothing, on_linux
from kit.tcp import (
    PATIENCE_S,
    Certificates,
    Held,
    engine_node,
    held,
    needs_openssl,
    own_endpoint,
    served,
    server_process,
)
from tenax._core.coordinator import NodeLost, Opened, Received, RunPhase
from tenax._core.events import Fenced, GenerationEnded, GenerationFormed, JoinRefused, RunEnded, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.messages import NodeJoined, NodeLeft, NodeSucceeded
from tenax._core.model import Assignment, Outcome, Verdict
from tenax._engines.tcp import wire
from tenax._io.tls import TlsFiles

TERMS = LeaseTerms(beat_s=0.1, lease_s=2.0)  # what no test stalls for


@pytest.fixture(autouse=True)
def own_folder_for_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def address() -> Iterator[Held]:
    with held() as made:
        yield made


# --- finding ----------------------------------------------------------------------------------------------------------


def test_who_can_bind_the_endpoint_serves_it_and_the_others_join() -> None:
    endpoint = own_endpoint()
    with (
        leaving_nothing(),
        engine_node(endpoint, nodes=(2, 2)) as first,
        engine_node(endpoint, nodes=(2, 2)) as other,
    ):
        first.until_said(f"this node serves the coordinator of the run 'run' at {endpoint}")
        parts = [node.until(GenerationFormed).assignment for node in (first, other)]
        assert sorted(part.group_rank for part in parts) == [0, 1]
        assert not other.said


def test_a_node_that_came_before_the_server_joins_when_it_is_there(address: Held) -> None:
    with engine_node(address.endpoint) as early:
        early.until_said("no coordinator at")
        with served(door=address.listen()) as server:
            early.until(GenerationFormed)
            assert server.facts(Received)[0].message.node.host == os.uname().nodename


def test_a_name_that_does_not_exist_is_said_tried_again_and_does_not_hold_the_loop() -> None:
    with engine_node("no-such-host.invalid:29400", join_timeout_s=1.2) as node:
        node.thread.call(lambda: None)  # the loop is free while the name is looked up
        reason = node.until(JoinRefused).reason
        assert reason.startswith("cannot resolve the host name 'no-such-host.invalid': ")
        assert "join_timeout" in reason


def test_leaving_while_a_name_is_looked_up_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    with leaving_nothing():
        with engine_node("no-such-host.invalid:29400"):
            pass
        for thread in set(threading.enumerate()) - before:  # its own end closes what it holds
            thread.join(PATIENCE_S)


def test_without_a_coordinator_a_node_gives_up_in_time_and_says_what_to_do(address: Held) -> None:
    with leaving_nothing(), engine_node(address.endpoint, join_timeout_s=0.3) as node:
        reason = node.until(JoinRefused).reason
        assert reason.startswith(f"no coordinator at {address.endpoint}: Connection refused; gave up after ")
        assert "start the node that serves it" in reason
        assert "join_timeout" in reason


def test_a_peer_that_accepts_and_says_nothing_is_given_up_in_time(address: Held) -> None:
    address.listen()
    with engine_node(address.endpoint, join_timeout_s=0.5) as node:
        assert "is not a tenax coordinator" in node.until(JoinRefused).reason


def test_a_port_of_somebody_else_is_tried_again_and_the_sentence_says_so(address: Held) -> None:
    """A web server, say. It may be replaced by the coordinator yet."""
    door = address.listen()
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if select.select([door], [], [], 0.05)[0]:
                with door.accept()[0] as visitor:
                    visitor.recv(1000)
                    visitor.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with engine_node(address.endpoint, join_timeout_s=0.5) as node:
            assert "if another program uses that port, choose another" in node.until(JoinRefused).reason
    finally:
        over.set()
        thread.join()


def test_a_run_that_is_just_ending_on_the_same_port_is_waited_for() -> None:
    """And then this node serves its own."""
    endpoint = own_endpoint()
    host, _, port = endpoint.rpartition(":")
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind((host, int(port)))
    door.listen()
    with served(door=door, run_id="old") as old:
        old.thread.call(lambda: old.server.cancel("it is over"))
        with engine_node(endpoint, run_id="new") as node:
            node.until_said("it serves another run or has another secret")
            assert not [event for event in node.events if isinstance(event, JoinRefused)]
            old.thread.call(old.server.close)
            node.until_said("this node serves the coordinator of the run 'new'")
            node.until(GenerationFormed)


REJECTED = (
    "the coordinator at {endpoint} rejected this node: it serves another run or has another secret; give every node "
    "the same --rdzv-id and the same secret (--rdzv-conf token_file=FILE or the variable TENAX_RDZV_TOKEN)"
)


def test_a_run_that_is_at_work_on_the_same_port_refuses_for_good(address: Held) -> None:
    """The node is not told which run that is, but what to do."""
    with served(door=address.listen(), run_id="theirs"), engine_node(address.endpoint, run_id="ours") as node:
        assert node.until(JoinRefused).reason == REJECTED.format(endpoint=address.endpoint)


def test_another_secret_is_refused_for_good(address: Held) -> None:
    """With the same message as another run."""
    with served(door=address.listen(), secret=b"one"), engine_node(address.endpoint, secret=b"other") as node:
        assert node.until(JoinRefused).reason == REJECTED.format(endpoint=address.endpoint)


# --- believing --------------------------------------------------------------------------------------------------------

VERDICT = wire.Event(RunEnded(Verdict(Outcome.CANCELLED, "says who?"), 0.0))
FORMED = wire.Event(GenerationFormed(Assignment(1)))
LIES: dict[str, list[wire.FromServer]] = {
    "accepts without a proof": [wire.Accepted(b"", 1.0, 5.0)],
    "ends the run without a proof": [VERDICT],
    "forms a generation without a proof": [FORMED],
    "answers beats without a proof": [wire.BeatAnswer(1)],
    "accepts and ends the run": [wire.Accepted(b"", 1.0, 5.0), VERDICT],
    "sends a short challenge": [wire.Challenge(b"n")],
    "ends the run after its challenge": [wire.Challenge(b"n" * 16), VERDICT],
}


class Liar:
    """Somebody at the endpoint who does not know the secret; says the same to everybody."""

    def __init__(self, door: socket.socket, frames: list[wire.FromServer]) -> None:
        self.heard: list[wire.FromAgent] = []
        self._door = door
        self._data = b"".join(map(wire.encode, frames))
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._stop_reader not in select.select([self._door, self._stop_reader], [], [])[0]:
            with self._door.accept()[0] as victim:
                reader = wire.FrameReader()
                while not (bodies := reader.feed(victim.recv(4096))):
                    pass
                victim.sendall(self._data)
                with suppress(ConnectionResetError):  # which is how a node closes what it did not want
                    while data := victim.recv(4096):
                        bodies += reader.feed(data)
                self.heard += [wire.decode_from_agent(body) for body in bodies]

    def close(self) -> None:
        os.write(self._stop_writer, b"!")
        self._thread.join(PATIENCE_S)
        os.close(self._stop_reader)
        os.close(self._stop_writer)


@pytest.mark.parametrize("frames", LIES.values(), ids=LIES.keys())
def test_a_coordinator_that_proves_nothing_is_not_believed(address: Held, frames: list[wire.FromServer]) -> None:
    liar = Liar(address.listen(), frames)
    try:
        with engine_node(address.endpoint, secret=b"secret", join_timeout_s=0.3) as node:
            assert "is not a tenax coordinator" in node.until(JoinRefused).reason
            assert node.turns() == [JoinRefused]
    finally:
        liar.close()
    assert all(isinstance(frame, wire.Hello | wire.Proof) for frame in liar.heard), "it got nothing but the handshake"


def test_a_coordinator_with_a_wrong_proof_is_rejected(address: Held) -> None:
    """It accepts everyone, and then ends the run: nothing after the wrong proof is believed."""
    lies = [wire.Challenge(b"n" * 16), wire.Accepted(b"x" * 32, 1.0, 5.0), VERDICT]
    liar = Liar(address.listen(), lies)
    try:
        with engine_node(address.endpoint, secret=b"secret") as node:
            assert "does not know the secret of the run" in node.until(JoinRefused).reason
            assert node.turns() == [JoinRefused]
    finally:
        liar.close()


def test_a_coordinator_of_another_version_is_named_as_such(address: Held) -> None:
    """The text of a rejection is not shown, because anyone may have sent it."""
    liar = Liar(address.listen(), [wire.Refused("\x1b[2J click here")])  # as version 1 sends it: without its number
    try:
        with engine_node(address.endpoint) as node:
            reason = node.until(JoinRefused).reason
            assert "its protocol version is 1, this node's is 2; use the same tenax version" in reason
            assert "click" not in reason
    finally:
        liar.close()


def test_the_secret_itself_never_travels(address: Held) -> None:
    """Nor anything that could be replayed: see the wire's tests."""
    with served(door=address.listen(), secret=b"swordfish") as server:
        with engine_node(address.endpoint, secret=b"swordfish") as node:
            node.until(GenerationFormed)
        assert "swordfish" not in repr(server.record)


# --- losing -----------------------------------------------------------------------------------------------------------


def test_a_new_coordinator_is_told_everything_and_adopts_the_generation(address: Held) -> None:
    """Nothing was kept in between; workers were not touched."""
    door = address.listen()
    copy = socket.socket(fileno=os.dup(door.fileno()))  # the port stays taken while servers come and go
    with served(door=door) as first, engine_node(address.endpoint) as node:
        node.until(GenerationFormed)
        first.thread.call(first.server.close)
        node.until_said("workers keep running while this node reconnects")
        with served(door=copy, opened=Opened(recover_s=30.0)) as second:
            joined = second.until_heard(Received).message
            assert isinstance(joined, NodeJoined)
            assert (joined.generation, joined.is_running) == (1, True)
            assert second.thread.call(lambda: second.server.coordinator.state.phase) is RunPhase.RUNNING
            assert node.turns() == [GenerationFormed]
            node.tell(NodeSucceeded(1))
            assert node.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED


def test_a_link_that_breaks_costs_nothing_but_a_greeting(address: Held) -> None:
    """A middle box forgets the connection, say. The same coordinator hears everything again, and nothing is changed."""
    with served(door=address.listen()) as server, engine_node(address.endpoint) as node:
        node.until(GenerationFormed)

        def break_it() -> None:
            (peer,) = server.server._nodes.values()
            peer.link.reset("it broke")

        server.thread.call(break_it)
        node.until_said("workers keep running while this node reconnects")
        again = server.until_heard(Received, number=1, kind_of_message=NodeJoined).message
        assert (again.generation, again.is_running) == (1, True)
        node.tell(NodeSucceeded(1))
        assert node.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
        assert not server.facts(NodeLost)
        assert node.turns() == [GenerationFormed, RunEnded]


def test_a_node_that_leaves_closes_in_order_and_one_that_gives_up_a_link_resets_it(address: Held) -> None:
    """Closed in order means that nothing of the node is alive. The keeper holds a copy until that is so."""
    door = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        first, _ = door.accept()
        accept_by_hand(first, TERMS)
        node.until(GenerationFormed)
        assert node.kept == ["link"]
        first.sendall(b"\0\0\0\x04what")  # a coordinator that talks nonsense
        assert how_it_ends(first) == "reset"
        node.until_said(": invalid data: not a valid frame")
        assert node.released == ["link"]
        second, _ = door.accept()
        accept_by_hand(second, TERMS, is_formed=False)
    assert how_it_ends(second) == "closed"
    first.close()
    second.close()


def how_it_ends(sock: socket.socket) -> str:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return "reset"
    return "closed"


def test_a_survivor_on_the_same_host_takes_over_at_once() -> None:
    """The endpoint is here: who finds it free serves it, knows the generation, and gives the others a moment."""
    endpoint = own_endpoint()
    with engine_node(endpoint, nodes=(1, 2), terms=TERMS) as first:
        first.until(GenerationFormed)
        with engine_node(endpoint, nodes=(1, 2), terms=TERMS) as survivor:
            survivor.until(GenerationFormed)
            assert survivor.generation == 2
            first.close()
            survivor.until_said(f"this node takes over the coordinator of the run 'run' at {endpoint}")
            survivor.until(GenerationEnded)
            survivor.until_held(lambda holds: holds[-1] == 0)


@pytest.mark.process
@on_linux
def test_a_stopped_coordinator_fences_nobody() -> None:
    """Its host's system still takes every beat, so this node is not cut off, and the coordinator judges nobody."""
    with server_process(terms=TERMS) as server, engine_node(f"127.0.0.1:{server.port}", terms=TERMS) as node:
        node.until(GenerationFormed)
        server.stop()
        held_before = len(node.holds)
        node.until_held(lambda holds: len(holds) > held_before + 25)  # more beats than a lease is long
        server.go_on()
        assert server.facts()["lost"] == []
        assert node.turns() == [GenerationFormed]


@on_linux
def test_who_cannot_reach_a_silent_coordinator_is_fenced_in_time(address: Held) -> None:
    """The other host's system takes nothing any more: for all this node knows, it is cut off."""
    terms = LeaseTerms(beat_s=0.002, lease_s=0.5)
    door = address.listen()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least there is; full after a few dozen beats
    with engine_node(address.endpoint, terms=terms) as node:
        sock, _ = door.accept()
        accept_by_hand(sock, terms)
        fenced = node.until(Fenced)
        assert fenced.generation == 1
        assert fenced.why.startswith(f"no answer from the coordinator at {address.endpoint} for 0.4 s")
        assert 0 < node.holds[-1] <= terms.fence_s, "the keeper would have done it without us"
        assert "workers keep running" not in node.until_said(": no answer for")
        sock.close()


def accept_by_hand(sock: socket.socket, terms: LeaseTerms, is_formed: bool = True) -> None:
    """The coordinator's side of a handshake without a secret, and a generation; then silence."""
    reader = wire.FrameReader(wire.MAX_BYTES)
    bodies: list[bytes] = []

    def frame() -> Any:
        while True:
            while not bodies:
                bodies.extend(reader.feed(sock.recv(4096)))
            found = wire.decode_from_agent(bodies.pop(0))
            if not isinstance(found, wire.Beat):
                return found

    hello = frame()
    nonce = os.urandom(wire.NONCE_BYTES)
    sock.sendall(wire.encode(wire.Challenge(nonce)))
    assert frame().proof == wire.prove(b"", "agent", hello, nonce)
    proof = wire.prove(b"", "coordinator", hello, nonce)
    sock.sendall(wire.encode(wire.Accepted(proof, terms.beat_s, terms.lease_s)))
    assert isinstance(frame().message, NodeJoined)
    if is_formed:
        sock.sendall(wire.encode(wire.Event(GenerationFormed(Assignment(1)))))


def test_a_part_that_is_said_again_is_taken_once(address: Held) -> None:
    """It may have waited in the coordinator's queue while our link broke, and been said to the next link too."""
    door = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        sock, _ = door.accept()
        accept_by_hand(sock, TERMS)
        for event in (GenerationFormed(Assignment(1)), Waiting("the end")):
            sock.sendall(wire.encode(wire.Event(event)))
        node.until(Waiting)
        assert node.turns() == [GenerationFormed]
        sock.close()


def test_a_coordinator_that_is_gone_harms_nobody_for_longer_than_a_lease(address: Held) -> None:
    """Refused connections prove that nobody forms a generation without us."""
    door = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        sock, _ = door.accept()
        accept_by_hand(sock, TERMS)
        node.until(GenerationFormed)
        held_before = len(node.holds)
        door.shutdown(socket.SHUT_RDWR)  # nobody listens any more, and the port stays taken
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        node.until_held(lambda holds: len(holds) > held_before + 20)  # renewed at every refusal, longer than a lease
        assert node.turns() == [GenerationFormed]


def test_the_workers_of_a_run_that_is_over_have_their_whole_grace(address: Held) -> None:
    """Nobody forms a generation any more, so no lease may end them, also when the coordinator is gone."""
    with served(door=address.listen(), terms=TERMS) as server, engine_node(address.endpoint, terms=TERMS) as node:
        node.until(GenerationFormed)
        node.until_held(lambda holds: holds[-1] > 0)
        server.thread.call(lambda: server.server.cancel("enough"))
        node.until(RunEnded)
        server.thread.call(server.server.close)
        node.thread.call(lambda: None)
        assert node.holds[-1] == 0


def test_leaving_says_goodbye_before_the_link_is_closed(address: Held) -> None:
    with served(door=address.listen()) as server:
        with engine_node(address.endpoint) as node:
            node.until(GenerationFormed)
            node.tell(NodeLeft("asked to"))
        assert server.until_heard(NodeLost)
        words = [event.message for event in server.facts(Received)]
        assert words[-1] == NodeLeft("asked to")


def test_a_cancel_through_the_engine_ends_the_run_for_all() -> None:
    endpoint = own_endpoint()
    with engine_node(endpoint, nodes=(2, 2)) as one, engine_node(endpoint, nodes=(2, 2)) as other:
        for node in (one, other):
            node.until(GenerationFormed)
        other.thread.call(lambda: other.engine.cancel("by hand"))
        verdicts = [node.until(RunEnded).verdict for node in (one, other)]
        assert verdicts[0] == verdicts[1]
        assert (verdicts[0].outcome, verdicts[0].why) == (Outcome.CANCELLED, "by hand")


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.process
@needs_openssl
def test_nodes_meet_through_tls(certificates: Certificates) -> None:
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    endpoint = certificates.endpoint
    with (
        leaving_nothing(),
        engine_node(endpoint, nodes=(2, 2), tls=files, secret=b"secret") as one,
        engine_node(endpoint, nodes=(2, 2), tls=files, secret=b"secret") as other,
    ):
        for node in (one, other):
            node.until(GenerationFormed)


@needs_openssl
def test_a_node_that_would_serve_without_a_certificate_says_so_and_leaves_nothing(certificates: Certificates) -> None:
    with leaving_nothing(), engine_node(own_endpoint(), tls=TlsFiles(ca=certificates.ca)) as node:
        assert "ssl_cert" in node.until(JoinRefused).reason


@needs_openssl
def test_a_coordinator_of_another_authority_is_refused_with_a_sentence(certificates: Certificates) -> None:
    endpoint = certificates.endpoint
    strange = TlsFiles(certificates.strange_cert, certificates.strange_key)
    with engine_node(endpoint, tls=msgspec.structs.replace(strange, ca=certificates.strange_ca)) as theirs:
        theirs.until(GenerationFormed)
        with engine_node(endpoint, tls=TlsFiles(certificates.cert, certificates.key, certificates.ca)) as ours:
            assert "TLS handshake failed" in ours.until(JoinRefused).reason


# --- the marker, in a life --------------------------------------------------------------------------------------------

SERVE = """
import sys
from kit.tcp import EngineNode
from tenax._core.events import GenerationFormed
node = EngineNode(sys.argv[1])
node.until(GenerationFormed)
print("formed", flush=True)
sys.stdin.read()
node.close()
"""


def serving_process(endpoint: str, folder: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"formed\n"
    return process


@pytest.mark.process
def test_who_follows_a_killed_coordinator_waits_for_its_nodes_and_counts_on(tmp_path: Path) -> None:
    endpoint = own_endpoint()
    killed = serving_process(endpoint, tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(tmp_path.iterdir()), "it left its marker"
    with engine_node(endpoint, terms=TERMS) as heir:
        heir.until_said("this node takes over the coordinator")
        assert heir.until(GenerationFormed).assignment.generation == 2
    assert not list(tmp_path.iterdir()), "an orderly end removes it"


@pytest.mark.process
def test_who_follows_an_orderly_end_begins_anew(tmp_path: Path) -> None:
    endpoint = own_endpoint()
    ended = serving_process(endpoint, tmp_path)
    ended.communicate()
    assert ended.returncode == 0
    assert not list(tmp_path.iterdir())
    with engine_node(endpoint) as node:
        node.until_said("this node serves the coordinator")
        assert node.until(GenerationFormed).assignment.generation == 1
