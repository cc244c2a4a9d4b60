"""What the lane has found, told again with as little as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from tenax.core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, Heard, NodeLost, Opened, RunSettings, Say
from tenax.core.events import GenerationEnded, GenerationFormed
from tenax.core.messages import NodeInfo, NodeJoined, NodeReady
from tenax.core.record import RunRecord
from tenax.etcd.client import EtcdClient
from tenax.etcd.operations import TransactionAnswer
from tenax.rendezvous.etcd.candidacy import Elected
from tenax.rendezvous.etcd.decisions import Decisions
from tenax.rendezvous.etcd.keys import Keys, Place, Written


class SlowEtcd:
    """In the place of a client: it answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[TransactionAnswer], None]] = []
        self.revision = 10

    def call(self, _: object, done: Callable[[Any], None], failed: object) -> None:
        self.waiting.append(done)

    def answer(self) -> None:
        """Every write succeeds, also those that follow."""
        while self.waiting:
            self.revision += 1
            self.waiting.pop(0)(TransactionAnswer(self.revision, succeeded=True))


class Leading:
    """A coordinator of two nodes that writes its decisions to a slow etcd, and what the nodes hear."""

    def __init__(self) -> None:
        self.etcd = SlowEtcd()
        self.heard: dict[str, list[object]] = {"a": [], "b": []}
        self._machine = CoordinatorMachine(RunSettings("run", 2, 2))
        elected = Elected(5, 6, Written(RunRecord(), Place("a", "host", "127.0.0.1", 1)))
        client = cast("EtcdClient", self.etcd)
        self._decisions = Decisions(client, Keys("run"), elected, 7, self._deliver, print, print, lambda _: None)
        self.step(Opened())

    def _deliver(self, say: Say) -> None:
        for node_id in say.to:
            if isinstance(say.event, GenerationFormed | GenerationEnded):
                self.heard[node_id].append(say.event)

    def step(self, event: AnyCoordinatorEvent) -> None:
        for say in self._machine.step(event, 100.0):
            self._decisions.say(say, self._machine.state)

    def link(self, *node_ids: str) -> None:
        """A link of this node begins: it says who it is, and that it is ready."""
        for node_id in node_ids:
            self.step(Heard(node_id, NodeJoined(NodeInfo(node_id, "host", 1, min_nodes=2, max_nodes=2))))
            self.step(Heard(node_id, NodeReady(0, "127.0.0.1", 1000, True)))

    def formed(self, node_id: str) -> list[int]:
        return [each.assignment.generation for each in self.heard[node_id] if isinstance(each, GenerationFormed)]


def test_who_was_given_up_does_not_hear_of_a_generation_in_which_it_is_not_any_more() -> None:
    """Seed 15: stopped while its generation waited for etcd, it came back and heard of it; the others had the next."""
    leading = Leading()
    leading.link("a", "b")
    assert leading.heard == {"a": [], "b": []}, "nothing is written yet"
    leading.step(NodeLost("b", "it was silent for 6 s"))
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("a") == [1]
    assert isinstance(leading.heard["a"][1], GenerationEnded)
    assert leading.heard["b"] == []
    leading.step(Heard("a", NodeReady(1, "127.0.0.1", 1001, True)))
    leading.etcd.answer()
    assert leading.formed("a") == [1, 2]
    assert leading.formed("b") == [2]


def test_who_links_anew_while_its_part_waits_hears_it_once() -> None:
    """Seeds 12 and 117: it was heard twice, and the agent died of that."""
    leading = Leading()
    leading.link("a", "b")
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("b") == [1]


def test_who_links_anew_after_its_part_was_said_hears_it_again() -> None:
    """Perhaps it was under way on the link that broke."""
    leading = Leading()
    leading.link("a", "b")
    leading.etcd.answer()
    leading.link("b")
    assert leading.formed("b") == [1, 1]


def test_who_links_anew_while_something_else_waits_hears_its_part_again() -> None:
    leading = Leading()
    leading.link("a", "b")
    leading.step(NodeLost("a", "it was silent for 6 s"))
    leading.etcd.answer()
    assert leading.formed("b") == [1]
    leading.step(Heard("b", NodeReady(1, "127.0.0.1", 1001, True)))
    leading.link("a")
    assert leading.formed("b") == [1], "the second is not written yet"
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("b") == [1, 2]
