"""The machine of leadership, without a network: a leader that learns from a node that it was replaced."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.leadership import machine as outputs
from tenax._core.leadership.calls import Request
from tenax._core.leadership.keys import Keys, Leader, LeaderAddress
from tenax._core.leadership.machine import SEED_BYTES, Leadership, Output
from tenax._core.leadership.term import StopServing
from tenax._core.link import wire
from tenax._core.link.client import LinkClient
from tenax._core.link.server import LinkServer
from tenax._core.messages import NodeInfo
from tenax.testing.etcd_model import EtcdModel

NOW = 100.0
TERMS = AuthorityTerms()
OTHER = Leader(LeaderAddress("other", "host-b", "10.0.0.2", 4000), b"secret")


class Elected:
    """A machine that was elected, and the outputs of its last input."""

    def __init__(self) -> None:
        client = LinkClient(NodeInfo("one", "host-a", 1), "run", TERMS.lease, NOW, is_elected=True)
        self.etcd = EtcdModel()
        self.machine = Leadership(client, "run", TERMS, NOW, lease_id=1)
        self.last: list[Output] = []
        self.do(self.machine.followed(self.etcd.watch(Keys("run").leader, b"", lambda _: None), NOW))
        self.do(self.machine.tick(NOW))
        assert outputs.Listen() in self.last
        address = LeaderAddress("one", "host-a", "10.0.0.1", 4000)
        self.do(self.machine.listening(address, b"", bytes(range(SEED_BYTES)), NOW))
        coordinator = CoordinatorMachine(RunSettings("run"))
        server = LinkServer("run", TERMS.lease, b"", lambda: coordinator.state, NOW, counts=self.machine.counts)
        self.do(self.machine.served(server, lambda: coordinator.state, NOW))

    def do(self, made: list[Output]) -> None:
        """Answer every request at once."""
        self.last = made
        for output in made:
            if isinstance(output, Request):
                try:
                    answer = self.etcd.call(output.operation, NOW)
                except EtcdRejected as error:
                    self.do(self.machine.failed(output.number, error, NOW))
                else:
                    self.do(self.machine.answered(output.number, answer, NOW, NOW))


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
