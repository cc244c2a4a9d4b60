"""An agent process: the real agent machine and the real client side of links, on simulated connections and workers.

It follows the rules of the real shells (``linked.py`` and ``engine.py`` in ``_engines/tcp``, ``_node/supervisor.py``):
the keeper holds a copy of a link from when it is established, so the link is closed in good order only when the agent
is dead and the node is clear. The node at the endpoint that can bind the port serves the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import AgentState, messages_on_connecting
from tenax._core.link import client, wire
from tenax._core.link.client import Note
from tenax._core.model import AgentSettings
from tenax.testing.agent_invariants import InvariantChecker
from tenax.testing.simulator.history import describe
from tenax.testing.simulator.network import FIN, RESET
from tenax.testing.simulator.process import Alarm, Process
from tenax.testing.simulator.server import SECRET, Server
from tenax.testing.simulator.setup import ENDPOINT
from tenax.testing.simulator.workers import Keeper

if TYPE_CHECKING:
    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent
    from tenax._core.model import Verdict
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.network import End, Host, Payload
    from tenax.testing.simulator.setup import NodePlan


_MAX_OFFERS = 64
_LINGER_S = 5.0  # see ``_engines/tcp/linked.py``


class AgentProcess(Process):
    """One agent process. A restarted agent is another one, with another ``node_id``."""

    is_elected = False  # whether etcd elects the coordinator

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
            grace_s=setup.grace_s,
        )
        self.machine = cluster.parts.make_agent(settings)
        self._checker = InvariantChecker(self.machine.state)
        self.client = cluster.parts.make_client(
            self.info,
            "run",
            setup.terms,
            self.clock(),
            join_timeout_s=setup.engine.give_up_s,
            location="" if self.is_elected else "at host0",
            is_elected=self.is_elected,
        )
        self.keeper = Keeper(self)
        self.last_event_at = 0.0
        self.server: Server | None = None
        self.has_left = False  # the machine has ended; the process may still serve
        self.connection: End | None = None
        self._kept: End | None = None  # the connection of which the keeper holds a copy
        self._lease_ends_at: float | None = None
        self._attempt = 0
        self._is_lingering = False
        self._formed: events.GenerationFormed | None = None  # read, but not started yet
        self._stores: list[int] = []  # ports that were offered since the last generation
        self._alarm = Alarm(self, self.state.next_deadline, lambda at: self.step(events.Tick(), at))
        self._link_alarm = Alarm(self, self.client.next_deadline, self._on_link_deadline)

    @property
    def secret(self) -> bytes:
        return SECRET

    @property
    def state(self) -> AgentState:
        return self.machine.state

    def _note(self, text: str) -> None:
        self.cluster.history.note(self.label, text)

    # --- the agent machine --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._note("starts")
        self.step(events.RunRequested())
        self._find_coordinator()

    def step(self, event: AnyEvent, at: float = 0.0) -> None:
        if self.has_left:
            return
        is_lease_over = self._lease_ends_at is not None and self.clock() >= self._lease_ends_at
        if is_lease_over and self.state.must_be_fenced(event):
            self.step(events.Fenced(self.state.generation, "this agent was suspended for too long"))
        if isinstance(event, events.Fenced):
            self.cluster.checks.on_disturbance()
        is_checked = self.cluster.parts.are_checked_inside
        if is_checked:
            self._checker.expect(self.state, event)
        commands = self.machine.step(event, max(self.clock(), at))
        if self.cluster.history.is_recorded:
            answers = "; ".join(describe(command) for command in commands) or "-"
            self._note(f"{describe(event)} -> {answers} [{self.state.phase.value}]")
        if is_checked:
            self._checker.check(self.state, event, commands)
        for command in commands:
            self._execute(command)
        self._alarm.plan()

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case commands.SendMessage(message):
                self._do(self.client.send(self._with_offer(message) if self.client.is_linked else message))
            case commands.StartWorkers(assignment, survivors):
                self.cluster.checks.served(self, assignment, self._stores)
                self._stores = []
                self.keeper.start(assignment, survivors)
            case commands.HoldWorkers(generation, local_ranks):
                self.keeper.end(generation, local_ranks)
            case commands.StopWorker(local_rank=local_rank, signal=signal):
                self.keeper.stop(local_rank, signal)
            case commands.SignalWorkers(_, signal, _):
                self.keeper.signal(signal)
            case commands.ClearNode(generation, held):
                self.keeper.clear(generation, held)
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

    # --- the link -----------------------------------------------------------------------------------------------------

    def _do(self, outputs: list[client.Output]) -> None:
        for output in outputs:
            if not self.is_alive:
                return
            match output:
                case client.SendFrame(frame):
                    if self.connection is not None:
                        self.connection.send(frame)
                case client.Hold(seconds):
                    self._lease_ends_at = self.clock() + seconds if seconds else None
                    self.keeper.hold(seconds)
                case client.Close(is_finished):
                    if is_finished and self.connection is not None:
                        self.connection.close()
                    self._drop_connection()
                case client.Linked():
                    self._note("is linked")
                    self._kept = self.connection
                    offered = map(self._with_offer, messages_on_connecting(self.state, self.info, self.clock()))
                    self._do(self.client.announce(list(offered), self.clock()))
                case client.Lost(reason, retry_s):
                    self._reconnect(reason, retry_s=retry_s)
                case client.Emit(event):
                    self._on_event(event)
                case client.Print(text):
                    self._note(text)
                case client.Forward():
                    raise AssertionError("operators here do not use links")
        self._link_alarm.plan()

    def _on_link_deadline(self, now: float) -> None:
        has_all_arrived = self.connection is not None and self.connection.out.all_is_acknowledged
        self._do(self.client.tick(now, has_all_arrived=has_all_arrived))
        self.cluster.checks.bounded(self)

    def on_payload(self, end: End, payload: Payload) -> None:
        if end is not self.connection:
            return
        if payload is FIN or payload is RESET:
            self._drop_connection()
            self._do(self.client.closed(str(payload), self.clock(), by_peer=True))
            return
        try:
            outputs = self.client.received(payload, self.clock())  # type: ignore[arg-type]
        except wire.WireError as error:
            self.cluster.checks.on_protocol_error(self.label, error)
        else:
            self._do(outputs)

    def _on_event(self, event: AnyEvent) -> None:
        """Handle an event. A generation read together with the end of the run is not started (``Supervisor.run``)."""
        if isinstance(event, events.GenerationFormed):
            self._formed = event
            self.later(0.0, self._start_formed)
            return
        if isinstance(event, events.RunEnded | events.JoinRefused):
            self._formed = None
        self._start_formed()
        self.step(event)

    def _start_formed(self) -> None:
        event, self._formed = self._formed, None
        if event is not None:
            self.step(event)

    def _with_offer(self, message: messages.FromNode) -> messages.FromNode:
        if isinstance(message, messages.NodeReady):
            return msgspec.structs.replace(message, store_addr=self.host.name, store_port=self._store())
        return message

    def _store(self) -> int:
        engine = self.cluster.setup.engine
        if not self._stores or engine.offers_fresh_store:
            kept = self._stores[-_MAX_OFFERS:] if engine.keeps_offers else []
            self._stores = [*kept, self.cluster.new_port()]
        return self._stores[-1]

    # --- connecting ---------------------------------------------------------------------------------------------------

    @property
    def _wants_connection(self) -> bool:
        return self.is_alive and not self.client.is_finished and self.connection is None

    def _find_coordinator(self) -> None:
        self._serve_if_local()
        self._connect()

    def _reconnect(self, reason: str, *, retry_s: float) -> None:
        self._retry(reason, retry_s)

    def _connect(self) -> None:
        if self._wants_connection:
            self._attempt += 1
            self.client.connecting(self.clock())
            self.cluster.network.connect(self, self.cluster.hosts[ENDPOINT], self._attempt)

    def _retry(self, why: str, after_s: float) -> None:
        self._do(self.client.retry(why, "check the network", self.clock()))
        if self._wants_connection:
            self._attempt += 1  # ignore a later answer to an earlier attempt
            self.later(after_s, self._connect_again, self._attempt)

    def _connect_again(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._connect()

    def on_unanswered(self, attempt: int) -> None:
        if attempt == self._attempt and self.connection is None:
            self._retry("no answer", self.client.backoff_s(self.cluster.rng.random()))

    def on_refused(self, attempt: int) -> None:
        if attempt == self._attempt and self._wants_connection:
            self._do(self.client.unserved(self.clock()))
            if self._serve_if_local():
                self._connect()
            else:
                self._retry("connection refused", self.client.backoff_s(self.cluster.rng.random()))

    def on_established(self, attempt: int, end: End) -> None:
        if attempt != self._attempt or not self._wants_connection:
            end.abort()
            return
        self.connection = end
        self._note(f"is connected (attempt {attempt})")
        self._do(self.client.opened(self.cluster.new_nonce(), self.secret, self.clock()))

    def _drop_connection(self) -> None:
        if self.connection is not None:
            self.connection.abort()
            self.connection = self._kept = None

    def suspend(self) -> None:
        self._note("is suspended")
        self.pause()

    def on_resumed(self) -> None:
        self._note("resumes")

    # --- serving ------------------------------------------------------------------------------------------------------

    def _serve_if_local(self) -> bool:
        host, engine = self.host, self.cluster.setup.engine
        if host.index != ENDPOINT or host.server is not None:
            return False
        if engine.waits_until_predecessor_cleared and host.clearing:
            return False
        note = host.note if host.note is None or engine.marker_remembers else Note()
        self.client.serves()
        opened = self.client.takeover(note, self.cluster.setup.terms.lease_s)
        self.server = host.server = Server(self, opened)
        self.server.open(opened)
        return True

    # --- exit ---------------------------------------------------------------------------------------------------------

    def _finish(self, verdict: Verdict) -> None:
        self.has_left = True
        self.cluster.checks.left(self, verdict)
        self.exit_if_unneeded()

    def exit_if_unneeded(self) -> None:
        """Exit, unless other nodes need the coordinator in this process (``LinkedEngine.stays_for_others``)."""
        if not self.has_left or not self.is_alive:
            return
        if self.server is None or not self.server.links.others(self.info.node_id):
            self.exit()
        elif self.server.links.is_over and not self._is_lingering:
            self._is_lingering = True
            self.later(_LINGER_S, self.exit)

    def exit(self) -> None:
        """Exit normally."""
        if not self.is_alive:
            return
        self._note("exits")
        if self.server is not None:
            self.server.close()
        self.is_alive = False
        if self.connection is not None:
            self.connection.close()
        self.cluster.on_process_gone(self, crashed=False)

    def crash(self) -> None:
        """Die by SIGKILL."""
        self._note("is killed")
        self.die()
        if self.server is not None:
            self.server.close()
        self.host.clearing[self.serial] = self
        if self.connection is not None and (self._kept is None or not self.cluster.setup.engine.keeper_holds_socket):
            self.connection.close()
        self.keeper.agent_died()
        self.cluster.on_process_gone(self, crashed=True)

    def on_cleared(self) -> None:
        """The keeper has ended all processes and exits."""
        self._note("all its processes have exited")
        self.host.clearing.pop(self.serial, None)
        if self._kept is not None:
            self._kept.close()

    def vanish(self) -> None:
        """Disappear with the host's power."""
        self.die()
        if self.server is not None:
            self.server.vanish()
        self.keeper.vanish()
        self.cluster.on_process_gone(self, crashed=True)
