"""Events of the dynamic rendezvous; recording them never affects it."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest

from kit.processes import leaving_nothing
from tenax import events
from tenax._engines.free_port import free_port
from tenax.events import EventHandler, NodeState, RdzvEvent
from tenax.rendezvous._dynamic.event_recorder import changes
from tenax.rendezvous._dynamic.state import Node, Standing, State
from tenax.rendezvous.api import RendezvousClosedError, RendezvousParameters
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout, create_handler
from tenax.store import MemoryStore

from .kit import Keeping

LIMIT_S = 60.0
HANDLER = "dynamic_rendezvous.py:DynamicRendezvousHandler"


def a_node(store: MemoryStore, min_nodes: int = 1, max_nodes: int = 1) -> DynamicRendezvousHandler:
    timeout = RendezvousTimeout(timedelta(seconds=LIMIT_S), timedelta(seconds=0.05))
    backend = C10dRendezvousBackend(store, "run")
    return DynamicRendezvousHandler.from_backend("run", store, backend, min_nodes, max_nodes, "127.0.0.1", timeout)


def rows(handler: Keeping) -> list[tuple[str, str, str]]:
    """Return the method, the state, and the message without the node's name; without heartbeats, whose times vary."""
    found = []
    for event in handler.kept:
        assert isinstance(event, RdzvEvent)
        assert RdzvEvent.deserialize(event.serialize()) == event
        assert (event.run_id, event.hostname, event.pid) == ("run", "127.0.0.1", os.getpid())
        if not event.name.startswith("holder.py"):
            message = event.message.partition(") ")[2] or event.message
            found.append((event.name.rpartition(".")[2], event.node_state.value, message))
    return found


def test_each_step_of_a_node_is_recorded() -> None:
    """From the first request to the end of the run, in order, with rank and store once they are known."""
    handler = Keeping()
    with leaving_nothing(), events.configure(handler):
        node = a_node(MemoryStore())
        info = node.next_rendezvous()
        node.shutdown()
        with pytest.raises(RendezvousClosedError):
            node.next_rendezvous()
        node.shutdown()
    assert rows(handler) == [
        ("next_rendezvous", "RUNNING", "requests the next round of the run 'run'"),
        ("_join", "RUNNING", "joins the participants of round 1"),
        ("_join", "SUCCEEDED", "completes round 1 with 1 node"),
        ("_join", "RUNNING", "wrote the change"),
        ("next_rendezvous", "RUNNING", "is in round 1 as rank 0 of 1"),
        ("shutdown", "RUNNING", "leaves the participants of round 1"),
        ("shutdown", "SUCCEEDED", "closes the run: the workers of 127.0.0.1 finished"),
        ("next_rendezvous", "RUNNING", "requests the next round of the run 'run'"),
        (
            "next_rendezvous",
            "FAILED",
            "RendezvousClosedError: the run 'run' is over: the workers of 127.0.0.1 finished",
        ),
    ]
    joined = next(each for each in handler.kept if isinstance(each, RdzvEvent) and each.rank is not None)
    found = info.bootstrap_store_info
    assert found is not None
    assert (joined.rank, joined.master_endpoint) == (0, f"{found.master_addr}:{found.master_port}")
    assert joined.name == f"{HANDLER}.next_rendezvous"
    assert "RendezvousClosedError" in handler.kept[-1].error_trace  # type: ignore[union-attr]


def test_a_cancel_by_an_operator_is_recorded() -> None:
    handler = Keeping()
    with leaving_nothing(), events.configure(handler):
        node = a_node(MemoryStore())
        node.set_closed()
        assert node.is_closed()
        node.shutdown()
    assert rows(handler) == [("set_closed", "SUCCEEDED", "has closed the run 'run'")]


def test_invalid_parameters_are_recorded() -> None:
    handler = Keeping()
    store = MemoryStore()
    params = RendezvousParameters("memory", "", "run", 1, 1, "127.0.0.1", join_timeout="soon")
    with leaving_nothing(), events.configure(handler), pytest.raises(ValueError, match="soon"):
        create_handler(store, C10dRendezvousBackend(store, "run"), params)
    (event,) = handler.kept
    assert isinstance(event, RdzvEvent)
    assert (event.name, event.node_state) == ("dynamic_rendezvous.py:create_handler", NodeState.FAILED)


def test_the_host_of_the_store_and_an_unreachable_one_are_recorded() -> None:
    handler = Keeping()
    address = f"127.0.0.1:{free_port()}"  # torch's store, if imported, listens at every address of this host
    params = RendezvousParameters("c10d", address, "run", 1, 2, "127.0.0.1")
    invalid = RendezvousParameters("c10d", address, "run", 1, 2, "127.0.0.1", store_type="cloud")
    with events.configure(handler):
        create_backend(params)
        with pytest.raises(ValueError, match="cloud"):
            create_backend(invalid)
    hosts, failed = handler.kept
    assert isinstance(hosts, RdzvEvent)
    assert isinstance(failed, RdzvEvent)
    assert (hosts.node_state, hosts.master_endpoint) == (NodeState.INIT, address)
    assert hosts.message.endswith("hosts the rendezvous store")
    assert (failed.name, failed.node_state) == ("c10d_rendezvous_backend.py:create_backend", NodeState.FAILED)
    assert "ValueError" in failed.error_trace


class Stuck(EventHandler):
    """Blocks until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def record(self, event: Any) -> None:
        assert self.let_go.wait(LIMIT_S)


def test_a_handler_that_hangs_does_not_delay_a_rendezvous() -> None:
    stuck = Stuck()
    with leaving_nothing(), events.configure(stuck):
        node = a_node(MemoryStore())
        assert node.next_rendezvous().rank == 0
        assert node.num_nodes_waiting() == 0
        stuck.let_go.set()
        node.shutdown()


def test_a_handler_that_raises_is_logged_and_does_not_end_a_rendezvous() -> None:
    with leaving_nothing(), events.configure(Keeping(OSError("disk full"))):
        node = a_node(MemoryStore())
        assert node.next_rendezvous().rank == 0
        with pytest.warns(RuntimeWarning, match=r"lost rendezvous events.*disk full"):
            node.shutdown()


def test_without_a_receiver_no_thread_is_started() -> None:
    with leaving_nothing():
        node = a_node(MemoryStore())
        node.next_rendezvous()
        names = [thread.name for thread in threading.enumerate()]
        node.shutdown()
    assert not [name for name in names if "events" in name]


class TestChanges:
    """The message for each kind of write."""

    def state(self, *nodes: Node, **more: Any) -> State:
        return State("run", 2, 2, nodes=nodes, **more)

    @pytest.mark.parametrize(
        ("before", "after", "texts"),
        [
            ({}, {}, []),
            ({"nodes": "b:joined"}, {"nodes": "a:joined b:joined"}, ["joins the participants of round 1"]),
            (
                {"nodes": "b:joined"},
                {"nodes": "a:running b:running", "complete": True, "members": {"a": 0, "b": 1}},
                ["joins the participants of round 1", "completes round 1 with 2 nodes"],
            ),
            (
                {"nodes": "b:running c:running", "complete": True, "members": {"b": 0, "c": 1}},
                {"nodes": "b:running c:running a:waiting", "complete": True, "members": {"b": 0, "c": 1}},
                ["joins the wait list of round 2"],
            ),
            (
                {"nodes": "a:waiting b:running", "complete": True, "members": {"b": 0, "c": 1}},
                {"nodes": "a:joined", "round": 2, "members": {"b": 0, "c": 1}},
                [
                    "leaves the wait list of round 2",
                    "joins the participants of round 2",
                    "removes host-b (b): no heartbeat, or not joined in time",
                ],
            ),
            (
                {"nodes": "a:running b:running", "complete": True, "members": {"a": 0, "b": 1}},
                {"nodes": "a:joined b:running", "round": 2, "members": {"a": 0, "b": 1}},
                ["joins the participants of round 2"],
            ),
            (
                {"nodes": "a:running b:running", "complete": True, "members": {"a": 0, "b": 1}},
                {"nodes": "b:running", "complete": True, "members": {"a": 0, "b": 1}, "closed": "enough"},
                ["leaves the participants of round 1", "closes the run: enough"],
            ),
        ],
    )
    def test_each_write_has_its_message(self, before: dict[str, Any], after: dict[str, Any], texts: list[str]) -> None:
        def state(fields: dict[str, Any]) -> State:
            nodes = [each.split(":") for each in fields.get("nodes", "").split()]
            others = {name: value for name, value in fields.items() if name != "nodes"}
            return self.state(*(Node(each, f"host-{each}", Standing(standing)) for each, standing in nodes), **others)

        assert [text for text, _ in changes(state(before), state(after), "a")] == texts

    def test_a_lost_write_is_recorded_only_by_its_writer(self) -> None:
        """Two nodes join: each write is recorded by its writer, and by no other node."""
        handler = Keeping()
        store = MemoryStore()
        with leaving_nothing(), events.configure(handler):
            nodes = [a_node(store, 2, 2) for _ in range(2)]
            threads = [threading.Thread(target=node.next_rendezvous) for node in nodes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            for node in nodes:
                node.shutdown()
        recorded = [message for _, _, message in rows(handler)]
        assert recorded.count("joins the participants of round 1") >= 2
        assert recorded.count("is in round 1 as rank 0 of 2") == recorded.count("is in round 1 as rank 1 of 2") == 1
        assert recorded.count("leaves the participants of round 1") == 2
        written, lost = (
            recorded.count("wrote the change"),
            recorded.count("could not write the change: another node wrote first"),
        )
        assert written == 2
        assert lost <= recorded.count("joins the participants of round 1") - 2
