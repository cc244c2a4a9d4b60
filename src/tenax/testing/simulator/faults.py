"""Faults: injects the planned faults into a cluster.

A fault is a value (``setup.Fault``). ``a`` and ``b`` identify a host, a node or an agent by a number modulo how many
there are at that moment, so that a shortened plan stays valid.

    slow              the whole network, by the factor a, for some seconds
    stall             the connection of agent a, in both directions (b % 3 = 0) or in one (1, 2)
    break             the connection of agent a is reset: at both ends (b % 3 = 0), at the agent (1), at the server (2)
    partition         host a from all others: both directions (b % 3 = 0), only sending (1), only receiving (2)
    split             hosts into two sides, by the bits of a
    flap              host a is disconnected and reconnected b times within the seconds
    pause             agent a is suspended (SIGSTOP)
    freeze            the coordinator's process is suspended
    crash             agent a is killed (SIGKILL), and restarted after some seconds (0: never)
    kill_coordinator  the coordinator's process is killed; with b, after it has sent b more messages
    power             host a loses power for some seconds; its agents are restarted afterwards
    fail              a worker of agent a fails
    drain             agent a receives SIGTERM; with b odd, SIGINT follows
    notice            agent a is notified that it will be drained
    join              a new node on host a (modulo one more than there are)
    replace           an agent with the name of agent a is started on another host, while the old one keeps running
    etcd_cut          host a from etcd alone (b = 0: the leader's host): both directions (b % 3 = 0), or one (1, 2)
    etcd_down         etcd is suspended
    isolate           the leader's host, with b odd also others by the bits of a, from the other hosts and from etcd
    cancel            an operator ends the run
    restart_request   an operator requests a restart
    drain_request     an operator drains agent a

There is no wall clock in the simulation, so its jumps are not a fault (see ``network.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tenax._core import events
from tenax._core.agent import SIGINT, SIGTERM
from tenax._core.coordinator import CancelRequested, DrainRequested, RestartRequested
from tenax.testing.simulator.etcd import ETCD
from tenax.testing.simulator.network import MAX_SLOWNESS
from tenax.testing.simulator.setup import ENDPOINT, Fault, NodePlan

if TYPE_CHECKING:
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.cluster import Cluster, Node
    from tenax.testing.simulator.network import Host
    from tenax.testing.simulator.server import Server

Way = tuple[int, int]
# The kinds that concern agent ``a``, or the coordinator. They have no effect if there is none.
_OF_AGENT = frozenset({"stall", "break", "pause", "crash", "fail", "drain", "notice", "replace", "drain_request"})
_OF_SERVER = frozenset({"isolate", "freeze", "kill_coordinator", "cancel", "restart_request"})


class Faults:
    """Injects the faults of a setup into a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan(self) -> None:
        for fault in self.cluster.setup.faults:
            self.cluster.schedule.at(fault.at, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        if self.cluster.has_faults:
            self.inject(fault)

    def inject(self, fault: Fault) -> None:
        self.cluster.history.note("FAULT", f"{fault.kind} a={fault.a} b={fault.b} for {fault.seconds:.3f} s")
        self.cluster.counts[f"fault {fault.kind}"] += 1
        if fault.kind not in ("fail", "notice"):
            self.cluster.checks.on_disturbance()
        carry_out: Callable[..., None] = getattr(self, f"_{fault.kind}")
        agents, server = self.cluster.agents, self.cluster.server
        if fault.kind in _OF_SERVER:
            if server is not None:
                carry_out(server, fault)
        elif fault.kind not in _OF_AGENT:
            carry_out(fault)
        elif agents:
            carry_out(agents[fault.a % len(agents)], fault)

    def _host(self, number: int) -> Host:
        return self.cluster.hosts[number % len(self.cluster.hosts)]

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self.cluster.schedule.after(seconds, call, *arguments)

    # --- the network --------------------------------------------------------------------------------------------------

    def _slow(self, fault: Fault) -> None:
        network = self.cluster.network
        network.slowness = 1.0 + fault.a % MAX_SLOWNESS
        self._later(fault.seconds, setattr, network, "slowness", 1.0)

    def _stall(self, agent: AgentProcess, fault: Fault) -> None:
        if (end := agent.connection) is not None:
            if fault.b % 3 != 1:
                end.out.stall(fault.seconds)
            if fault.b % 3 != 2:
                end.out.sink.out.stall(fault.seconds)

    def _break(self, agent: AgentProcess, fault: Fault) -> None:
        if (end := agent.connection) is not None:
            network, other = self.cluster.network, end.out.sink
            if fault.b % 3 != 1:
                network.reset(other, other.host)
            if fault.b % 3 != 2:
                network.reset(end, end.host)

    def _partition(self, fault: Fault) -> None:
        self._cut(self.ways(self._host(fault.a).index, fault.b % 3), fault.seconds)

    def _split(self, fault: Fault) -> None:
        with_etcd = {ETCD} if self.cluster.setup.has_etcd and fault.b % 2 else set()
        self._cut_off(self._side(fault.a) | with_etcd, fault.seconds)

    def _isolate(self, server: Server, fault: Fault) -> None:
        others = self._side(fault.a) if fault.b % 2 else set()
        self._cut_off({server.agent.host.index} | others, fault.seconds)

    def _side(self, bits: int) -> set[int]:
        return {host.index for host in self.cluster.hosts if bits >> host.index & 1}

    def _cut_off(self, side: set[int], seconds: float) -> None:
        everywhere = [host.index for host in self.cluster.hosts]
        if self.cluster.setup.has_etcd:
            everywhere.append(ETCD)
        self._cut([(a, b) for a in everywhere for b in everywhere if (a in side) != (b in side)], seconds)

    def _etcd_cut(self, fault: Fault) -> None:
        host = self._host(fault.a).index
        if fault.b == 0 and self.cluster.server is not None:
            host = self.cluster.server.agent.host.index
        ways = [(host, ETCD)] if fault.b % 3 != 2 else []
        self._cut(ways + ([(ETCD, host)] if fault.b % 3 != 1 else []), fault.seconds)

    def _etcd_down(self, fault: Fault) -> None:
        etcd = self.cluster.etcd
        if not etcd.is_paused:
            etcd.pause()
            self._later(fault.seconds, etcd.resume)

    def _flap(self, fault: Fault) -> None:
        ways = self.ways(self._host(fault.a).index, 0)
        times = max(1, fault.b)
        for number in range(times):
            self._later(fault.seconds * number / times, self._cut, ways, fault.seconds / times * 0.7)

    def ways(self, host: int, which: int) -> list[Way]:
        others = [other.index for other in self.cluster.hosts if other.index != host]
        if self.cluster.setup.has_etcd:
            others.append(ETCD)
        out = [(host, other) for other in others] if which != 2 else []
        return out + ([(other, host) for other in others] if which != 1 else [])

    def _cut(self, ways: list[Way], seconds: float) -> None:
        if self.cluster.has_faults:
            for way in ways:
                self.cluster.network.cut(way)
            self._later(seconds, self._heal, ways)

    def _heal(self, ways: list[Way]) -> None:
        if self.cluster.has_faults:  # else all paths are healed already
            for way in ways:
                self.cluster.network.heal(way)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _pause(self, agent: AgentProcess, fault: Fault) -> None:
        if not agent.is_paused:
            agent.suspend()
            self._later(fault.seconds, agent.resume)

    def _freeze(self, server: Server, fault: Fault) -> None:
        self._pause(server.agent, fault)

    def _crash(self, agent: AgentProcess, fault: Fault) -> None:
        node = self._node_of(agent)
        agent.crash()
        self._restart(node, fault.seconds)

    def _restart(self, node: Node, seconds: float) -> None:
        if seconds > 0:
            self.cluster.start_later(node, seconds)
        else:
            node.is_wanted = False

    def _kill_coordinator(self, server: Server, fault: Fault) -> None:
        node = self._node_of(server.agent)
        if fault.b:
            server.sends_left = fault.b
            server.on_killed = lambda: self._restart(node, fault.seconds)
        else:
            self._crash(server.agent, fault)

    def _node_of(self, agent: AgentProcess) -> Node:
        return next(node for node in self.cluster.nodes if node.agent is agent)

    def _power(self, fault: Fault) -> None:
        host = self._host(fault.a)
        if not host.is_up:
            return
        host.is_up = False
        host.off_since = self.cluster.schedule.now
        host.note = None
        for dead in host.clearing.values():
            dead.keeper.vanish()
        host.clearing.clear()
        host.listeners.clear()
        if self._has_marker(host):
            self.cluster.checks.has_lost_memory = True
        for node in self.cluster.nodes:
            if node.plan.host == host.index and node.agent is not None and node.agent.is_alive:
                node.agent.vanish()
        self._later(fault.seconds, self.power_on_soon, host)

    def _has_marker(self, host: Host) -> bool:
        return host.index == ENDPOINT and not self.cluster.setup.has_etcd

    def power_on_soon(self, host: Host) -> None:
        """Power a host on. The endpoint's host has lost its marker, so it stays off for longer than a lease."""
        at_least_s = self.cluster.setup.terms.lease_s + 1 if self._has_marker(host) else 0.0
        self.cluster.schedule.at(host.off_since + at_least_s, self._power_on, host)

    def _power_on(self, host: Host) -> None:
        if host.is_up:
            return
        host.is_up = True
        host.boots += 1
        for node in self.cluster.nodes:
            if node.plan.host == host.index and node.is_wanted:
                self.cluster.start_later(node, 0.5 + self.cluster.rng.random())

    # --- workers and operators ----------------------------------------------------------------------------------------

    def _fail(self, agent: AgentProcess, _: Fault) -> None:
        alive = [worker for worker in agent.keeper.workers.values() if worker.is_alive]
        for worker in alive[:1]:
            agent.keeper.fail(worker)

    def _drain(self, agent: AgentProcess, fault: Fault) -> None:
        self._node_of(agent).is_wanted = False
        agent.do(agent.signal, SIGTERM)
        if fault.b % 2:
            self._later(fault.seconds, self._interrupt, agent)

    def _interrupt(self, agent: AgentProcess) -> None:
        if self.cluster.has_faults:  # else it would be a second disturbance next to the measured one
            agent.do(agent.signal, SIGINT)

    def _notice(self, agent: AgentProcess, fault: Fault) -> None:
        agent.do(agent.step, events.NoticeReceived("maintenance", fault.seconds))

    def _join(self, fault: Fault) -> None:
        host = fault.a % (len(self.cluster.hosts) + 1)
        if len(self.cluster.nodes) < 3 * len(self.cluster.setup.nodes) + 2:
            self.cluster.add(NodePlan(host, slots=1 + fault.b % 2))

    def _replace(self, agent: AgentProcess, fault: Fault) -> None:
        host = (agent.host.index + 1 + fault.b) % len(self.cluster.hosts)
        if agent.plan.name and host != agent.host.index:
            self._node_of(agent).is_wanted = False
            self.cluster.add(msgspec.structs.replace(agent.plan, host=host))

    def _cancel(self, server: Server, _: Fault) -> None:
        server.agent.do(server.step, CancelRequested("no longer needed"))

    def _restart_request(self, server: Server, _: Fault) -> None:
        server.agent.do(server.step, RestartRequested("new data"))

    def _drain_request(self, agent: AgentProcess, _: Fault) -> None:
        if (server := self.cluster.server) is not None:
            server.agent.do(server.step, DrainRequested(agent.info.node_id, "maintenance"))
