"""A serving process: the real coordinator machine on a model of the tcp engine's server.

It follows the engine's rules: a connection belongs to the node that joined over it, and of two connections of a node
the later one counts. A node is lost when its connection is closed (its agent and workers are dead) or its lease
expires, not when a connection is reset. Decisions are written to the marker before they are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tenax._core import events, messages
from tenax._core.coordinator import NodeLost, Over, Received, Resumed, Running, RunSettings, Send, Tick
from tenax.testing.run_invariants import RunChecker
from tenax.testing.simulator.history import describe
from tenax.testing.simulator.marker import Marker
from tenax.testing.simulator.network import FIN, RESET, Clocks, End
from tenax.testing.simulator.scheduler import Plan, cancel, is_due

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, Opened
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.network import Payload


_LINGER_S = 5.0


class Server:
    """One coordinator, in the process of an agent at the endpoint."""

    def __init__(self, agent: AgentProcess, opened: Opened) -> None:
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
        self.checker = RunChecker(settings)
        self.is_open = True
        self.known_generation = opened.generation  # the greatest that a node has reported
        self.known_restarts = opened.restarts_used
        self.causes_seen = 0
        self.sends_left = -1  # the process dies after this many messages; negative: never
        self.on_killed: Callable[[], None] = lambda: None
        self._ends: dict[str, End] = {}
        self._all_ends: list[End] = []
        self._last_received_at: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self._clocks: dict[str, Clocks] = {}
        self._clock_errors_s: dict[int, float] = {}  # by generation
        self._deadline: float | None = None
        self._deadline_plan: Plan | None = None
        self._marker = agent.host.marker = agent.host.marker or Marker()
        self.cluster.checks.opened(self)
        self._step(opened)

    @property
    def state(self) -> CoordinatorState:
        return self.machine.state

    def _note(self, text: str) -> None:
        if self.cluster.history is not None:
            self.cluster.history.note(f"{self.agent.host.name}/coord", text)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _step(self, event: AnyCoordinatorEvent, at: float = 0.0) -> None:
        now = max(self.agent.clock(), at)
        before = self.state.phase
        if self.cluster.parts.are_checked_inside:
            self.checker.expect(self.state, event)
        step = self.machine.step(event, now)
        if self.cluster.history is not None:
            answers = "; ".join(f"{describe(send.event)} to {','.join(send.to)}" for send in step.sends) or "-"
            phases = " > ".join(dict.fromkeys((before.name, self.state.phase.name)))
            self._note(f"{describe(event)} -> {answers} [{phases}]")
        self.cluster.checks.stepped(self, event, step, now)
        self._write_marker()
        for send in step.sends:
            self._deliver(send)
        self._plan_deadline()
        if isinstance(self.state.phase, Over) and not isinstance(before, Over) and self.agent.has_left:
            self._leave_later()

    def _write_marker(self) -> None:
        """Write a restart together with the generation that it formed, so that a successor does not charge it again."""
        marker, state = self._marker, self.state
        if isinstance(state.phase, Running) and state.generation > marker.generation:
            marker.generation, marker.restarts_used = state.generation, state.restarts_used
            marker.store = state.store
        marker.verdict = state.verdict or marker.verdict

    def clock_error_s(self, generation: int) -> float:
        """Return the error of the failure times of a generation, due to the estimated clock differences."""
        return self._clock_errors_s.get(generation, 0.0)

    def on_operator_request(self, event: AnyCoordinatorEvent) -> None:
        """Handle an operator's request."""
        if self.is_open:
            self._step(event)

    def _plan_deadline(self) -> None:
        deadline = self.state.next_deadline()
        if deadline != self._deadline:
            cancel(self._deadline_plan)
            self._deadline = deadline
            if deadline is not None:
                self._deadline_plan = self.agent.later(deadline - self.agent.clock(), self._on_deadline)

    def _on_deadline(self) -> None:
        deadline, self._deadline = self._deadline, None
        if not self.is_open:
            return
        if deadline is not None and deadline == self.state.next_deadline() and is_due(deadline, self.agent.clock()):
            self._step(Tick(), deadline)
        self._plan_deadline()

    def _deliver(self, send: Send) -> None:
        is_final = isinstance(send.event, events.RunEnded | events.JoinRefused)
        for node_id in send.to:
            if not self.is_open:
                return
            end = self._ends.get(node_id)
            if end is None:
                continue
            end.send(("event", send.event))
            if is_final:
                end.finish()
            if self.sends_left >= 0:
                self.sends_left -= 1
                if self.sends_left < 0:
                    self.agent.crash()
                    self.on_killed()

    # --- connections --------------------------------------------------------------------------------------------------

    def accept(self, node_id: str, attempt: int) -> End:
        end = End(self.agent.host, self.agent, self._on_payload)
        end.node_id, end.attempt = node_id, attempt
        self._all_ends.append(end)
        return end

    def _on_payload(self, end: End, payload: Payload) -> None:
        if not self.is_open:
            return
        kind, what = payload
        node_id = end.node_id
        if node_id and self._ends.get(node_id) is end:
            self._last_received_at[node_id] = self.agent.clock()
        if kind == "beat":
            number, sent_at = what
            self._clocks.setdefault(node_id, Clocks()).compare(self.agent.clock(), sent_at)
            end.send(("answer", number))
        elif kind == "message":
            if isinstance(what, messages.NodeJoined):
                if not self._bind(end):
                    return
            elif self._ends.get(end.node_id) is not end:
                return  # the node has opened another connection since
            self._step(Received(end.node_id, self._with_time(end, what)))
            if isinstance(what, messages.NodeJoined) and end.node_id in self.state.nodes:  # not refused
                self.known_generation = max(self.known_generation, what.generation)
                self.known_restarts = max(self.known_restarts, what.restarts_used)
        elif payload is FIN or payload is RESET:
            self._on_closed(end, payload)

    def _with_time(self, end: End, message: messages.FromNode) -> messages.FromNode:
        if (
            not isinstance(message, messages.FailureSeen | messages.NodeStopped)
            or not self.cluster.setup.engine.timestamps_messages
        ):
            return message
        clocks = self._clocks.get(end.node_id)
        if clocks is not None:
            sent_at = max(message.sent_at, self.agent.clock() - clocks.difference)
            message = msgspec.structs.replace(message, sent_at=sent_at)
        now_there = self.cluster.schedule.now + end.out.sink.host.offset
        self._clock_errors_s[message.generation] = max(
            self.clock_error_s(message.generation), now_there - message.sent_at
        )
        return message

    def _bind(self, end: End) -> bool:
        node_id = end.node_id
        old = self._ends.get(node_id)
        if (
            self._attempts.get(node_id, 0) > end.attempt
        ):  # the agent has abandoned this attempt; a handshake would show it
            end.abort()
            return False
        self._ends[node_id] = end
        self._attempts[node_id] = end.attempt
        is_new = node_id not in self._last_received_at
        self._last_received_at[node_id] = self.agent.clock()
        if old is not None and old is not end:
            old.abort()
        if is_new and node_id != self.agent.info.node_id:  # the node in this process has no lease
            self.agent.later(self.cluster.setup.terms.lease_s, self._check_lease_of, node_id)
        return True

    def _on_closed(self, end: End, how: Payload) -> None:
        end.close()
        if end in self._all_ends:
            self._all_ends.remove(end)
        node_id = end.node_id
        if not node_id or self._ends.get(node_id) is not end:
            return
        del self._ends[node_id]
        if how is FIN or self.cluster.setup.engine.reset_means_death:
            self._lose(node_id, "connection closed")

    def _check_lease_of(self, node_id: str) -> None:
        """Check the lease of a node. Pending input is read before: see ``Process.resume``."""
        received_at = self._last_received_at.get(node_id)
        if received_at is None or not self.is_open:
            return
        left_s = received_at + self.cluster.setup.terms.lease_s - self.agent.clock()
        if left_s > 1e-6:
            self.agent.later(left_s, self._check_lease_of, node_id)
            return
        end = self._ends.pop(node_id, None)
        if end is not None:
            end.abort()
        self._lose(node_id, f"silent for {self.cluster.setup.terms.lease_s:g} s")

    def on_resumed(self, seconds: float) -> None:
        """Extend leases after a suspension, as the real server does (``_engines/tcp/server.py``)."""
        if not self.cluster.setup.engine.reads_before_checking_leases:
            return
        now = self.agent.clock()
        if seconds > self.cluster.setup.terms.freeze_s:
            self._step(Resumed(seconds))
            seconds = float("inf")
        self._last_received_at = {node_id: min(now, at + seconds) for node_id, at in self._last_received_at.items()}

    def on_own_agent_left(self) -> None:
        """Remove the node in this process, which has no lease."""
        if self.is_open and self.agent.info.node_id in self._last_received_at:
            self._lose(self.agent.info.node_id, "left")

    def _lose(self, node_id: str, why: str) -> None:
        del self._last_received_at[node_id]
        self._clocks.pop(node_id, None)
        self.cluster.checks.on_disturbance()
        self._step(NodeLost(node_id, why))
        self._leave_if_done()

    # --- exit ---------------------------------------------------------------------------------------------------------

    @property
    def _has_others(self) -> bool:
        return bool(self._last_received_at.keys() - {self.agent.info.node_id})

    def must_stay(self) -> bool:
        """Whether other nodes need this coordinator: until the run has ended and they have received the verdict."""
        if isinstance(self.state.phase, Over):
            self._leave_later()
        return self._has_others

    def _leave_later(self) -> None:
        self.agent.later(_LINGER_S, self._leave)

    def _leave_if_done(self) -> None:
        if not self._has_others:
            self._leave()

    def _leave(self) -> None:
        if self.is_open and self.agent.has_left:
            self.agent.exit()

    def close(self) -> None:
        """Close every connection, as the kernel does when a process exits."""
        self._stop_listening()
        for end in self._all_ends:
            end.close()

    def vanish(self) -> None:
        self._stop_listening()

    def _stop_listening(self) -> None:
        self.is_open = False
        if self.agent.host.server is self:
            self.agent.host.server = None
