"""A random environment of the coordinator machine: nodes that join, work, fail, leave, are cut off, die and restart.

Links delay and lose messages, the coordinator may die and be replaced, and on request invalid events are mixed in. All
randomness comes from the caller's ``rng``, so a history is a function of its seed. ``RandomRun`` knows which workers
are alive and raises ``ExpectationBroken`` if a generation is formed while workers of an older one are alive;
``RunChecker`` checks every step as well.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import msgspec

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorMachine,
    CoordinatorState,
    RunSettings,
    Send,
)
from tenax._core.model import Assignment, Evidence, Failure, Outcome, Stopped, Verdict
from tenax._core.policy import (
    AnyDecision,
    BudgetPolicy,
    Change,
    Continue,
    GiveUp,
    History,
    Restart,
    RestartPolicy,
    Wait,
)
from tenax._core.record import record_of
from tenax.testing.run_invariants import RunChecker

from .policies import Pausing
from .random_node import ExpectationBroken

MAX_STEPS = 2_000  # a longer history is taken as endless
MAX_INVALID_EVENTS = 40
CALM_AFTER_S = 60.0  # no faults after this time, so every history ends
FENCE_S, LEASE_S = 4.3, 5.0

Step = tuple[AnyCoordinatorEvent, float, list[Send]]
MakeMachine = Callable[[RunSettings, RestartPolicy, CoordinatorState | None], CoordinatorMachine]


class Counting:
    """A policy that counts the restarts it granted."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.granted = 0

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        decision = self._policy.decide(failure, history)
        self.granted += not isinstance(decision, GiveUp)
        return decision

    def decide_change(self, change: Change, history: History) -> AnyDecision:
        decide: Callable[[Change, History], AnyDecision] | None = getattr(self._policy, "decide_change", None)
        decision = Continue(change.why) if decide is None else decide(change, history)
        # A restart for a join is granted before its generation has ended: see ``RandomRun._check_ledger``.
        self.granted += isinstance(decision, Restart | Wait)
        return decision


class Node:
    """One agent, as a coordinator sees it: ready -> running -> stopping -> ready ... -> done -> ended.

    A node that must stop its held workers is clearing until it is ready again.
    """

    def __init__(self, info: messages.NodeInfo, clock_ahead_s: float, *, opts_in: bool = False) -> None:
        self.info = info
        self.opts_in = opts_in  # its workers are held when their generation ends
        self.must_stop = False  # ... but not this time
        self.held: set[int] = set()  # local ranks
        self.survivors = 0  # in the current generation
        self.clock_ahead_s = clock_ahead_s
        self.phase = "ready"
        self.part: Assignment | None = None
        self.failures: list[Failure] = []
        self.is_draining = False
        self.is_up = False  # all its workers of this generation are running
        self.is_quiet = False  # it has sent NodeQuiet
        self.steps: tuple[int, float] | None = None  # the first step, and its time; None: not reported
        self.was_cut_off = False
        self.has_generation_ended = False
        self.is_refused = False
        self.is_alive = True
        self.link = 0  # number of the connection; 0: none yet
        self.is_linked = False
        self.received_until = 0.0  # messages of a link keep their order, in both directions
        self.sent_until = 0.0
        self.verdict: Verdict | None = None

    @property
    def node_id(self) -> str:
        return self.info.node_id

    @property
    def generation(self) -> int:
        return self.part.generation if self.part is not None else 0

    @property
    def is_working(self) -> bool:
        return self.is_alive and self.phase in ("running", "stopping")

    def joined(self) -> messages.NodeJoined:
        part = self.part
        return messages.NodeJoined(
            self.info,
            generation=self.generation,
            is_running=self.is_working,
            has_succeeded=self.phase == "done",
            group_rank=part.group_rank if part else -1,
            group_world_size=part.group_world_size if part else 0,
            restarts_used=part.restarts_used if part else 0,
            store=part.store if part else "",
        )


class RandomRun:
    """One run: call ``run``, then read ``steps``."""

    def __init__(
        self,
        rng: random.Random,
        *,
        invalid_events: bool = False,
        make_machine: MakeMachine = CoordinatorMachine,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._rng = rng
        self._has_invalid_events = invalid_events
        self._invalid_events_left = MAX_INVALID_EVENTS
        self._make_machine = make_machine
        min_nodes = rng.randint(1, 3)
        self.settings = RunSettings(
            run_id="run",
            min_nodes=min_nodes,
            max_nodes=min_nodes + rng.choice((0, 0, 1, 2)),
            max_restarts=rng.choice((0, 1, 3, 9)),
            join_timeout_s=rng.choice((20.0, 100.0)),
            last_call_s=rng.choice((0.0, 0.5, 5.0)),
            scale_up=rng.random() < 0.8,
            waiting_every_s=rng.choice((1.0, 10.0)),
            serving_node="n0" if rng.random() < 0.3 else "",
            on_hang=rng.choice(("off", "report", "report", "restart")),
            hang_after_s=rng.choice((0.0, 2.0)),
            stacks_timeout_s=3.0,
        )
        drawn = Pausing() if rng.random() < 0.3 else BudgetPolicy()
        self.policy = Counting(policy or drawn)
        self._decides_changes = hasattr(policy, "decide_change")
        self.machine = make_machine(self.settings, self.policy, None)
        self._checker = RunChecker(self.settings, decides_changes=self._decides_changes)
        self._granted_before = 0  # by earlier coordinators
        self._is_awaited = False  # a granted restart has not taken effect
        self._inherited = 0  # restarts that were reported to this coordinator
        self.steps: list[Step] = []
        self._opened_at = 0  # index of this coordinator's first step
        self.nodes: dict[str, Node] = {}
        self._excused: set[tuple[str, int]] = set()  # (node, generation) that need not be waited for
        self._now = 0.0
        self._port = 1024
        self._saved = 0  # the last step in a checkpoint
        self._pending: list[tuple[float, float, int, Callable[[], None]]] = []
        self._planned = 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Step the machine from its start until all nodes have received the verdict."""
        rng, settings = self._rng, self.settings
        self._step(run.Opened())
        for _ in range(settings.min_nodes + rng.choice((0, 0, 1, 2))):
            self._soon(self._start_node, 3.0)
        for _ in range(rng.choice((0, 0, 1, 3))):
            self._soon(self._start_node, 40.0)
        if rng.random() < 0.12:
            self._soon(lambda: self._step(run.CancelRequested("cancelled by an operator")), 40.0)
        if rng.random() < 0.15:
            self._soon(self._replace_coordinator, 40.0)
        for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
            self._soon(self._request_as_operator, 40.0)
        for _ in range(rng.choice((0, 0, 1, 3))):
            self._soon(self._hang, 40.0)
        while not self._is_finished():
            if len(self.steps) > MAX_STEPS:
                raise ExpectationBroken(f"no end after {MAX_STEPS} steps: {self.machine.state.phase.name}")
            if self._has_invalid_events and self._now > 2 * CALM_AFTER_S:
                break
            self._next()
        if self._has_invalid_events and self.machine.state.verdict is None:
            # It may wait for nodes that do not exist; but an operator can always end the run.
            self._step(run.CancelRequested("cancelled by an operator"))
        verdict = self.machine.state.verdict
        if verdict is None:
            raise ExpectationBroken(f"{self.machine.state.phase.name}: the coordinator waits for no event or deadline")
        return verdict

    def _is_finished(self) -> bool:
        if self.machine.state.next_deadline() is not None:
            return False
        if not self._pending:
            return True
        return isinstance(self.machine.state.phase, run.Over) and all(
            node.phase == "ended" for node in self.nodes.values() if node.is_alive
        )

    def _next(self) -> None:
        if self._has_invalid_events and self._invalid_events_left > 0 and self._rng.random() < 0.15:
            self._invalid_events_left -= 1
            self._step(self._invalid_event())
            return
        deadline = self.machine.state.next_deadline()
        if deadline is not None and not (self._pending and self._pending[0][0] < deadline):
            self._now = max(self._now, deadline)
            self._step(run.Tick())
            return
        at, _, _, call = heapq.heappop(self._pending)
        self._now = max(self._now, at)
        call()

    def _step(self, event: AnyCoordinatorEvent) -> None:
        if self._rng.random() < 0.1:
            self._round_trip_state()
        self._checker.expect(self.machine.state, event)
        step = self.machine.step(event, self._now)
        self.steps.append((event, self._now, step.sends))
        state = self.machine.state
        self._checker.check(state, event, step, self._now)
        if isinstance(event, run.Received) and isinstance(event.message, messages.NodeJoined):
            self._inherited = max(self._inherited, event.message.restarts_used)
            self._expect_again(event.message)
        if not self._has_invalid_events:
            self._check_ledger()
        if isinstance(event, run.NodeLost):
            self._excuse(event.node_id)
        for send in step.sends:
            if isinstance(send.event, events.GenerationFormed) and not self._has_invalid_events:
                self._check_no_older_workers(send.event.assignment.generation)
            for node_id in send.to:
                self._deliver(node_id, send.event)

    def _round_trip_state(self) -> None:
        """Replace the machine by one with its encoded and decoded state."""
        written = msgspec.json.encode(self.machine.state)
        state = msgspec.json.decode(written, type=CoordinatorState)
        assert state == self.machine.state
        self.machine = self._make_machine(self.settings, self.policy, state)

    def _soon(self, call: Callable[[], None], within: float = 0.4) -> None:
        self._at(self._now + self._rng.random() * within, call)

    def _at(self, at: float, call: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._pending, (at, self._rng.random(), self._planned, call))

    def _request_as_operator(self) -> None:
        """Request a restart or a drain."""
        if self._rng.random() < 0.5 or not self.nodes:
            self._step(run.RestartRequested("new data"))
        else:
            self._step(run.DrainRequested(self._rng.choice(list(self.nodes)), "maintenance"))

    def _hang(self) -> None:
        """Let all or most nodes become quiet, some of them only for a while."""
        for node in self.nodes.values():
            if node.phase == "running" and node.is_up and self._rng.random() < 0.9:
                self._soon(lambda node=node, at=node.generation: self._become_quiet(node, at), 1.0)  # type: ignore[misc]

    def _become_quiet(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive or node.is_quiet:
            return
        node.is_quiet = True
        self._send(node, messages.NodeQuiet(generation, self._clock(node), self._clock(node) - 1.0, "no step"))
        if self._rng.random() < 0.5:
            self._soon(lambda: self._become_busy(node, generation), 8.0)

    def _become_busy(self, node: Node, generation: int) -> None:
        if node.phase == "running" and node.generation == generation and node.is_alive and node.is_quiet:
            node.is_quiet = False
            self._send(node, messages.NodeBusy(generation))

    def _send_stacks(self, node: Node, number: int) -> None:
        assert node.part is not None
        first = node.part.first_global_rank
        locations = [
            messages.StackLocation((first + rank,), (f"train.py:{self._rng.randint(1, 2)} in load",), local_rank=rank)
            for rank in range(node.info.slots)
        ]
        self._send(node, messages.StacksTaken(node.generation, number, tuple(locations)))

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_no_older_workers(self, generation: int) -> None:
        for node in self.nodes.values():
            is_excused = (node.node_id, node.generation) in self._excused
            if node.is_working and node.generation < generation and not is_excused:
                raise ExpectationBroken(
                    f"generation {generation} is formed while {node.node_id} runs workers of {node.generation}"
                )

    def _check_ledger(self) -> None:
        granted = self.policy.granted - self._granted_before
        used = self.machine.state.restarts_used
        if self._decides_changes:
            granted = min(granted, used)  # a grant for a join is used, or replaced, after the generation
        # While held workers are stopped, a decision has not taken effect. It never does if the run ends meanwhile.
        phase = self.machine.state.phase
        is_awaited = isinstance(phase, run.Ending) and phase.is_decided
        self._is_awaited = is_awaited or (self._is_awaited and isinstance(phase, run.Over))
        if not granted - self._is_awaited <= used <= max(self._inherited, 0) + granted:
            raise ExpectationBroken(f"{used} restarts used, but {granted} were granted and {self._inherited} reported")

    def _excuse(self, node_id: str) -> None:
        if node_id in self.nodes:
            self._excused.add((node_id, self.nodes[node_id].generation))

    def _expect_again(self, joined: messages.NodeJoined) -> None:
        """Expect the coordinator to wait for a lost node that is back before the next generation forms."""
        state = self.machine.state
        if (
            joined.generation == state.generation
            and joined.store == state.store
            and isinstance(state.phase, run.Ending)
        ):
            self._excused.discard((joined.node.node_id, joined.generation))

    # --- links --------------------------------------------------------------------------------------------------------

    def _send(self, node: Node, message: messages.FromNode) -> None:
        """Send a message to the coordinator; it is lost if the link breaks."""
        if not node.is_linked:
            return
        link = node.link
        node.sent_until = max(node.sent_until + 1e-6, self._now + self._rng.random() * 0.2)

        def arrive() -> None:
            if node.link == link:
                self._step(run.Received(node.node_id, message))

        self._at(node.sent_until, arrive)

    def _deliver(self, node_id: str, event: events.FromCoordinator) -> None:
        node = self.nodes.get(node_id)
        if node is None or not node.is_linked:
            return
        link = node.link
        node.received_until = max(node.received_until + 1e-6, self._now + self._rng.random() * 0.2)

        def arrive() -> None:
            if node.link == link and node.is_alive:
                self._receive(node, event)

        self._at(node.received_until, arrive)

    def _connect(self, node: Node) -> None:
        if not node.is_alive or node.phase == "ended":
            return
        node.link += 1
        node.is_linked = True
        self._send(node, node.joined())
        if node.phase == "running" and node.is_up:
            self._send(node, self._running(node))
            now = self._clock(node)
            quiet, busy = (
                messages.NodeQuiet(node.generation, now, now - 1.0, "no step"),
                messages.NodeBusy(node.generation),
            )
            self._send(node, quiet if node.is_quiet else busy)
        elif node.phase == "stopping":
            for failure in node.failures[:1]:
                self._send(node, messages.FailureSeen(node.generation, failure, self._clock(node)))
            if node.is_draining:
                self._send(node, messages.NodeDraining(node.generation, 2.0, "its agent received SIGTERM"))
        elif node.phase == "ready":
            if node.failures or node.was_cut_off or node.held:
                self._send(node, self._stopped(node))
            self._send(node, self._ready(node))

    @staticmethod
    def _running(node: Node) -> messages.WorkersRunning:
        return messages.WorkersRunning(node.generation, tuple(range(100, 100 + node.info.slots)), node.survivors)

    def _send_steps(self, node: Node) -> None:
        """Report steps, as an agent does now and then and when its workers have ended."""
        if node.steps is None:
            return
        first, since = node.steps
        passed_s = self._now - since
        last = first + int(10 * passed_s)
        self._saved = max(self._saved, last - self._rng.randint(0, 30))
        began_at = since + node.clock_ahead_s
        progress = [messages.WorkerProgress(0, first, last, began_at, began_at + (last - first) / 10)]
        if node.info.slots > 1:
            progress.append(messages.WorkerProgress(1, -1, -1, 0.0, 0.0, "checkpoint"))
        self._send(node, messages.NodeProgress(node.generation, self._clock(node), tuple(progress)))

    def _ready(self, node: Node) -> messages.NodeReady:
        self._port += 1  # every store has its own address
        return messages.NodeReady(node.generation, node.node_id, self._port, held=len(node.held))

    def _clock(self, node: Node) -> float:
        return self._now + node.clock_ahead_s

    def _disconnect(self, node: Node, why: str, *, is_noticed: bool) -> None:
        if not node.is_linked:
            return
        node.link += 1
        node.is_linked = False
        link = node.link

        def lose() -> None:
            if node.link == link:
                self._step(run.NodeLost(node.node_id, f"silent for {LEASE_S:g} s"))

        if is_noticed:
            self._step(run.NodeLost(node.node_id, why))
        else:
            self._at(self._now + LEASE_S, lose)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _start_node(self, name: str = "") -> None:
        rng, count = self._rng, len(self.nodes)
        node_id = f"n{count}"
        info = messages.NodeInfo(
            node_id,
            host=f"host{rng.randint(0, 4)}",
            slots=rng.randint(1, 3),
            role=rng.choice(("default", "default", "reader")),
            rank=rng.randint(0, self.settings.max_nodes) if rng.random() < 0.1 else -1,
            name=name or (f"name{count}" if rng.random() < 0.3 else ""),
            order=f"rack-{rng.randint(0, 12)}" if rng.random() < 0.5 else "",
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes + (rng.random() < 0.02),
        )
        node = self.nodes[node_id] = Node(info, rng.choice((0.0, 1e6, -1e3)), opts_in=rng.random() < 0.4)
        self._connect(node)
        if rng.random() < 0.5:
            self._soon(lambda: self._inject_fault(node), 40.0)

    def _inject_fault(self, node: Node) -> None:
        """Let a node die, disconnect, be cut off, drain or announce that it will leave."""
        if not node.is_alive or node.phase == "ended" or self._now > CALM_AFTER_S:
            return
        rng = self._rng
        match rng.randint(0, 6):
            case 0:
                self._die(node)
            case 1:
                self._disconnect(node, "connection closed", is_noticed=True)
                self._soon(lambda: self._connect(node), 2.0)
            case 2:
                self._disconnect(node, "", is_noticed=False)
                self._soon(lambda: self._connect(node), 2.0)
            case 3:
                self._cut_off(node)
            case 4 | 5:
                self._drain(node)
            case 6:
                self._send(node, messages.NodeWillLeave(node.generation, "spot reclaim", 30.0))
        if node.info.name and rng.random() < 0.4:
            self._soon(lambda: self._start_node(node.info.name), 3.0)
        if rng.random() < 0.5:
            self._soon(lambda: self._inject_fault(node), 20.0)

    def _die(self, node: Node) -> None:
        node.is_alive = False
        self._disconnect(node, "connection closed", is_noticed=True)

    def _cut_off(self, node: Node) -> None:
        """Cut the link. The node fences itself in time; the coordinator declares it lost unless it is back soon."""
        self._disconnect(node, "", is_noticed=False)
        link = node.link
        generation = node.generation

        def fence() -> None:
            if node.link == link and node.is_working and node.generation == generation:
                node.was_cut_off = True
                self._stopped_all(node)

        self._at(self._now + FENCE_S, fence)
        self._at(self._now + self._rng.choice((1.0, FENCE_S + 0.1, LEASE_S + 1)), lambda: self._connect_if(node, link))

    def _connect_if(self, node: Node, link: int) -> None:
        if node.link == link:
            self._connect(node)

    def _drain(self, node: Node) -> None:
        if node.phase == "running":
            node.is_draining = node.must_stop = True
            self._send(node, messages.NodeDraining(node.generation, 2.0, "its agent received SIGTERM"))
            self._stop(node)
        elif node.phase in ("ready", "done"):
            self._leave(node)

    def _leave(self, node: Node) -> None:
        self._send(node, messages.NodeLeft("its agent received SIGTERM"))
        self._end(node)

    def _end(self, node: Node) -> None:
        """End the agent, and close its link after its last message."""
        node.phase = "ended"
        node.held = set()
        link = node.link

        def close() -> None:
            if node.link == link and node.is_linked:
                self._disconnect(node, "connection closed", is_noticed=True)

        self._at(node.sent_until + 0.01, close)

    def _receive(self, node: Node, event: events.FromCoordinator) -> None:
        match event:
            case events.GenerationFormed(part) if node.phase == "ready" and part.generation > node.generation:
                self._start_work(node, part)
            case events.GenerationEnded(generation, stops=stops) if generation == node.generation:
                node.has_generation_ended = True
                node.must_stop |= stops
                if node.phase == "running":
                    self._stop(node)
                elif node.phase == "ready" and stops and node.opts_in:
                    self._stop_held(node)
                elif node.phase == "done":
                    self._become_ready(node)
            case events.RunEnded(verdict):
                node.verdict = verdict
                self._stop_and_end(node)
            case events.StacksRequested(generation, number) if (
                generation == node.generation and node.phase == "running"
            ):
                if self._rng.random() < 0.8:
                    self._send_stacks(node, number)
            case events.LeaveRequested():
                self._drain(node)
            case events.JoinRefused():
                node.is_refused = True
                self._stop_and_end(node)

    def _stop_held(self, node: Node) -> None:
        """Stop the held workers; without any, the node is ready at once."""
        node.phase = "clearing"

        def stopped() -> None:
            if node.phase == "clearing" and node.is_alive:
                node.held = set()
                self._stopped_all(node)

        self._soon(stopped, self._rng.choice((0.1, 2.0)))

    def _lose_held(self, node: Node, generation: int) -> None:
        """Let a held worker exit."""
        if node.phase == "ready" and node.is_alive and node.generation == generation and node.held:
            node.held.pop()
            self._send(node, self._ready(node))

    def _stop_and_end(self, node: Node) -> None:
        node.must_stop = True
        if node.phase == "running":
            self._stop(node)
        elif node.phase in ("ready", "done"):
            self._end(node)

    def _start_work(self, node: Node, part: Assignment) -> None:
        rng = self._rng
        node.part = part
        node.phase = "running"
        node.survivors, node.held, node.must_stop = len(node.held), set(), False
        node.failures = []
        node.was_cut_off = node.has_generation_ended = False
        generation = part.generation
        is_calm = self._now > CALM_AFTER_S
        node.is_up, node.steps, node.is_quiet = False, None, False
        self._soon(lambda: self._report_running(node, generation))
        after = rng.choice((0.5, 3.0, 70.0)) * rng.random()
        if not is_calm and rng.random() < 0.25:
            self._at(self._now + after, lambda: self._fail(node, generation))
        else:
            self._at(self._now + after, lambda: self._succeed(node, generation))

    def _report_running(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        node.is_up = True
        self._send(node, self._running(node))
        if self._rng.random() < 0.5:
            node.steps = (self._saved, self._now)
            self._soon(lambda: self._send_steps_if_running(node, generation), 5.0)

    def _send_steps_if_running(self, node: Node, generation: int) -> None:
        if node.phase == "running" and node.generation == generation and node.is_alive:
            self._send_steps(node)

    def _succeed(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        self._send_steps(node)
        node.phase = "done"
        self._send(node, messages.NodeSucceeded(generation))
        if node.has_generation_ended:
            self._become_ready(node)

    def _fail(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        node.failures = [self._failure(node, self._rng.randrange(node.info.slots))]
        self._send(node, messages.FailureSeen(generation, node.failures[0], self._clock(node)))
        self._stop(node)

    def _failure(self, node: Node, local_rank: int) -> Failure:
        assert node.part is not None
        now = self._clock(node)
        kind = self._rng.choice(("", "RuntimeError", "ImportError", "RuntimeError"))
        evidence = Evidence(kind, f"{kind}: boom", raised_at=now - self._rng.random()) if kind else Evidence()
        rank = node.part.first_global_rank + local_rank
        return Failure(node.generation, local_rank, rank, 100 + rank, 1, now, evidence=evidence)

    def _stop(self, node: Node) -> None:
        node.phase = "stopping"
        generation = node.generation

        def stopped() -> None:
            if node.phase == "stopping" and node.generation == generation and node.is_alive:
                others = [
                    rank for rank in range(node.info.slots) if rank not in {each.local_rank for each in node.failures}
                ]
                if others and self._rng.random() < 0.15:
                    node.failures.append(self._failure(node, self._rng.choice(others)))
                if node.opts_in and not node.must_stop:
                    node.held = {rank for rank in others if self._rng.random() < 0.8}
                    node.held -= {each.local_rank for each in node.failures}
                self._stopped_all(node)

        self._soon(stopped, self._rng.choice((0.1, 2.0)))

    def _stopped(self, node: Node) -> messages.NodeStopped:
        assert node.part is not None
        failed = {failure.local_rank for failure in node.failures}
        first = node.part.first_global_rank
        others = [rank for rank in range(node.info.slots) if rank not in failed | node.held]
        stopped = [Stopped(rank, first + rank, 9, -15) for rank in others]
        held = tuple(first + rank for rank in sorted(node.held))
        now = self._clock(node)
        return messages.NodeStopped(node.generation, now, tuple(node.failures), tuple(stopped), node.was_cut_off, held)

    def _stopped_all(self, node: Node) -> None:
        """All workers of the node have exited."""
        self._send_steps(node)
        node.phase = "ready"
        self._send(node, self._stopped(node))
        if node.verdict is not None or node.is_refused:
            self._end(node)
        elif node.is_draining:
            self._leave(node)
        else:
            self._become_ready(node)

    def _become_ready(self, node: Node) -> None:
        node.phase = "ready"
        self._send(node, self._ready(node))
        if node.held and self._rng.random() < 0.2:
            generation = node.generation
            self._soon(lambda: self._lose_held(node, generation), 1.0)

    # --- another coordinator ------------------------------------------------------------------------------------------

    def _replace_coordinator(self) -> None:
        """Let the coordinator and all links die, and open a successor with a record, some knowledge or none."""
        state = self.machine.state
        if isinstance(state.phase, run.Over):
            return
        for node in self.nodes.values():
            self._disconnect(node, "", is_noticed=False)
            self._soon(lambda node=node: self._connect(node), 12.0)  # type: ignore[misc]
        dead_rank = -1
        if self.nodes and self._rng.random() < 0.3:
            victim = self._rng.choice(list(self.nodes.values()))
            victim.is_alive = False
            dead_rank = state.members.get(victim.node_id, -1)
        self._granted_before = self.policy.granted
        has_record = self._rng.random() < 0.5
        is_known = has_record or self._rng.random() < 0.5
        self._inherited = state.restarts_used if is_known else 0
        recover_s = self._rng.choice((5.0, 20.0) if has_record else (0.0, 5.0, 20.0))
        opened = run.Opened(recover_s, dead_rank, state.generation * is_known, self._inherited)
        if has_record:
            opened = self._elected(state, recover_s)
        if recover_s == 0.0:
            # The successor waits for no node: workers may be alive when it forms its first generation.
            self._excused |= {(node.node_id, node.generation) for node in self.nodes.values()}
        self._excused |= {(node.node_id, node.generation) for node in self.nodes.values() if not node.is_working}
        self._excuse_missing_nodes(recover_s)
        self.machine = self._make_machine(self.settings, self.policy, None)
        self._checker = RunChecker(self.settings, decides_changes=self._decides_changes)
        self._opened_at = len(self.steps)
        self._step(opened)
        if has_record:
            served_by = self._rng.choice([node.node_id for node in self.nodes.values() if not node.is_alive] or [""])
            self._soon(lambda: self._step(run.EarlierCoordinatorGone(served_by)), 12.0)

    def _elected(self, state: CoordinatorState, recover_s: float) -> run.Opened:
        """Return the opening event of a successor that has the record of all decisions."""
        return run.Opened(
            recover_s,
            generation=state.generation,
            restarts_used=state.restarts_used,
            store=state.store,
            record=record_of(state),
            return_s=recover_s + 3.0,
            alone_s=recover_s + 9.0,
        )

    def _excuse_missing_nodes(self, recover_s: float) -> None:
        """Do not require the successor to wait for nodes that are not back in time."""

        def excuse() -> None:
            for node in self.nodes.values():
                if not node.is_linked or node.sent_until > self._now:
                    self._excused.add((node.node_id, node.generation))

        self._at(self._now + recover_s - 1e-9, excuse)

    # --- invalid events -----------------------------------------------------------------------------------------------

    def _invalid_event(self) -> AnyCoordinatorEvent:
        """Return an event that is a duplicate, of another generation, of an unknown node, or wrong."""
        rng, state = self._rng, self.machine.state
        received = [event for event, _, _ in self.steps[self._opened_at :] if isinstance(event, run.Received)]
        if received and rng.random() < 0.5:
            return rng.choice(received)
        node_id = rng.choice([*self.nodes, f"unknown{self._invalid_events_left}"])
        generation = max(0, state.generation + rng.choice((-1, 0, 0, 1)))
        rank = rng.randint(0, 3)
        info = messages.NodeInfo(
            node_id, "host9", min_nodes=state.settings.min_nodes, max_nodes=state.settings.max_nodes
        )
        failure = Failure(generation, 0, rank, 9, 1, self._now)
        match rng.randint(0, 16):
            case 16:
                return run.Resumed(rng.choice((3.0, 60.0)))
            case 10:
                return run.RestartRequested("an invalid event")
            case 11:
                return run.DrainRequested(node_id, "an invalid event")
            case 12:
                return run.Received(node_id, messages.WorkersRunning(generation, (1, 2)))
            case 13:
                steps = messages.WorkerProgress(0, rank, rng.randint(-1, 99), self._now - 1e3, self._now + 1e3)
                return run.Received(node_id, messages.NodeProgress(generation, self._now, (steps,)))
            case 14:
                return run.Received(
                    node_id, messages.NodeQuiet(generation, self._now, self._now - 1e3, "an invalid event")
                )
            case 15:
                locations = (messages.StackLocation((rank,), why="an invalid event"),)
                taken = messages.StacksTaken(generation, rng.randint(1, 3), locations)
                return run.Received(node_id, rng.choice((taken, messages.NodeBusy(generation))))
            case 0:
                return run.NodeLost(node_id, "an invalid event")
            case 1:
                return run.Tick()
            case 2 if node_id not in self.nodes:
                is_running = rng.random() < 0.5
                joined = messages.NodeJoined(
                    info, generation, is_running, not is_running and rng.random() < 0.5, rank, 2
                )
                return run.Received(node_id, joined)
            case 3 | 4:
                return run.Received(node_id, messages.NodeReady(generation))
            case 5:
                return run.Received(node_id, messages.FailureSeen(generation, failure, self._now))
            case 6:
                return run.Received(node_id, messages.NodeStopped(generation, self._now, (failure,)))
            case 7:
                return run.Received(node_id, messages.NodeSucceeded(generation))
            case 8:
                return run.Received(node_id, messages.NodeDraining(generation, 1.0, "an invalid event"))
            case _:
                return run.Received(node_id, messages.NodeLeft("an invalid event", is_clear=rng.random() < 0.8))


def format_steps(steps: list[Step]) -> str:
    """Format a history for the message of a failed test."""
    return "\n".join(f"{now:9.4f} {event}\n            -> {sends}" for event, now, sends in steps)


OUTCOMES = {Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED, Outcome.BROKEN}  # outcomes that a coordinator decides
