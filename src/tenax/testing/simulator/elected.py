"""An agent process of the etcd engine: the real leadership machine, on simulated connections and a model of etcd.

It follows the rules of the real shell (``_engines/etcd/engine.py``): a leader listens at a port of its own, which stays
open after its term, for as long as the agent lives or its keeper has processes to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenax._core.events import RunEnded
from tenax._core.leadership import machine
from tenax._core.leadership.calls import Cancel, Request
from tenax._core.leadership.keys import LeaderAddress
from tenax._core.leadership.term import Deliver, Probe, StepCoordinator, StopServing
from tenax.testing.simulator.agent import AgentProcess
from tenax.testing.simulator.etcd import EtcdClientModel
from tenax.testing.simulator.history import describe
from tenax.testing.simulator.process import Alarm
from tenax.testing.simulator.server import SECRET, Server

if TYPE_CHECKING:
    from tenax._core.coordinator import CoordinatorState, Send
    from tenax._core.leadership.candidacy import Elected
    from tenax._core.link import wire
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.network import End, Host, Payload
    from tenax.testing.simulator.setup import NodePlan

_HANDOVER_S, _LEAVE_TIMEOUT_S = 5.0, 4.0  # see ``_engines/etcd/engine.py``


class Listener:
    """A listening socket. Without a server, connections wait in its queue."""

    def __init__(self, agent: ElectedAgent) -> None:
        self.agent = agent
        self._server: Server | None = None
        self._waiting: dict[End, list[Payload]] = {}

    def open(self, server: Server) -> None:
        """Accept the connections that wait, and read what has arrived."""
        self._server = server
        waiting, self._waiting = self._waiting, {}
        for end, payloads in waiting.items():
            server.accept(end)
            for payload in payloads:
                server.on_payload(end, payload)

    def accept(self, end: End) -> None:
        if self._server is not None and self._server.is_open:
            self._server.accept(end)
        else:
            self._waiting[end] = []

    def on_payload(self, end: End, payload: Payload) -> None:
        if end in self._waiting:
            self._waiting[end].append(payload)
        elif self._server is not None:
            self._server.on_payload(end, payload)

    def close(self) -> None:
        for end in self._waiting:
            end.abort()


class Prober:
    """A connection attempt that only asks whether a leader is dead."""

    def __init__(self, agent: ElectedAgent) -> None:
        self.agent = agent
        self.host = agent.host
        self.later = agent.later
        self.do = agent.do
        self.receive: Callable[..., None] = lambda *_: None
        self.on_payload: Callable[..., None] = lambda *_: None

    def on_refused(self, _: int) -> None:
        self.agent.probed(self, is_dead=True)

    def on_unanswered(self, _: int) -> None:
        self.agent.probed(self, is_dead=False)

    def on_established(self, _: int, end: End) -> None:
        end.abort()
        self.agent.probed(self, is_dead=False)


class ElectedAgent(AgentProcess):
    """One agent process of the etcd engine."""

    is_elected = True

    def __init__(self, cluster: Cluster, host: Host, plan: NodePlan, serial: int) -> None:
        super().__init__(cluster, host, plan, serial)
        setup = cluster.setup
        self.leadership = cluster.parts.make_leadership(
            self.client,
            "run",
            setup.authority,
            self.clock(),
            lease_id=cluster.new_lease_id(),
            join_timeout_s=setup.engine.give_up_s,
        )
        self.etcd = EtcdClientModel(self)
        self.listeners: dict[int, Listener] = {}  # by port
        self._port = 0  # of the listener of this node's candidacy
        self._prober: Prober | None = None
        self._queue: deque[machine.Output] = deque()
        self._is_acting = False
        self._is_leaving = False
        self._leave_by: float | None = None
        self._wake = Alarm(self, self.leadership.next_deadline, lambda at: self.act(self.leadership.tick(at)))

    def _find_coordinator(self) -> None:
        self.etcd.follow()

    def _reconnect(self, reason: str, *, retry_s: float) -> None:
        self.act(self.leadership.link_lost(reason, self.clock(), retry_s=retry_s))

    # --- the machine's outputs ----------------------------------------------------------------------------------------

    def act(self, outputs: list[machine.Output]) -> None:
        self._queue.extend(outputs)
        if self._is_acting:
            return
        self._is_acting = True
        while self._queue and self.is_alive:
            self._carry_out(self._queue.popleft())
        self._is_acting = False
        if self.is_alive:
            self._wake.plan()
            self.exit_if_unneeded()

    def _carry_out(self, output: machine.Output) -> None:
        if self.cluster.history.is_recorded and not isinstance(output, Request | Cancel | Deliver):
            self._note(f"  {describe(output)}")
        match output:
            case Request():
                self.etcd.request(output)
            case Cancel(number):
                self.etcd.cancel(number)
            case machine.Listen():
                self._listen()
            case machine.StopListening():
                self._close_listener(self._port)
            case machine.Connect(leader):
                self._attempt += 1
                address = leader.address
                host = self.cluster.host_named(address.addr)
                self.cluster.network.connect(self, host, self._attempt, address.port)
            case machine.StopConnecting():
                self._attempt += 1
            case machine.Serve(elected):
                self._serve(elected)
            case Deliver(send):
                if self.server is not None:
                    self.server.deliver(send)
            case StepCoordinator(event):
                if self.server is not None:
                    self.server.step(event)
            case Probe(address):
                self._prober = Prober(self)
                host = self.cluster.host_named(address.addr)
                self.cluster.network.connect(self._prober, host, 0, address.port)
            case StopServing():
                self._prober = None
                if self.server is not None:
                    server, self.server = self.server, None
                    server.close()
            case machine.Ended(verdict):
                self._do(self.client.ended(RunEnded(verdict, self.clock() + self._wall_ahead_s), self.clock()))
            case machine.Troubled():
                pass
            case machine.Unregistered():
                self.exit()
            case _:
                self._do([output])

    def probed(self, prober: Prober, *, is_dead: bool) -> None:
        if prober is self._prober:
            self._prober = None
            self.act(self.leadership.probed(self.clock(), is_dead=is_dead))

    # --- connecting ---------------------------------------------------------------------------------------------------

    def on_unanswered(self, attempt: int) -> None:
        if attempt == self._attempt and self.connection is None:
            self._attempt += 1
            self.act(self.leadership.unreachable("no answer", self.cluster.rng.random(), self.clock()))

    def on_refused(self, attempt: int) -> None:
        if attempt == self._attempt:
            self.act(self.leadership.refused(self.cluster.rng.random(), self.clock()))

    def on_established(self, attempt: int, end: End) -> None:
        if attempt == self._attempt and self._wants_connection:
            self.leadership.connected()
        super().on_established(attempt, end)

    @property
    def secret(self) -> bytes:
        leader = self.leadership.leader
        return SECRET + (leader.secret if leader is not None else b"")

    # --- serving ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._port = self.cluster.new_port()
        self.listeners[self._port] = self.host.listeners[self._port] = Listener(self)
        address = LeaderAddress(self.info.node_id, self.host.name, self.host.name, self._port)
        lease_ids = b"".join((2 * self.cluster.new_lease_id()).to_bytes(8, "big") for _ in range(2))
        self.act(self.leadership.listening(address, b"", self.cluster.new_nonce() + lease_ids, self.clock()))

    def _close_listener(self, port: int) -> None:
        listener = self.listeners.pop(port, None)
        if listener is not None:
            self.host.listeners.pop(port, None)
            listener.close()

    def close_listeners(self) -> None:
        for port in list(self.listeners):
            self._close_listener(port)

    def _serve(self, elected: Elected) -> None:
        opened = self.leadership.opened(elected, self._wall_ahead_s)
        server = self.server = Server(
            self, opened, self.leadership.counts, self._after_step, self._hold_back, self._on_deposed
        )
        server.term = elected.term
        server.open(opened)
        self.later(0.0, self.listeners[self._port].open, server)
        if server.is_open:
            self.act(self.leadership.served(server.links, lambda: server.state, self.clock()))

    @property
    def _wall_ahead_s(self) -> float:
        return -self.host.offset

    def _after_step(self, state: CoordinatorState) -> None:
        self.act(self.leadership.stepped(state, self.clock(), self._wall_ahead_s))

    def _hold_back(self, send: Send, state: CoordinatorState) -> None:
        self.act(self.leadership.submit(send, state, self.clock(), self._wall_ahead_s))

    def _on_deposed(self, frame: wire.Replaced) -> None:
        self.act(self.leadership.replaced(frame, self.clock()))

    # --- exit ---------------------------------------------------------------------------------------------------------

    def exit_if_unneeded(self) -> None:
        """Exit, unless this leader still decides (``EtcdEngine.stays_for_others``)."""
        if not self.has_left or not self.is_alive or self._is_leaving or self._is_acting:
            return
        server, term = self.server, self.leadership.leading
        if server is not None and term is not None:
            is_needed = term.is_deciding() if not server.links.is_over else bool(server.links.others(self.info.node_id))
            if is_needed and self._leave_by is None:
                self._leave_by = self.clock() + _HANDOVER_S
                self.later(_HANDOVER_S, self.exit_if_unneeded)
            if is_needed and self._leave_by is not None and self.clock() < self._leave_by - 1e-6:
                return
        if server is not None and not server.state.nodes.keys() - {self.info.node_id}:
            self.cluster.checks.may_begin_anew = True
        self._is_leaving = True
        self.later(_LEAVE_TIMEOUT_S, self.exit)
        self.act(self.leadership.leave(self.clock()))

    def exit(self) -> None:
        if self.is_alive:
            super().exit()
            self.close_listeners()

    def on_cleared(self) -> None:
        super().on_cleared()
        self.close_listeners()

    def vanish(self) -> None:
        super().vanish()
        self.close_listeners()
