"""What the lane has found, told again with as little as it takes."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest

from kit.etcd import PATIENCE_S, EtcdCluster, needs_etcd, unique_prefix
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
from tenax._core.events import Fenced, GenerationEnded, GenerationFormed
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._core.model import AgentSettings, Assignment
from tenax._core.record import RunRecord
from tenax._engines.etcd.candidacy import Elected
from tenax._engines.etcd.decisions import Decisions
from tenax._engines.etcd.engine import EtcdEngine, EtcdEngineSettings
from tenax._engines.etcd.keys import Keys, Leader, Written
from tenax._engines.etcd.leader_address import LeaderAddress, this_machine
from tenax._engines.tcp import wire
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.operations import Put, TransactionAnswer
from tenax._io.interfaces import ControlledNode
from tenax._io.loop import Loop


class SlowEtcd:
    """In the place of a client: it answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[TransactionAnswer], None]] = []
        self.revision = 10

    def call(self, _: object, done: Callable[[Any], None], failed: object) -> None:
        self.waiting.append(done)

    def answer(self) -> None:
        """Every write succeeds, also those that follow."""
        while self.waiting:
            self.revision += 1
            self.waiting.pop(0)(TransactionAnswer(self.revision, succeeded=True))


class Leading:
    """A coordinator of two nodes that writes its decisions to a slow etcd, and what the nodes hear."""

    def __init__(self) -> None:
        self.etcd = SlowEtcd()
        self.heard: dict[str, list[object]] = {"a": [], "b": []}
        self._machine = CoordinatorMachine(RunSettings("run", 2, 2))
        place = LeaderAddress("a", "host", "127.0.0.1", 1)
        elected = Elected(5, 6, Written(RunRecord(), place), Leader(place, b"secret"))
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

    def _deliver(self, say: Send) -> None:
        for node_id in say.to:
            if isinstance(say.event, GenerationFormed | GenerationEnded):
                self.heard[node_id].append(say.event)

    def step(self, event: AnyCoordinatorEvent) -> None:
        for say in self._machine.step(event, 100.0):
            self._decisions.submit(say, self._machine.state)

    def link(self, *node_ids: str) -> None:
        """A link of this node begins: it says who it is, and that it is ready."""
        for node_id in node_ids:
            self.step(Received(node_id, NodeJoined(NodeInfo(node_id, "host", 1, min_nodes=2, max_nodes=2))))
            self.step(Received(node_id, NodeReady(0, "127.0.0.1", 1000, True)))

    def formed(self, node_id: str) -> list[int]:
        return [each.assignment.generation for each in self.heard[node_id] if isinstance(each, GenerationFormed)]


def test_who_was_given_up_does_not_hear_of_a_generation_in_which_it_is_not_any_more() -> None:
    """Seed 15: stopped while its generation waited for etcd, it came back and heard of it; the others had the next."""
    leading = Leading()
    leading.link("a", "b")
    assert leading.heard == {"a": [], "b": []}, "nothing is written yet"
    leading.step(NodeLost("b", "it was silent for 6 s"))
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("a") == [1]
    assert isinstance(leading.heard["a"][1], GenerationEnded)
    assert leading.heard["b"] == []
    leading.step(Received("a", NodeReady(1, "127.0.0.1", 1001, True)))
    leading.etcd.answer()
    assert leading.formed("a") == [1, 2]
    assert leading.formed("b") == [2]


def test_who_links_anew_while_its_part_waits_hears_it_once() -> None:
    """Seeds 12 and 117: it was heard twice, and the agent died of that."""
    leading = Leading()
    leading.link("a", "b")
    leading.link("b")
    leading.etcd.answer()
    assert leading.formed("b") == [1]


def test_who_links_anew_after_its_part_was_said_hears_it_again() -> None:
    """Perhaps it was under way on the link that broke."""
    leading = Leading()
    leading.link("a", "b")
    leading.etcd.answer()
    leading.link("b")
    assert leading.formed("b") == [1, 1]


def test_who_links_anew_while_something_else_waits_hears_its_part_again() -> None:
    leading = Leading()
    leading.link("a", "b")
    leading.step(NodeLost("a", "it was silent for 6 s"))
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
    """An engine in a thread, and what it tells its agent."""

    def __init__(self, etcd: EtcdCluster, run_id: str) -> None:
        self.events: queue.Queue[object] = queue.Queue()
        self._loop = Loop()
        self._is_over = False
        settings = EtcdEngineSettings(etcd.endpoints, run_id, 2, 2, etcd=etcd.settings())
        self._engine = EtcdEngine(settings, "127.0.0.1")
        self._thread = threading.Thread(target=self._run, name="follower")
        self._thread.start()

    def _run(self) -> None:
        node = ControlledNode(
            settings=AgentSettings("run", "default", 1, max_restarts=0),
            policy=None,
            messages_on_connecting=lambda info: [NodeJoined(info), NodeReady(0)],
            hold=lambda _: None,
            keep=lambda *_: None,
            release=lambda _: None,
            say=lambda _: None,
            record_run=lambda _: lambda *_: None,
        )
        self._engine.open(self._loop, self._hear, node)
        self._loop.next_event(lambda: 0.0 if self._is_over else None)
        self._engine.close()
        self._loop.close()

    def _hear(self, event: object) -> None:
        """As an agent does: ready for the next generation as soon as its workers have ended."""
        self.events.put(event)
        if isinstance(event, Fenced):
            self._engine.send(NodeReady(event.generation))

    def close(self) -> None:
        self._is_over = True
        self._loop.soon(lambda: None)  # if it waits; it may have seen it already, and be closed
        self._thread.join()


class FakeLeader:
    """Who leads, as etcd says; it answers every beat, and says whether its answers count."""

    BEAT_S, LEASE_S = 0.1, 2.0

    def __init__(self, etcd: EtcdCluster, run_id: str) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(PATIENCE_S)
        self._secret = os.urandom(16)
        self._client = BlockingEtcd(etcd.settings())
        leader = Leader(LeaderAddress("leader", "host", *self._door.getsockname(), this_machine()), self._secret)
        self._client.call(Put(Keys(run_id).leader, msgspec.json.encode(leader)))
        self.counts = True
        self.beats = 0

    def take(self) -> Iterator[wire.FromAgent]:
        """What the next link says, after it was let in; beats are answered. Ends with the link."""
        sock, _ = self._door.accept()
        sock.settimeout(PATIENCE_S)
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
                            self.say(wire.Challenge(nonce))
                        case wire.Proof(proof):
                            assert hello is not None
                            assert proof == wire.prove(self._secret, "agent", hello, nonce)
                            ours = wire.prove(self._secret, "coordinator", hello, nonce)
                            self.say(wire.Accepted(ours, self.BEAT_S, self.LEASE_S, self.counts))
                        case wire.Beat(number):
                            self.say(wire.BeatAnswer(number, self.counts))
                            yield frame
                        case _:
                            yield frame

    def say(self, frame: wire.FromServer) -> None:
        self._sock.sendall(wire.encode(frame))

    def close(self) -> None:
        self._door.close()
        self._client.close()


def _received(sock: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1 << 16)
    return b""


@pytest.fixture
def led(etcd: EtcdCluster) -> Iterator[tuple[FakeLeader, Follower]]:
    run_id = unique_prefix().decode()
    leader = FakeLeader(etcd, run_id)
    follower = Follower(etcd, run_id)
    yield leader, follower
    follower.close()
    leader.close()


@needs_etcd
def test_a_leader_whose_answers_do_not_count_keeps_its_links(led: tuple[FakeLeader, Follower]) -> None:
    """Seed 26: etcd was away, a member was missing, and the others linked anew 36 times in a second, for ever."""
    leader, _ = led
    leader.counts = False
    beats = [frame for frame in itertools.islice(leader.take(), 40) if isinstance(frame, wire.Beat)]
    assert len(beats) > 30, "over one link, for much longer than a lease"


@needs_etcd
def test_workers_end_when_answers_do_not_count_any_more_and_the_link_stays(
    led: tuple[FakeLeader, Follower],
) -> None:
    leader, follower = led
    said = leader.take()

    def next_event() -> object:
        """What the agent is told next, while beats are answered over this one link."""
        for _ in said:
            with contextlib.suppress(queue.Empty):
                return follower.events.get_nowait()
        return pytest.fail("the link was closed")

    for generation in (1, 2):
        leader.counts = True
        for _ in itertools.islice(said, 3):
            pass  # an answer that counts has arrived
        leader.say(wire.Event(GenerationFormed(Assignment(generation, 1, 2, 1, 2, 1, 2, "127.0.0.1", 1))))
        assert isinstance(next_event(), GenerationFormed)
        leader.counts = False
        assert isinstance(next_event(), Fenced)
        for _ in itertools.islice(said, 15):
            pass
        assert follower.events.empty(), "once is enough"
