"""Requests over links: each is answered once, and none costs a link that a run needs."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec
import pytest

from kit.processes import until
from kit.tcp import PATIENCE_S, Client, Served, engine_node, own_endpoint, served
from tenax._core.bounds import MAX_SLOTS
from tenax._core.coordinator import NodeLost, Received
from tenax._core.events import GenerationFormed
from tenax._core.messages import NodeReady
from tenax._core.requests import LogsRequest, StatusRequest
from tenax._engines.tcp import wire


class Answers:
    """What an operator hears who asks at the desk itself."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self.heard: list[tuple[Any, str]] = []

    def ask(self, request: Any) -> None:
        def reply(value: Any, error: str) -> None:
            self.heard.append((value, error))

        self._server.thread.call(lambda: self._server.server.operator_api.submit(request, reply))

    def until(self, count: int) -> list[tuple[Any, str]]:
        until(lambda: len(self.heard) >= count, "an answer", PATIENCE_S)
        self._server.thread.call(lambda: None)  # whatever would come twice has come
        assert len(self.heard) == count
        return self.heard


def member(server: Served, node_id: str) -> Client:
    """One that the coordinator knows."""
    client = server.member(node_id)
    server.until_heard(Received, kind_of_message=NodeReady, node_id=node_id)
    return client


def operator(server: Served) -> Client:
    client = Client(server.port, "operator", server.secret)
    client.hello = wire.Hello(wire.VERSION, "run", "operator", os.urandom(wire.NONCE_BYTES), is_operator=True)
    proof = wire.prove(server.secret, "operator", client.hello, client.challenge().nonce)
    client.send(wire.Proof(proof))
    client.until(wire.Accepted)
    return client


def test_what_was_asked_over_a_link_that_was_replaced_is_answered() -> None:
    with served() as server, member(server, "a") as old:
        operator = Answers(server)
        operator.ask(LogsRequest("a"))
        asked = old.until(wire.Ask)
        with server.client("a") as new:
            new.greet()
            assert "lost the link to that node before it answered" in operator.until(1)[0][1]
            new.send(wire.Answer(asked.number, msgspec.Raw(b"1")))  # by one who knows no better: too late
            operator.ask(LogsRequest("a"))
            number = new.until(wire.Ask).number
            new.send(wire.Answer(number, msgspec.Raw(b"2")))
            assert operator.until(2)[1] == (msgspec.Raw(b"2"), "")


def test_nobody_answers_for_another_node() -> None:
    with served() as server, member(server, "a") as asked, member(server, "b") as other:
        operator = Answers(server)
        operator.ask(LogsRequest("a"))
        number = asked.until(wire.Ask).number
        other.send(wire.Answer(number, msgspec.Raw(b'"of b"')))
        other.send(wire.Beat(1))
        other.until(wire.BeatAnswer)  # so its answer was taken before
        asked.send(wire.Answer(number, msgspec.Raw(b'"of a"')))
        assert operator.until(1) == [(msgspec.Raw(b'"of a"'), "")]


def test_a_node_that_never_answers_is_given_up() -> None:
    later_s = 0.0
    with served(clock=lambda: time.monotonic() + later_s) as server, member(server, "a") as silent:
        operator = Answers(server)
        operator.ask(LogsRequest("a"))
        silent.until(wire.Ask)
        later_s = 61.0
        silent.send(wire.Beat(1))
        assert operator.until(1) == [(None, "that node did not answer in time")]


@pytest.mark.parametrize(
    "request_",
    [
        LogsRequest("a", generation=10**17),
        LogsRequest("a", generation=10**30),
        LogsRequest("a", wait_s=float("nan")),
        LogsRequest("a", since=float("inf")),
        LogsRequest("a", containing="x" * (9 << 20)),
    ],
)
def test_a_request_that_a_node_would_not_take_costs_nobody_a_link(request_: LogsRequest) -> None:
    """A page may ask with any numbers; a node closes a link over which such a frame comes."""
    with served() as server, member(server, "a") as node:
        operator = Answers(server)
        operator.ask(request_)
        assert "invalid request" in operator.until(1)[0][1]
        operator.ask(LogsRequest("a", generation=2))
        assert node.until(wire.Ask).request.generation == 2
        assert not server.facts(NodeLost)


def test_answers_that_a_node_does_not_take_do_not_cost_it_its_link() -> None:
    """Somebody at the door of node a wants more lines than its link takes."""
    with served() as server, member(server, "a") as asks, member(server, "b") as has_lines:
        count = 120
        for number in range(count):
            asks.send(wire.Ask(number + 1, LogsRequest("b")))
        lines = msgspec.Raw(b'"' + b"x" * (300 << 10) + b'"')
        for _ in range(count):
            has_lines.send(wire.Answer(has_lines.until(wire.Ask).number, lines))
        has_lines.send(wire.Beat(1))
        has_lines.until(wire.BeatAnswer)  # all of it was passed on, and node a has read nothing yet
        answers = [asks.until(wire.Answer) for _ in range(count)]
        assert sorted(answer.number for answer in answers) == list(range(1, count + 1))
        declined = [answer for answer in answers if answer.error]
        assert 0 < len(declined) < count
        assert {answer.error for answer in declined} == {wire.TOO_MANY_ANSWERS}
        asks.send(wire.Beat(7))
        assert asks.until(wire.BeatAnswer).number == 7


def test_operators_who_read_nothing_do_not_take_the_moment_for_the_nodes_last_words() -> None:
    """When the server closes there is a moment for what is unsent, and nodes have it first."""
    count, lines = 40, msgspec.Raw(b'"' + b"x" * (300 << 10) + b'"')
    with served(secret=b"secret") as server, member(server, "a") as reads_late, member(server, "b") as has_lines:
        deaf = [operator(server) for _ in range(4)]
        for client in (*deaf, reads_late):
            for number in range(count):
                client.send(wire.Ask(number + 1, LogsRequest("b")))
        for _ in range(count * (len(deaf) + 1)):
            has_lines.send(wire.Answer(has_lines.until(wire.Ask).number, lines))
        has_lines.send(wire.Beat(1))
        has_lines.until(wire.BeatAnswer)
        is_closing = threading.Event()
        answered: list[int] = []

        def read() -> None:
            is_closing.wait(PATIENCE_S)
            while (frame := reads_late.receive()) is not None:
                answered.extend([frame.number] if isinstance(frame, wire.Answer) else [])

        reader = threading.Thread(target=read)
        reader.start()

        def close() -> None:
            is_closing.set()
            server.server.close()

        server.thread.call(close)
        reader.join(PATIENCE_S)
        for client in deaf:
            client.close()
        assert sorted(answered) == list(range(1, count + 1))


def test_who_asks_at_a_node_that_leaves_is_told_so() -> None:
    endpoint = own_endpoint()
    with engine_node(endpoint, nodes=(2, 2)) as one, engine_node(endpoint, nodes=(2, 2)) as two:
        one.until(GenerationFormed)
        guest = two if one.thread.call(lambda: one.engine._server is not None) else one
        heard: list[tuple[Any, str]] = []
        mark: list[str] = []

        def take_mark(value: Any, error: str) -> None:
            assert not error
            mark.append(msgspec.json.decode(value)["mark"])

        def take(value: Any, error: str) -> None:
            heard.append((value, error))

        guest.thread.call(lambda: guest.engine.submit(StatusRequest(), take_mark))
        until(lambda: mark, "a status", PATIENCE_S)
        guest.thread.call(lambda: guest.engine.submit(StatusRequest(mark[0], 30.0), take))
        guest.close()
        assert heard == [(None, "this node has left the run")]


@pytest.mark.parametrize(("greets_as_operator", "proves"), [(True, "agent"), (False, "operator")])
def test_nobody_on_the_way_makes_an_operator_of_a_node_or_the_other_way_round(
    greets_as_operator: bool, proves: str
) -> None:
    """The greeting is not encrypted; what it says is part of the proof."""
    with served(secret=b"secret") as server, server.client("a") as client:
        client.hello = msgspec.structs.replace(client.hello, is_operator=greets_as_operator)
        nonce = client.challenge().nonce
        client.send(wire.Proof(wire.prove(b"secret", proves, client.hello, nonce)))
        assert client.until(wire.Refused) == wire.Refused("", True, wire.VERSION)


def test_a_node_with_as_many_workers_as_are_allowed_can_be_shown() -> None:
    """More of them close the connection (``test_bounds.py``)."""
    with served(nodes=(2, 2)) as server, server.client("a") as node:
        node.greet()
        node.join(nodes=(2, 2), slots=MAX_SLOTS)
        server.until_heard(Received, kind_of_message=NodeReady)
        operator = Answers(server)
        operator.ask(StatusRequest())
        status, error = operator.until(1)[0]
        assert (error, status.nodes[0].slots) == ("", MAX_SLOTS)
