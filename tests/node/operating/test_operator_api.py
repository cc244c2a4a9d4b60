"""``OperatorApi`` answers every request once: immediately, after a change, or at the timeout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tenax._core.coordinator import CancelRequested, EndCause, Opened, Received, RunSettings
from tenax._core.messages import NodeDraining, NodeInfo, NodeJoined, NodeReady, WorkersRunning
from tenax._core.requests import (
    AgentRequest,
    DrainRequest,
    LogsRequest,
    NodeRequest,
    RestartRequest,
    StatusRequest,
    StopRequest,
)
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.operator_api import OperatorApi
from tenax._io.loop import Loop
from tenax.testing.clock import FakeClock

pytestmark = pytest.mark.unit


class Harness:
    """An ``OperatorApi`` on a fake clock."""

    def __init__(self, nodes: int = 2) -> None:
        self.clock = FakeClock(1000.0)
        self.loop = Loop(self.clock, selector=self.clock.selector())
        self.host = CoordinatorHost(RunSettings("run", nodes, nodes), None, self.loop, lambda _: None)
        self.wall = 5000.0
        self.forwarded: list[str] = []
        self.silent: set[str] = set()  # nodes that do not answer
        self.worked_s = 0.0  # how long a status takes to make
        self._work = 0.0
        self.api = OperatorApi(self.host, self.loop, self._forward, lambda: self.wall + self.clock(), self._work_clock)
        self.answers: list[tuple[float, Any, str]] = []
        self.host.step(Opened())

    def _work_clock(self) -> float:
        self._work += self.worked_s
        return self._work

    def _forward(self, node_id: str, request: object, reply: Any) -> None:
        self.forwarded.append(node_id)
        if node_id not in self.silent:
            reply("of the node", "")

    def node(self, node_id: str, host: str = "") -> None:
        info = NodeInfo(node_id, host or node_id, min_nodes=2, max_nodes=2)
        self.host.step(Received(node_id, NodeJoined(info)))
        self.host.step(Received(node_id, NodeReady(0)))

    def run(self) -> None:
        for node_id in ("a", "b"):
            self.node(node_id)
        for node_id in ("a", "b"):
            self.host.step(Received(node_id, WorkersRunning(1, (1,))))

    def ask(self, request: Any) -> Any:
        """Return the immediate answer, or None."""
        before = len(self.answers)
        self.api.submit(request, lambda value, error: self.answers.append((self.clock() - 1000.0, value, error)))
        return self.answers[-1][1:] if len(self.answers) > before else None

    def wait_until(self, moment: float) -> None:
        assert self.loop.next_event(lambda: 1000.0 + moment) is None


@pytest.fixture
def api() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.host.close()
    made.loop.close()


def test_a_status_is_answered_immediately_and_its_mark_changes_with_the_run(api: Harness) -> None:
    first, _ = api.ask(StatusRequest())
    again, _ = api.ask(StatusRequest())
    assert first.mark == again.mark != ""
    api.node("a")
    assert api.ask(StatusRequest())[0].mark != first.mark


def test_a_status_with_activity_asks_every_node_once_a_second(api: Harness) -> None:
    """Only while somebody asks, and it does not wait for a node that does not answer."""
    api.run()
    assert api.ask(StatusRequest()) is not None
    assert api.forwarded == []
    assert api.ask(StatusRequest(with_activity=True)) is not None
    assert api.ask(StatusRequest(with_activity=True)) is not None
    assert api.forwarded == ["a", "b"]
    api.silent = {"b"}
    api.wait_until(5.0)
    assert api.ask(StatusRequest(with_activity=True)) is None
    assert api.forwarded == ["a", "b", "a", "b"]
    api.wait_until(6.9)
    assert len(api.answers) == 3
    api.wait_until(7.1)
    assert len(api.answers) == 4


def test_a_request_with_the_latest_mark_waits_for_a_change(api: Harness) -> None:
    mark = api.ask(StatusRequest())[0].mark
    assert api.ask(StatusRequest(mark, 10.0)) is None
    api.wait_until(3.0)
    assert len(api.answers) == 1
    api.node("a")  # two steps, one answer
    api.wait_until(9.0)
    (at, status, _) = api.answers[-1]
    assert len(api.answers) == 2
    assert 3.0 < at < 3.5
    assert len(status.nodes) == 1
    assert status.mark != mark


def test_a_request_waits_no_longer_than_requested_and_than_the_maximum(api: Harness) -> None:
    api.run()  # while nodes are waited for, a message is sent now and then
    mark = api.ask(StatusRequest())[0].mark
    api.ask(StatusRequest(mark, 2.0))
    api.ask(StatusRequest(mark, 1e9))
    api.wait_until(100.0)
    times = [round(at, 3) for at, _, _ in api.answers[1:]]
    assert times == [2.0, 30.0]
    assert api.answers[-1][1].mark == mark


def test_a_repeated_request_is_delayed_slightly(api: Harness) -> None:
    assert api.ask(StatusRequest("of another coordinator", 0.0)) is None
    api.wait_until(1.0)
    assert len(api.answers) == 1
    assert api.answers[0][0] == pytest.approx(0.2)


def test_the_end_of_the_run_is_answered_immediately(api: Harness) -> None:
    api.run()
    mark = api.ask(StatusRequest())[0].mark
    assert api.ask(StatusRequest(mark, 10.0)) is None
    assert api.ask(StatusRequest("another", 10.0)) is None
    api.host.step(CancelRequested("enough"))
    assert [answer[1].outcome for answer in api.answers[1:]] == ["cancelled", "cancelled"]
    assert api.ask(StatusRequest(api.answers[-1][1].mark, 10.0)) is not None
    api.wait_until(60.0)
    assert len(api.answers) == 4, "once each"


def test_the_number_of_waiting_requests_is_bounded(api: Harness) -> None:
    mark = api.ask(StatusRequest())[0].mark
    for _ in range(256):
        assert api.ask(StatusRequest(mark, 10.0)) is None
    assert api.ask(StatusRequest(mark, 10.0)) is not None


def test_events_keep_their_wall_time_until_the_clock_is_set(api: Harness) -> None:
    first = api.ask(StatusRequest())[0].events[0].at
    api.wall += 0.01
    assert api.ask(StatusRequest())[0].events[0].at == first
    api.wall += 3600
    assert api.ask(StatusRequest())[0].events[0].at == pytest.approx(first + 3600.01)


def test_a_restart_needs_a_generation_that_runs(api: Harness) -> None:
    _, error = api.ask(RestartRequest("new data"))
    assert error.startswith("no generation to restart: ")
    api.run()
    assert api.ask(RestartRequest("new data")) == ("stopping generation 1; the next one follows", "")
    assert api.host.state.phase.cause is EndCause.REQUEST


def test_a_restart_is_rejected_if_too_few_nodes_would_stay(api: Harness) -> None:
    api.run()
    api.host.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))
    assert api.ask(RestartRequest("new data")) == (None, "generation 1 is already ending: a is draining")
    api.node("c")  # a spare, which takes its place
    assert api.ask(RestartRequest("new data")) == ("stopping generation 1; the next one follows", "")


def test_the_status_shows_since_when_a_node_drains(api: Harness) -> None:
    api.run()
    formed = {node.name: node.since for node in api.ask(StatusRequest())[0].nodes}
    api.wait_until(100.0)
    api.host.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))
    api.wait_until(110.0)
    api.host.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))  # its link had broken: it sends this again
    draining, working = api.ask(StatusRequest())[0].nodes
    assert (draining.state, draining.since) == ("draining", formed["a"] + 100.0)
    assert (working.state, working.since) == ("working", formed["b"])


def test_an_ended_run_rejects_operations(api: Harness) -> None:
    api.run()
    assert api.ask(StopRequest("enough"))[1] == ""
    for request in (StopRequest("again"), RestartRequest(""), DrainRequest("a", "")):
        assert api.ask(request) == (None, "the run is over")


@pytest.mark.parametrize(("name", "node_id"), [("a", "a"), ("1", "b"), ("host-of-c", "c"), ("1" * 5000, ""), ("x", "")])
def test_a_node_is_named_by_id_rank_or_host(api: Harness, name: str, node_id: str) -> None:
    api.run()
    api.node("c", "host-of-c")
    value, error = api.ask(LogsRequest(name))
    if node_id:
        assert (value, error, api.forwarded) == ("of the node", "", [node_id])
    else:
        assert api.forwarded == []
        assert error.startswith("no node ")
        assert len(error) < 300


def test_an_unknown_node_name_is_answered_with_names_and_ranks(api: Harness) -> None:
    api.run()
    api.node("c", "host-of-c")
    refusal = "no node 'vmm'; known nodes: a (rank 0), b (rank 1), host-of-c"
    for request in (DrainRequest("vmm", ""), LogsRequest("vmm"), NodeRequest("vmm")):
        assert api.ask(request) == (None, refusal)
    assert api.ask(NodeRequest("1")) == ("b", "")


def test_an_ambiguous_node_name_is_rejected(api: Harness) -> None:
    api.node("a", "host")
    api.node("b", "host")
    state = api.host.state
    label = state.nodes["b"].label
    assert api.api.find(label) == ("b", "")
    assert api.ask(AgentRequest())[1] == "the coordinator cannot answer this request; send it to an agent"


def test_many_status_requests_in_a_large_run_share_one_status(api: Harness) -> None:
    """The status is reused until a multiple of its cost has passed, so requests cannot occupy the loop."""
    api.worked_s = 0.1
    first, _ = api.ask(StatusRequest())
    for number in range(5):
        api.node(f"node-{number}")
        assert api.ask(StatusRequest())[0] is first
    api.wait_until(3.0)
    assert api.ask(StatusRequest())[0].mark != first.mark


def test_all_waiting_requests_in_a_large_run_get_the_same_status(api: Harness) -> None:
    api.worked_s = 0.1
    mark = api.ask(StatusRequest())[0].mark
    api.wait_until(3.0)
    for _ in range(50):
        api.ask(StatusRequest(mark, 10.0))
    api.node("a")
    api.wait_until(4.0)
    statuses = [value for _, value, _ in api.answers[1:]]
    assert len(statuses) == 50
    assert len({id(each) for each in statuses}) == 1
    assert statuses[0].mark != mark


def test_the_end_of_a_large_run_is_answered_to_all(api: Harness) -> None:
    api.worked_s = 0.1
    mark = api.ask(StatusRequest())[0].mark
    api.ask(StatusRequest(mark, 10.0))
    api.host.step(CancelRequested("enough"))
    api.wait_until(0.1)
    assert api.answers[-1][1].phase == "over"


def test_an_exception_in_the_status_becomes_an_error_answer(api: Harness) -> None:
    mark = api.ask(StatusRequest())[0].mark
    api.ask(StatusRequest(mark, 10.0))
    api.host.recent.append((0.0, "no event", None))  # type: ignore[arg-type] - what a bug may leave there
    api.node("a")
    api.wait_until(1.0)
    value, error = api.answers[-1][1:]
    assert value is None
    assert "could not build the status" in error
    assert api.ask(StatusRequest())[1] == error


def test_waiting_requests_are_answered_when_the_coordinator_closes(api: Harness) -> None:
    mark = api.ask(StatusRequest())[0].mark
    api.ask(StatusRequest(mark, 10.0))
    api.ask(StatusRequest("of another", 10.0))
    api.api.close()
    gone = (None, "the coordinator is no longer on this node; try again")
    assert [answer[1:] for answer in api.answers[1:]] == [gone, gone]
    assert api.ask(StatusRequest()) == gone
    api.wait_until(40.0)
    assert len(api.answers) == 4
