"""The desk answers every request once: at once, when something has changed, or when the time is up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tenax._core.coordinator import CancelRequested, Ending, Opened, Received, RunSettings
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


class Office:
    """A desk on a clock that the test holds."""

    def __init__(self, nodes: int = 2) -> None:
        self.clock = FakeClock(1000.0)
        self.loop = Loop(self.clock, selector=self.clock.selector())
        self.seat = CoordinatorHost(RunSettings("run", nodes, nodes), None, self.loop, lambda _: None)
        self.wall = 5000.0
        self.passed_on: list[str] = []
        self.worked_s = 0.0  # how long a status takes to make
        self._work = 0.0
        self.desk = OperatorApi(self.seat, self.loop, self._pass_on, lambda: self.wall + self.clock(), self._work_clock)
        self.answers: list[tuple[float, Any, str]] = []
        self.seat.step(Opened())

    def _work_clock(self) -> float:
        self._work += self.worked_s
        return self._work

    def _pass_on(self, node_id: str, request: object, reply: Any) -> None:
        self.passed_on.append(node_id)
        reply("of the node", "")

    def node(self, node_id: str, host: str = "") -> None:
        info = NodeInfo(node_id, host or node_id, min_nodes=2, max_nodes=2)
        self.seat.step(Received(node_id, NodeJoined(info)))
        self.seat.step(Received(node_id, NodeReady(0)))

    def run(self) -> None:
        for node_id in ("a", "b"):
            self.node(node_id)
        for node_id in ("a", "b"):
            self.seat.step(Received(node_id, WorkersRunning(1, (1,))))

    def ask(self, request: Any) -> Any:
        """What is answered at once; None if nothing is."""
        before = len(self.answers)
        self.desk.ask(request, lambda value, error: self.answers.append((self.clock() - 1000.0, value, error)))
        return self.answers[-1][1:] if len(self.answers) > before else None

    def wait_until(self, moment: float) -> None:
        assert self.loop.next_event(lambda: 1000.0 + moment) is None


@pytest.fixture
def office() -> Iterator[Office]:
    made = Office()
    yield made
    made.seat.close()
    made.loop.close()


def test_a_status_is_answered_at_once_and_its_mark_stays_until_something_happens(office: Office) -> None:
    first, _ = office.ask(StatusRequest())
    again, _ = office.ask(StatusRequest())
    assert first.mark == again.mark != ""
    office.node("a")
    assert office.ask(StatusRequest())[0].mark != first.mark


def test_whoever_has_seen_the_last_one_waits_for_a_change(office: Office) -> None:
    mark = office.ask(StatusRequest())[0].mark
    assert office.ask(StatusRequest(mark, 10.0)) is None
    office.wait_until(3.0)
    assert len(office.answers) == 1
    office.node("a")  # two steps, one answer
    office.wait_until(9.0)
    (at, status, _) = office.answers[-1]
    assert len(office.answers) == 2
    assert 3.0 < at < 3.5
    assert len(status.nodes) == 1
    assert status.mark != mark


def test_nobody_waits_for_longer_than_was_asked_nor_for_ever(office: Office) -> None:
    office.run()  # while nodes are waited for, something is said now and then
    mark = office.ask(StatusRequest())[0].mark
    office.ask(StatusRequest(mark, 2.0))
    office.ask(StatusRequest(mark, 1e9))
    office.wait_until(100.0)
    times = [round(at, 3) for at, _, _ in office.answers[1:]]
    assert times == [2.0, 30.0]
    assert office.answers[-1][1].mark == mark


def test_whoever_asks_again_at_once_is_held_back_a_little(office: Office) -> None:
    assert office.ask(StatusRequest("of another coordinator", 0.0)) is None
    office.wait_until(1.0)
    assert len(office.answers) == 1
    assert office.answers[0][0] == pytest.approx(0.2)


def test_the_end_of_the_run_is_answered_at_once(office: Office) -> None:
    office.run()
    mark = office.ask(StatusRequest())[0].mark
    assert office.ask(StatusRequest(mark, 10.0)) is None
    assert office.ask(StatusRequest("another", 10.0)) is None
    office.seat.step(CancelRequested("enough"))
    assert [answer[1].outcome for answer in office.answers[1:]] == ["cancelled", "cancelled"]
    assert office.ask(StatusRequest(office.answers[-1][1].mark, 10.0)) is not None
    office.wait_until(60.0)
    assert len(office.answers) == 4, "once each"


def test_only_so_many_wait(office: Office) -> None:
    mark = office.ask(StatusRequest())[0].mark
    for _ in range(256):
        assert office.ask(StatusRequest(mark, 10.0)) is None
    assert office.ask(StatusRequest(mark, 10.0)) is not None


def test_what_has_happened_keeps_its_time_until_somebody_sets_the_clock(office: Office) -> None:
    first = office.ask(StatusRequest())[0].events[0].at
    office.wall += 0.01
    assert office.ask(StatusRequest())[0].events[0].at == first
    office.wall += 3600
    assert office.ask(StatusRequest())[0].events[0].at == pytest.approx(first + 3600.01)


def test_a_restart_needs_a_generation_that_runs(office: Office) -> None:
    _, error = office.ask(RestartRequest("new data"))
    assert error.startswith("no generation is running that could be restarted: ")
    office.run()
    assert office.ask(RestartRequest("new data")) == ("generation 1 is being ended, and another follows", "")
    assert office.seat.state.ended_by is Ending.REQUEST


def test_a_restart_is_not_promised_when_too_few_stay_for_another_generation(office: Office) -> None:
    office.run()
    office.seat.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))
    assert office.ask(RestartRequest("new data")) == (None, "generation 1 is ending already: a was asked to leave")
    office.node("c")  # a spare, which takes its place
    assert office.ask(RestartRequest("new data")) == ("generation 1 is being ended, and another follows", "")


def test_a_node_drains_since_it_was_asked_to_leave(office: Office) -> None:
    office.run()
    formed = {node.name: node.since for node in office.ask(StatusRequest())[0].nodes}
    office.wait_until(100.0)
    office.seat.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))
    office.wait_until(110.0)
    office.seat.step(Received("a", NodeDraining(1, 30.0, "Ctrl-C")))  # its link had broken: it says so again
    draining, working = office.ask(StatusRequest())[0].nodes
    assert (draining.state, draining.since) == ("draining", formed["a"] + 100.0)
    assert (working.state, working.since) == ("working", formed["b"])


def test_a_run_that_is_over_is_not_operated(office: Office) -> None:
    office.run()
    assert office.ask(StopRequest("enough"))[1] == ""
    for request in (StopRequest("again"), RestartRequest(""), DrainRequest("a", "")):
        assert office.ask(request) == (None, "the run is over")


@pytest.mark.parametrize(("name", "node_id"), [("a", "a"), ("1", "b"), ("host-of-c", "c"), ("1" * 5000, ""), ("x", "")])
def test_a_node_is_meant_by_id_rank_or_host(office: Office, name: str, node_id: str) -> None:
    office.run()
    office.node("c", "host-of-c")
    value, error = office.ask(LogsRequest(name))
    if node_id:
        assert (value, error, office.passed_on) == ("of the node", "", [node_id])
    else:
        assert office.passed_on == []
        assert error.startswith("there is no node ")
        assert len(error) < 300


def test_a_name_that_nobody_has_is_answered_with_names_and_ranks(office: Office) -> None:
    office.run()
    office.node("c", "host-of-c")
    refusal = "there is no node 'vmm'; there are a (rank 0), b (rank 1), host-of-c"
    for request in (DrainRequest("vmm", ""), LogsRequest("vmm"), NodeRequest("vmm")):
        assert office.ask(request) == (None, refusal)
    assert office.ask(NodeRequest("1")) == ("b", "")


def test_what_may_be_two_nodes_is_none(office: Office) -> None:
    office.node("a", "host")
    office.node("b", "host")
    state = office.seat.state
    label = state.nodes["b"].label
    assert office.desk.find(label) == ("b", "")
    assert office.ask(AgentRequest())[1] == "this is asked of an agent, not of the coordinator"


def test_however_many_ask_of_a_large_run_its_loop_is_left_in_peace(office: Office) -> None:
    """A thousand nodes whose people ask at once: one status for all, until a multiple of its cost is over."""
    office.worked_s = 0.1
    first, _ = office.ask(StatusRequest())
    for number in range(5):
        office.node(f"node-{number}")
        assert office.ask(StatusRequest())[0] is first
    office.wait_until(3.0)
    assert office.ask(StatusRequest())[0].mark != first.mark


def test_all_who_wait_for_a_change_in_a_large_run_get_the_same(office: Office) -> None:
    office.worked_s = 0.1
    mark = office.ask(StatusRequest())[0].mark
    office.wait_until(3.0)
    for _ in range(50):
        office.ask(StatusRequest(mark, 10.0))
    office.node("a")
    office.wait_until(4.0)
    told = [value for _, value, _ in office.answers[1:]]
    assert len(told) == 50
    assert len({id(each) for each in told}) == 1
    assert told[0].mark != mark


def test_of_the_end_everybody_hears_even_of_a_large_run(office: Office) -> None:
    office.worked_s = 0.1
    mark = office.ask(StatusRequest())[0].mark
    office.ask(StatusRequest(mark, 10.0))
    office.seat.step(CancelRequested("enough"))
    office.wait_until(0.1)
    assert office.answers[-1][1].phase == "over"


def test_a_status_that_cannot_be_made_is_a_sentence_and_not_the_end_of_the_coordinator(office: Office) -> None:
    mark = office.ask(StatusRequest())[0].mark
    office.ask(StatusRequest(mark, 10.0))
    office.seat.recent.append((0.0, "no event", None))  # type: ignore[arg-type] - what a bug may leave there
    office.node("a")
    office.wait_until(1.0)
    value, error = office.answers[-1][1:]
    assert value is None
    assert "the status cannot be made" in error
    assert office.ask(StatusRequest())[1] == error


def test_who_waits_for_news_of_a_coordinator_that_goes_is_told_so(office: Office) -> None:
    mark = office.ask(StatusRequest())[0].mark
    office.ask(StatusRequest(mark, 10.0))
    office.ask(StatusRequest("of another", 10.0))
    office.desk.close()
    gone = (None, "the coordinator has just gone from here; ask again")
    assert [told[1:] for told in office.answers[1:]] == [gone, gone]
    assert office.ask(StatusRequest()) == gone
    office.wait_until(40.0)
    assert len(office.answers) == 4
