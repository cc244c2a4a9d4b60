"""The journals of links: what the machines of simulated nodes were called with gives the same decisions again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax._core.leadership.machine import Leadership
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.link.client import LinkClient
from tenax._core.link.recording import Call, Quiet, Recorder
from tenax._core.link.server import LinkServer, Peer
from tenax._core.messages import NodeInfo
from tenax.testing.link_replay import LinkReplay
from tenax.testing.simulator import NodePlan, Setup, simulate
from tenax.testing.simulator.cluster import Parts
from tenax.testing.simulator.draw import draw
from tenax.testing.simulator.server import SECRET


class Journals:
    """The journals of all nodes of a simulation, by node id."""

    def __init__(self, setup: Setup) -> None:
        self.recorders: dict[str, Recorder] = {}
        self.lines: dict[str, list[Call | Quiet]] = {}
        self.created: list[Any] = []
        self._serving = ""
        parts = Parts(
            make_client=self._make_client,
            make_leadership=self._make_leadership,
            make_coordinator=self._make_coordinator,
            make_server=self._make_server,
        )
        simulate(setup, parts)
        for recorder in self.recorders.values():
            recorder.flush()

    def _make_client(self, info: Any, *args: Any, **kwargs: Any) -> LinkClient:
        lines = self.lines[info.node_id] = []
        recorder = self.recorders[info.node_id] = Recorder(lines.append, lambda: 0.0, b"key of this journal")
        return recorder.create(LinkClient, info, *args, **kwargs)

    def _make_leadership(self, client: LinkClient, *args: Any, **kwargs: Any) -> Leadership:
        machine = self.recorders[client.node.node_id].create(Leadership, client, *args, **kwargs)
        self.created.append(machine)
        return machine

    def _make_coordinator(self, settings: Any, policy: Any) -> CoordinatorMachine:
        self._serving = settings.serving_node
        return self.recorders[self._serving].create(CoordinatorMachine, settings, policy)

    def _make_server(self, *args: Any, **kwargs: Any) -> LinkServer:
        return self.recorders[self._serving].create(LinkServer, *args, **kwargs)

    def as_read(self, node_id: str) -> list[Call | Quiet]:
        decode = msgspec.json.Decoder(Call | Quiet).decode
        return [decode(msgspec.json.encode(line)) for line in self.lines[node_id]]


@pytest.mark.parametrize("engine", ["tcp", "etcd"])
@pytest.mark.parametrize("seed", [7, 1018, 1099, 1121, 5079, 5228])
def test_every_call_returns_the_same_in_a_replay(seed: int, engine: str) -> None:
    """With faults of every kind, and on every node."""
    journals = Journals(draw(seed, engine=engine))
    assert journals.lines
    for node_id in journals.lines:
        assert LinkReplay(journals.as_read(node_id)).differences == [], node_id


def quiet_run(seconds: float, engine: str = "tcp") -> Journals:
    nodes = tuple(NodePlan(host) for host in range(3))
    return Journals(Setup(seed=1, nodes=nodes, min_nodes=3, max_nodes=3, seconds=seconds, has_etcd=engine == "etcd"))


@pytest.mark.parametrize("engine", ["tcp", "etcd"])
def test_time_without_events_takes_no_space(engine: str) -> None:
    """Thousands of beats and keep-alives are not recorded."""
    short, long = (sum(map(len, quiet_run(seconds, engine).lines.values())) for seconds in (60, 3000))
    assert long < short + 60


def test_secrets_and_proofs_are_not_recorded() -> None:
    journals = Journals(draw(7, engine="etcd"))
    secrets = {machine.leader.secret for machine in journals.created if machine.leader is not None}
    assert secrets
    lines = b"".join(msgspec.json.encode(line) for each in journals.lines.values() for line in each)
    for secret in {SECRET, *secrets}:
        encoded = msgspec.json.encode(secret)[1:-1]
        for form in (secret, encoded, msgspec.json.encode(encoded)[1:-1]):
            assert form not in lines
    proofs = [line for each in journals.lines.values() for line in each if b'"proof":"' in msgspec.json.encode(line)]
    assert proofs
    assert all(b'"proof":""' in msgspec.json.encode(line) for line in proofs)


def test_a_changed_line_is_reported() -> None:
    journals = quiet_run(20)
    (serving,) = (node_id for node_id, lines in journals.lines.items() if any(x.machine == "server" for x in lines))
    lines = journals.as_read(serving)
    number, formed = next((n, line) for n, line in enumerate(lines) if isinstance(line, Call) and line.method == "step")
    lines[number] = msgspec.structs.replace(formed, digest=1, outputs=["Send"])
    (difference,) = LinkReplay(lines).differences
    assert difference.startswith(f"line {number + 2}, coordinator.step: the journal has Send, this version")


def test_a_line_that_cannot_be_replayed_ends_the_replay() -> None:
    """Nothing that a file names is imported."""
    lines = quiet_run(20).as_read("n1")
    first = lines[0]
    assert isinstance(first, Call)
    lines[0] = msgspec.structs.replace(first, given=[{"struct": "os.system", "value": {}}])
    (difference,) = LinkReplay(lines).differences
    assert difference == "line 2, client.create, cannot be replayed: KeyError('os.system'); ended there"


def test_unauthenticated_peers_leave_no_line() -> None:
    """However many connect, send something, and are evicted or rejected."""
    journals = quiet_run(5)
    node_id = next(iter(journals.lines))
    recorder = journals.recorders[node_id]
    state = CoordinatorMachine(RunSettings("run", 1, 1)).state
    server = recorder.create(LinkServer, "run", LeaseTerms(), SECRET, lambda: state, 0.0, max_unauthenticated=8)
    recorder.flush()
    before = len(journals.lines[node_id])
    for number in range(400):
        now = number / 4
        server.tick(now)
        peer = Peer(now, bytes(16), f"10.0.0.{number % 250}")
        server.opened(peer)
        server.received(peer, wire.Hello(wire.VERSION, "run", "node", bytes(16)), now)
        if number % 3 == 0:
            server.received(peer, wire.Proof(b"wrong"), now)
    recorder.flush()
    assert len(journals.lines[node_id]) == before


def test_one_flush_is_planned_at_a_time() -> None:
    """However many calls are pending: many planned ones would write everything at once, and the agent would stall."""
    written: list[Call | Quiet] = []
    planned: list[bool] = []
    recorder = Recorder(written.append, lambda: 0.0, b"key", planned.append)
    machine = recorder.create(LinkClient, NodeInfo("n1", "host"), "run", LeaseTerms(), 0.0)
    for _ in range(12_000):
        machine.connecting(0.0)
    assert planned == [True]
    oldest = len(written)
    assert oldest == 2001, "more than 10,000 are not kept in memory"
    recorder.flush(50)
    assert planned == [True, False]
    assert len(written) == oldest + 50
