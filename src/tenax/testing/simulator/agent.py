"""An agent process: the real agent machine and the real lease, on a model of the tcp engine's client.

It follows the engine's rules: a node sends its identity and state on every connection, before anything but a beat. It
closes its side of a connection only when the agent is dead and the node is clear, and resets it otherwise. It checks
its lease before it reads, and accepts a generation only under a valid lease. While the endpoint's kernel refuses
connections, there is no coordinator that could form a generation, so each refusal renews the lease from the time of the
attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import AgentState, messages_on_connecting
from tenax._core.coordinator import Opened
from tenax._core.model import AgentSettings
from tenax.testing.agent_invariants import InvariantChecker
from tenax.testing.simulator.history import describe
from tenax.testing.simulator.network import FIN, RESET
from tenax.testing.simulator.process import Process
from tenax.testing.simulator.scheduler import Plan, cancel, is_due
from tenax.testing.simulator.server import Server
from tenax.testing.simulator.setup import ENDPOINT
from tenax.testing.simulator.workers import Keeper

if TYPE_CHECKING:
    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent
    from tenax._core.model import Assignment, Verdict
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.marker import Marker
    from tenax.testing.simulator.network import End, Host, Payload
    from tenax.testing.simulator.setup import NodePlan


_MAX_OFFERS = 64


class AgentProcess(Process):
    """One agent process. A restarted agent is another one, with another ``node_id``."""

    def __init__(self, cluster: Cluster, host: Host, plan: NodePlan, serial: int) -> None:
        super().__init__(cluster, host)
        self.plan = plan
        self.serial = serial
        self.label = f"{host.name}/n{serial}"
        setup = cluster.setup
        settings = AgentSettings(
            run_id="run",
            role="default",
            local_world_size=plan.slots,
            max_restarts=setup.max_restarts,
            grace_s=setup.grace_s,
            abandon_s=setup.abandon_s,
        )
        self.info = messages.NodeInfo(
            node_id=f"n{serial}",
            host=host.name,
            slots=plan.slots,
            rank=plan.rank,
            name=plan.name,
            order=plan.order,
            min_nodes=setup.min_nodes,
            max_nodes=setup.max_nodes,
        )
        self.machine = cluster.parts.make_agent(settings)
        self._checker = InvariantChecker(self.machine.state)
        self.keeper = Keeper(self)
        self.last_event_at = 0.0
        self.server: Server | None = None
        self.lease = cluster.parts.make_lease(setup.terms, self.clock())
        self.has_left = False  # the machine has ended; the process may still serve
        self._end: End | None = None
        self._established_at = 0.0
        self._attempt = 0
        self._disconnected_since = self.clock()
        self._saw_close = False
        self._suspended_since = 0.0
        self._formed: events.GenerationFormed | None = None  # read, but not accepted yet
        self._stores: list[int] = []  # ports that were offered since the last generation
        self._beat_plan: Plan | None = None
        self._lease_plan: Plan | None = None
        self._deadline_plan: Plan | None = None
        self._deadline: float | None = None

    @property
    def state(self) -> AgentState:
        return self.machine.state

    @property
    def connection(self) -> End | None:
        return self._end

    def _note(self, text: str) -> None:
        if self.cluster.history is not None:
            self.cluster.history.note(self.label, text)

    # --- the machine --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._note("starts")
        self.step(events.RunRequested())
        self._connect()

    def step(self, event: AnyEvent, at: float = 0.0) -> None:
        if self.has_left:
            return
        is_checked = self.cluster.parts.are_checked_inside
        if is_checked:
            self._checker.expect(self.state, event)
        commands = self.machine.step(event, max(self.clock(), at))
        if self.cluster.history is not None:
            answers = "; ".join(describe(command) for command in commands) or "-"
            self._note(f"{describe(event)} -> {answers} [{self.state.phase.value}]")
        if is_checked:
            self._checker.check(self.state, event, commands)
        for command in commands:
            self._execute(command)
        self._plan_deadline()

    def _plan_deadline(self) -> None:
        deadline = self.state.next_deadline()
        if deadline != self._deadline:
            cancel(self._deadline_plan)
            self._deadline = deadline
            if deadline is not None:
                self._deadline_plan = self.later(deadline - self.clock(), self._on_deadline)

    def _on_deadline(self) -> None:
        deadline, self._deadline = self._deadline, None
        if deadline is not None and deadline == self.state.next_deadline() and is_due(deadline, self.clock()):
            self.step(events.Tick(), deadline)
        self._plan_deadline()

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case commands.SendMessage(message):
                if self._end is not None:
                    self._emit(message)
            case commands.StartWorkers(assignment):
                self.cluster.checks.served(self, assignment, self._stores)
                self._stores = []
                self.keeper.start(assignment)
                self._watch_lease()
            case commands.SignalWorkers(_, signal, _):
                self.keeper.signal(signal)
            case commands.ClearNode(generation):
                self.keeper.clear(generation)
            case commands.KillNode(generation, _):
                self.keeper.kill(generation)
            case commands.ExamineFailure():
                self.keeper.examine(command)
            case commands.Finish(verdict):
                self._finish(verdict)
            case commands.ForwardNotice():
                pass  # workers here do not save anything
            case commands.DumpStacks() | commands.EndWorker():
                raise AssertionError("workers here enter no scopes")

    def signal(self, number: int) -> None:
        """Receive a stop signal. An agent that only serves the coordinator exits."""
        if not self.has_left:
            self.step(events.SignalReceived(number))
        elif self.is_alive:
            self.exit()

    def _finish(self, verdict: Verdict) -> None:
        self.has_left = True
        self.cluster.checks.left(self, verdict)
        if self.server is None or not self.server.must_stay():
            self.exit()
        else:
            self.later(0.01, self.server.on_own_agent_left)

    def exit(self) -> None:
        """Exit normally."""
        self._note("exits")
        if self.server is not None:
            self.server.close()
        self.is_alive = False
        if self._end is not None:
            self._end.close()
        self.cluster.on_process_gone(self, crashed=False)

    # --- the connection -----------------------------------------------------------------------------------------------

    @property
    def _wants_connection(self) -> bool:
        return self.is_alive and not self.has_left and self.state.decided is None and self._end is None

    def _connect(self) -> None:
        if self._wants_connection:
            self._attempt += 1
            self.cluster.network.connect(self, self.cluster.hosts[ENDPOINT], self._attempt)

    def _retry(self) -> None:
        disconnected_s = self.clock() - self._disconnected_since
        if disconnected_s > self.cluster.setup.engine.give_up_s:
            self.step(events.JoinRefused(f"no coordinator at the endpoint for {disconnected_s:.0f} s"))
        if self._wants_connection:
            self.later(0.1 + 0.2 * self.cluster.rng.random(), self._connect)

    def on_unanswered(self, attempt: int) -> None:
        if attempt == self._attempt and self._end is None:
            self._attempt += 1  # ignore a later answer to this attempt
            self._retry()

    def on_refused(self, attempt: int, attempted_at: float) -> None:
        if attempt != self._attempt or not self._wants_connection:
            return
        # There was no coordinator when the connection was refused, so the next one starts after this attempt.
        self._prove(attempted_at + self.host.offset)
        if self.host.index == ENDPOINT:
            self._serve_if_unserved()
        self._retry()

    def on_established(self, attempt: int, end: End) -> None:
        if attempt != self._attempt or not self._wants_connection:
            end.abort()
            return
        self._end = end
        self._established_at = self.clock()
        self._saw_close = False
        self.lease = self.cluster.parts.make_lease(self.cluster.setup.terms, self.lease.proven_at)
        self._note(f"is connected (attempt {attempt})")
        self._beat(end)  # first, so that its answer precedes the replies to the messages below
        for message in messages_on_connecting(self.state, self.info, self.clock()):
            self._emit(message)
        self._watch_lease()

    def _emit(self, message: messages.FromNode) -> None:
        assert self._end is not None
        if isinstance(message, messages.NodeReady):
            message = msgspec.structs.replace(message, store_addr=self.host.name, store_port=self._store())
        self._end.send(("message", message))

    def _store(self) -> int:
        engine = self.cluster.setup.engine
        if not self._stores or engine.offers_fresh_store:
            kept = self._stores[-_MAX_OFFERS:] if engine.keeps_offers else []
            self._stores = [*kept, self.cluster.new_port()]
        return self._stores[-1]

    def _beat(self, end: End) -> None:
        if end is not self._end or self.has_left:
            return
        if end.out.all_is_acknowledged and end.out.sent:
            self._on_all_acknowledged()
        end.send(("beat", (self.lease.beat(self.clock()), self.clock())))
        self.cluster.checks.bounded(self)
        self._beat_plan = self.later(self.cluster.setup.terms.beat_s, self._beat, end)

    def on_payload(self, end: End, payload: Payload) -> None:
        kind, what = payload
        if kind == "event":
            if end is self._end or isinstance(what, events.RunEnded | events.JoinRefused):
                self._on_event(what)
        elif end is not self._end:
            return
        elif kind == "answer":
            self.lease.answered(what)
            self._watch_lease()
        elif payload is FIN or payload is RESET:
            self._on_closed(payload)

    def _on_event(self, event: AnyEvent) -> None:
        """Handle an event. A generation read together with the end of the run is not started (``Supervisor.run``)."""
        if isinstance(event, events.GenerationFormed):
            self._formed = event
            self.later(0.0, self._accept_formed)
            return
        if isinstance(event, events.RunEnded | events.JoinRefused):
            self._formed = None
        self._accept_formed()
        self.step(event)

    def _accept_formed(self) -> None:
        event, self._formed = self._formed, None
        if event is not None and self._holds_lease():
            self.step(event)
        elif event is not None:
            self._note(f"{describe(event)} arrives after the lease has expired")
            self._drop_connection()

    def _holds_lease(self) -> bool:
        if self._serves or not self.cluster.setup.engine.checks_lease_before_reading:
            return True
        return self.lease.ends_at() > self.clock() and self.lease.is_answered(self.clock())

    def _on_closed(self, how: Payload) -> None:
        if self.state.decided is not None and how is FIN:
            return  # this side stays open until the node is clear
        self._note(f"its connection is {how[0]}")
        self._saw_close = True
        self._drop_connection()

    def _drop_connection(self) -> None:
        if self._end is not None:
            self._end.abort()
            self._end = None
            cancel(self._beat_plan)
            self._disconnected_since = self.clock()
            self._retry()

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _prove(self, at: float) -> None:
        self.lease.proven_at = max(self.lease.proven_at, at)
        self._watch_lease()

    def _on_all_acknowledged(self) -> None:
        self.lease.all_has_arrived()
        self._watch_lease()

    def _watch_lease(self) -> None:
        """Schedule a check for when the lease ends."""
        if self._lease_plan is None:
            at = self.lease.ends_at() - self.host.offset
            self._lease_plan = self.cluster.schedule.at(at + 1e-6, self._lease_may_have_ended)

    def _lease_may_have_ended(self) -> None:
        self._lease_plan = None
        if not self.is_alive or self.has_left or self._serves:
            return
        if self.lease.ends_at() > self.clock():
            self._watch_lease()
        elif not self.is_paused:
            self._check_lease()
        elif self.cluster.setup.engine.keeper_enforces_lease and not self.state.cleared:
            self._note("its keeper ends the workers: the lease has expired and the agent is suspended")
            self.keeper.fence()

    @property
    def _serves(self) -> bool:
        """Whether this agent hosts the coordinator, and so needs no lease."""
        return self.server is not None

    def _check_lease(self) -> None:
        if self._serves:
            return
        end = self._end
        if end is not None and end.out.all_is_acknowledged:
            self._on_all_acknowledged()
        if self.lease.ends_at() > self.clock():
            return
        if not self.state.cleared:
            why = f"no answer from the coordinator for {self.cluster.setup.terms.fence_s:.3g} s"
            self.cluster.checks.on_disturbance()
            self.step(events.Fenced(self.state.generation, why))
        if end is not None and end is self._end:
            drop_at = self._established_at + self.cluster.setup.terms.fence_s
            if drop_at <= self.clock() + 1e-6:
                self._note("drops its connection")
                self._drop_connection()
            else:
                self._lease_plan = self.cluster.schedule.at(
                    drop_at - self.host.offset + 1e-6, self._lease_may_have_ended
                )

    def suspend(self) -> None:
        self._note("is suspended")
        self._suspended_since = self.clock()
        self.pause()

    def on_resumed(self) -> None:
        self._note("resumes")
        if self.server is not None:
            self.server.on_resumed(self.clock() - self._suspended_since)
        if self.cluster.setup.engine.checks_lease_before_reading and not self.has_left:
            self._check_lease()

    # --- serving ------------------------------------------------------------------------------------------------------

    def _serve_if_unserved(self) -> None:
        host, engine = self.host, self.cluster.setup.engine
        if host.server is not None or (engine.waits_until_predecessor_cleared and host.clearing):
            return
        part = self.state.assignment
        marker = host.marker
        if marker is not None and not engine.marker_remembers:
            marker = type(marker)()
        generation = max(self.state.generation, marker.generation if marker else 0)
        opened = Opened(
            recover_s=self.cluster.setup.terms.lease_s if part is not None or marker is not None else 0.0,
            dead_rank=self._dead_rank(part, generation),
            generation=generation,
            restarts_used=max(self.state.restarts_used, marker.restarts_used if marker else 0),
            store=self._last_store(part, marker),
        )
        if marker is not None and marker.verdict is not None:
            opened = msgspec.structs.replace(opened, verdict=marker.verdict)
        self.server = host.server = Server(self, opened)

    @staticmethod
    def _last_store(part: Assignment | None, marker: Marker | None) -> str:
        if marker is not None and (part is None or marker.generation >= part.generation):
            return marker.store
        return part.store if part is not None else ""

    def _dead_rank(self, part: Assignment | None, generation: int) -> int:
        """Return the rank of the last coordinator's node, if its connection was closed in the last generation."""
        if part is None or not self._saw_close or part.generation != generation:
            return -1
        return part.coordinator_rank if part.coordinator_rank != part.group_rank else -1

    # --- exit ---------------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Die by SIGKILL."""
        self._note("is killed")
        self.die()
        if self.server is not None:
            self.server.close()
        self.host.clearing[self.serial] = self
        if self._end is not None and not self.cluster.setup.engine.keeper_holds_socket:
            self._end.close()
        self.keeper.agent_died()
        self.cluster.on_process_gone(self, crashed=True)

    def on_cleared(self) -> None:
        """The keeper has ended all processes and exits."""
        self._note("all its processes have exited")
        self.host.clearing.pop(self.serial, None)
        if self._end is not None:
            self._end.close()

    def vanish(self) -> None:
        """Disappear with the host's power."""
        self.die()
        if self.server is not None:
            self.server.vanish()
        self.keeper.vanish()
        self.cluster.on_process_gone(self, crashed=True)
