"""The node's side of a link: what it sends and decides for every frame, closed connection and deadline (K1 to K7)."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import messages
from tenax._core.events import Fenced, GenerationFormed, JoinRefused, RunEnded
from tenax._core.lease import LeaseTerms
from tenax._core.link import client, wire
from tenax._core.link.client import (
    Close,
    Emit,
    Hold,
    LinkClient,
    Linked,
    LinkPhase,
    Lost,
    Note,
    Output,
    Print,
    SendFrame,
)
from tenax._core.model import Assignment, Outcome, Verdict

TERMS = LeaseTerms(beat_s=1.0, lease_s=5.0)  # a fence after 4.3 s
NODE = messages.NodeInfo("a", "host-a")
JOINED, READY = messages.NodeJoined(NODE), messages.NodeReady(0)
PART = Assignment(
    1, group_rank=1, group_world_size=2, coordinator_rank=0, restarts_used=3, master_addr="h", master_port=1
)
SECRET, NONCE, CHALLENGE = b"secret", b"n" * 16, b"c" * 16
HELLO = wire.Hello(wire.VERSION, "run", "a", NONCE)


def make(now: float = 0.0, **options: object) -> LinkClient:
    return LinkClient(NODE, "run", TERMS, now, location="at host:1", **options)  # type: ignore[arg-type]


def accepted(**fields: bool) -> wire.Accepted:
    return wire.Accepted(wire.prove(SECRET, "coordinator", HELLO, CHALLENGE), 1.0, 5.0, **fields)


def greet(machine: LinkClient, now: float = 0.0) -> None:
    machine.connecting(now)
    machine.opened(NONCE, SECRET, now)
    machine.received(wire.Challenge(CHALLENGE), now)


def link(machine: LinkClient, now: float = 0.0) -> list[Output]:
    greet(machine, now)
    assert machine.received(accepted(), now) == [Linked()]
    return machine.announce([JOINED, READY], now)


def member(now: float = 0.0, **options: object) -> LinkClient:
    machine = make(now, **options)
    link(machine, now)
    machine.received(wire.Event(GenerationFormed(PART)), now)
    return machine


def sent(outputs: list[Output]) -> list[wire.FromAgent]:
    return [output.frame for output in outputs if isinstance(output, SendFrame)]


def emitted(outputs: list[Output]) -> list[object]:
    return [output.event for output in outputs if isinstance(output, Emit)]


def test_a_host_of_the_coordinator_that_was_refused_is_fenced_with_its_link() -> None:
    """K3: it has no lease and does not connect again, so the coordinator declares it lost while its workers stop."""
    machine = make()
    machine.is_sole_host = True
    link(machine)
    machine.received(wire.Event(GenerationFormed(PART)), 0.0)
    machine.received(wire.Event(JoinRefused("replaced")), 1.0)
    (event,) = emitted(machine.closed("connection reset", 2.0))
    assert isinstance(event, Fenced)
    assert event.generation == PART.generation


def test_after_a_generation_that_came_too_late_the_next_attempt_waits_longer_each_time() -> None:
    """K4: a coordinator whose answers do not count sends it again on each link, and the node offers a store on each."""
    machine = make()
    delays = []
    for now in range(0, 600, 100):
        link(machine, float(now))
        outputs = machine.received(wire.Event(GenerationFormed(PART)), now + 60.0)
        delays += [output.retry_s for output in outputs if isinstance(output, Lost)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# --- the handshake (K1, K2) -------------------------------------------------------------------------------------------


def test_a_link_starts_with_proofs_a_beat_and_the_nodes_state() -> None:
    machine = make()
    assert machine.opened(NONCE, SECRET, 0.0) == [SendFrame(HELLO)]
    proof = wire.Proof(wire.prove(SECRET, "agent", HELLO, CHALLENGE))
    assert machine.received(wire.Challenge(CHALLENGE), 0.1) == [SendFrame(proof)]
    assert machine.received(accepted(), 0.2) == [Linked()]
    assert sent(machine.announce([JOINED, READY], 0.2)) == [
        wire.Beat(1, 0.2),
        wire.Message(JOINED),
        wire.Message(READY),
    ]


EVENT = wire.Event(GenerationFormed(PART))
UNEXPECTED: dict[str, tuple[LinkPhase, wire.FromServer]] = {
    "an event before the proof": (LinkPhase.GREETING, EVENT),
    "an event after our proof": (LinkPhase.PROVING, EVENT),
    "an answer before the proof": (LinkPhase.PROVING, wire.BeatAnswer(1)),
    "an acceptance before the challenge": (LinkPhase.GREETING, accepted()),
    "a short challenge": (LinkPhase.GREETING, wire.Challenge(b"c")),
    "a second challenge": (LinkPhase.PROVING, wire.Challenge(CHALLENGE)),
    "a rejection without a connection": (LinkPhase.UNLINKED, wire.Refused("")),
    "a rejection of a link": (LinkPhase.LINKED, wire.Refused("")),
}


@pytest.mark.parametrize(("phase", "frame"), UNEXPECTED.values(), ids=UNEXPECTED.keys())
def test_a_frame_is_accepted_only_in_its_phase(phase: LinkPhase, frame: wire.FromServer) -> None:
    machine = make()
    if phase is LinkPhase.LINKED:
        link(machine)
    elif phase is LinkPhase.PROVING:
        greet(machine)
    elif phase is LinkPhase.GREETING:
        machine.opened(NONCE, SECRET, 0.0)
    with pytest.raises(wire.WireError):
        machine.received(frame, 0.0)
    assert machine.phase is phase


def test_a_coordinator_without_the_secret_is_rejected_for_good() -> None:
    machine = make()
    greet(machine)
    (refused,) = emitted(machine.received(wire.Accepted(b"guessed", 1.0, 5.0), 0.0))
    assert isinstance(refused, JoinRefused)
    assert "does not know the secret" in refused.reason
    assert machine.is_finished


def test_a_handshake_without_an_answer_is_given_up() -> None:
    machine = make()
    machine.opened(NONCE, SECRET, 0.0)
    assert machine.next_deadline() == client.HANDSHAKE_TIMEOUT_S
    close, lost = machine.tick(client.HANDSHAKE_TIMEOUT_S)
    assert close == Close()
    assert isinstance(lost, Lost)
    assert "is not a tenax coordinator" in lost.reason


def test_an_elected_coordinator_that_rejects_a_known_node_is_another_program() -> None:
    """Its address was reused. The node looks for the new leader."""
    machine = member(is_elected=True)
    machine.closed("gone", 1.0, by_peer=True)
    greet(machine, 1.0)
    assert not emitted(machine.received(wire.Refused("", is_final=True, version=wire.VERSION), 1.0))
    assert not machine.is_finished


def test_nothing_is_queued_between_links_except_a_cancellation() -> None:
    machine = make()
    assert machine.send(READY) == []
    assert machine.cancel("enough") == []
    assert wire.Cancel("enough") in sent(link(machine))


# --- generations (K4) -------------------------------------------------------------------------------------------------


def test_a_generation_is_accepted_once() -> None:
    """A coordinator that does not know whether it had arrived sends it again."""
    machine = make()
    link(machine)
    assert emitted(machine.received(EVENT, 0.5)) == [GenerationFormed(PART)]
    assert machine.received(EVENT, 0.6) == []


def test_a_generation_that_this_node_was_not_ready_for_breaks_the_protocol() -> None:
    machine = member()
    with pytest.raises(wire.WireError, match="not ready"):
        machine.received(wire.Event(GenerationFormed(Assignment(2))), 0.5)


def test_a_generation_that_arrives_too_late_is_dropped_with_the_link() -> None:
    """Acknowledged bytes prove that the coordinator's host is alive, but not that this message is recent."""
    machine = make()
    link(machine)
    for now in (1.0, 2.0, 3.0, 4.0):
        machine.tick(now, has_all_arrived=True)
    assert machine.holds_lease(4.5)
    outputs = machine.received(EVENT, 4.5)
    assert outputs[0] == Close()
    assert not emitted(outputs)


# --- the lease (K3, K5) -----------------------------------------------------------------------------------------------


def test_an_answer_renews_the_lease_from_when_its_beat_was_sent() -> None:
    machine = member()
    machine.tick(1.0)
    assert machine.received(wire.BeatAnswer(2), 1.9) == [Hold(pytest.approx(1.0 + 4.3 - 1.9))]


def test_an_answer_that_does_not_count_renews_nothing() -> None:
    machine = member()
    machine.tick(1.0)
    assert machine.received(wire.BeatAnswer(2, counts=False), 1.1) == []


def test_a_node_without_answers_is_fenced_and_looks_for_the_coordinator() -> None:
    machine = member()
    for now in (1.0, 2.0, 3.0, 4.0):
        machine.tick(now)
    fenced, close, line, lost = machine.tick(4.3)
    assert isinstance(fenced, Emit)
    assert isinstance(fenced.event, Fenced)
    assert close == Close()
    assert isinstance(line, Print)
    assert lost == Lost("cannot reach the coordinator at host:1: no answer for 4.3 s", retry_s=0.0)


def test_acknowledged_bytes_keep_the_lease_unless_the_coordinator_is_elected() -> None:
    """A stopped coordinator at a fixed endpoint has no successor; an elected one may have."""
    for is_elected in (False, True):
        machine = member(is_elected=is_elected)
        for now in (1.0, 2.0, 3.0, 4.0):
            machine.tick(now, has_all_arrived=True)
        assert machine.holds_lease(4.4) is not is_elected


def test_acknowledged_bytes_of_a_handshake_are_no_beats() -> None:
    machine = member()
    machine.tick(1.0)
    machine.closed("reset", 1.5)
    greet(machine, 2.0)
    machine.tick(4.3, has_all_arrived=True)
    assert not machine.holds_lease(4.4)


def test_an_elected_coordinator_whose_answers_do_not_count_fences_the_node_and_keeps_the_link() -> None:
    machine = member(is_elected=True)
    for now in (1.0, 2.0, 3.0, 4.0):
        machine.tick(now)
        machine.received(wire.BeatAnswer(int(now) + 1, counts=False), now)
    (fenced,) = machine.tick(4.3)
    assert isinstance(fenced, Emit)
    assert machine.is_linked
    assert not emitted(machine.tick(5.3)), "once"


def test_a_refused_connection_renews_the_lease_from_the_attempt() -> None:
    machine = member()
    machine.closed("connection closed", 1.0, by_peer=True)
    machine.connecting(3.0)
    assert machine.unserved(3.5) == [Hold(pytest.approx(3.0 + 4.3 - 3.5))]
    assert machine.next_deadline() == pytest.approx(7.3)


def test_the_host_of_the_coordinator_needs_no_lease() -> None:
    machine = member()
    machine.is_sole_host = True
    assert machine.received(wire.BeatAnswer(1), 0.5) == [Hold(0)]
    assert not emitted(machine.tick(60.0))


# --- the end (K6, K7) -------------------------------------------------------------------------------------------------


def test_a_node_that_finds_no_coordinator_gives_up() -> None:
    machine = make(join_timeout_s=30.0)
    assert machine.retry("no route", "check the network", 0.1) == []
    assert machine.retry("no route", "check the network", 1.0) == [Print("no route; retrying for up to 29 s")]
    assert machine.retry("no route", "check the network", 2.0) == [], "not again so soon"
    (refused,) = emitted(machine.retry("no route", "check the network", 31.0))
    assert isinstance(refused, JoinRefused)
    assert refused.reason.startswith("no route; gave up after 31 s; check the network")


def test_after_the_end_of_the_run_workers_have_their_grace_period_and_no_coordinator_is_searched() -> None:
    """Even if this process is stopped: the keeper then kills them. Later answers do not prolong that."""
    machine = member()
    machine.node = msgspec.structs.replace(machine.node, grace_s=30.0)
    verdict = Verdict(Outcome.SUCCEEDED, "done")
    hold = Hold(30.0 + machine.lease.terms.fence_s)
    assert machine.received(wire.Event(RunEnded(verdict, 0.0)), 1.0) == [hold, Emit(RunEnded(verdict, 0.0))]
    assert machine.received(wire.BeatAnswer(1), 1.5) == []
    assert machine.closed("connection closed", 2.0, by_peer=True) == []


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_node_that_has_left_does_not_join_again(is_linked: bool) -> None:
    """It stays because it hosts the coordinator of the others. Announced again, they would wait for it forever."""
    machine = member()
    if not is_linked:
        machine.closed("reset", 1.0)
        greet(machine, 1.0)
    machine.send(messages.NodeLeft("its agent received SIGTERM"))
    if is_linked:
        assert machine.closed("reset", 2.0) == []
    else:
        assert machine.received(accepted(), 2.0) == [Close()]


def test_a_successor_knows_what_its_node_and_the_note_know() -> None:
    assert make().takeover(None, 5.0).recover_s == 0.0
    machine = member()
    opened = machine.takeover(Note(1, 2, "other:1"), 5.0)
    assert (opened.recover_s, opened.generation, opened.restarts_used, opened.store) == (5.0, 1, 3, PART.store)
    assert opened.dead_rank == -1, "the coordinator's node may be alive"
    machine.closed("connection closed", 1.0, by_peer=True)
    assert machine.takeover(None, 5.0).dead_rank == 0
    assert machine.takeover(Note(2, 4, "other:1"), 5.0).store == "other:1"
