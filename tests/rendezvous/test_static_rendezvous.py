"""The static rendezvous: fixed ranks, one attempt for all nodes, and fresh keys in every attempt."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tenax._engines.free_port import free_port
from tenax.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from tenax.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler
from tenax.store import TCPStore
from tenax.testing.rendezvous_contract import BlockingCall, wait_until

LIMIT_S = 60


class Group:
    """Nodes with one port. They are shut down with the test, rank 0 last."""

    def __init__(self) -> None:
        self.port = free_port()
        self.handlers: list[StaticTCPRendezvous] = []

    def node(self, rank: int, world_size: int, timeout_s: int = LIMIT_S) -> StaticTCPRendezvous:
        handler = StaticTCPRendezvous("127.0.0.1", self.port, rank, world_size, "run", timeout_s)
        self.handlers.append(handler)
        return handler


@pytest.fixture
def group() -> Iterator[Group]:
    here = Group()
    yield here
    for handler in sorted(here.handlers, key=lambda each: -each.rank):
        handler.shutdown()


def meet(*handlers: StaticTCPRendezvous) -> list[RendezvousInfo]:
    calls = [BlockingCall(handler.next_rendezvous) for handler in handlers]
    return [call.result() for call in calls]


def test_every_node_has_its_configured_rank(group: Group) -> None:
    nodes = [group.node(rank, 3) for rank in (2, 0, 1)]
    infos = meet(*nodes)
    assert [(info.rank, info.world_size) for info in infos] == [(2, 3), (0, 3), (1, 3)]
    where = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos}
    assert where == {("127.0.0.1", group.port)}
    infos[0].store.set("colour", b"blue")
    assert infos[1].store.get("colour") == b"blue"
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    node = nodes[0]
    assert (node.get_backend(), node.get_run_id(), node.use_agent_store) == ("static", "run", True)
    assert not node.is_closed()
    node.set_closed()
    assert not node.is_closed()


def test_all_nodes_follow_a_node_that_restarts(group: Group) -> None:
    """In TorchElastic it restarts alone (W19)."""
    zero, one = group.node(0, 2), group.node(1, 2)
    meet(zero, one)
    again = BlockingCall(one.next_rendezvous)
    wait_until(lambda: zero.num_nodes_waiting() > 0)
    assert zero.next_rendezvous().world_size == 2
    assert again.result().rank == 1
    wait_until(lambda: zero.num_nodes_waiting() == 0 and one.num_nodes_waiting() == 0)


def test_an_attempt_has_fresh_keys_for_agents_and_workers(group: Group) -> None:
    """Workers use the store without a prefix: their keys must be deleted too."""
    nodes = [group.node(rank, 2) for rank in range(2)]
    for info in meet(*nodes):
        info.store.set(f"from-{info.rank}", b"old")
    with TCPStore("127.0.0.1", group.port, timeout=timedelta(seconds=LIMIT_S)) as worker:
        worker.set("default_pg/0//cpu//0/1", b"a dead address")
        infos = meet(*nodes)
        assert not any(info.store.check([f"from-{rank}"]) for info in infos for rank in (0, 1))
        assert not worker.check(["default_pg/0//cpu//0/1"])
        assert not [key for key in worker.list_keys() if key.startswith("run/1/")]


def test_a_node_that_was_started_again_joins_the_next_attempt(group: Group) -> None:
    """The slot in the current attempt belongs to its dead predecessor, so it begins the next one."""
    zero, one = group.node(0, 2), group.node(1, 2)
    meet(zero, one)
    successor = BlockingCall(group.node(1, 2).next_rendezvous)
    wait_until(lambda: zero.num_nodes_waiting() > 0)
    zero.next_rendezvous()
    assert successor.result().rank == 1


def test_the_earlier_of_two_nodes_with_the_same_rank_is_rejected(group: Group) -> None:
    """The later one counts as its successor."""
    zero, one = group.node(0, 2), group.node(1, 2)
    meet(zero, one)
    earlier = BlockingCall(one.next_rendezvous)
    wait_until(lambda: zero.num_nodes_waiting() > 0)
    later = BlockingCall(group.node(1, 2).next_rendezvous)
    with pytest.raises(RendezvousStateError, match="another node joined the run 'run' with rank 1"):
        earlier.result()
    assert zero.next_rendezvous().world_size == 2
    assert later.result().rank == 1


def test_a_timeout_names_the_missing_ranks(group: Group) -> None:
    with pytest.raises(
        RendezvousTimeoutError, match="did not join attempt 1 of the run 'run' within 1 s: 1, 2; start them"
    ):
        group.node(0, 3, timeout_s=1).next_rendezvous()


def test_an_unreachable_rank_0_is_a_connection_error(group: Group) -> None:
    with pytest.raises(RendezvousConnectionError, match=f"cannot use the store of rank 0 at 127.0.0.1:{group.port}"):
        group.node(1, 2, timeout_s=1).next_rendezvous()


def test_a_lost_store_does_not_end_healthy_workers(group: Group) -> None:
    zero, one = group.node(0, 2), group.node(1, 2)
    meet(zero, one)
    zero.shutdown()
    assert one.num_nodes_waiting() == 0
    with pytest.raises(RendezvousConnectionError):
        one.next_rendezvous()


def params(endpoint: str, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("static", endpoint, "run", 2, 2, **options)


def test_a_handler_is_created_from_parameters() -> None:
    handler = create_rdzv_handler(params("[::1]:123", rank="1"))
    assert isinstance(handler, StaticTCPRendezvous)
    assert (handler.master_addr, handler.master_port, handler.rank, handler.world_size) == ("::1", 123, 1, 2)
    assert handler.timeout == timedelta(seconds=600)
    assert create_rdzv_handler(params("host:1", rank=0, timeout="7")).timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("endpoint", "options", "fault"),
    [
        ("host:1", {}, "--node-rank"),
        ("", {"rank": 0}, "--master-addr"),
        ("host", {"rank": 0}, "--master-port"),
        ("host:1", {"rank": 2}, "expected one from 0 to 1"),
        ("host:1", {"rank": -1}, "expected one from 0 to 1"),
        ("host:1", {"rank": "first"}, "expected a whole number"),
        ("host:1", {"rank": 0, "timeout": 0}, "timeout"),
    ],
)
def test_invalid_parameters_are_rejected(endpoint: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        create_rdzv_handler(params(endpoint, **options))
