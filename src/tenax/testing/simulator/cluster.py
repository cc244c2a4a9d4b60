"""A simulated cluster: hosts, agents, one coordinator at a time, a network, and one clock.

``Cluster(setup).run()`` runs a whole simulation; ``simulate(setup)`` returns its outcome. A simulation is a function
of its setup: all randomness comes from its seed, and nothing depends on an order that Python does not define.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from tenax._core.agent import AgentMachine
from tenax._core.coordinator import CoordinatorMachine
from tenax._core.leadership.machine import Leadership
from tenax._core.link.client import LinkClient
from tenax._core.link.server import LinkServer
from tenax._core.link.wire import NONCE_BYTES
from tenax._core.policy import BudgetPolicy, Restart, Wait
from tenax.testing.simulator.agent import AgentProcess
from tenax.testing.simulator.checks import Checks, PropertyBroken
from tenax.testing.simulator.elected import ElectedAgent
from tenax.testing.simulator.etcd import EtcdProcess
from tenax.testing.simulator.faults import Faults
from tenax.testing.simulator.history import History
from tenax.testing.simulator.liveness import Liveness
from tenax.testing.simulator.network import Host, Network
from tenax.testing.simulator.scheduler import Scheduler

if TYPE_CHECKING:
    from tenax._core.model import Failure
    from tenax._core.policy import AnyDecision, RestartPolicy
    from tenax._core.policy import History as FailureHistory
    from tenax.testing.simulator.server import Server
    from tenax.testing.simulator.setup import NodePlan, Setup


class Parts(msgspec.Struct, frozen=True):
    """The machines under test. Tests of the checks replace them with broken ones."""

    make_agent: Callable[..., AgentMachine] = AgentMachine
    make_coordinator: Callable[..., CoordinatorMachine] = CoordinatorMachine
    make_client: Callable[..., LinkClient] = LinkClient
    make_server: Callable[..., LinkServer] = LinkServer
    make_leadership: Callable[..., Leadership] = Leadership
    are_checked_inside: bool = True  # also by their own checkers


class Node:
    """One node: its plan and its current agent."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.agent: AgentProcess | None = None
        self.is_wanted = True  # restart the agent when it dies
        self.is_starting = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a simulation."""

    setup: Setup
    broken: str = ""  # the broken property, and what was observed
    property: str = ""
    history: str = ""
    counts: dict[str, int] = {}
    seconds: float = 0.0


class Pausing:
    """The default policy, but with a pause before each restart."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._inner = BudgetPolicy()

    def decide(self, failure: Failure, history: FailureHistory) -> AnyDecision:
        decision = self._inner.decide(failure, history)
        return Wait(decision.why, seconds=self._seconds) if isinstance(decision, Restart) else decision


class Cluster:
    """A whole cluster."""

    make_elected: type[AgentProcess] = ElectedAgent

    def __init__(self, setup: Setup, parts: Parts | None = None, *, record_history: bool = False) -> None:
        self.setup = setup
        self.behaviour = setup.behaviour
        self.parts = parts or Parts()
        self.schedule = Scheduler()
        self.history = History(self.schedule, is_recorded=record_history)
        self.rng = random.Random(f"history {setup.seed}")  # noqa: S311 - a simulation must repeat itself
        self.survivor_rng = random.Random(f"survivors {setup.seed}")  # noqa: S311 - as above, and apart from the others
        self.counts: Counter[str] = Counter()
        self.network = Network(self.schedule, self.rng, setup.delays)
        self.hosts = [Host(index, self.rng.randint(0, 10**6) / 8) for index in range(setup.hosts)]
        self.etcd = EtcdProcess(self)
        self.policy: RestartPolicy = Pausing(setup.pause_s) if setup.pause_s else BudgetPolicy()
        self.checks = Checks(self)
        self.has_faults = True  # faults are still being injected
        self.slots: dict[str, int] = {}  # of every node, including dead ones
        self.nodes = [Node(plan) for plan in setup.nodes]
        self.faults = Faults(self)
        self.liveness = Liveness(self)
        self._serial = 0
        self._pids, self._ports, self._nonces = count(1001), count(20001), count(1)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def new_pid(self) -> int:
        return next(self._pids)

    def new_port(self) -> int:
        return next(self._ports)

    def new_nonce(self) -> bytes:
        return next(self._nonces).to_bytes(NONCE_BYTES, "big")

    def new_lease_id(self) -> int:
        return 2 * self.new_port()

    def draw_success(self) -> float:
        """Draw when the workers of a generation formed now will succeed."""
        return self.schedule.now + self.behaviour.generation_s * (0.5 + self.rng.random())

    @property
    def max_nodes_seen(self) -> int:
        return self._serial

    @property
    def max_workers(self) -> int:
        return self.setup.max_nodes * max(node.plan.slots for node in self.nodes)

    # --- nodes --------------------------------------------------------------------------------------------------------

    @property
    def agents(self) -> list[AgentProcess]:
        """The agents that are alive and have not left the run."""
        found = (node.agent for node in self.nodes)
        return [agent for agent in found if agent is not None and agent.is_alive and not agent.has_left]

    @property
    def server(self) -> Server | None:
        if not self.setup.has_etcd:
            return self.hosts[0].server
        serving = (agent.server for node in self.nodes if (agent := node.agent) is not None and agent.is_alive)
        is_open = [server for server in serving if server is not None and server.is_open]
        return max(is_open, key=lambda server: server.term, default=None)

    def host_named(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def add(self, plan: NodePlan) -> Node:
        while plan.host >= len(self.hosts):
            self.hosts.append(Host(len(self.hosts), self.rng.randint(0, 10**6) / 8))
        node = Node(plan)
        self.nodes.append(node)
        self.start_later(node, 0.0)
        return node

    def start_later(self, node: Node, seconds: float) -> None:
        if not node.is_starting:
            node.is_starting = True
            self.schedule.after(seconds, self._start, node)

    def _start(self, node: Node) -> None:
        host = self.hosts[node.plan.host]
        old = node.agent
        if not host.is_up or not node.is_wanted or (old is not None and old.is_alive):
            node.is_starting = False
            return
        if self.setup.engine.waits_until_predecessor_cleared and old is not None and old.serial in host.clearing:
            self.schedule.after(0.05, self._start, node)
            return
        node.is_starting = False
        self.checks.on_disturbance()
        self._serial += 1
        make_agent = self.make_elected if self.setup.has_etcd else AgentProcess
        agent = node.agent = make_agent(self, host, node.plan, self._serial)
        self.slots[agent.info.node_id] = node.plan.slots
        agent.begin()

    def on_process_gone(self, agent: AgentProcess, *, crashed: bool) -> None:
        self.checks.on_disturbance()
        if not crashed:
            for node in self.nodes:
                if node.agent is agent:
                    node.is_wanted = False

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the whole simulation. Raises ``PropertyBroken``, or the error of a machine's own checker."""
        for node in self.nodes:
            self.start_later(node, node.plan.start_at)
        self.faults.plan()
        self.liveness.plan()
        until = self.setup.seconds
        while self.schedule.now < until:
            self.schedule.run(min(until, self.schedule.now + 5.0))
            if self.is_over or self.liveness.is_done:
                break
        self.liveness.conclude()

    @property
    def is_over(self) -> bool:
        """Whether no agent is alive and none will start."""
        return not any(
            node.is_starting or node.is_wanted or (node.agent is not None and node.agent.is_alive)
            for node in self.nodes
        )


def simulate(setup: Setup, parts: Parts | None = None, *, record_history: bool = False) -> Outcome:
    """Run a setup and return its outcome."""
    cluster = Cluster(setup, parts, record_history=record_history)
    broken = name = ""
    try:
        cluster.run()
    except AssertionError as error:
        broken = str(error)
        name = error.name if isinstance(error, PropertyBroken) else broken.partition(":")[0]
        cluster.history.note("BROKEN", broken)
    counts = cluster.counts
    counts["events"] = cluster.schedule.count
    counts["generations"] = len(cluster.checks.formations)
    counts["verdicts"] = int(cluster.checks.verdict is not None)
    return Outcome(
        setup=setup,
        broken=broken,
        property=name,
        history="".join(cluster.history.lines),
        counts=dict(counts),
        seconds=cluster.schedule.now,
    )
