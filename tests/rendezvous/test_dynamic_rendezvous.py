"""DynamicRendezvousHandler: rounds, dead members, lost backends, the end of a run, and invalid states."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tenax.rendezvous._dynamic.state import MAX_BYTES, Node, Standing, State, decode, encode
from tenax.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from tenax.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    create_handler,
    get_method_name,
)
from tenax.store import MemoryStore, StoreServer, TCPStore
from tenax.testing.rendezvous_contract import BlockingCall, wait_until

LIMIT_S = 60.0
KEY = "torch.rendezvous.run"


class MemoryBackend(RendezvousBackend):
    """Holds the state in this process. With ``fault`` set, every call raises it."""

    def __init__(self) -> None:
        self.cell: tuple[bytes, int] | None = None
        self.fault: BaseException | None = None
        self.calls = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._lock:
            self.calls += 1
            if self.fault is not None:
                raise self.fault
            return self.cell

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with self._lock:
            if self.fault is not None:
                raise self.fault
            if (None if self.cell is None else self.cell[1]) != token:
                return None if self.cell is None else (*self.cell, False)
            self.cell = (state, (token or 0) + 1)
            return (*self.cell, True)


class Rendezvous:
    """The nodes of one test, with their store and backend. They are shut down with the test."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.backend = MemoryBackend()
        self.handlers: list[DynamicRendezvousHandler] = []

    def node(
        self,
        min_nodes: int = 1,
        max_nodes: int = 4,
        *,
        last_call_s: float = 0.05,
        join_s: float = LIMIT_S,
        keep_alive_s: float = 1.0,
        attempts: int = 30,
        store: Any = None,
        backend: RendezvousBackend | None = None,
    ) -> DynamicRendezvousHandler:
        handler = DynamicRendezvousHandler.from_backend(
            "run",
            self.store if store is None else store,
            backend or self.backend,
            min_nodes,
            max_nodes,
            "127.0.0.1",
            RendezvousTimeout(timedelta(seconds=join_s), timedelta(seconds=last_call_s)),
            keep_alive_interval=keep_alive_s,
            keep_alive_max_attempt=attempts,
        )
        self.handlers.append(handler)
        return handler


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    here = Rendezvous()
    yield here
    here.backend.fault = None
    for handler in here.handlers:
        handler.shutdown()


def meet(*handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
    calls = [BlockingCall(handler.next_rendezvous) for handler in handlers]
    return [call.result() for call in calls]


def interrupt(handler: DynamicRendezvousHandler) -> None:
    """Do what a launcher does after Ctrl-C: its ``finally`` block shuts the handler down."""

    def launch() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            handler.shutdown()

    with pytest.raises(KeyboardInterrupt):
        launch()


# --- settings ---------------------------------------------------------------------------------------------------------


def test_timeouts_have_torchs_defaults_and_must_be_positive() -> None:
    timeout = RendezvousTimeout()
    assert [each.total_seconds() for each in (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)] == [
        600,
        30,
        30,
        5,
    ]
    for name in ("join", "last_call", "close", "heartbeat"):
        for wrong in (timedelta(0), timedelta(seconds=-1)):
            with pytest.raises(ValueError, match=f"the rendezvous timeout '{name}'"):
                RendezvousTimeout(**{name: wrong})


def test_a_handler_is_created_from_parameters() -> None:
    params = RendezvousParameters(
        "memory", "", "run", 1, 2, join_timeout="7", last_call_timeout=8, keep_alive_interval="2"
    )
    settings = create_handler(MemoryStore(), MemoryBackend(), params).settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("run", 1, 2)
    assert (settings.timeout.join, settings.timeout.last_call) == (timedelta(seconds=7), timedelta(seconds=8))
    assert (settings.timeout.close, settings.timeout.heartbeat) == (timedelta(seconds=30), timedelta(seconds=5))
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=2), 3)


def test_the_option_timeout_is_the_join_timeout() -> None:
    """Unless ``join_timeout`` is given too."""
    params = RendezvousParameters("memory", "", "run", 1, 2, timeout=9)
    assert create_handler(None, MemoryBackend(), params).settings.timeout.join == timedelta(seconds=9)
    params = RendezvousParameters("memory", "", "run", 1, 2, timeout=9, join_timeout=0)
    with pytest.raises(ValueError, match="the rendezvous timeout 'join'"):
        create_handler(None, MemoryBackend(), params)


@pytest.mark.parametrize(
    ("run_id", "min_nodes", "max_nodes", "interval", "attempts"),
    [("", 1, 1, 5, 3), ("run", 0, 1, 5, 3), ("run", 2, 1, 5, 3), ("run", 1, 1, 0, 3), ("run", 1, 1, 5, 0)],
)
def test_invalid_settings_are_rejected(
    run_id: str, min_nodes: int, max_nodes: int, interval: int, attempts: int
) -> None:
    with pytest.raises(ValueError, match=r"expected|empty"):
        DynamicRendezvousHandler.from_backend(
            run_id,
            None,
            MemoryBackend(),
            min_nodes,
            max_nodes,
            keep_alive_interval=interval,
            keep_alive_max_attempt=attempts,
        )


def test_get_method_name_returns_the_callers_name() -> None:
    def inner() -> str:
        return get_method_name(1)

    assert inner() == "inner"
    assert get_method_name(10_000) == "no_method_name"


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_every_round_has_its_own_keys_in_the_store(rendezvous: Rendezvous) -> None:
    node = rendezvous.node()
    node.next_rendezvous().store.set("key", b"1")
    node.next_rendezvous().store.set("key", b"2")
    assert rendezvous.store.get("tenax.rendezvous.run.1/key") == b"1"
    assert rendezvous.store.get("tenax.rendezvous.run.2/key") == b"2"


def test_known_members_do_not_wait_for_new_nodes(rendezvous: Rendezvous) -> None:
    """Otherwise an elastic job below its maximum size would wait for a last call at every restart."""
    nodes = [rendezvous.node(2, 4, last_call_s=0.05) for _ in range(2)]
    meet(*nodes)
    patient = [rendezvous.node(2, 4, last_call_s=10_000, join_s=20_000) for _ in range(2)]
    for node in nodes:
        interrupt(node)
    calls = [
        BlockingCall(node.next_rendezvous) for node in patient
    ]  # two new nodes: these would wait for the last call
    third = rendezvous.node(2, 4, last_call_s=0.05)
    assert third.next_rendezvous().world_size == 3
    assert sorted(call.result().world_size for call in calls) == [3, 3]
    assert [info.world_size for info in meet(*patient, third)] == [3, 3, 3]  # the last calls of 10,000 s do not matter


def test_all_members_get_the_new_address_when_rank_0_is_gone(rendezvous: Rendezvous) -> None:
    """TorchElastic's survivors kept the old one (W3)."""
    nodes = [rendezvous.node(2, 3) for _ in range(3)]
    infos = meet(*nodes)
    by_rank = {info.rank: node for info, node in zip(infos, nodes, strict=True)}
    interrupt(by_rank[0])
    infos = meet(by_rank[1], by_rank[2])
    assert [info.rank for info in infos] == [0, 1]
    ports = {info.bootstrap_store_info.master_port for info in infos}
    assert len(ports) == 1
    with socket.create_connection(("127.0.0.1", ports.pop()), LIMIT_S):
        pass


def test_the_workers_store_is_served_anew_in_every_round(rendezvous: Rendezvous) -> None:
    """By rank 0's agent, at a bound port; the server of the last round is gone with its keys."""
    node = rendezvous.node(1, 1)
    first = node.next_rendezvous().bootstrap_store_info
    TCPStore(first.master_addr, first.master_port).set("stale", b"1")
    second = node.next_rendezvous().bootstrap_store_info
    assert not TCPStore(second.master_addr, second.master_port).check(["stale"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first.master_addr, first.master_port), LIMIT_S)
    assert node.use_agent_store
    node.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((second.master_addr, second.master_port), LIMIT_S)


def test_the_workers_can_serve_their_store_themselves(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the port is only chosen, not bound."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    node = rendezvous.node(1, 1)
    where = node.next_rendezvous().bootstrap_store_info
    assert not node.use_agent_store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.master_addr, where.master_port), LIMIT_S)


def test_a_torch_store_gets_a_torch_prefix_store(rendezvous: Rendezvous) -> None:
    distributed = pytest.importorskip("torch.distributed", reason="torch is not installed")
    store = rendezvous.node(1, 1, store=distributed.HashStore()).next_rendezvous().store
    assert isinstance(store, distributed.PrefixStore)


def test_a_lost_state_is_recreated_with_later_rounds(rendezvous: Rendezvous) -> None:
    """Members notice it, and numbers of old rounds are not used again."""
    nodes = [rendezvous.node(2, 2) for _ in range(2)]
    meet(*nodes)
    meet(*nodes)
    rendezvous.backend.cell = None
    wait_until(lambda: nodes[0].num_nodes_waiting() > 0)
    meet(*nodes)
    assert rendezvous.backend.cell is not None
    assert decode(rendezvous.backend.cell[0], "run").round == 3


def test_the_death_of_rank_0_before_it_publishes_its_address_does_not_block_the_others(rendezvous: Rendezvous) -> None:
    """The next round forms."""
    rendezvous.backend.cell = (encode(State("run", 2, 2, nodes=(Node("dead", "host-b", Standing.JOINED),))), 1)
    waiting = BlockingCall(rendezvous.node(2, 2, keep_alive_s=0.2, attempts=5).next_rendezvous)
    wait_until(lambda: decode(rendezvous.backend.cell[0], "run").members.get("dead") == 0)  # type: ignore[index]
    other = BlockingCall(rendezvous.node(2, 2).next_rendezvous)
    assert {waiting.result().world_size, other.result().world_size} == {2}


# --- death ------------------------------------------------------------------------------------------------------------

_MEMBER = """
import sys
from datetime import timedelta
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from tenax.store import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=timedelta(seconds=60))
backend = C10dRendezvousBackend(store, "run")
handler = DynamicRendezvousHandler.from_backend(
    "run", store, backend, 1, 2, "127.0.0.1", RendezvousTimeout(last_call=timedelta(seconds=30)), 0.2, 10)
print(handler.next_rendezvous().rank, flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_num_nodes_waiting_reports_the_death_of_a_member() -> None:
    """After SIGKILL of the other member, the survivor forms the next round alone."""
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
        here = Rendezvous()
        node = here.node(
            1,
            2,
            last_call_s=30,
            keep_alive_s=0.2,
            attempts=10,
            store=store,
            backend=C10dRendezvousBackend(store, "run"),
        )
        joining = BlockingCall(node.next_rendezvous)
        with subprocess.Popen(
            [sys.executable, "-c", _MEMBER, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as member:
            assert member.stdout is not None
            rank = int(member.stdout.readline())
            assert {joining.result().rank, rank} == {0, 1}
            assert node.num_nodes_waiting() == 0
            member.kill()
        wait_until(lambda: node.num_nodes_waiting() > 0)
        again = node.next_rendezvous()
        assert (again.rank, again.world_size) == (0, 1)
        node.shutdown()


def test_a_node_that_blocks_on_the_store_keeps_sending_heartbeats() -> None:
    """As in an exit barrier. The heartbeat thread has its own connection."""
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        here = Rendezvous()
        nodes = []
        for _ in range(2):
            store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
            backend = C10dRendezvousBackend(store, "run")
            nodes.append(here.node(2, 2, keep_alive_s=0.1, attempts=10, store=store, backend=backend))
        infos = meet(*nodes)
        blocked = BlockingCall(lambda: infos[0].store.wait(["never"], timedelta(seconds=1.5)))
        with pytest.raises(TimeoutError):
            blocked.result()
        assert nodes[1].num_nodes_waiting() == 0
        for node in nodes:
            node.shutdown()


def test_a_short_outage_of_the_backend_is_not_an_error(rendezvous: Rendezvous) -> None:
    node = rendezvous.node(1, 1, keep_alive_s=0.1, attempts=600)
    node.next_rendezvous()
    rendezvous.backend.fault = RendezvousConnectionError("unreachable")
    before = rendezvous.backend.calls
    wait_until(lambda: node.num_nodes_waiting() == 0 and rendezvous.backend.calls > before + 3)
    rendezvous.backend.fault = None
    before = rendezvous.backend.calls
    wait_until(lambda: node.num_nodes_waiting() == 0 and rendezvous.backend.calls > before + 3)


def test_a_long_outage_of_the_backend_is_an_error(rendezvous: Rendezvous) -> None:
    """By then this node counts as dead, and the others may have formed a group without it."""
    node = rendezvous.node(1, 1, keep_alive_s=0.1, attempts=5)
    node.next_rendezvous()
    rendezvous.backend.fault = RendezvousConnectionError("gone")
    with pytest.raises(RendezvousConnectionError, match="gone"):
        wait_until(lambda: node.num_nodes_waiting() > 0)


def test_an_outage_of_the_backend_after_the_end_of_the_run_is_not_an_error(rendezvous: Rendezvous) -> None:
    """It may have been hosted by the node that finished first."""
    nodes = [rendezvous.node(2, 2, keep_alive_s=0.1, attempts=2) for _ in range(2)]
    meet(*nodes)
    nodes[0].shutdown()
    wait_until(nodes[1].is_closed)
    rendezvous.backend.fault = RendezvousConnectionError("gone")
    before = rendezvous.backend.calls
    wait_until(lambda: nodes[1].num_nodes_waiting() == 0 and rendezvous.backend.calls > before + 5)


def test_joining_fails_if_the_backend_is_never_reachable(rendezvous: Rendezvous) -> None:
    rendezvous.backend.fault = RendezvousConnectionError("unreachable")
    with pytest.raises(RendezvousConnectionError, match="unreachable"):
        rendezvous.node(1, 1, keep_alive_s=0.1, attempts=2).next_rendezvous()


def test_an_exception_of_the_heartbeat_is_raised_by_the_next_call(rendezvous: Rendezvous) -> None:
    """Also an unexpected exception of a third-party backend."""
    node = rendezvous.node(1, 1, keep_alive_s=0.1, attempts=5)
    node.next_rendezvous()
    rendezvous.backend.fault = ZeroDivisionError("a bug of the backend")
    with pytest.raises(ZeroDivisionError, match="a bug of the backend"):
        wait_until(lambda: node.num_nodes_waiting() > 0)
    with pytest.raises(ZeroDivisionError, match="a bug of the backend"):
        node.next_rendezvous()


def test_a_node_whose_join_failed_is_removed_from_the_state(rendezvous: Rendezvous) -> None:
    """And its heartbeat thread has ended."""
    node = rendezvous.node(2, 2, join_s=1.0)
    with pytest.raises(RendezvousTimeoutError, match="only 1 of at least 2 nodes joined"):
        node.next_rendezvous()
    assert rendezvous.backend.cell is not None
    assert decode(rendezvous.backend.cell[0], "run").nodes == ()
    assert not [
        thread for thread in threading.enumerate() if thread.name == f"rendezvous-heartbeat-{node._node.id[:8]}"
    ]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_member_that_finishes_closes_the_run(rendezvous: Rendezvous) -> None:
    nodes = [rendezvous.node(2, 2) for _ in range(2)]
    meet(*nodes)
    assert nodes[0].shutdown()
    assert nodes[1].is_closed()
    wait_until(lambda: nodes[1].num_nodes_waiting() == 0)  # no group can form any more, so it may finish
    with pytest.raises(RendezvousClosedError, match=r"the run 'run' is over: the workers of 127\.0\.0\.1 finished"):
        nodes[1].next_rendezvous()


def test_an_interrupt_on_one_node_does_not_close_the_run(rendezvous: Rendezvous) -> None:
    """Ctrl-C, or a signal that became an exception. The others notice the change at once."""
    nodes = [rendezvous.node(1, 2, last_call_s=0.5) for _ in range(2)]
    meet(*nodes)
    interrupt(nodes[0])
    assert not nodes[1].is_closed()
    wait_until(lambda: nodes[1].num_nodes_waiting() == 1)
    assert nodes[1].next_rendezvous().world_size == 1


def test_a_node_that_the_group_left_behind_does_not_close_the_run(rendezvous: Rendezvous) -> None:
    """It was stopped while the others continued, and then shuts down."""
    nodes = [rendezvous.node(1, 2, last_call_s=0.5) for _ in range(2)]
    meet(*nodes)
    left_behind, other = nodes
    assert other.next_rendezvous().world_size == 1  # after two last calls without the first one
    wait_until(lambda: left_behind.num_nodes_waiting() > 0)
    left_behind.shutdown()
    assert not other.is_closed()


def test_a_run_without_nodes_can_be_closed(rendezvous: Rendezvous) -> None:
    operator = rendezvous.node()
    operator.set_closed()
    assert operator.is_closed()
    with pytest.raises(RendezvousClosedError, match=r"it was closed on 127\.0\.0\.1"):
        rendezvous.node().next_rendezvous()


def test_shutdown_returns_whether_it_succeeded(rendezvous: Rendezvous) -> None:
    node = rendezvous.node(1, 1)
    node.next_rendezvous()
    rendezvous.backend.fault = RendezvousConnectionError("gone")
    with pytest.warns(RuntimeWarning, match="could not leave the run 'run': gone"):
        assert not node.shutdown()


def test_the_heartbeat_thread_ends_with_a_garbage_collected_handler(rendezvous: Rendezvous) -> None:
    node = rendezvous.node(1, 1)
    node.next_rendezvous()
    name = f"rendezvous-heartbeat-{node._node.id[:8]}"
    (heartbeat,) = [thread for thread in threading.enumerate() if thread.name == name]
    rendezvous.handlers.clear()
    del node
    heartbeat.join(LIMIT_S)
    assert not heartbeat.is_alive()


# --- invalid states (S1) ----------------------------------------------------------------------------------------------

GOOD = json.loads(encode(State("run", 1, 2, nodes=(Node("a", "host", Standing.JOINED),))))


class Trap:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def node(**fields: Any) -> dict[str, Any]:
    return {**GOOD["nodes"][0], **fields}


INVALID = {
    "empty": b"",
    "random bytes": bytes(range(255, 0, -1)),
    "text": b"hello",
    "a number": b"17",
    "a list": b"[]",
    "null": b"null",
    "an empty object": b"{}",
    "a truncated document": encode(State("run", 1, 2))[:-5],
    "two documents": encode(State("run", 1, 2)) * 2,
    "not UTF-8": b'{"format": "tenax.rendezvous\xff"}',
    "huge": b'{"format": "' + b"x" * MAX_BYTES + b'"}',
    "deeply nested": b'{"format": ' + b"[" * 100_000,
    "deeply nested after a valid header": changed(nodes=[])[:-1] + b', "more": ' + b'{"a":' * 100_000,
    "another format": changed(format="another.format"),
    "a later version": changed(version=2),
    "an unknown field": changed(colour="blue"),
    "another run": changed(run_id="other"),
    "round 0": changed(round=0),
    "a negative round": changed(round=-1),
    "a round that is too large": changed(round=1 << 70),
    "a round that is text": changed(round="1"),
    "min_nodes above max_nodes": changed(min_nodes=3, max_nodes=2),
    "max_nodes 0": changed(max_nodes=0),
    "a node twice": changed(nodes=[node(), node()]),
    "a node without an id": changed(nodes=[node(id="")]),
    "a node with a long id": changed(nodes=[node(id="x" * 65)]),
    "a node with a long address": changed(nodes=[node(addr="x" * 256)]),
    "an unknown standing": changed(nodes=[node(standing="unknown")]),
    "too many nodes": changed(nodes=[node(id=str(number)) for number in range(20_001)]),
    "a rank twice": changed(members={"a": 0, "b": 0}),
    "a missing rank": changed(members={"a": 1}),
    "a running node that is not a member": changed(nodes=[node(standing="running")]),
    "complete without members": changed(complete=True, nodes=[]),
    "complete with a joined node without a rank": changed(complete=True, members={"b": 0}),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_state_is_rejected(rendezvous: Rendezvous, name: str) -> None:
    rendezvous.backend.cell = (INVALID[name], 1)
    with pytest.raises(RendezvousStateError, match="rendezvous state of the run 'run' is invalid: ") as caught:
        rendezvous.node(1, 2).next_rendezvous()
    assert len(str(caught.value)) < 500
    assert rendezvous.backend.cell == (INVALID[name], 1), "it is not overwritten"


def test_a_pickle_is_rejected_and_not_loaded(rendezvous: Rendezvous, tmp_path: Path) -> None:
    """TorchElastic loads it, and so runs code that any writer put there."""
    trace = tmp_path / "loaded"
    rendezvous.backend.cell = (pickle.dumps(Trap(trace)), 1)
    with pytest.raises(RendezvousStateError, match="it is a pickle, written by an agent of TorchElastic"):
        rendezvous.node(1, 2).next_rendezvous()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace)))
    assert trace.exists(), "the trap works"


def test_an_invalid_state_written_while_a_group_runs_is_reported(rendezvous: Rendezvous) -> None:
    store = MemoryStore()
    member = rendezvous.node(1, 1, keep_alive_s=0.1, store=store, backend=C10dRendezvousBackend(store, "run"))
    member.next_rendezvous()
    store.set(KEY, base64.b64encode(b"overwritten"))
    with pytest.raises(RendezvousStateError, match="is invalid: it begins with b'overwritten'"):
        wait_until(lambda: member.num_nodes_waiting() > 0)
    store.delete_key(KEY)
