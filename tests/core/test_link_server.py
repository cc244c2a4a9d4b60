"""The coordinator's side of links: who is authenticated, which link is a node's, and who is lost (V1 to V6)."""

from __future__ import annotations

import pytest

from tenax._core import messages
from tenax._core.coordinator import CoordinatorState, NodeLost, Received, Resumed, RunSettings, Send
from tenax._core.events import GenerationEnded, GenerationFormed, JoinRefused
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.link.server import Close, LinkServer, Output, Peer, Print, SendFrame, Step, Trust, Unlinked
from tenax._core.model import Assignment, Failure

TERMS = LeaseTerms(beat_s=1.0, lease_s=5.0)
SECRET, NONCE, CHALLENGE = b"secret", b"n" * 16, b"c" * 16

Outputs = list[Output]


class Links:
    """The machine, and the peers of a test by node id."""

    def __init__(self, **options: object) -> None:
        self.state = CoordinatorState(RunSettings("run", 1, 4, 3))
        self.machine = LinkServer("run", TERMS, SECRET, lambda: self.state, 0.0, **options)  # type: ignore[arg-type]

    def connect(self, now: float = 0.0, address: str = "10.0.0.1") -> Peer:
        peer = Peer(now, CHALLENGE, address)
        assert self.machine.opened(peer) == []
        return peer

    def prove(self, peer: Peer, node_id: str, now: float = 0.0, secret: bytes = SECRET, **hello: object) -> Outputs:
        greeting = wire.Hello(wire.VERSION, str(hello.get("run_id", "run")), node_id, NONCE, "is_operator" in hello)
        assert self.machine.received(peer, greeting, now) == [SendFrame((peer,), wire.Challenge(CHALLENGE))]
        role = "operator" if greeting.is_operator else "agent"
        return self.machine.received(peer, wire.Proof(wire.prove(secret, role, greeting, CHALLENGE)), now)

    def node(self, node_id: str = "a", now: float = 0.0) -> Peer:
        peer = self.connect(now)
        self.prove(peer, node_id, now)
        self.say(peer, messages.NodeJoined(messages.NodeInfo(node_id, f"host-{node_id}")), now)
        return peer

    def say(self, peer: Peer, message: messages.FromNode, now: float) -> Outputs:
        return self.machine.received(peer, wire.Message(message), now)

    def run(self, until: float) -> Outputs:
        """Tick in time, up to a moment."""
        outputs: Outputs = []
        while self.machine.next_deadline() <= until:
            outputs += self.machine.tick(self.machine.next_deadline())
        return outputs


def lost(outputs: Outputs) -> list[NodeLost]:
    return [output.event for output in outputs if isinstance(output, Step) and isinstance(output.event, NodeLost)]


# --- unauthenticated peers (V1) ---------------------------------------------------------------------------------------


def test_a_peer_that_proves_the_secret_gets_a_proof_and_the_terms() -> None:
    links = Links()
    peer = links.connect()
    trust, answer = links.prove(peer, "a")
    assert trust == Trust(peer)
    assert isinstance(answer, SendFrame)
    assert isinstance(answer.frame, wire.Accepted)
    assert (answer.frame.beat_s, answer.frame.lease_s) == (1.0, 5.0)


@pytest.mark.parametrize("wrong", [{"secret": b"guessed"}, {"run_id": "other"}])
def test_a_wrong_secret_and_a_wrong_run_get_the_same_rejection(wrong: dict[str, object]) -> None:
    links = Links()
    peer = links.connect()
    refused, close, line = links.prove(peer, "a", **wrong)  # type: ignore[arg-type]
    assert isinstance(line, Print)
    assert refused == SendFrame((peer,), wire.Refused("", True, wire.VERSION))
    assert close == Close(peer)
    assert links.machine.refused == 1


def test_an_unauthenticated_peer_is_not_heard_and_has_a_limited_time() -> None:
    links = Links(handshake_timeout_s=2.0)
    peer = links.connect()
    with pytest.raises(wire.WireError):
        links.say(peer, messages.NodeLeft("bye"), 0.0)
    assert links.run(2.5) == [Close(peer)]


def test_a_flood_evicts_its_own_connections() -> None:
    links = Links(max_unauthenticated=4)
    honest = links.connect(address="10.0.0.9")
    flood = [links.connect() for _ in range(3)]
    assert links.machine.opened(Peer(0.0, CHALLENGE, "10.0.0.1")) == [Close(flood[0], is_reset=True)]
    assert honest in links.machine.peers


def test_an_operator_may_only_send_requests() -> None:
    links = Links()
    peer = links.connect()
    links.prove(peer, "operator", is_operator=True)
    with pytest.raises(wire.WireError, match="operators"):
        links.machine.received(peer, wire.Beat(1), 0.0)


# --- one link per node (V2) -------------------------------------------------------------------------------------------


def test_a_new_link_replaces_the_old_one_and_nothing_is_accepted_from_that() -> None:
    links = Links()
    old, new = links.node(), links.connect()
    assert links.prove(new, "a")[:2] == [Close(old, is_reset=True), Unlinked("a")]
    assert links.say(old, messages.NodeLeft("bye"), 0.0) == []
    assert links.machine.closed(old, "connection closed", was_finished=True) == []
    (received,) = links.say(new, messages.NodeLeft("bye"), 0.0)
    assert received == Step(Received("a", messages.NodeLeft("bye")))


def test_a_message_with_impossible_values_breaks_the_protocol() -> None:
    links = Links()
    peer = links.node("a")
    for joined in (
        messages.NodeJoined(messages.NodeInfo("b", "host")),
        messages.NodeJoined(messages.NodeInfo("a", "host"), generation=1 << 40),
        messages.NodeJoined(messages.NodeInfo("a", "host"), generation=2, restarts_used=2),
    ):
        with pytest.raises(wire.WireError):
            links.say(peer, joined, 0.0)


def test_an_event_goes_to_the_nodes_that_are_linked() -> None:
    links = Links()
    a, b = links.node("a"), links.node("b")
    ended = GenerationEnded(1, "enough")
    assert links.machine.deliver(Send(("a", "b", "gone"), ended)) == [SendFrame((a, b), wire.Event(ended))]
    assert links.machine.deliver(Send(("gone",), ended)) == []


def test_a_node_is_sent_a_generation_only_on_a_link_on_which_it_has_joined() -> None:
    """The coordinator concludes from the join that the node has not received it (V6)."""
    links = Links()
    links.node("a")
    peer = links.connect()
    links.prove(peer, "a")
    formed = GenerationFormed(Assignment(1))
    assert links.machine.deliver(Send(("a",), formed)) == []
    links.say(peer, messages.NodeJoined(messages.NodeInfo("a", "host-a")), 0.0)
    assert links.machine.deliver(Send(("a",), formed)) == [SendFrame((peer,), wire.Event(formed))]


# --- lost nodes (V3) --------------------------------------------------------------------------------------------------


def test_an_orderly_end_of_a_link_is_the_end_of_the_node() -> None:
    links = Links()
    peer = links.node()
    assert lost(links.machine.closed(peer, "connection closed", was_finished=True)) == [
        NodeLost("a", "connection closed")
    ]
    assert links.machine.others("") == 0


def test_before_the_node_has_joined_its_keeper_may_not_hold_the_link() -> None:
    """An agent that is killed then closes it in good order, while its workers are still alive."""
    links = Links()
    peer = links.connect()
    links.prove(peer, "a")
    assert not lost(links.machine.closed(peer, "connection closed", was_finished=True))
    assert lost(links.run(6.0)) == [NodeLost("a", "connection closed")]


def test_a_node_whose_link_was_reset_is_lost_when_its_lease_ends() -> None:
    links = Links()
    peer = links.node()
    assert not lost(links.machine.closed(peer, "connection reset", was_finished=False))
    assert links.machine.others("") == 1, "it may reconnect"
    assert not lost(links.run(5.0))
    assert lost(links.run(5.5)) == [NodeLost("a", "connection reset")]


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_refused_node_whose_link_was_reset_is_lost_at_once_if_it_had_joined(has_joined: bool) -> None:
    """A refusal may have been held back for an earlier link. Then it is not known yet whether the node has workers."""
    links = Links()
    peer = links.connect()
    links.prove(peer, "a")
    if has_joined:
        links.say(peer, messages.NodeJoined(messages.NodeInfo("a", "host-a")), 0.0)
    links.machine.deliver(Send(("a",), JoinRefused("replaced")))
    assert bool(lost(links.machine.closed(peer, "connection reset", was_finished=False))) is has_joined


def test_a_node_that_reconnects_in_time_is_not_lost() -> None:
    links = Links()
    links.machine.closed(links.node(), "connection reset", was_finished=False)
    links.run(4.0)
    links.node("a", 4.0)
    assert not lost(links.run(8.9))


def test_a_silent_node_is_reset_and_lost_when_its_lease_ends() -> None:
    links = Links()
    peer = links.node()
    links.run(2.0)
    links.machine.received(peer, wire.Beat(1, 2.0), 2.0)
    assert not lost(links.run(7.0))
    outputs = links.run(7.5)
    assert outputs[0] == Close(peer, is_reset=True)
    assert lost(outputs) == [NodeLost("a", "no heartbeat for 5 s")]


# --- pauses and clocks (V4, V5) ---------------------------------------------------------------------------------------


def test_a_node_without_a_lease_is_reset_when_it_is_silent_but_not_lost() -> None:
    """The node in the coordinator's process would not stop its workers."""
    is_finished = False
    links = Links(is_unleased=lambda node_id: node_id == "a" and not is_finished)
    a, b = links.node("a"), links.node("b")
    outputs = links.run(until=60.0)
    assert [output.peer for output in outputs if isinstance(output, Close)] == [a, b]
    assert [each.node_id for each in lost(outputs)] == ["b"]
    is_finished = True
    assert [each.node_id for each in lost(links.run(until=61.0))] == ["a"]


def test_a_short_pause_is_not_counted_as_silence() -> None:
    links = Links()
    links.node(now=0.0)
    links.run(4.0)
    assert not lost(links.machine.tick(6.0)), "2 s late"
    assert not lost(links.run(6.5))
    assert lost(links.run(8.0))


def test_after_a_long_pause_every_node_gets_a_full_lease() -> None:
    links = Links()
    links.node(now=0.0)
    (resumed,) = links.machine.tick(100.0)
    assert resumed == Step(Resumed(pytest.approx(99.75)))
    assert not lost(links.run(105.0))
    assert lost(links.run(105.5))


def test_the_delay_of_a_message_does_not_make_a_failure_later() -> None:
    """The node's clock is 100 s ahead. Its fastest beat took 0.1 s, the message 3 s."""
    links = Links()
    peer = links.node()
    links.machine.received(peer, wire.Beat(1, 101.0), 1.1)
    failure = Failure(1, 0, 0, 1, 1, seen_at=104.9)
    (step,) = links.say(peer, messages.FailureSeen(1, failure, sent_at=105.0), 8.0)
    assert isinstance(step, Step)
    assert isinstance(step.event, Received)
    assert isinstance(step.event.message, messages.FailureSeen)
    assert step.event.message.sent_at == pytest.approx(107.9)


def test_members_are_proven_by_what_they_have_acknowledged() -> None:
    """See ``authority.py``: an elected coordinator without etcd must know that its members still listen to it."""
    links = Links()
    peer = links.node()
    links.state.last.members = {"a": 0, "gone": 1}
    links.machine.received(peer, wire.Beat(1, 1.0), 1.0)
    links.machine.received(peer, wire.Beat(2, 2.0, seen=1), 2.0)
    assert list(links.machine.members_proven_at()) == [1.0, None]
