"""The liveness properties: what must happen after the faults have stopped.

At ``calm_at`` all paths heal, suspended processes resume, hosts are powered on and dead agents restart. The cluster
must settle within a limit: every agent is a member of one complete generation or a spare, or the run has ended and all
agents have left. Then a single disturbance follows, from which the cluster must recover within a limit (L1 to L8 of the
reliability plan, in simulated time):

L1  ``fail``              a failed worker is detected at once; the next generation forms soon after all have stopped
L2  ``join``, ``leave``   a new generation runs
L3  ``partition``         a node that is cut off for long is lost; after it heals there is one group
L4  ``pause``             an agent that was suspended for longer than its lease is back
L5  ``kill_coordinator``  after the coordinator's process dies, the next one controls the group
L8  ``stop``, ``cancel``  all processes have ended

Stopping workers takes up to the grace period, which the user sets and which is added to the limits. L6 (hostile
traffic, deadlines of calls) and L7 (log readers, disks, name servers) concern real I/O and are tested with real sockets
and processes.

This engine has two limitations. An agent that is disconnected when the run ends, and returns when there is no
coordinator any more, ends only by giving up (``Engine.give_up_s``). L5 requires that the endpoint's host comes back:
without it, workers keep running for at most ``give_up_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tenax._core.agent import SIGINT, SIGTERM, Phase
from tenax._core.coordinator import CancelRequested, Over, Running
from tenax._core.model import WorkerPhase
from tenax.testing.simulator.checks import PropertyBroken
from tenax.testing.simulator.setup import ENDPOINT, Fault, NodePlan

if TYPE_CHECKING:
    from tenax._core.coordinator import CoordinatorState
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.cluster import Cluster

DISTURBANCES = ("fail", "join", "leave", "partition", "pause", "kill_coordinator", "stop", "cancel")
_POLL_EVERY_S = 0.05
_Stage = tuple[str, float, Callable[[], bool]]  # the property, its time limit in seconds, and whether it is reached


class Liveness:
    """Stops the faults, waits until the cluster has settled, injects one disturbance, and waits again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.is_done = False
        self._stages: tuple[_Stage, ...] = ()  # what must be reached, one after the other
        self._limit = 0.0  # of the first of them
        self._is_disturbed = False

    def plan(self) -> None:
        if self.cluster.setup.calm_at:
            self.cluster.schedule.at(self.cluster.setup.calm_at, self._calm)

    def conclude(self) -> None:
        if self.cluster.setup.calm_at and not self.is_done and not self.cluster.is_over:
            name = self._stages[0][0] if self._stages else "L2"
            raise PropertyBroken(name, f"not settled when the simulation ended: {self._summary()}")

    # --- calm ---------------------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        cluster, setup = self.cluster, self.cluster.setup
        self._note("the faults stop")
        cluster.has_faults = False
        cluster.network.calm()
        cluster.etcd.resume()
        if cluster.server is not None:
            cluster.server.sends_left = -1
        for host in cluster.hosts:
            cluster.faults.power_on_soon(host)
        for node in list(cluster.nodes):
            if node.agent is not None:
                node.agent.resume()
            if node.is_wanted:
                cluster.start_later(node, 0.5 * cluster.rng.random())
        self._fill_up()
        # One lease to detect lost nodes, one to recover, and the time to stop workers.
        limit = 2 * setup.terms.lease_s + 2 * self._stopping_s + setup.pause_s + setup.last_call_s + 10
        if setup.has_etcd:  # a successor waits for the only member of a generation
            limit += setup.authority.alone_s + setup.authority.ttl_s
        self._expect(("L3", limit, self.has_settled))

    def _fill_up(self) -> None:
        """Add nodes until there are enough."""
        cluster = self.cluster
        wanted = [node for node in cluster.nodes if node.is_wanted and not (node.agent and node.agent.has_left)]
        if not cluster.setup.has_etcd and not any(node.plan.host == ENDPOINT for node in wanted):
            wanted.append(cluster.add(NodePlan(ENDPOINT)))
        is_over = cluster.checks.verdict is not None and not cluster.checks.has_lost_memory
        for _ in range(0 if is_over else max(0, cluster.setup.min_nodes - len(wanted))):
            cluster.add(NodePlan(len(cluster.hosts)))

    @property
    def _stopping_s(self) -> float:
        setup, behaviour = self.cluster.setup, self.cluster.setup.behaviour
        # Workers that are not held are stopped one by one; what they leave behind is awaited longer if others are held.
        holding_s = behaviour.hold_timeout_s + max(setup.grace_s, setup.abandon_s) if behaviour.opts_in else 0.0
        abandoning_s = setup.abandon_s if behaviour.stuck else 0.0
        return holding_s + setup.grace_s + abandoning_s + 2.0  # evidence may take as long

    @property
    def _stopping_held_s(self) -> float:
        """How long it takes to stop held workers, after the others, if the policy keeps none or the run ends."""
        return self._stopping_s if self.cluster.setup.behaviour.opts_in else 0.0

    def _note(self, text: str) -> None:
        self.cluster.history.note("CALM", text)

    def _expect(self, *stages: _Stage) -> None:
        self._stages = stages
        self._limit = self.cluster.schedule.now + stages[0][1]
        self._poll()

    def _poll(self) -> None:
        name, _, is_reached = self._stages[0]
        if is_reached():
            self._note(f"{name} is reached {self._limit - self.cluster.schedule.now:.2f} s before its limit")
            if len(self._stages) > 1:
                self._expect(*self._stages[1:])
            elif self._is_disturbed:
                self.is_done = True
            else:
                self._disturb()
        elif self.cluster.schedule.now > self._limit:
            raise PropertyBroken(name, f"not reached in time: {self._summary()}")
        else:
            if is_reached == self.has_settled:
                self._fill_up()
            self.cluster.schedule.after(_POLL_EVERY_S, self._poll)

    # --- settled ------------------------------------------------------------------------------------------------------

    def has_settled(self) -> bool:
        cluster = self.cluster
        agents = cluster.agents
        if any(node.is_starting for node in cluster.nodes):
            return False
        if not agents:
            return True
        if cluster.server is None:
            return self._only_latecomers(agents)
        if not all(agent.client.is_linked for agent in agents):
            return False  # the run may end before it is back, and it ends only by giving up
        state = cluster.server.state
        is_deposed = cluster.setup.has_etcd and not cluster.etcd.is_led_by(cluster.server)
        if not isinstance(state.phase, Running) or is_deposed:
            return False
        at_work = {agent.info.node_id for agent in agents if self._is_at_work(agent, state.generation)}
        waiting = {agent.info.node_id for agent in agents if agent.state.phase is Phase.JOINING}
        if len(at_work) + len(waiting) != len(agents) or not waiting <= state.ready.keys():
            return False
        return at_work | state.last.done >= state.members.keys() and at_work <= state.members.keys()

    @staticmethod
    def _is_at_work(agent: AgentProcess, generation: int) -> bool:
        state = agent.state
        if state.generation != generation or state.phase not in (Phase.RUNNING, Phase.CLOSING, Phase.DONE):
            return False
        return all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())

    def _only_latecomers(self, agents: list[AgentProcess]) -> bool:
        """Whether the run has ended without a coordinator, so that the remaining agents will give up."""
        is_over = self.cluster.checks.verdict is not None
        return is_over and all(agent.connection is None and agent.host.index != ENDPOINT for agent in agents)

    def _summary(self) -> str:
        server = self.cluster.server
        parts = [f"coordinator {server.state.phase.name} {server.state.generation}" if server else "no coordinator"]
        parts += [f"{a.label} {a.state.phase.value} {a.state.generation}" for a in self.cluster.agents]
        return ", ".join(parts)

    # --- one disturbance ----------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        self._is_disturbed = True
        kind = self.cluster.setup.disturbance
        server = self.cluster.server
        if not kind or server is None or not self.cluster.agents or server.state.last.done:
            self.is_done = True
            return
        self._note(f"disturbance: {kind}")
        disturb: Callable[[], None] = getattr(self, f"_{kind}")
        disturb()

    def _inject(self, kind: str, a: int = 0, seconds: float = 0.0) -> None:
        self.cluster.faults.inject(Fault(self.cluster.schedule.now, kind, a, seconds=seconds))

    def _pick_agent(self, wanted: Callable[[AgentProcess], bool]) -> int | None:
        """Return the number of a random agent that matches; if there is none, there is no disturbance."""
        numbers = [number for number, agent in enumerate(self.cluster.agents) if wanted(agent)]
        self.is_done = not numbers
        return self.cluster.rng.choice(numbers) if numbers else None

    def _serves(self, agent: AgentProcess) -> bool:
        server = self.cluster.server
        return agent.host.index == (server.agent.host.index if server is not None else ENDPOINT)

    def _state(self) -> CoordinatorState | None:
        server = self.cluster.server
        return server.state if server is not None else None

    def _fail(self) -> None:
        number = self._pick_agent(lambda agent: agent.state.phase is Phase.RUNNING)
        if number is None:
            return
        state = self._state()
        assert state is not None
        ended = state.generation
        self._inject("fail", number)
        failed = self.cluster.checks.formations[-1]
        exits_s = 1.0  # maximum time from an exception to the worker's exit

        def is_known() -> bool:
            state = self._state()
            return state is None or not isinstance(state.phase, Running) or state.generation != ended

        def is_quiet() -> bool:
            return failed.alive == 0 and not any(
                agent.state.phase in (Phase.STOPPING, Phase.CLOSING) and not agent.state.cleared
                for agent in self.cluster.agents
            )

        def is_next() -> bool:
            state = self._state()
            is_further = state is not None and (isinstance(state.phase, Over) or state.generation > ended)
            return is_further or len(self.cluster.agents) < self.cluster.setup.min_nodes

        held_s = self._stopping_held_s
        self._expect(
            ("L1", exits_s + 1, is_known),
            ("L1", self._stopping_s + held_s + 1, is_quiet),
            ("L1", 2 + self.cluster.setup.pause_s + held_s, is_next),
            ("L2", 10 + held_s, self.has_settled),
        )

    def _join(self) -> None:
        self.cluster.add(NodePlan(len(self.cluster.hosts)))
        self._expect(("L2", 10 + self._stopping_s, self.has_settled))

    def _leave(self) -> None:
        number = self._pick_agent(lambda agent: not self._serves(agent))
        if number is None or len(self.cluster.agents) <= self.cluster.setup.min_nodes:
            self.is_done = True
            return
        self._inject("drain", number)
        self._expect(("L2", 10 + 2 * self._stopping_s, self.has_settled))

    def _partition(self) -> None:
        number = self._pick_agent(lambda agent: not self._serves(agent))
        if number is None:
            return
        seconds = self.cluster.rng.choice((1.0, 4.5, 5.0, 12.0)) + self.cluster.rng.random()
        agent, lease_s = self.cluster.agents[number], self.cluster.setup.terms.lease_s
        ways = self.cluster.faults.ways(agent.host.index, self.cluster.rng.randrange(3))
        for way in ways:
            self.cluster.network.cut(way)

        def heal() -> None:
            server = self.cluster.server
            # Its last message may have been sent just before its own lease ended.
            if server is not None and seconds > 2 * lease_s + 1 and agent.info.node_id in server.state.nodes:
                raise PropertyBroken("L3", f"{agent.label} was cut off for {seconds:.0f} s and is not lost")
            for way in ways:
                self.cluster.network.heal(way)
            self._expect(("L3", lease_s + 10 + self._stopping_s, self.has_settled))

        self.cluster.schedule.after(seconds, heal)

    def _pause(self) -> None:
        number = self.cluster.rng.choice(range(len(self.cluster.agents)))
        seconds = self.cluster.rng.choice((2.0, 5.0, 20.0)) + self.cluster.rng.random()
        self._inject("pause", number, seconds)
        within = self.cluster.setup.terms.lease_s + 10 + self._stopping_s
        self.cluster.schedule.after(seconds, self._expect, ("L4", within, self.has_settled))

    def _kill_coordinator(self) -> None:
        seconds = 0.2 + self.cluster.rng.random()
        self._inject("kill_coordinator", seconds=seconds)
        within = seconds + self.cluster.setup.terms.lease_s + 5 + self._stopping_s
        self.cluster.schedule.after(0.0, self._expect, ("L5", within, self.has_settled))

    def _stop(self) -> None:
        # A node that succeeded alone waits for the verdict, at most until its engine gives up.
        may_wait = any(agent.state.phase in (Phase.CLOSING, Phase.DONE) for agent in self.cluster.agents)
        waiting_s = self.cluster.setup.engine.give_up_s if may_wait else 0.0
        for agent in self.cluster.agents:
            self.cluster.schedule.after(0.1, agent.do, agent.signal, SIGINT)
            agent.do(agent.signal, SIGTERM)
        self._expect(("L8", self._stopping_s + waiting_s + 3, lambda: not self.cluster.agents))

    def _cancel(self) -> None:
        server = self.cluster.server
        assert server is not None
        server.agent.do(server.step, CancelRequested("no longer needed"))
        self._expect(("L8", self._stopping_s + 3, lambda: not self.cluster.agents))
