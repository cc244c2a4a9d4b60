"""Bugs that the lane of faults has found, reproduced with minimal means."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kit.etcd import TIMEOUT_S, EtcdCluster, needs_etcd, unique_prefix
from kit.fake_node import fake_node
from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorMachine,
    NodeLost,
    Opened,
    Received,
    RunSettings,
    Send,
)
from tenax._core.etcd.operations import Header, Put, TransactionAnswer
from tenax._core.events import Fenced, GenerationEnded, GenerationFormed
from tenax._core.leadership.candidacy import Elected
from tenax._core.leadership.decisions import Decisions
from tenax._core.leadership.keys import Keys, Leader, LeaderAddress, Written
from tenax._core.link import wire
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._core.model import AgentSettings, Assignment
from tenax._core.record import RunRecord
from tenax._engines.etcd.engine import EtcdEngine, EtcdEngineSettings
from tenax._engines.etcd.leader_address import this_machine
from tenax._io.etcd.client import EtcdClient
from tenax._io.loop import Loop


class SlowEtcd:
    """Replaces a client: it answers on request."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[TransactionAnswer], None]] = []
        self.revision = 10
        self.loop = SimpleNamespace(now=lambda: 0.0)

    def call(self, _: object, done: Callable[[Any], None], failed: object) -> None:
        self.waiting.append(done)

    def answer(self) -> None:
        """Let every write succeed, including those that follow."""
        while self.waiting:
            self.revision += 1
            self.waiting.pop(0)(TransactionAnswer(Header(self.revision), succeeded=True))


class Leading:
    """A coordinator of two nodes that writes its decisions to a slow etcd, and what the nodes receive."""

    def __init__(self) -> None:
        self.etcd = SlowEtcd()
        self.received: dict[str, list[object]] = {"a": [], "b": []}
        self._machine = CoordinatorMachine(RunSettings("run", 2, 2))
        address = LeaderAddress("a", "host", "127.0.0.1", 1)
        elected = Elected(5, 6, Written(RunRecord(), address), Leader(address, b"secret"))
        client = cast("EtcdClient", self.etcd)
        self._decisions = Decisions(
            client,
            Keys("run"),
            elected,
            7,
            AuthorityTerms(),
            deliver=self._deliver,
            deposed=print,
            troubled=print,
            written=lambda _: None,
        )
        self.step(Opened())

    def _deliver(self, send: Send) -> None:
        for node_id in send.to:
            if isinstance(send.event, GenerationFormed | GenerationEnded):
                self.received[node_id].append(send.event)

    def step(self, event: AnyCoordinatorEvent) -> None:
        for send in self._machine.step(event, 100.0).sends:
            self._decisions.submit(send, self._machine.state)

    def link(self, *node_ids: str) -> None:
        """Start a link of each node, which joins and reports that it is ready."""
        for node_id in node_ids:
            self.step(Received(node_id, NodeJoined(NodeInfo(node_id, "host", 1, min_nodes=2, max_nodes=2))))
            self.step(Received(node_id, NodeReady(0, "127.0.0.1", 1000, True)))

    def formed(self, node_id: str) -> list[int]:
        return [each.assignment.generation for each in self.received[node_id] if isinstance(each, GenerationFormed)]


def test_a_lost_node_does_not_receive_the_generation_that_it_lost() -> None:
    """Seed 15: stopped while its generation waited for etcd, it came back and received it; the others had the next."""
    leading = Leading()
    leading.link("a", "b")
    assert leading.received == {"a": [], "b": []}, "nothing is written yet"
    leading.step(NodeLost("b", "no heartbeat for 6 s"))
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("a") == [1]
    assert isinstance(leading.received["a"][1], GenerationEnded)
    assert leading.received["b"] == []
    leading.step(Received("a", NodeReady(1, "127.0.0.1", 1001, True)))
    leading.etcd.answer()
    assert leading.formed("a") == [1, 2]
    assert leading.formed("b") == [2]


def test_a_node_that_reconnects_before_its_assignment_is_written_receives_it_once() -> None:
    """Seeds 12 and 117: it was received twice, and the agent crashed."""
    leading = Leading()
    leading.link("a", "b")
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("b") == [1]


def test_a_node_that_reconnects_after_its_assignment_was_sent_receives_it_again() -> None:
    """It may have been lost with the old link."""
    leading = Leading()
    leading.link("a", "b")
    leading.etcd.answer()
    leading.link("b")
    assert leading.formed("b") == [1, 1]


def test_a_node_that_reconnects_during_another_write_receives_its_assignment_again() -> None:
    leading = Leading()
    leading.link("a", "b")
    leading.step(NodeLost("a", "no heartbeat for 6 s"))
    leading.etcd.answer()
    assert leading.formed("b") == [1]
    leading.step(Received("b", NodeReady(1, "127.0.0.1", 1001, True)))
    leading.link("a")
    assert leading.formed("b") == [1], "the second is not written yet"
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("b") == [1, 2]


# --- a leader without authority ---------------------------------------------------------------------------------------


class Follower:
    """An engine in a thread, and the events that it sends to its agent."""

    def __init__(self, etcd: EtcdCluster, run_id: str) -> None:
        self.events: queue.Queue[object] = queue.Queue()
        self._loop = Loop()
        self._is_over = False
        settings = EtcdEngineSettings(etcd.endpoints, run_id, 2, 2, etcd=etcd.settings())
        self._engine = EtcdEngine(settings, "127.0.0.1")
        self._thread = threading.Thread(target=self._run, name="follower")
        self._thread.start()

    def _run(self) -> None:
        node = fake_node(
            AgentSettings("run", "default", 1, max_restarts=0),
            messages_on_connecting=lambda info: [NodeJoined(info), NodeReady(0)],
        )
        self._engine.open(self._loop, self._receive, node)
        self._loop.next_event(lambda: 0.0 if self._is_over else None)
        self._engine.close()
        self._loop.close()

    def _receive(self, event: object) -> None:
        """Act like an agent: ready for the next generation as soon as its workers have ended."""
        self.events.put(event)
        if isinstance(event, Fenced):
            self._engine.send(NodeReady(event.generation))

    def close(self) -> None:
        self._is_over = True
        self._loop.soon(lambda: None)  # wakes it if it waits; it may already be closed
        self._thread.join()


class FakeLeader:
    """The leader according to etcd; it answers every heartbeat, with or without authority."""

    BEAT_S, LEASE_S = 0.1, 2.0

    def __init__(self, etcd: EtcdCluster, run_id: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self._secret = os.urandom(16)
        self._client = etcd.client()
        leader = Leader(LeaderAddress("leader", "host", *self._listener.getsockname(), this_machine()), self._secret)
        self._client.call(Put(Keys(run_id).leader, msgspec.json.encode(leader)))
        self.has_authority = True
        self.beats = 0

    def take(self) -> Iterator[wire.FromAgent]:
        """Yield the frames of the next link after its authentication, and answer heartbeats. Ends with the link."""
        sock, _ = self._listener.accept()
        sock.settimeout(TIMEOUT_S)
        self._sock = sock
        reader = wire.FrameReader(wire.MAX_BYTES)
        hello: wire.Hello | None = None
        nonce = os.urandom(wire.NONCE_BYTES)
        with sock:
            while data := _received(sock):
                for frame in map(wire.decode_from_agent, reader.feed(data)):
                    match frame:
                        case wire.Hello():
                            hello = frame
                            self.send(wire.Challenge(nonce))
                        case wire.Proof(proof):
                            assert hello is not None
                            assert proof == wire.prove(self._secret, "agent", hello, nonce)
                            ours = wire.prove(self._secret, "coordinator", hello, nonce)
                            self.send(wire.Accepted(ours, self.BEAT_S, self.LEASE_S, self.has_authority))
                        case wire.Beat(number):
                            self.send(wire.BeatAnswer(number, self.has_authority))
                            yield frame
                        case _:
                            yield frame

    def send(self, frame: wire.FromServer) -> None:
        self._sock.sendall(wire.encode(frame))

    def close(self) -> None:
        self._listener.close()
        self._client.close()


def _received(sock: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1 << 16)
    return b""


@pytest.fixture
def leader_and_follower(etcd: EtcdCluster) -> Iterator[tuple[FakeLeader, Follower]]:
    run_id = unique_prefix().decode()
    leader = FakeLeader(etcd, run_id)
    follower = Follower(etcd, run_id)
    yield leader, follower
    follower.close()
    leader.close()


@needs_etcd
def test_a_leader_without_authority_keeps_its_links(leader_and_follower: tuple[FakeLeader, Follower]) -> None:
    """Seed 26: etcd was down, a member was missing, and the others reconnected 36 times a second, for ever."""
    leader, _ = leader_and_follower
    leader.has_authority = False
    beats = [frame for frame in itertools.islice(leader.take(), 40) if isinstance(frame, wire.Beat)]
    assert len(beats) > 30, "over one link, for much longer than a lease"


@needs_etcd
def test_workers_end_when_a_leader_loses_authority_and_the_link_stays(
    leader_and_follower: tuple[FakeLeader, Follower],
) -> None:
    leader, follower = leader_and_follower
    frames = leader.take()

    def next_event() -> object:
        """Return the next event of the agent, while heartbeats are answered over this one link."""
        for _ in frames:
            with contextlib.suppress(queue.Empty):
                return follower.events.get_nowait()
        return pytest.fail("the link was closed")

    for generation in (1, 2):
        leader.has_authority = True
        for _ in itertools.islice(frames, 3):
            pass  # an answer with authority has arrived
        leader.send(wire.Event(GenerationFormed(Assignment(generation, 1, 2, 1, 2, 1, 2, "127.0.0.1", 1))))
        assert isinstance(next_event(), GenerationFormed)
        leader.has_authority = False
        assert isinstance(next_event(), Fenced)
        for _ in itertools.islice(frames, 15):
            pass
        assert follower.events.empty(), "once is enough"
