"""A crowd: the real coordinator machine with ten thousand nodes, for a day.

The nodes have only a few fields each, but send the messages of a real agent. There is no network, lease or worker; this
simulation finds what shows only with many nodes and generations: quadratic work, growing memory, duplicate ranks. Every
generation is checked from the outside, in linear time, for properties of ``checks.py``: S1, S3, S4, S5, S10, S12.

Each simulated minute a node dies (its connection is closed), and later another replaces it, with the same name or
without a name. Sometimes a second node dies while the others are stopping.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, NodeLost, Opened, Received, Running, RunSettings, Tick
from tenax._core.model import Stopped
from tenax.testing.simulator.checks import PropertyBroken

if TYPE_CHECKING:
    from tenax._core.coordinator import AnyCoordinatorEvent, Send
    from tenax._core.model import Assignment

_SLOTS = 8


class CrowdSetup(msgspec.Struct, frozen=True):
    nodes: int = 10_000
    hours: float = 24.0
    deaths_per_minute: float = 1.0
    spares: int = 0
    seed: int = 1
    named_share: float = 0.5  # of the nodes have a name that their replacement takes over


class CrowdOutcome(msgspec.Struct, frozen=True):
    setup: CrowdSetup
    broken: str = ""
    events: int = 0  # handled by the coordinator
    sent: int = 0  # messages to single nodes
    generations: int = 0
    deaths: int = 0
    state_bytes: int = 0  # of the coordinator at the end, as JSON


def _stopped(first: int) -> tuple[Stopped, ...]:
    """Return the stopped workers of a node whose first rank is ``first``."""
    return tuple(Stopped(rank, first + rank, 1000 + rank, -15) for rank in range(_SLOTS))


class _Node:
    """One node: a minimal agent."""

    __slots__ = ("generation", "info", "part", "works")

    def __init__(self, info: messages.NodeInfo) -> None:
        self.info = info
        self.generation = 0
        self.works = False  # its workers are alive
        self.part: Assignment | None = None


class Crowd:
    """Simulates a setup; ``run`` raises ``PropertyBroken``."""

    def __init__(self, setup: CrowdSetup) -> None:
        self._setup = setup
        self._rng = random.Random(setup.seed)  # noqa: S311 - a simulation must repeat itself
        self._settings = RunSettings(
            "run", min_nodes=max(1, setup.nodes // 2), max_nodes=setup.nodes, max_restarts=3, join_timeout_s=600.0
        )
        self.machine = CoordinatorMachine(self._settings)
        self._nodes: dict[str, _Node] = {}
        self._serial = 0
        self._port = 0
        self._now = 0.0
        self._to_stop: list[str] = []
        self._stopped = [_stopped(rank * _SLOTS) for rank in range(setup.nodes)]
        self._working = 0  # nodes whose workers are alive
        self._stores: set[tuple[str, int]] = set()
        self._latest = 0
        self.events = self.sent = self.generations = self.deaths = 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        setup = self._setup
        self._step(Opened())
        for number in range(setup.nodes + setup.spares):
            self._arrive(f"node-{number}" if self._rng.random() < setup.named_share else "")
        if not isinstance(self.machine.state.phase, Running):
            raise PropertyBroken("L2", f"all nodes have joined, but the run is {self.machine.state.phase.name}")
        every_s = 60.0 / setup.deaths_per_minute
        until = self._now + setup.hours * 3600
        while self._now + every_s < until:
            begins = self._now
            name = self._kill_node()
            self._settle()
            self._now = max(self._now, begins + every_s * (0.1 + 0.4 * self._rng.random()))
            self._arrive(name)
            self._settle()
            self._now = max(self._now, begins + every_s)
            self._check_settled()

    def _arrive(self, name: str) -> None:
        self._serial += 1
        info = messages.NodeInfo(
            f"{self._serial:032x}",
            f"host-{self._serial}",
            slots=_SLOTS,
            name=name,
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
        )
        self._nodes[info.node_id] = _Node(info)
        self._now += 0.0001
        self._step(Received(info.node_id, messages.NodeJoined(info)))
        self._become_ready(info.node_id)

    def _become_ready(self, node_id: str) -> None:
        node = self._nodes[node_id]
        self._port += 1
        self._step(Received(node_id, messages.NodeReady(node.generation, node.info.host, self._port, True)))

    def _kill_node(self) -> str:
        """Kill a node that runs workers; return its name."""
        members = [node_id for node_id, node in self._nodes.items() if node.works]
        node_id = self._rng.choice(members or list(self._nodes))
        return self._lose(node_id)

    def _lose(self, node_id: str) -> str:
        node = self._nodes.pop(node_id)
        self._working -= node.works
        self.deaths += 1
        self._step(NodeLost(node_id, "connection closed"))
        return node.info.name

    def _settle(self) -> None:
        """Stop all nodes that were sent the end of their generation, in random order."""
        while self._to_stop:
            stopping, self._to_stop = self._to_stop, []
            self._rng.shuffle(stopping)
            victim = self._rng.choice(stopping) if self._rng.random() < 0.02 else ""
            for node_id in stopping:
                self._now += 0.0001
                if node_id == victim:
                    self._arrive(self._lose(node_id))
                elif node_id in self._nodes:
                    self._stop(node_id)

    def _stop(self, node_id: str) -> None:
        node = self._nodes[node_id]
        node.works = False
        self._working -= 1
        assert node.part is not None
        stopped = self._stopped[node.part.group_rank]
        self._step(Received(node_id, messages.NodeStopped(node.generation, self._now, (), stopped)))
        self._become_ready(node_id)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _step(self, event: AnyCoordinatorEvent) -> None:
        self.events += 1
        sends = self.machine.step(event, self._now).sends
        if sends:
            self._deliver(sends)
        deadline = self.machine.state.next_deadline()
        if deadline is not None and deadline <= self._now:
            self.events += 1
            self._deliver(self.machine.step(Tick(), self._now).sends)

    def _deliver(self, sends: list[Send]) -> None:
        parts: dict[str, Assignment] = {}
        for send in sends:
            event = send.event
            self.sent += len(send.to)
            if isinstance(event, events.GenerationFormed):
                parts[send.to[0]] = event.assignment
            elif isinstance(event, events.GenerationEnded):
                nodes = self._nodes
                self._to_stop += [each for each in send.to if each in nodes and nodes[each].works]
            elif isinstance(event, events.RunEnded | events.JoinRefused):
                raise PropertyBroken("S6", f"the run continues, but {send.to[0]} was sent {event}")
        if parts:
            self._form(parts)

    def _form(self, parts: dict[str, Assignment]) -> None:
        self.generations += 1
        self._check_formed(parts)
        for node_id, part in parts.items():
            node = self._nodes[node_id]
            node.works, node.part, node.generation = True, part, part.generation
        self._working = len(parts)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_formed(self, parts: dict[str, Assignment]) -> None:
        first = next(iter(parts.values()))
        if self._working:
            raise PropertyBroken(
                "S1", f"generation {first.generation} forms while {self._working} nodes have live workers"
            )
        if first.generation <= self._latest:
            raise PropertyBroken("S10", f"generation {first.generation} forms after {self._latest}")
        self._latest = first.generation
        store = (first.master_addr, first.master_port)
        if store in self._stores:
            raise PropertyBroken("S4", f"generation {first.generation} has an old store")
        self._stores.add(store)
        if first.restarts_used:
            raise PropertyBroken("S5", f"{first.restarts_used} restarts were charged, but no worker has failed")
        count = len(parts)
        common = (first.generation, count, count * _SLOTS, store)
        is_taken = bytearray(count)
        for node_id, part in parts.items():
            if node_id not in self._nodes:
                raise PropertyBroken("S1", f"{node_id} is dead, but a member")
            seen = (part.generation, part.group_world_size, part.world_size, (part.master_addr, part.master_port))
            if seen != common or part.first_global_rank != part.group_rank * _SLOTS or is_taken[part.group_rank]:
                raise PropertyBroken("S3", f"{node_id} got {part}")
            is_taken[part.group_rank] = 1

    def _check_settled(self) -> None:
        state, setup = self.machine.state, self._setup
        if not isinstance(state.phase, Running) or self._working != min(setup.nodes, len(self._nodes)):
            raise PropertyBroken(
                "L2", f"{state.phase.name}; {self._working} of {len(self._nodes)} nodes have live workers"
            )
        if len(state.nodes) != len(self._nodes) or len(state.names.ranks_by_name) > setup.nodes:
            raise PropertyBroken(
                "S12", f"{len(state.nodes)} nodes and {len(state.names.ranks_by_name)} names are remembered"
            )


def simulate_crowd(setup: CrowdSetup, make_crowd: Callable[[CrowdSetup], Crowd] = Crowd) -> CrowdOutcome:
    """Run a crowd simulation and return its outcome."""
    crowd = make_crowd(setup)
    broken = ""
    try:
        crowd.run()
    except PropertyBroken as error:
        broken = str(error)
    state_bytes = len(msgspec.json.encode(crowd.machine.state))
    return CrowdOutcome(setup, broken, crowd.events, crowd.sent, crowd.generations, crowd.deaths, state_bytes)
