"""The machine of leadership, without a network: a leader that was replaced, and a node of an earlier run."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import CancelRequested, CoordinatorMachine, Opened, Received, RunSettings
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import Change, KeyValue, Put, Range, RangeAnswer
from tenax._core.events import JoinRefused
from tenax._core.leadership import machine as outputs
from tenax._core.leadership.calls import Request
from tenax._core.leadership.keys import Keys, Leader, LeaderAddress, Written
from tenax._core.leadership.machine import SEED_BYTES, Leadership, Output
from tenax._core.leadership.term import Deliver, Probe, StopServing
from tenax._core.link import wire
from tenax._core.link.client import Emit, LinkClient, LinkPhase, SendFrame
from tenax._core.link.server import LinkServer
from tenax._core.messages import FromNode, NodeInfo, NodeJoined, NodeStopped
from tenax._core.model import Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord
from tenax.testing.etcd_model import EtcdModel

NOW = 100.0
TERMS = AuthorityTerms()
OTHER = Leader(LeaderAddress("other", "host-b", "10.0.0.2", 4000), b"secret")
FIRST, NEXT = (msgspec.structs.replace(OTHER, run=run, secret=bytes([run])) for run in (1, 2))
VERDICT = Verdict(Outcome.SUCCEEDED, "all workers succeeded")


class Follower:
    """A machine that follows the leader key, and the outputs of its last input."""

    def __init__(self, etcd: EtcdModel | None = None) -> None:
        self.client = LinkClient(NodeInfo("one", "host-a", 1), "run", TERMS.lease, NOW, is_elected=True)
        self.etcd = etcd or EtcdModel()
        self.machine = Leadership(self.client, "run", TERMS, NOW, lease_id=1)
        self.last: list[Output] = []

    def follow(self, leader: Leader, term: int, now: float = NOW) -> None:
        kv = KeyValue(Keys("run").leader, msgspec.json.encode(leader), term, term)
        self.do(self.machine.changed([Change("put", kv)], now), now)

    def do(self, made: list[Output], now: float = NOW) -> None:
        """Answer every request at once."""
        self.last = made
        for output in made:
            if isinstance(output, Request):
                try:
                    answer = self.etcd.call(output.operation, now)
                except EtcdRejected as error:
                    self.do(self.machine.failed(output.number, error, now), now)
                else:
                    self.do(self.machine.answered(output.number, answer, now, now), now)


class Elected(Follower):
    """A machine that was elected."""

    def __init__(self, etcd: EtcdModel | None = None, opened: Opened | None = None) -> None:
        super().__init__(etcd)
        self.do(self.machine.followed(self.etcd.watch(Keys("run").leader, b"", lambda _: None), NOW))
        self.do(self.machine.tick(NOW))
        assert outputs.Listen() in self.last
        address = LeaderAddress("one", "host-a", "10.0.0.1", 4000)
        self.do(self.machine.listening(address, b"", bytes(range(SEED_BYTES)), NOW))
        coordinator = self.coordinator = CoordinatorMachine(RunSettings("run"))
        if opened is not None:
            coordinator.step(opened, NOW)
        server = LinkServer("run", TERMS.lease, b"", lambda: coordinator.state, NOW, counts=self.machine.counts)
        self.do(self.machine.served(server, lambda: coordinator.state, NOW))


def test_a_leader_follows_the_one_that_a_node_reports() -> None:
    elected = Elected()
    term = elected.machine.term
    assert term > 0
    elected.do(elected.machine.replaced(wire.Replaced(msgspec.json.encode(OTHER), term + 5), NOW))
    assert StopServing() in elected.last
    assert outputs.Connect(OTHER) in elected.last
    assert (elected.machine.leader, elected.machine.term) == (OTHER, term + 5)


@pytest.mark.parametrize("leader", [msgspec.json.encode(OTHER), b"not a leader"])
def test_a_leader_ignores_a_report_of_an_earlier_term_or_without_a_leader(leader: bytes) -> None:
    """A node may report what it has read long ago."""
    elected = Elected()
    term = elected.machine.term
    is_earlier = leader.startswith(b"{")
    elected.do(elected.machine.replaced(wire.Replaced(leader, term - 1 if is_earlier else term + 5), NOW))
    assert elected.last == []
    assert elected.machine.term == term


def test_a_cancel_that_a_replaced_leader_could_not_store_is_sent_to_the_next_one() -> None:
    """The operator was answered that the run stops."""
    elected = Elected()
    coordinator, machine = elected.coordinator, elected.machine
    coordinator.step(Received("one", NodeJoined(elected.client.node)), NOW)
    elected.etcd.call(Put(Keys("run").leader, msgspec.json.encode(OTHER)), NOW)
    (send,) = coordinator.step(CancelRequested("no longer needed"), NOW).sends
    elected.do(machine.stepped(coordinator.state, NOW, 0.0))
    elected.do(machine.submit(send, coordinator.state, NOW, 0.0))
    assert StopServing() in elected.last
    elected.client.phase = LinkPhase.LINKED
    assert SendFrame(wire.Cancel("no longer needed")) in elected.client.announce([], NOW)


@pytest.mark.parametrize("is_dead", [False, True])
def test_the_id_of_a_cancelled_run_stays_in_use_while_an_earlier_leader_may_be_alive(is_dead: bool) -> None:
    """Members that have not reconnected may be at work with that one, for as long as the record exists."""
    record = RunRecord(1, (RecordedMember("b", 0, "host-b"), RecordedMember("c", 1, "host-c")), world_size=2)
    etcd = EtcdModel()
    etcd.call(Put(Keys("run").record, msgspec.json.encode(Written(record, OTHER.address, run=1))), NOW)
    elected = Elected(etcd, Opened(generation=1, record=record))
    assert Probe(OTHER.address) in elected.last
    elected.do(elected.machine.probed(NOW, is_dead=is_dead))
    coordinator, machine = elected.coordinator, elected.machine
    coordinator.step(Received("one", NodeJoined(elected.client.node)), NOW)
    (send,) = coordinator.step(CancelRequested("no longer needed"), NOW).sends
    elected.do(machine.stepped(coordinator.state, NOW, 0.0))
    elected.do(machine.submit(send, coordinator.state, NOW, 0.0))
    etcd.expire(NOW + 600.0)
    answer = etcd.call(Range(Keys("run").record), NOW + 600.0)
    assert isinstance(answer, RangeAnswer)
    assert bool(answer.kvs) is not is_dead


def test_a_replaced_node_is_refused_although_it_has_stopped_before_the_decision_was_stored() -> None:
    """It is still linked, and would wait for ever."""
    b, c = (RecordedMember(name, rank, f"host-{name}") for rank, name in enumerate("bc"))
    record = RunRecord(1, (b, c), world_size=2)
    etcd = EtcdModel()
    etcd.call(Put(Keys("run").record, msgspec.json.encode(Written(record, OTHER.address, run=1))), NOW)
    elected = Elected(etcd, Opened(generation=1, record=record, return_s=9.0, recover_s=6.0))
    coordinator, machine = elected.coordinator, elected.machine
    unanswered: list[Output] = []

    def receive(node_id: str, message: FromNode) -> None:
        step = coordinator.step(Received(node_id, message), NOW)
        unanswered.extend(machine.stepped(coordinator.state, NOW, 0.0))
        for send in step.sends:
            unanswered.extend(machine.submit(send, coordinator.state, NOW, 0.0))

    for rank, name in enumerate("bc"):
        node = NodeInfo(name, f"host-{name}", 1, name=name)
        receive(name, NodeJoined(node, 1, is_running=True, group_rank=rank, group_world_size=2))
    receive("d", NodeJoined(NodeInfo("d", "host-b", 1, name="b")))
    receive("b", NodeStopped(1, NOW))
    assert "b" not in coordinator.state.nodes
    assert not any(isinstance(output, Deliver) for output in unanswered), "the end of the recovery is not stored yet"
    elected.do(unanswered)
    sent = [output.send for output in elected.last if isinstance(output, Deliver)]
    assert [send.to for send in sent if isinstance(send.event, JoinRefused)] == [("b",)]


def was_linked() -> Follower:
    """Return a node that was linked to the leader of the first run, and has lost it."""
    follower = Follower()
    follower.follow(FIRST, 1)
    assert follower.last == [outputs.Connect(FIRST)]
    follower.machine.connected()
    follower.client.was_ever_linked = True
    return follower


def test_a_node_whose_run_has_ended_leaves_with_its_verdict_when_the_next_run_has_begun() -> None:
    follower = was_linked()
    follower.etcd.call(Put(Keys("run").ended(FIRST.run), msgspec.json.encode(VERDICT)), NOW)
    follower.follow(NEXT, 2)
    assert follower.last == [outputs.Ended(VERDICT)]


def test_a_node_of_an_unknown_run_does_not_join_another_after_its_lease() -> None:
    follower = was_linked()
    follower.follow(NEXT, 2, NOW + TERMS.lease.lease_s)
    (refusal,) = follower.last
    assert isinstance(refusal, Emit)
    assert isinstance(refusal.event, JoinRefused)
    assert "etcd has no record of the run 'run' that this node was in" in refusal.event.reason


def test_a_node_under_a_lease_follows_the_leader_that_was_elected_after_etcd_lost_its_data() -> None:
    follower = was_linked()
    follower.follow(NEXT, 2)
    assert follower.last == [outputs.Connect(NEXT)]
    assert follower.machine.run == NEXT.run
