"""Requests over links: each is answered once, and none closes a link of the run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec
import pytest

from kit.processes import until
from kit.tcp import TIMEOUT_S, Client, ServerThread, engine_node, own_endpoint, run_server
from tenax._core.bounds import MAX_SLOTS
from tenax._core.coordinator import NodeLost, Received
from tenax._core.events import GenerationFormed
from tenax._core.link import wire
from tenax._core.messages import NodeReady
from tenax._core.requests import LogsRequest, StatusRequest


class Answers:
    """Sends requests to the operator API and records the answers."""

    def __init__(self, server: ServerThread) -> None:
        self._server = server
        self.answers: list[tuple[Any, str]] = []

    def ask(self, request: Any) -> None:
        def reply(value: Any, error: str) -> None:
            self.answers.append((value, error))

        self._server.thread.call(lambda: self._server.server.operator_api.submit(request, reply))

    def until(self, count: int) -> list[tuple[Any, str]]:
        until(lambda: len(self.answers) >= count, "an answer", TIMEOUT_S)
        self._server.thread.call(lambda: None)  # a second answer would have arrived
        assert len(self.answers) == count
        return self.answers


def member(server: ServerThread, node_id: str) -> Client:
    """Return a client that has joined the run."""
    client = server.member(node_id)
    server.until_event(Received, message_kind=NodeReady, node_id=node_id)
    return client


def operator(server: ServerThread) -> Client:
    client = Client(server.port, "operator", server.secret)
    client.hello = wire.Hello(wire.VERSION, "run", "operator", os.urandom(wire.NONCE_BYTES), is_operator=True)
    proof = wire.prove(server.secret, "operator", client.hello, client.challenge().nonce)
    client.send(wire.Proof(proof))
    client.until(wire.Accepted)
    return client


def test_a_request_over_a_replaced_link_fails() -> None:
    with run_server() as server, member(server, "a") as old:
        operator = Answers(server)
        operator.ask(LogsRequest("a"))
        asked = old.until(wire.Ask)
        with server.client("a") as new:
            new.greet()
            assert "lost the link to that node before it answered" in operator.until(1)[0][1]
            new.send(wire.Answer(asked.number, msgspec.Raw(b"1")))  # too late
            operator.ask(LogsRequest("a"))
            number = new.until(wire.Ask).number
            new.send(wire.Answer(number, msgspec.Raw(b"2")))
            assert operator.until(2)[1] == (msgspec.Raw(b"2"), "")


def test_a_node_cannot_answer_for_another() -> None:
    with run_server() as server, member(server, "a") as asked, member(server, "b") as other:
        operator = Answers(server)
        operator.ask(LogsRequest("a"))
        number = asked.until(wire.Ask).number
        other.send(wire.Answer(number, msgspec.Raw(b'"of b"')))
        other.send(wire.Beat(1))
        other.until(wire.BeatAnswer)  # so its answer was processed before
        asked.send(wire.Answer(number, msgspec.Raw(b'"of a"')))
        assert operator.until(1) == [(msgspec.Raw(b'"of a"'), "")]


def test_a_request_to_a_node_that_never_answers_times_out() -> None:
    later_s = 0.0
    with run_server(clock=lambda: time.monotonic() + later_s) as server, member(server, "a") as silent:
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
def test_a_request_that_a_node_would_reject_is_not_sent(request_: LogsRequest) -> None:
    """The dashboard may send any numbers, and a node closes its link at an invalid frame."""
    with run_server() as server, member(server, "a") as node:
        operator = Answers(server)
        operator.ask(request_)
        assert "invalid request" in operator.until(1)[0][1]
        operator.ask(LogsRequest("a", generation=2))
        assert node.until(wire.Ask).request.generation == 2
        assert not server.events(NodeLost)


def test_more_answers_than_a_link_carries_are_declined_without_closing_it() -> None:
    """An operator at the control socket of node a requests more lines than its link carries."""
    with run_server() as server, member(server, "a") as asking, member(server, "b") as has_lines:
        count = 120
        for number in range(count):
            asking.send(wire.Ask(number + 1, LogsRequest("b")))
        lines = msgspec.Raw(b'"' + b"x" * (300 << 10) + b'"')
        for _ in range(count):
            has_lines.send(wire.Answer(has_lines.until(wire.Ask).number, lines))
        has_lines.send(wire.Beat(1))
        has_lines.until(wire.BeatAnswer)  # all was forwarded, and node a has read nothing yet
        answers = [asking.until(wire.Answer) for _ in range(count)]
        assert sorted(answer.number for answer in answers) == list(range(1, count + 1))
        declined = [answer for answer in answers if answer.error]
        assert 0 < len(declined) < count
        assert {answer.error for answer in declined} == {wire.TOO_MANY_ANSWERS}
        asking.send(wire.Beat(7))
        assert asking.until(wire.BeatAnswer).number == 7


def test_operators_that_do_not_read_do_not_delay_the_last_messages_to_nodes() -> None:
    """When the server closes, unsent data is flushed for a limited time, for nodes first."""
    count, lines = 40, msgspec.Raw(b'"' + b"x" * (300 << 10) + b'"')
    with run_server(secret=b"secret") as server, member(server, "a") as reads_late, member(server, "b") as has_lines:
        slow = [operator(server) for _ in range(4)]
        for client in (*slow, reads_late):
            for number in range(count):
                client.send(wire.Ask(number + 1, LogsRequest("b")))
        for _ in range(count * (len(slow) + 1)):
            has_lines.send(wire.Answer(has_lines.until(wire.Ask).number, lines))
        has_lines.send(wire.Beat(1))
        has_lines.until(wire.BeatAnswer)
        is_closing = threading.Event()
        answered: list[int] = []

        def read() -> None:
            is_closing.wait(TIMEOUT_S)
            while (frame := reads_late.receive()) is not None:
                answered.extend([frame.number] if isinstance(frame, wire.Answer) else [])

        reader = threading.Thread(target=read)
        reader.start()

        def close() -> None:
            is_closing.set()
            server.server.close()

        server.thread.call(close)
        reader.join(TIMEOUT_S)
        for client in slow:
            client.close()
        assert sorted(answered) == list(range(1, count + 1))


def test_a_request_at_a_node_that_leaves_fails_with_the_reason() -> None:
    endpoint = own_endpoint()
    with engine_node(endpoint, nodes=(2, 2)) as one, engine_node(endpoint, nodes=(2, 2)) as two:
        one.until(GenerationFormed)
        follower = two if one.thread.call(lambda: one.engine._server is not None) else one
        answers: list[tuple[Any, str]] = []
        mark: list[str] = []

        def take_mark(value: Any, error: str) -> None:
            assert not error
            mark.append(msgspec.json.decode(value)["mark"])

        def take(value: Any, error: str) -> None:
            answers.append((value, error))

        follower.thread.call(lambda: follower.engine.submit(StatusRequest(), take_mark))
        until(lambda: mark, "a status", TIMEOUT_S)
        follower.thread.call(lambda: follower.engine.submit(StatusRequest(mark[0], 30.0), take))
        follower.close()
        assert answers == [(None, "this node has left the run")]


@pytest.mark.parametrize(("is_operator", "proves"), [(True, "agent"), (False, "operator")])
def test_the_role_in_a_hello_cannot_be_changed_in_transit(is_operator: bool, proves: str) -> None:
    """The hello is not encrypted, but its role is part of the proof."""
    with run_server(secret=b"secret") as server, server.client("a") as client:
        client.hello = msgspec.structs.replace(client.hello, is_operator=is_operator)
        nonce = client.challenge().nonce
        client.send(wire.Proof(wire.prove(b"secret", proves, client.hello, nonce)))
        assert client.until(wire.Refused) == wire.Refused("", True, wire.VERSION)


def test_the_status_shows_a_node_with_the_maximum_number_of_workers() -> None:
    """More workers close the connection (``test_bounds.py``)."""
    with run_server(nodes=(2, 2)) as server, server.client("a") as node:
        node.greet()
        node.join(nodes=(2, 2), slots=MAX_SLOTS)
        server.until_event(Received, message_kind=NodeReady)
        operator = Answers(server)
        operator.ask(StatusRequest())
        status, error = operator.until(1)[0]
        assert (error, status.nodes[0].slots) == ("", MAX_SLOTS)
