"""DynamicRendezvousHandler at its edges: death, lost places, hostile documents, endings, and the workers' store."""

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
    """One document in this process. A test can break it."""

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


class Place:
    """Where the nodes of one test meet. All of them have threads, which end with the test."""

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
def place() -> Iterator[Place]:
    here = Place()
    yield here
    here.backend.fault = None
    for handler in here.handlers:
        handler.shutdown()


def meet(*handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
    calls = [BlockingCall(handler.next_rendezvous) for handler in handlers]
    return [call.result() for call in calls]


def interrupted(handler: DynamicRendezvousHandler) -> None:
    """What a launcher does whose ``finally`` shuts the handler down, after Ctrl-C."""

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


def test_a_handler_is_made_from_parameters() -> None:
    params = RendezvousParameters(
        "memory", "", "run", 1, 2, join_timeout="7", last_call_timeout=8, keep_alive_interval="2"
    )
    settings = create_handler(MemoryStore(), MemoryBackend(), params).settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("run", 1, 2)
    assert (settings.timeout.join, settings.timeout.last_call) == (timedelta(seconds=7), timedelta(seconds=8))
    assert (settings.timeout.close, settings.timeout.heartbeat) == (timedelta(seconds=30), timedelta(seconds=5))
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=2), 3)


def test_the_timeout_of_the_command_line_is_not_ignored() -> None:
    """``--rdzv-conf timeout=9`` says how long to wait for a group, unless ``join_timeout`` says it too."""
    params = RendezvousParameters("memory", "", "run", 1, 2, timeout=9)
    assert create_handler(None, MemoryBackend(), params).settings.timeout.join == timedelta(seconds=9)
    params = RendezvousParameters("memory", "", "run", 1, 2, timeout=9, join_timeout=0)
    with pytest.raises(ValueError, match="the rendezvous timeout 'join'"):
        create_handler(None, MemoryBackend(), params)


@pytest.mark.parametrize(
    ("run_id", "min_nodes", "max_nodes", "interval", "attempts"),
    [("", 1, 1, 5, 3), ("run", 0, 1, 5, 3), ("run", 2, 1, 5, 3), ("run", 1, 1, 0, 3), ("run", 1, 1, 5, 0)],
)
def test_settings_that_make_no_sense(run_id: str, min_nodes: int, max_nodes: int, interval: int, attempts: int) -> None:
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


def test_method_names() -> None:
    def inner() -> str:
        return get_method_name(1)

    assert inner() == "inner"
    assert get_method_name(10_000) == "no_method_name"


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_every_round_has_its_own_keys_in_the_store(place: Place) -> None:
    node = place.node()
    node.next_rendezvous().store.set("key", b"1")
    node.next_rendezvous().store.set("key", b"2")
    assert place.store.get("tenax.rendezvous.run.1/key") == b"1"
    assert place.store.get("tenax.rendezvous.run.2/key") == b"2"


def test_known_members_do_not_wait_for_strangers(place: Place) -> None:
    """An elastic job that restarts below its largest size would else pay for a last call every time."""
    nodes = [place.node(2, 4, last_call_s=0.05) for _ in range(2)]
    meet(*nodes)
    patient = [place.node(2, 4, last_call_s=10_000, join_s=20_000) for _ in range(2)]
    for node in nodes:
        interrupted(node)
    calls = [
        BlockingCall(node.next_rendezvous) for node in patient
    ]  # two strangers: these would wait for the last call
    third = place.node(2, 4, last_call_s=0.05)
    assert third.next_rendezvous().world_size == 3
    assert sorted(call.result().world_size for call in calls) == [3, 3]
    assert [info.world_size for info in meet(*patient, third)] == [3, 3, 3]  # the last calls of 10,000 s do not matter


def test_all_members_get_the_new_address_when_rank_0_is_gone(place: Place) -> None:
    """TorchElastic's survivors kept the old one (W3)."""
    nodes = [place.node(2, 3) for _ in range(3)]
    infos = meet(*nodes)
    by_rank = {info.rank: node for info, node in zip(infos, nodes, strict=True)}
    interrupted(by_rank[0])
    infos = meet(by_rank[1], by_rank[2])
    assert [info.rank for info in infos] == [0, 1]
    ports = {info.bootstrap_store_info.master_port for info in infos}
    assert len(ports) == 1
    with socket.create_connection(("127.0.0.1", ports.pop()), LIMIT_S):
        pass


def test_the_workers_store_is_served_anew_in_every_round(place: Place) -> None:
    """By rank 0's agent, at a port that it holds; the server of the last round is gone, and with it every key."""
    node = place.node(1, 1)
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


def test_the_workers_may_serve_their_store_themselves(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the port is only chosen, and nobody listens there yet."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    node = place.node(1, 1)
    where = node.next_rendezvous().bootstrap_store_info
    assert not node.use_agent_store
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.master_addr, where.master_port), LIMIT_S)


def test_a_store_of_torch_stays_one(place: Place) -> None:
    distributed = pytest.importorskip("torch.distributed", reason="torch is not installed")
    store = place.node(1, 1, store=distributed.HashStore()).next_rendezvous().store
    assert isinstance(store, distributed.PrefixStore)


def test_a_lost_state_is_begun_anew_with_later_rounds(place: Place) -> None:
    """The place where nodes meet was emptied: members notice, and numbers of old rounds do not come back."""
    nodes = [place.node(2, 2) for _ in range(2)]
    meet(*nodes)
    meet(*nodes)
    place.backend.cell = None
    wait_until(lambda: nodes[0].num_nodes_waiting() > 0)
    meet(*nodes)
    assert place.backend.cell is not None
    assert decode(place.backend.cell[0], "run").round == 3


def test_rank_0_that_dies_before_it_publishes_does_not_hold_up_the_others(place: Place) -> None:
    """The round is complete, but its rank 0 is gone before anybody learned its address. The next one forms."""
    place.backend.cell = (encode(State("run", 2, 2, nodes=(Node("dead", "host-b", Standing.JOINED),))), 1)
    waiting = BlockingCall(place.node(2, 2, keep_alive_s=0.2, attempts=5).next_rendezvous)
    wait_until(lambda: decode(place.backend.cell[0], "run").members.get("dead") == 0)  # type: ignore[index]
    other = BlockingCall(place.node(2, 2).next_rendezvous)
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
def test_the_death_of_a_member_is_a_change_of_the_group() -> None:
    """Nobody says goodbye after SIGKILL. The survivor is told through num_nodes_waiting(), and goes on alone."""
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
        here = Place()
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


def test_a_node_that_blocks_on_the_store_of_its_round_is_not_taken_for_dead() -> None:
    """As in an exit barrier. Its heart has a connection of its own."""
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        here = Place()
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


def test_a_backend_that_is_away_for_a_moment_disturbs_nobody(place: Place) -> None:
    node = place.node(1, 1, keep_alive_s=0.1, attempts=600)
    node.next_rendezvous()
    place.backend.fault = RendezvousConnectionError("away")
    before = place.backend.calls
    wait_until(lambda: node.num_nodes_waiting() == 0 and place.backend.calls > before + 3)
    place.backend.fault = None
    before = place.backend.calls
    wait_until(lambda: node.num_nodes_waiting() == 0 and place.backend.calls > before + 3)


def test_a_backend_that_stays_away_is_an_error(place: Place) -> None:
    """The others must think us dead by then, and may have formed a group without us."""
    node = place.node(1, 1, keep_alive_s=0.1, attempts=5)
    node.next_rendezvous()
    place.backend.fault = RendezvousConnectionError("gone")
    with pytest.raises(RendezvousConnectionError, match="gone"):
        wait_until(lambda: node.num_nodes_waiting() > 0)


def test_a_backend_that_went_away_after_the_end_of_the_run_disturbs_nobody(place: Place) -> None:
    """It may have lived on the node that ended first; the others finish their work."""
    nodes = [place.node(2, 2, keep_alive_s=0.1, attempts=2) for _ in range(2)]
    meet(*nodes)
    nodes[0].shutdown()
    wait_until(nodes[1].is_closed)
    place.backend.fault = RendezvousConnectionError("gone")
    before = place.backend.calls
    wait_until(lambda: nodes[1].num_nodes_waiting() == 0 and place.backend.calls > before + 5)


def test_a_backend_that_is_never_reached_is_an_error_of_the_join(place: Place) -> None:
    place.backend.fault = RendezvousConnectionError("nobody there")
    with pytest.raises(RendezvousConnectionError, match="nobody there"):
        place.node(1, 1, keep_alive_s=0.1, attempts=2).next_rendezvous()


def test_the_heart_does_not_die_in_silence(place: Place) -> None:
    """A fault of somebody's backend is raised by the next call, whatever it is; after that the heart beats on."""
    node = place.node(1, 1, keep_alive_s=0.1, attempts=5)
    node.next_rendezvous()
    place.backend.fault = ZeroDivisionError("a fault of mine")
    with pytest.raises(ZeroDivisionError, match="a fault of mine"):
        wait_until(lambda: node.num_nodes_waiting() > 0)
    with pytest.raises(ZeroDivisionError, match="a fault of mine"):
        node.next_rendezvous()


def test_a_join_that_fails_takes_its_node_off_the_list(place: Place) -> None:
    """Nobody waits for it, and its heart is still."""
    node = place.node(2, 2, join_s=1.0)
    with pytest.raises(RendezvousTimeoutError, match="only 1 of at least 2 nodes joined"):
        node.next_rendezvous()
    assert place.backend.cell is not None
    assert decode(place.backend.cell[0], "run").nodes == ()
    assert not [thread for thread in threading.enumerate() if thread.name == f"rendezvous-heart-{node._node.id[:8]}"]


# --- endings ----------------------------------------------------------------------------------------------------------


def test_a_member_whose_work_ends_ends_the_run(place: Place) -> None:
    nodes = [place.node(2, 2) for _ in range(2)]
    meet(*nodes)
    assert nodes[0].shutdown()
    assert nodes[1].is_closed()
    wait_until(lambda: nodes[1].num_nodes_waiting() == 0)  # nothing could form any more: let it finish its work
    with pytest.raises(RendezvousClosedError, match=r"the run 'run' is over: the workers of 127\.0\.0\.1 finished"):
        nodes[1].next_rendezvous()


def test_an_interrupt_on_one_node_leaves_the_run_to_the_others(place: Place) -> None:
    """Ctrl-C, or a signal that became an exception. The others are told at once that the group changed."""
    nodes = [place.node(1, 2, last_call_s=0.5) for _ in range(2)]
    meet(*nodes)
    interrupted(nodes[0])
    assert not nodes[1].is_closed()
    wait_until(lambda: nodes[1].num_nodes_waiting() == 1)
    assert nodes[1].next_rendezvous().world_size == 1


def test_a_node_that_was_left_behind_does_not_end_the_run(place: Place) -> None:
    """It was stopped while the others went on; then it gives up. Their run is not its to end."""
    nodes = [place.node(1, 2, last_call_s=0.5) for _ in range(2)]
    meet(*nodes)
    left_behind, other = nodes
    assert other.next_rendezvous().world_size == 1  # after two last calls without the first one
    wait_until(lambda: left_behind.num_nodes_waiting() > 0)
    left_behind.shutdown()
    assert not other.is_closed()


def test_closing_a_run_that_nobody_joined(place: Place) -> None:
    operator = place.node()
    operator.set_closed()
    assert operator.is_closed()
    with pytest.raises(RendezvousClosedError, match=r"it was closed on 127\.0\.0\.1"):
        place.node().next_rendezvous()


def test_shutdown_says_whether_it_worked(place: Place) -> None:
    node = place.node(1, 1)
    node.next_rendezvous()
    place.backend.fault = RendezvousConnectionError("gone")
    with pytest.warns(RuntimeWarning, match="could not leave the run 'run': gone"):
        assert not node.shutdown()


def test_a_handler_that_is_forgotten_lets_its_heart_go(place: Place) -> None:
    node = place.node(1, 1)
    node.next_rendezvous()
    name = f"rendezvous-heart-{node._node.id[:8]}"
    (heart,) = [thread for thread in threading.enumerate() if thread.name == name]
    place.handlers.clear()
    del node
    heart.join(LIMIT_S)
    assert not heart.is_alive()


# --- hostile documents (S1) -------------------------------------------------------------------------------------------

GOOD = json.loads(encode(State("run", 1, 2, nodes=(Node("a", "host", Standing.JOINED),))))


class Trap:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def node(**fields: Any) -> dict[str, Any]:
    return {**GOOD["nodes"][0], **fields}


HOSTILE = {
    "nothing": b"",
    "random bytes": bytes(range(255, 0, -1)),
    "text": b"hello",
    "a number": b"17",
    "a list": b"[]",
    "null": b"null",
    "an empty object": b"{}",
    "half a document": encode(State("run", 1, 2))[:-5],
    "two documents": encode(State("run", 1, 2)) * 2,
    "not UTF-8": b'{"format": "tenax.rendezvous\xff"}',
    "huge": b'{"format": "' + b"x" * MAX_BYTES + b'"}',
    "deep": b'{"format": ' + b"[" * 100_000,
    "deep behind a good header": changed(nodes=[])[:-1] + b', "more": ' + b'{"a":' * 100_000,
    "another format": changed(format="somebody.else"),
    "a later version": changed(version=2),
    "an unknown field": changed(colour="blue"),
    "another run": changed(run_id="other"),
    "round 0": changed(round=0),
    "a negative round": changed(round=-1),
    "a round beyond all numbers": changed(round=1 << 70),
    "a round that is text": changed(round="1"),
    "more at least than at most": changed(min_nodes=3, max_nodes=2),
    "no nodes at all": changed(max_nodes=0),
    "a node twice": changed(nodes=[node(), node()]),
    "a node without an id": changed(nodes=[node(id="")]),
    "a node with a long id": changed(nodes=[node(id="x" * 65)]),
    "a node with a long address": changed(nodes=[node(addr="x" * 256)]),
    "a standing that does not exist": changed(nodes=[node(standing="king")]),
    "too many nodes": changed(nodes=[node(id=str(number)) for number in range(20_001)]),
    "a rank twice": changed(members={"a": 0, "b": 0}),
    "a missing rank": changed(members={"a": 1}),
    "a stranger that runs": changed(nodes=[node(standing="running")]),
    "complete without members": changed(complete=True, nodes=[]),
    "complete with somebody without a place": changed(complete=True, members={"b": 0}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_document_that_is_not_ours_is_refused(place: Place, name: str) -> None:
    place.backend.cell = (HOSTILE[name], 1)
    with pytest.raises(RendezvousStateError, match="rendezvous state of the run 'run' is invalid: ") as caught:
        place.node(1, 2).next_rendezvous()
    assert len(str(caught.value)) < 500
    assert place.backend.cell == (HOSTILE[name], 1), "an invalid state is not overwritten either"


def test_a_pickle_is_refused_and_not_loaded(place: Place, tmp_path: Path) -> None:
    """TorchElastic ran whatever a stranger wrote there."""
    trace = tmp_path / "loaded"
    place.backend.cell = (pickle.dumps(Trap(trace)), 1)
    with pytest.raises(RendezvousStateError, match="it is a pickle, written by an agent of TorchElastic"):
        place.node(1, 2).next_rendezvous()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace)))
    assert trace.exists(), "the trap works"


def test_a_stranger_that_writes_while_a_group_runs_is_reported(place: Place) -> None:
    store = MemoryStore()
    member = place.node(1, 1, keep_alive_s=0.1, store=store, backend=C10dRendezvousBackend(store, "run"))
    member.next_rendezvous()
    store.set(KEY, base64.b64encode(b"I was here"))
    with pytest.raises(RendezvousStateError, match="is invalid: it begins with b'I was here'"):
        wait_until(lambda: member.num_nodes_waiting() > 0)
    store.delete_key(KEY)
