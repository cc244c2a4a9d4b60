"""The tcp engine of a node: finding the coordinator, authenticating it, losing it, and taking over."""

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
    TIMEOUT_S,
    Certificates,
    ReservedAddress,
    engine_node,
    needs_openssl,
    own_endpoint,
    reserved_address,
    run_server,
    server_process,
)
from tenax._core.coordinator import CancelRequested, NodeLost, Opened, Received, Running
from tenax._core.events import Fenced, GenerationEnded, GenerationFormed, JoinRefused, RunEnded, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import NodeJoined, NodeLeft, NodeSucceeded
from tenax._core.model import Assignment, Outcome, Verdict
from tenax._io.tls import TlsFiles

TERMS = LeaseTerms(beat_s=0.1, lease_s=2.0)  # longer than any delay in these tests


@pytest.fixture(autouse=True)
def own_folder_for_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def address() -> Iterator[ReservedAddress]:
    with reserved_address() as made:
        yield made


# --- finding ----------------------------------------------------------------------------------------------------------


def test_the_node_that_can_bind_the_endpoint_serves_it_and_others_join() -> None:
    endpoint = own_endpoint()
    with (
        leaving_nothing(),
        engine_node(endpoint, nodes=(2, 2)) as first,
        engine_node(endpoint, nodes=(2, 2)) as other,
    ):
        first.until_printed(f"this node serves the coordinator of the run 'run' at {endpoint}")
        parts = [node.until(GenerationFormed).assignment for node in (first, other)]
        assert sorted(part.group_rank for part in parts) == [0, 1]
        assert not other.printed


def test_a_node_that_started_before_the_server_joins_it_later(address: ReservedAddress) -> None:
    with engine_node(address.endpoint) as early:
        early.until_printed("no coordinator at")
        with run_server(listener=address.listen()) as server:
            early.until(GenerationFormed)
            assert server.events(Received)[0].message.node.host == os.uname().nodename


def test_an_unknown_host_name_is_reported_and_retried_without_blocking_the_loop() -> None:
    with engine_node("no-such-host.invalid:29400", join_timeout_s=1.2) as node:
        node.thread.call(lambda: None)  # the loop runs while the name is looked up
        reason = node.until(JoinRefused).reason
        assert reason.startswith("cannot resolve the host name 'no-such-host.invalid': ")
        assert "join_timeout" in reason


def test_closing_during_a_name_lookup_leaks_nothing() -> None:
    before = set(threading.enumerate())
    with leaving_nothing():
        with engine_node("no-such-host.invalid:29400"):
            pass
        for thread in set(threading.enumerate()) - before:  # it closes its descriptors when it ends
            thread.join(TIMEOUT_S)


def test_a_node_without_a_coordinator_gives_up_after_the_join_timeout_with_the_remedy(address: ReservedAddress) -> None:
    with leaving_nothing(), engine_node(address.endpoint, join_timeout_s=0.3) as node:
        reason = node.until(JoinRefused).reason
        assert reason.startswith(f"no coordinator at {address.endpoint}: Connection refused; gave up after ")
        assert "start the node that serves it" in reason
        assert "join_timeout" in reason


def test_a_listener_that_never_answers_is_given_up_after_the_join_timeout(address: ReservedAddress) -> None:
    address.listen()
    with engine_node(address.endpoint, join_timeout_s=0.5) as node:
        assert "is not a tenax coordinator" in node.until(JoinRefused).reason


def test_another_program_at_the_endpoint_is_reported(address: ReservedAddress) -> None:
    """For example a web server. The node retries: the coordinator may replace it."""
    listening = address.listen()
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if select.select([listening], [], [], 0.05)[0]:
                with listening.accept()[0] as client:
                    client.recv(1000)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with engine_node(address.endpoint, join_timeout_s=0.5) as node:
            assert "if another program uses that port, choose another" in node.until(JoinRefused).reason
    finally:
        over.set()
        thread.join()


def test_a_node_waits_for_another_run_that_is_ending_at_its_endpoint() -> None:
    """Then it serves its own run."""
    endpoint = own_endpoint()
    host, _, port = endpoint.rpartition(":")
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, int(port)))
    listening.listen()
    with run_server(listener=listening, run_id="old") as old:
        old.thread.call(lambda: old.server.coordinator.step(CancelRequested("it is over")))
        with engine_node(endpoint, run_id="new") as node:
            node.until_printed("it serves another run or has another secret")
            assert not [event for event in node.events if isinstance(event, JoinRefused)]
            old.thread.call(old.server.close)
            node.until_printed("this node serves the coordinator of the run 'new'")
            node.until(GenerationFormed)


REJECTED = (
    "the coordinator at {endpoint} rejected this node: it serves another run or has another secret; give every node "
    "the same --rdzv-id and the same secret (--rdzv-conf token_file=FILE or the variable TENAX_RDZV_TOKEN)"
)


def test_a_node_is_rejected_for_good_by_another_run_at_its_endpoint(address: ReservedAddress) -> None:
    """The message names the remedy, but not that run."""
    with (
        run_server(listener=address.listen(), run_id="theirs"),
        engine_node(address.endpoint, run_id="ours") as node,
    ):
        assert node.until(JoinRefused).reason == REJECTED.format(endpoint=address.endpoint)


def test_another_secret_is_refused_for_good(address: ReservedAddress) -> None:
    """With the same message as another run."""
    with (
        run_server(listener=address.listen(), secret=b"one"),
        engine_node(address.endpoint, secret=b"other") as node,
    ):
        assert node.until(JoinRefused).reason == REJECTED.format(endpoint=address.endpoint)


# --- authenticating ---------------------------------------------------------------------------------------------------

VERDICT = wire.Event(RunEnded(Verdict(Outcome.CANCELLED, "not authenticated"), 0.0))
FORMED = wire.Event(GenerationFormed(Assignment(1)))
FALSE_FRAMES: dict[str, list[wire.FromServer]] = {
    "accepts without a proof": [wire.Accepted(b"", 1.0, 5.0)],
    "ends the run without a proof": [VERDICT],
    "forms a generation without a proof": [FORMED],
    "answers beats without a proof": [wire.BeatAnswer(1)],
    "accepts and ends the run": [wire.Accepted(b"", 1.0, 5.0), VERDICT],
    "sends a short challenge": [wire.Challenge(b"n")],
    "ends the run after its challenge": [wire.Challenge(b"n" * 16), VERDICT],
}


class Impostor:
    """A process at the endpoint without the secret. It sends the same frames to every client."""

    def __init__(self, listening: socket.socket, frames: list[wire.FromServer]) -> None:
        self.received: list[wire.FromAgent] = []
        self._door = listening
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
                with suppress(ConnectionResetError):  # how a node closes a link that it rejects
                    while data := victim.recv(4096):
                        bodies += reader.feed(data)
                self.received += [wire.decode_from_agent(body) for body in bodies]

    def close(self) -> None:
        os.write(self._stop_writer, b"!")
        self._thread.join(TIMEOUT_S)
        os.close(self._stop_reader)
        os.close(self._stop_writer)


@pytest.mark.parametrize("frames", FALSE_FRAMES.values(), ids=FALSE_FRAMES.keys())
def test_frames_of_a_coordinator_without_a_proof_are_ignored(
    address: ReservedAddress, frames: list[wire.FromServer]
) -> None:
    impostor = Impostor(address.listen(), frames)
    try:
        with engine_node(address.endpoint, secret=b"secret", join_timeout_s=0.3) as node:
            assert "is not a tenax coordinator" in node.until(JoinRefused).reason
            assert node.event_kinds() == [JoinRefused]
    finally:
        impostor.close()
    assert all(isinstance(frame, wire.Hello | wire.Proof) for frame in impostor.received), (
        "it received only handshake frames"
    )


def test_a_coordinator_with_a_wrong_proof_is_rejected(address: ReservedAddress) -> None:
    """Frames after the wrong proof are ignored."""
    frames = [wire.Challenge(b"n" * 16), wire.Accepted(b"x" * 32, 1.0, 5.0), VERDICT]
    impostor = Impostor(address.listen(), frames)
    try:
        with engine_node(address.endpoint, secret=b"secret") as node:
            assert "does not know the secret of the run" in node.until(JoinRefused).reason
            assert node.event_kinds() == [JoinRefused]
    finally:
        impostor.close()


def test_a_coordinator_with_another_protocol_version_is_reported(address: ReservedAddress) -> None:
    """The text of a rejection is not shown, because any process can send it."""
    impostor = Impostor(
        address.listen(), [wire.Refused("\x1b[2J click here")]
    )  # as version 1 sends it: without its number
    try:
        with engine_node(address.endpoint) as node:
            reason = node.until(JoinRefused).reason
            assert "its protocol version is 1, this node's is 2; use the same tenax version" in reason
            assert "click" not in reason
    finally:
        impostor.close()


def test_the_secret_is_never_sent(address: ReservedAddress) -> None:
    """Nor anything that could be replayed: see ``test_tcp_wire.py``."""
    with run_server(listener=address.listen(), secret=b"swordfish") as server:
        with engine_node(address.endpoint, secret=b"swordfish") as node:
            node.until(GenerationFormed)
        assert "swordfish" not in repr(server.record)


# --- losing the link---------------------------------------------------------------------------------------------------


def test_a_new_coordinator_gets_the_nodes_state_and_adopts_the_generation(address: ReservedAddress) -> None:
    """The workers keep running."""
    listening = address.listen()
    copy = socket.socket(fileno=os.dup(listening.fileno()))  # the port stays bound while servers come and go
    with run_server(listener=listening) as first, engine_node(address.endpoint) as node:
        node.until(GenerationFormed)
        first.thread.call(first.server.close)
        node.until_printed("workers keep running while this node reconnects")
        with run_server(listener=copy, opened=Opened(recover_s=30.0)) as second:
            joined = second.until_event(Received).message
            assert isinstance(joined, NodeJoined)
            assert (joined.generation, joined.is_running) == (1, True)
            assert isinstance(second.thread.call(lambda: second.server.coordinator.state.phase), Running)
            assert node.event_kinds() == [GenerationFormed]
            node.send(NodeSucceeded(1))
            assert node.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED


def test_a_broken_link_is_replaced_without_a_change_of_the_run(address: ReservedAddress) -> None:
    """For example, a firewall dropped the connection. The same coordinator receives the node's state again."""
    with run_server(listener=address.listen()) as server, engine_node(address.endpoint) as node:
        node.until(GenerationFormed)

        def break_it() -> None:
            (connection,) = server.server._connections.values()
            connection.link.reset("it broke")

        server.thread.call(break_it)
        node.until_printed("workers keep running while this node reconnects")
        again = server.until_event(Received, number=1, message_kind=NodeJoined).message
        assert (again.generation, again.is_running) == (1, True)
        node.send(NodeSucceeded(1))
        assert node.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED
        assert not server.events(NodeLost)
        assert node.event_kinds() == [GenerationFormed, RunEnded]


def test_a_leaving_node_closes_its_link_orderly_and_resets_a_rejected_one(address: ReservedAddress) -> None:
    """An orderly close means that no process of the node is alive. The keeper holds a copy until then."""
    listening = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        first, _ = listening.accept()
        accept_by_hand(first, TERMS)
        node.until(GenerationFormed)
        assert node.kept == ["link"]
        first.sendall(b"\0\0\0\x04what")  # an invalid frame
        assert read_end(first) == "reset"
        node.until_printed(": invalid data: not a valid frame")
        assert node.released == ["link"]
        second, _ = listening.accept()
        accept_by_hand(second, TERMS, is_formed=False)
    assert read_end(second) == "closed"
    first.close()
    second.close()


def read_end(sock: socket.socket) -> str:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return "reset"
    return "closed"


def test_a_node_on_the_endpoints_host_takes_over_at_once() -> None:
    """It can bind the endpoint, knows the generation, and waits for the other members."""
    endpoint = own_endpoint()
    with engine_node(endpoint, nodes=(1, 2), terms=TERMS) as first:
        first.until(GenerationFormed)
        with engine_node(endpoint, nodes=(1, 2), terms=TERMS) as survivor:
            survivor.until(GenerationFormed)
            assert survivor.generation == 2
            first.close()
            survivor.until_printed(f"this node takes over the coordinator of the run 'run' at {endpoint}")
            survivor.until(GenerationEnded)
            survivor.until_held(lambda holds: holds[-1] == 0)


@pytest.mark.process
@on_linux
def test_a_stopped_coordinator_causes_no_fence() -> None:
    """Its host acknowledges every beat, so this node is not cut off."""
    with server_process(terms=TERMS) as server, engine_node(f"127.0.0.1:{server.port}", terms=TERMS) as node:
        node.until(GenerationFormed)
        server.stop()
        held_before = len(node.holds)
        node.until_held(lambda holds: len(holds) > held_before + 25)  # more beats than fit in a lease
        server.resume()
        assert server.figures()["lost"] == []
        assert node.event_kinds() == [GenerationFormed]


@on_linux
def test_a_node_that_cannot_reach_a_silent_coordinator_is_fenced_in_time(address: ReservedAddress) -> None:
    """The other host acknowledges nothing, so this node may be cut off."""
    terms = LeaseTerms(beat_s=0.002, lease_s=0.5)
    listening = address.listen()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the minimum; full after a few dozen beats
    with engine_node(address.endpoint, terms=terms) as node:
        sock, _ = listening.accept()
        accept_by_hand(sock, terms)
        fenced = node.until(Fenced)
        assert fenced.generation == 1
        assert fenced.why.startswith(f"no answer from the coordinator at {address.endpoint} for 430 ms")
        assert 0 < node.holds[-1] <= terms.fence_s, "the keeper would have killed the workers without the agent"
        assert "workers keep running" not in node.until_printed(": no answer for")
        sock.close()


def accept_by_hand(sock: socket.socket, terms: LeaseTerms, is_formed: bool = True) -> None:
    """Do the coordinator's side of a handshake without a secret, and send a generation."""
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


def test_a_repeated_assignment_is_processed_once(address: ReservedAddress) -> None:
    """It may have waited at the coordinator while the link broke, and been sent on the next link too."""
    listening = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        sock, _ = listening.accept()
        accept_by_hand(sock, TERMS)
        for event in (GenerationFormed(Assignment(1)), Waiting("the end")):
            sock.sendall(wire.encode(wire.Event(event)))
        node.until(Waiting)
        assert node.event_kinds() == [GenerationFormed]
        sock.close()


def test_a_node_is_not_fenced_while_connections_to_the_coordinator_are_refused(address: ReservedAddress) -> None:
    """Refused connections prove that no coordinator forms a generation without this node."""
    listening = address.listen()
    with engine_node(address.endpoint, terms=TERMS) as node:
        sock, _ = listening.accept()
        accept_by_hand(sock, TERMS)
        node.until(GenerationFormed)
        held_before = len(node.holds)
        listening.shutdown(socket.SHUT_RDWR)  # connections are refused, and the port stays bound
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        node.until_held(lambda holds: len(holds) > held_before + 20)  # renewed at every refusal, longer than a lease
        assert node.event_kinds() == [GenerationFormed]


def test_workers_get_their_full_grace_period_after_the_end_of_the_run(address: ReservedAddress) -> None:
    """No further generation forms, so the lease must not end them, even if the coordinator is gone.

    The keeper ends them only later, if the agent is stopped.
    """
    with (
        run_server(listener=address.listen(), terms=TERMS) as server,
        engine_node(address.endpoint, terms=TERMS) as node,
    ):
        node.until(GenerationFormed)
        node.until_held(lambda holds: holds[-1] > 0)
        server.thread.call(lambda: server.server.coordinator.step(CancelRequested("enough")))
        node.until(RunEnded)
        server.thread.call(server.server.close)
        node.thread.call(lambda: None)
        assert node.holds[-1] == 30.0 + TERMS.fence_s, "grace period and lease"


def test_a_leaving_node_sends_its_last_message_before_it_closes_the_link(address: ReservedAddress) -> None:
    with run_server(listener=address.listen()) as server:
        with engine_node(address.endpoint) as node:
            node.until(GenerationFormed)
            node.send(NodeLeft("asked to"))
        assert server.until_event(NodeLost)
        sent = [event.message for event in server.events(Received)]
        assert sent[-1] == NodeLeft("asked to")


def test_cancelling_through_the_engine_ends_the_run_on_all_nodes() -> None:
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
def test_nodes_form_a_generation_over_tls(certificates: Certificates) -> None:
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
def test_a_node_that_cannot_serve_without_a_certificate_reports_that(certificates: Certificates) -> None:
    with leaving_nothing(), engine_node(own_endpoint(), tls=TlsFiles(ca=certificates.ca)) as node:
        assert "ssl_cert" in node.until(JoinRefused).reason


@needs_openssl
def test_a_coordinator_with_an_untrusted_certificate_is_rejected(certificates: Certificates) -> None:
    endpoint = certificates.endpoint
    strange = TlsFiles(certificates.other_cert, certificates.other_key)
    with engine_node(endpoint, tls=msgspec.structs.replace(strange, ca=certificates.other_ca)) as theirs:
        theirs.until(GenerationFormed)
        with engine_node(endpoint, tls=TlsFiles(certificates.cert, certificates.key, certificates.ca)) as ours:
            assert "TLS handshake failed" in ours.until(JoinRefused).reason


# --- the marker -------------------------------------------------------------------------------------------------------

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
def test_the_successor_of_a_killed_coordinator_continues_its_generations(tmp_path: Path) -> None:
    endpoint = own_endpoint()
    killed = serving_process(endpoint, tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(tmp_path.iterdir()), "it left its marker"
    with engine_node(endpoint, terms=TERMS) as successor:
        successor.until_printed("this node takes over the coordinator")
        assert successor.until(GenerationFormed).assignment.generation == 2
    assert not list(tmp_path.iterdir()), "an orderly end removes it"


@pytest.mark.process
def test_the_successor_of_an_orderly_end_starts_anew(tmp_path: Path) -> None:
    endpoint = own_endpoint()
    ended = serving_process(endpoint, tmp_path)
    ended.communicate()
    assert ended.returncode == 0
    assert not list(tmp_path.iterdir())
    with engine_node(endpoint) as node:
        node.until_printed("this node serves the coordinator")
        assert node.until(GenerationFormed).assignment.generation == 1
