"""Values from peers are bounded at the edge: an absurd one costs its sender the connection, and the run nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kit.addresses import own_endpoint
from kit.tcp import Client, EngineNode, run_server
from tenax._core import messages
from tenax._core.bounds import MAX_GENERATIONS_AHEAD, MAX_NAME, MAX_SECONDS, MAX_SLOTS, MAX_TEXT, MAX_WORLD
from tenax._core.coordinator import NodeLost
from tenax._core.events import GenerationFormed, JoinRefused, RunEnded
from tenax._core.link import wire
from tenax._core.model import Assignment, Evidence, Failure, Outcome, Stopped, Verdict
from tenax._core.requests import DrainRequest, StatusRequest, StopRequest
from tenax._view.status import RunStatus
from tenax.rendezvous._tcp_handler import tcp_settings
from tenax.rendezvous.api import RendezvousParameters

ABSURD_NODE = "absurd"  # the id of the node that sends absurd values


def joined(generation: int = 0, restarts_used: int = 0, group_rank: int = -1, **fields: Any) -> messages.NodeJoined:
    info = messages.NodeInfo(**{"node_id": ABSURD_NODE, "host": "host", "min_nodes": 1, "max_nodes": 4, **fields})
    return messages.NodeJoined(info, generation, group_rank=group_rank, restarts_used=restarts_used)


def failure(**fields: Any) -> messages.FailureSeen:
    defaults: dict[str, Any] = {
        "generation": 1,
        "local_rank": 0,
        "global_rank": 0,
        "pid": 7,
        "exit_code": 1,
        "seen_at": 1.0,
    }
    return messages.FailureSeen(1, Failure(**{**defaults, **fields}), 1.0)


ABSURD: dict[str, messages.FromNode] = {
    "slots 2^40": joined(slots=1 << 40),
    "slots beyond the maximum": joined(slots=MAX_SLOTS + 1),
    "slots 0": joined(slots=0),
    "slots -1": joined(slots=-1),
    "generation 2^53": joined(generation=1 << 53),
    "generation far ahead": joined(generation=MAX_GENERATIONS_AHEAD + 2),
    "generation -1": joined(generation=-1),
    "restarts 2^50": joined(restarts_used=1 << 50),
    "more restarts than generations": joined(generation=3, restarts_used=3),
    "restarts -1": joined(restarts_used=-1),
    "group rank 2^40": joined(generation=1, group_rank=1 << 40),
    "node rank 2^40": joined(rank=1 << 40),
    "node rank -2": joined(rank=-2),
    "nodes -1": joined(min_nodes=-1),
    "a host name of 4 MB": joined(host="h" * (4 << 20)),
    "a host name that is too long": joined(host="h" * (MAX_NAME + 1)),
    "a line break in a host name": joined(host="h\ntenax: the run succeeded"),
    "an escape sequence in a host name": joined(host="\x1b]0;title\x07"),
    "a line separator in a host name": joined(host="h\u2028tenax: the run succeeded"),
    "a line break in a role": joined(role="trainer\nevaluator"),
    "a line break in a node name": joined(name="n\n"),
    "a line break in the order": joined(order="\r"),
    "port 2^16": messages.NodeReady(0, "127.0.0.1", 1 << 16),
    "port -1": messages.NodeReady(0, "127.0.0.1", -1),
    "an address with a line break": messages.NodeReady(0, "127.0.0.1\n", 1),
    "pid -1": messages.WorkersRunning(1, (-1,)),
    "too many pids": messages.WorkersRunning(1, (1,) * (MAX_SLOTS + 1)),
    "a time of 1e300": messages.FailureSeen(1, failure().failure, 1e300),
    "a failure in 400 years": failure(seen_at=1.3e10),
    "an exit code of 2^60": failure(exit_code=1 << 60),
    "rank 2^40": failure(global_rank=1 << 40),
    "a reason of a megabyte": failure(reason="x" * (1 << 20)),
    "a message of a megabyte": failure(evidence=Evidence(message="x" * (1 << 20))),
    "too many last lines": failure(evidence=Evidence(last_lines=("x",) * 5000)),
    "a grace period of 1e300 s": messages.NodeDraining(1, 1e300, "asked"),
    "a negative grace period": messages.NodeDraining(1, -1.0, "asked"),
    "a notice 1e300 s ahead": messages.NodeWillLeave(1, "asked", 1e300),
    "a step of 2^60": messages.NodeProgress(1, 1.0, (messages.WorkerProgress(0, 0, 1 << 60, 0.0, 1.0),)),
    "local rank 2^40": messages.NodeProgress(1, 1.0, (messages.WorkerProgress(1 << 40, 0, 1, 0.0, 1.0),)),
    "a stopped worker of rank -5": messages.NodeStopped(1, 1.0, (), (Stopped(0, -5, 1, 0),)),
}


def status(client: Client) -> RunStatus:
    client.send(wire.Ask(1, StatusRequest()))
    answer: wire.Answer = client.until(wire.Answer)
    assert not answer.error
    return msgspec.json.decode(answer.value, type=RunStatus)


@pytest.mark.parametrize("message", ABSURD.values(), ids=ABSURD)
def test_an_absurd_value_closes_the_connection_and_the_run_continues(message: messages.FromNode) -> None:
    """Only the sender is disconnected: the other member stays in its generation, and the status works."""
    with run_server() as server, server.member("honest") as member:
        formed = member.until(GenerationFormed)
        with server.client(ABSURD_NODE) as absurd:
            absurd.greet()
            if not isinstance(message, messages.NodeJoined):
                absurd.send_message(joined())
            body = msgspec.json.encode(wire.Message(message))  # an honest sender shortens texts
            absurd.sock.sendall(len(body).to_bytes(4, "big") + body)
            assert absurd.is_closed_by_server()
        seen = status(member)
        assert (seen.generation, seen.restarts_used) == (formed.assignment.generation, 0)
        assert "honest" not in {lost.node_id for lost in server.events(NodeLost)}
        member.send_message(messages.NodeSucceeded(1))
        assert member.until(RunEnded).verdict.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    "frame",
    [
        wire.Beat(-1),
        wire.Beat(1 << 60),
        wire.Beat(1, at=1e300),
        wire.Ask(1, DrainRequest("x\ny", "why")),
        wire.Ask(1, DrainRequest("x" * 1000, "why")),
        wire.Ask(1, StopRequest("x" * (1 << 20))),
        wire.Ask(1, StatusRequest(wait_s=1e300)),
        wire.Cancel("x" * (1 << 20)),
    ],
    ids=lambda frame: repr(frame)[:60],
)
def test_an_absurd_frame_or_request_closes_the_connection(frame: wire.FromAgent) -> None:
    """Beats, requests and cancellations are bounded too."""
    with run_server() as server, server.member("honest") as member, server.client(ABSURD_NODE) as absurd:
        member.until(GenerationFormed)
        absurd.greet()
        absurd.send(frame)
        assert absurd.is_closed_by_server()
        assert status(member).generation == 1


def test_messages_derived_from_values_at_their_bounds_are_within_bounds() -> None:
    """Extreme but valid values of one member do not make the coordinator send a message that other members reject."""
    both = (2, 2)
    with (
        run_server(nodes=both, max_restarts=0) as server,
        server.member("honest", nodes=both) as honest,
        server.member("edge", nodes=both) as edge,
    ):
        generation = honest.until(GenerationFormed).assignment.generation
        at = MAX_SECONDS
        far = messages.WorkerProgress(0, -(1 << 53), 1 << 53, -at, at)
        edge.send_message(messages.NodeProgress(generation, -at, (far,)))
        text = "x" * MAX_TEXT
        evidence = Evidence(message=text, raised_at=-at, out_of_memory=text, proof=text)
        worst = Failure(generation, 0, 0, 1, -9, at, text, evidence)
        edge.send_message(messages.FailureSeen(generation, worst, -at))
        edge.send_message(messages.NodeStopped(generation, at, (worst,)))
        honest.send_message(messages.NodeStopped(generation, 1.0))
        for client in (edge, honest):
            client.send_message(messages.NodeReady(generation, "127.0.0.1", 1))
        verdict = honest.until(RunEnded).verdict
        assert verdict.outcome is Outcome.FAILED


def test_a_verdict_shifted_between_clocks_stays_within_bounds() -> None:
    """Times are clamped when they are moved to another clock, so that they can be sent again."""
    worst = Failure(1, 0, 0, 1, 1, MAX_SECONDS, evidence=Evidence(raised_at=-MAX_SECONDS))
    for by_s in (MAX_SECONDS, -MAX_SECONDS, float("nan")):
        event = wire.Event(RunEnded(Verdict(Outcome.FAILED, "why", failures=(worst.shifted(by_s),)), 0.0))
        assert wire.decode_from_server(wire.encode(event)[4:])


def test_every_rank_of_an_assignment_is_within_bounds() -> None:
    """A node adds its local ranks to the first global rank: the sum must be a valid rank, too."""
    for first in (MAX_WORLD - MAX_SLOTS, MAX_WORLD - MAX_SLOTS + 1):
        body = wire.encode(wire.Event(GenerationFormed(Assignment(1, first_global_rank=first))))[4:]
        if first + MAX_SLOTS <= MAX_WORLD:
            assert wire.decode_from_server(body)
        else:
            with pytest.raises(wire.WireError, match="first_global_rank"):
                wire.decode_from_server(body)


@pytest.mark.parametrize("name", ["a\nb", "n" * 256], ids=["line break", "too long"])
def test_a_node_name_that_others_would_reject_is_refused_as_an_option(name: str) -> None:
    """It is checked where the user sets it, and does not just close the connection."""
    params = RendezvousParameters("tcp", "localhost:1", "run", 1, 2, node_name=name)
    with pytest.raises(ValueError, match=r"option 'node_name' .* cannot be used"):
        tcp_settings(params)


def test_the_engine_refuses_an_invalid_node_name_with_a_reason() -> None:
    """An agent created in Python has no options to check, so the engine checks before it connects."""
    agent = EngineNode(own_endpoint(), node_name="a\nb")
    try:
        assert "name" in agent.until(JoinRefused).reason
    finally:
        agent.close()
