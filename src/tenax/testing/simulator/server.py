"""A serving process: the real coordinator machine and the real server side of links, on simulated connections.

It follows the rules of the real shells (``_engines/tcp/server.py``, ``_engines/coordinator_host.py``): everything that
has arrived is read before links are checked for silence, a deadline that fires so late that the process cannot have
been running becomes ``Resumed``, and decisions are noted for a successor before they are sent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tenax._core import messages
from tenax._core.coordinator import NodeLost, Received, Resumed, RunSettings, Tick
from tenax._core.link import server as links
from tenax._core.link import wire
from tenax._core.link.client import Note
from tenax.testing.run_invariants import RunChecker
from tenax.testing.simulator.history import describe
from tenax.testing.simulator.network import FIN, RESET
from tenax.testing.simulator.process import Alarm

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, Opened, Send
    from tenax._core.model import Assignment
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.network import End, Payload

SECRET = b"secret"


class Server:
    """One coordinator, in the process of an agent: at the endpoint, or of the leader."""

    def __init__(
        self,
        agent: AgentProcess,
        opened: Opened,
        counts: Callable[[float], bool] = lambda _: True,
        after_step: Callable[[CoordinatorState], None] = lambda _: None,
        hold_back: Callable[[Send, CoordinatorState], None] | None = None,
        on_deposed: Callable[[wire.Replaced], None] = lambda _: None,
    ) -> None:
        """``hold_back`` gets each message, and calls ``deliver`` later."""
        self.agent = agent
        self.cluster = agent.cluster
        setup = self.cluster.setup
        settings = RunSettings(
            run_id="run",
            min_nodes=setup.min_nodes,
            max_nodes=setup.max_nodes,
            max_restarts=setup.max_restarts,
            join_timeout_s=setup.join_timeout_s,
            last_call_s=setup.last_call_s,
            scale_up=setup.scale_up,
            serving_node=agent.info.node_id,
        )
        self.machine = self.cluster.parts.make_coordinator(settings, self.cluster.policy)
        self.links = self.cluster.parts.make_server(
            "run",
            setup.terms,
            agent.secret,
            lambda: self.state,
            agent.clock(),
            counts=counts,
            is_unleased=lambda node_id: node_id == agent.info.node_id and agent.client.is_unleased,
        )
        self.checker = RunChecker(settings)
        self.is_open = True
        self.term = 0  # of the leader in etcd
        self._after_step = after_step
        self._hold_back = hold_back
        self._on_deposed = on_deposed
        self.known_generation = opened.generation  # the greatest that a node has reported
        self.known_restarts = opened.restarts_used
        self.formed: dict[str, Assignment] = {}  # the last generation that was formed, perhaps not sent yet
        self.formed_at = 0.0
        self.known_when_formed = 0
        # Recorded ones were checked when the earlier coordinator named them, with the errors of its clock.
        self.causes_seen = len(opened.record.earlier) if opened.record is not None else 0
        self.sends_left = -1  # the process dies after this many messages; negative: never
        self.on_killed: Callable[[], None] = lambda: None
        self._ends: dict[links.Peer, End] = {}
        self._accepted: list[End] = []  # by the kernel; also those that the process has not accepted yet
        self._clock_errors_s: dict[int, float] = {}  # by generation
        self.floor = 0  # how many formations there were before its run began
        self._noted = (0, False)
        self._events: deque[AnyCoordinatorEvent] = deque()
        self._is_busy = False
        self._alarm = Alarm(agent, lambda: self.state.next_deadline() if self.is_open else None, self._on_deadline)
        self._link_alarm = Alarm(agent, lambda: self.links.next_deadline() if self.is_open else None, self._on_tick)
        self.cluster.checks.opened(self)

    def open(self, opened: Opened) -> None:
        self.step(opened)
        self._link_alarm.plan()

    @property
    def state(self) -> CoordinatorState:
        return self.machine.state

    def _note(self, text: str) -> None:
        self.cluster.history.note(f"{self.agent.host.name}/coord", text)

    # --- the coordinator machine --------------------------------------------------------------------------------------

    def step(self, event: AnyCoordinatorEvent, at: float = 0.0) -> None:
        """Events are processed one at a time, as in ``CoordinatorHost``. An operator's request is an event too."""
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        while self._events and self.is_open:
            self._process(self._events.popleft(), max(self.agent.clock(), at))
        self._is_busy = False
        self._alarm.plan()
        self.agent.exit_if_unneeded()

    def _process(self, event: AnyCoordinatorEvent, now: float) -> None:
        before = self.state.phase
        if isinstance(event, NodeLost):
            self.cluster.checks.on_disturbance()
        elif isinstance(event, Received):
            self._note_clock_error(event)
        if self.cluster.parts.are_checked_inside:
            self.checker.expect(self.state, event)
        step = self.machine.step(event, now)
        if self.cluster.history.is_recorded:
            answers = "; ".join(f"{describe(send.event)} to {','.join(send.to)}" for send in step.sends) or "-"
            phases = " > ".join(dict.fromkeys((before.name, self.state.phase.name)))
            self._note(f"{describe(event)} -> {answers} [{phases}]")
        match event:
            case Received(node_id, messages.NodeJoined() as joined) if node_id in self.state.nodes:  # not refused
                # With etcd, a number that is greater than the recorded one is from before the run was begun anew.
                number = min(joined.generation, self.state.generation) if self.term else joined.generation
                self.known_generation = max(self.known_generation, number)
                self.known_restarts = max(self.known_restarts, joined.restarts_used)
        self.cluster.checks.stepped(self, event, step, now)
        self._write_note()
        self._after_step(self.state)
        for send in step.sends:
            if self._hold_back is None:
                self._do(self.links.deliver(send))
            else:
                self._hold_back(send, self.state)

    def deliver(self, send: Send) -> None:
        """Send what was held back."""
        if self.is_open:
            self.cluster.checks.sent(self, [send])
            self._do(self.links.deliver(send))

    def _write_note(self) -> None:
        state = self.state
        noted = (state.generation, state.verdict is not None)
        if noted != self._noted:
            self._noted = noted
            self.agent.host.note = Note(state.generation, state.restarts_used, state.store, state.verdict)

    def _note_clock_error(self, event: Received) -> None:
        """Note the error of the times in a message, due to the estimated difference of the clocks."""
        message, peer = event.message, self.links.nodes.get(event.node_id)
        if isinstance(message, messages.FailureSeen | messages.NodeStopped) and peer is not None:
            ahead_s = self._ends[peer].out.sink.host.offset - self.agent.host.offset
            error_s = ahead_s - (message.sent_at - self.agent.clock() if peer.ahead_s is None else peer.ahead_s)
            self._clock_errors_s[message.generation] = max(self.clock_error_s(message.generation), error_s)

    def clock_error_s(self, generation: int) -> float:
        """Return the error of the failure times of a generation."""
        return self._clock_errors_s.get(generation, 0.0)

    def _on_deadline(self, now: float) -> None:
        deadline = self.state.next_deadline()
        assert deadline is not None
        late_s = now - deadline
        self.step(Resumed(late_s) if late_s > self.cluster.setup.terms.freeze_s else Tick(), now)

    # --- links --------------------------------------------------------------------------------------------------------

    def accept(self, end: End) -> None:
        """Accept a connection in the kernel. The process accepts it when it runs."""
        self._accepted.append(end)
        self.agent.do(self._on_connected, end)

    def _on_connected(self, end: End) -> None:
        if self.is_open:
            end.peer = links.Peer(self.agent.clock(), self.cluster.new_nonce(), end.out.sink.host.name)
            self._ends[end.peer] = end
            self._do(self.links.opened(end.peer))

    def on_payload(self, end: End, payload: Payload) -> None:
        peer = end.peer
        if not self.is_open or peer is None:
            return
        if payload is FIN or payload is RESET:
            self._do(self.links.closed(peer, str(payload), was_finished=payload is FIN))
            return
        try:
            outputs = self.links.received(peer, payload, self.agent.clock())  # type: ignore[arg-type]
        except wire.WireError as error:
            self.cluster.checks.on_protocol_error(f"{self.agent.host.name}/coord", error)
        else:
            self._do(outputs)

    def _do(self, outputs: list[links.Output]) -> None:
        for output in outputs:
            if not self.is_open:
                return
            match output:
                case links.SendFrame(peers, frame):
                    for peer in peers:
                        self._send(peer, frame)
                case links.Close(peer, is_reset):
                    self._close(peer, is_reset=is_reset)
                case links.Step(event):
                    self.step(event)
                case links.Deposed(frame):
                    self._on_deposed(frame)
                case links.Unlinked():
                    self.agent.exit_if_unneeded()
                case links.Print(text):
                    self._note(text)
                case links.Trust():
                    pass
                case links.Forward():
                    raise AssertionError("operators here do not use links")

    def _send(self, peer: links.Peer, frame: wire.FromServer) -> None:
        end = self._ends.get(peer)
        if end is None or not self.is_open:
            return
        end.send(frame)
        if self.sends_left >= 0 and isinstance(frame, wire.Event):
            self.sends_left -= 1
            if self.sends_left < 0:
                self.agent.crash()
                self.on_killed()

    def _close(self, peer: links.Peer, *, is_reset: bool) -> None:
        end = self._ends.pop(peer)
        self._accepted.remove(end)
        if is_reset:
            end.abort()
        else:
            end.close()

    def _on_tick(self, now: float) -> None:
        self._do(self.links.tick(now))

    # --- exit ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every connection, as the kernel does when a process exits."""
        self.vanish()
        for end in self._accepted:
            end.close()

    def vanish(self) -> None:
        self.is_open = False
        if self.agent.host.server is self:
            self.agent.host.server = None
