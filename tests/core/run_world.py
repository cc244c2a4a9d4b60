"""Nodes that live with the coordinator machine: they come, work, fail, leave, are cut off, die and are started again;
their links delay, break and forget; the coordinator itself may die; and if asked for, somebody tells it lies.

Every choice is a throw of the dice that the caller gives, so a history is a function of its seed. The world knows which
workers live and complains when a generation is formed beside an older one; ``RunChecker`` watches as well.
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
    RunPhase,
    RunSettings,
    Send,
)
from tenax._core.model import Assignment, Evidence, Failure, Outcome, Stopped, Verdict
from tenax._core.policy import AnyDecision, BudgetPolicy, GiveUp, History, RestartPolicy
from tenax._core.record import record_of
from tenax.testing.run_invariants import RunChecker

from .policies import Pausing
from .world import WorldBroken

MAX_STEPS = 2_000  # a history that needs more has lost its way
MAX_LIES = 40
CALM_AFTER_S = 60.0  # from then on nothing bad happens any more, so every history ends
FENCE_S, LEASE_S = 4.3, 5.0

Step = tuple[AnyCoordinatorEvent, float, list[Send]]
MakeMachine = Callable[[RunSettings, RestartPolicy, CoordinatorState | None], CoordinatorMachine]


class Counting:
    """A policy that counts what it granted."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.granted = 0

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        decision = self._policy.decide(failure, history)
        self.granted += not isinstance(decision, GiveUp)
        return decision


class Node:
    """One agent, as far as a coordinator can tell: ready -> running -> stopping -> ready ... -> done -> ended."""

    def __init__(self, info: messages.NodeInfo, clock_ahead_s: float) -> None:
        self.info = info
        self.clock_ahead_s = clock_ahead_s
        self.phase = "ready"
        self.part: Assignment | None = None
        self.failures: list[Failure] = []
        self.is_draining = False
        self.is_up = False  # all its workers of this generation run
        self.is_quiet = False  # nothing moves here, and it has said so
        self.steps: tuple[int, float] | None = None  # where they began to count, and when; None: they do not
        self.was_cut_off = False
        self.has_generation_ended = False
        self.is_refused = False
        self.is_alive = True
        self.link = 0  # grows with every connection; 0: none yet
        self.is_linked = False
        self.heard_until = 0.0  # words on a link keep their order, in both directions
        self.said_until = 0.0
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


class RunWorld:
    """One run. ``play`` it, then read ``steps``."""

    def __init__(
        self, dice: random.Random, *, lies: bool = False, make_machine: MakeMachine = CoordinatorMachine
    ) -> None:
        self._dice = dice
        self._lies = lies
        self._lies_left = MAX_LIES
        self._make_machine = make_machine
        least = dice.randint(1, 3)
        self.settings = RunSettings(
            run_id="run",
            min_nodes=least,
            max_nodes=least + dice.choice((0, 0, 1, 2)),
            max_restarts=dice.choice((0, 1, 3, 9)),
            join_timeout_s=dice.choice((20.0, 100.0)),
            last_call_s=dice.choice((0.0, 0.5, 5.0)),
            scale_up=dice.random() < 0.8,
            waiting_every_s=dice.choice((1.0, 10.0)),
            serving_node="n0" if dice.random() < 0.3 else "",
            on_hang=dice.choice(("off", "report", "report", "restart")),
            hang_after_s=dice.choice((0.0, 2.0)),
            stacks_timeout_s=3.0,
        )
        self.policy = Counting(Pausing() if dice.random() < 0.3 else BudgetPolicy())
        self.machine = make_machine(self.settings, self.policy, None)
        self._checker = RunChecker(self.settings)
        self._granted_before = 0  # by the coordinators before this one
        self._inherited = 0  # restarts that this coordinator heard of
        self.steps: list[Step] = []
        self._opened_at = 0  # where the steps of this coordinator begin
        self.nodes: dict[str, Node] = {}
        self._lost: set[tuple[str, int]] = set()  # (node, generation) that the coordinator was told it had lost
        self._now = 0.0
        self._port = 1024
        self._saved = 0  # the last step that a checkpoint has
        self._pending: list[tuple[float, float, int, Callable[[], None]]] = []
        self._planned = 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def play(self) -> Verdict:
        """From the opening to the verdict, and until everybody has heard it."""
        dice, settings = self._dice, self.settings
        self._step(run.Opened())
        for _ in range(settings.min_nodes + dice.choice((0, 0, 1, 2))):
            self._soon(self._start_node, 3.0)
        for _ in range(dice.choice((0, 0, 1, 3))):
            self._soon(self._start_node, 40.0)
        if dice.random() < 0.12:
            self._soon(lambda: self._step(run.CancelRequested("an operator ended it")), 40.0)
        if dice.random() < 0.15:
            self._soon(self._replace_coordinator, 40.0)
        for _ in range(dice.choice((0, 0, 0, 0, 1, 2))):
            self._soon(self._want, 40.0)
        for _ in range(dice.choice((0, 0, 1, 3))):
            self._soon(self._hang, 40.0)
        while not self._is_finished():
            if len(self.steps) > MAX_STEPS:
                raise WorldBroken(f"no end after {MAX_STEPS} steps: {self.machine.state.phase.value}")
            if self._lies and self._now > 2 * CALM_AFTER_S:
                break
            self._next()
        if self._lies and self.machine.state.verdict is None:
            # Who was told of nodes that are not there may wait for them; but an operator can always end the run.
            self._step(run.CancelRequested("enough of that"))
        verdict = self.machine.state.verdict
        if verdict is None:
            raise WorldBroken(f"{self.machine.state.phase.value}: the coordinator waits for nothing")
        return verdict

    def _is_finished(self) -> bool:
        if self.machine.state.next_deadline() is not None:
            return False
        if not self._pending:
            return True
        return self.machine.state.phase is RunPhase.OVER and all(
            node.phase == "ended" for node in self.nodes.values() if node.is_alive
        )

    def _next(self) -> None:
        if self._lies and self._lies_left > 0 and self._dice.random() < 0.15:
            self._lies_left -= 1
            self._step(self._lie())
            return
        deadline = self.machine.state.next_deadline()
        if deadline is not None and not (self._pending and self._pending[0][0] < deadline):
            self._now = max(self._now, deadline)
            self._step(run.Tick())
            return
        at, _, _, deed = heapq.heappop(self._pending)
        self._now = max(self._now, at)
        deed()

    def _step(self, event: AnyCoordinatorEvent) -> None:
        if self._dice.random() < 0.1:
            self._write_down_and_read_back()
        says = self.machine.step(event, self._now)
        self.steps.append((event, self._now, says))
        state = self.machine.state
        self._checker.check(state, event, says, self._now)
        if isinstance(event, run.Received) and isinstance(event.message, messages.NodeJoined):
            self._inherited = max(self._inherited, event.message.restarts_used)
            self._note_return(event.message)
        if not self._lies:
            self._check_ledger()
        if isinstance(event, run.NodeLost):
            self._note_loss(event.node_id)
        for say in says:
            if isinstance(say.event, events.GenerationFormed) and not self._lies:
                self._check_alone(say.event.assignment.generation)
            for node_id in say.to:
                self._deliver(node_id, say.event)

    def _write_down_and_read_back(self) -> None:
        """The state is all that a coordinator remembers: another one goes on with it."""
        written = msgspec.json.encode(self.machine.state)
        state = msgspec.json.decode(written, type=CoordinatorState)
        assert state == self.machine.state
        self.machine = self._make_machine(self.settings, self.policy, state)

    def _soon(self, deed: Callable[[], None], within: float = 0.4) -> None:
        self._at(self._now + self._dice.random() * within, deed)

    def _at(self, at: float, deed: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._pending, (at, self._dice.random(), self._planned, deed))

    def _want(self) -> None:
        """An operator wants something."""
        if self._dice.random() < 0.5 or not self.nodes:
            self._step(run.RestartRequested("new data"))
        else:
            self._step(run.DrainRequested(self._dice.choice(list(self.nodes)), "maintenance"))

    def _hang(self) -> None:
        """Nothing moves any more on any node, for a while or for ever; or only on some of them."""
        for node in self.nodes.values():
            if node.phase == "running" and node.is_up and self._dice.random() < 0.9:
                self._soon(lambda node=node, at=node.generation: self._fall_silent(node, at), 1.0)  # type: ignore[misc]

    def _fall_silent(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive or node.is_quiet:
            return
        node.is_quiet = True
        self._tell(node, messages.NodeQuiet(generation, self._clock(node), self._clock(node) - 1.0, "no step"))
        if self._dice.random() < 0.5:
            self._soon(lambda: self._move_again(node, generation), 8.0)

    def _move_again(self, node: Node, generation: int) -> None:
        if node.phase == "running" and node.generation == generation and node.is_alive and node.is_quiet:
            node.is_quiet = False
            self._tell(node, messages.NodeBusy(generation))

    def _tell_stacks(self, node: Node, number: int) -> None:
        assert node.part is not None
        first = node.part.first_global_rank
        locations = [
            messages.StackLocation((first + rank,), (f"train.py:{self._dice.randint(1, 2)} in load",), local_rank=rank)
            for rank in range(node.info.slots)
        ]
        self._tell(node, messages.StacksTaken(node.generation, number, tuple(locations)))

    # --- the truth ----------------------------------------------------------------------------------------------------

    def _check_alone(self, generation: int) -> None:
        for node in self.nodes.values():
            is_excused = (node.node_id, node.generation) in self._lost
            if node.is_working and node.generation < generation and not is_excused:
                raise WorldBroken(f"generation {generation} is formed beside {node.node_id} in {node.generation}")

    def _check_ledger(self) -> None:
        granted = self.policy.granted - self._granted_before
        used = self.machine.state.restarts_used
        if not granted <= used <= max(self._inherited, 0) + granted:
            raise WorldBroken(f"{used} restarts used: {granted} were granted and {self._inherited} heard of")

    def _note_loss(self, node_id: str) -> None:
        if node_id in self.nodes:
            self._lost.add((node_id, self.nodes[node_id].generation))

    def _note_return(self, joined: messages.NodeJoined) -> None:
        """One that was thought to be lost, and is back before the others have gone on, must be waited for after all."""
        state = self.machine.state
        if joined.generation == state.generation and joined.store == state.store and state.phase is RunPhase.ENDING:
            self._lost.discard((joined.node.node_id, joined.generation))

    # --- links --------------------------------------------------------------------------------------------------------

    def _tell(self, node: Node, message: messages.FromNode) -> None:
        """On the way to the coordinator; lost with the link."""
        if not node.is_linked:
            return
        link = node.link
        node.said_until = max(node.said_until + 1e-6, self._now + self._dice.random() * 0.2)

        def arrive() -> None:
            if node.link == link:
                self._step(run.Received(node.node_id, message))

        self._at(node.said_until, arrive)

    def _deliver(self, node_id: str, event: events.FromCoordinator) -> None:
        node = self.nodes.get(node_id)
        if node is None or not node.is_linked:
            return
        link = node.link
        node.heard_until = max(node.heard_until + 1e-6, self._now + self._dice.random() * 0.2)

        def arrive() -> None:
            if node.link == link and node.is_alive:
                self._hear(node, event)

        self._at(node.heard_until, arrive)

    def _connect(self, node: Node) -> None:
        if not node.is_alive or node.phase == "ended":
            return
        node.link += 1
        node.is_linked = True
        self._tell(node, node.joined())
        if node.phase == "running" and node.is_up:
            self._tell(node, self._running(node))
            now = self._clock(node)
            quiet, busy = (
                messages.NodeQuiet(node.generation, now, now - 1.0, "no step"),
                messages.NodeBusy(node.generation),
            )
            self._tell(node, quiet if node.is_quiet else busy)
        elif node.phase == "stopping":
            for failure in node.failures[:1]:
                self._tell(node, messages.FailureSeen(node.generation, failure, self._clock(node)))
            if node.is_draining:
                self._tell(node, messages.NodeDraining(node.generation, 2.0, "asked to stop"))
        elif node.phase == "ready":
            if node.failures or node.was_cut_off:
                self._tell(node, self._stopped(node))
            self._tell(node, self._ready(node))

    @staticmethod
    def _running(node: Node) -> messages.WorkersRunning:
        return messages.WorkersRunning(node.generation, tuple(range(100, 100 + node.info.slots)))

    def _tell_steps(self, node: Node) -> None:
        """As the agent does when its workers have ended, and now and then before."""
        if node.steps is None:
            return
        first, since = node.steps
        passed_s = self._now - since
        last = first + int(10 * passed_s)
        self._saved = max(self._saved, last - self._dice.randint(0, 30))
        began_at = since + node.clock_ahead_s
        said = [messages.WorkerProgress(0, first, last, began_at, began_at + (last - first) / 10)]
        if node.info.slots > 1:
            said.append(messages.WorkerProgress(1, -1, -1, 0.0, 0.0, "checkpoint"))
        self._tell(node, messages.NodeProgress(node.generation, self._clock(node), tuple(said)))

    def _ready(self, node: Node) -> messages.NodeReady:
        self._port += 1  # every store has a place of its own
        return messages.NodeReady(node.generation, node.node_id, self._port)

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
                self._step(run.NodeLost(node.node_id, f"it was silent for {LEASE_S:g} s"))

        if is_noticed:
            self._step(run.NodeLost(node.node_id, why))
        else:
            self._at(self._now + LEASE_S, lose)

    # --- the life of a node -------------------------------------------------------------------------------------------

    def _start_node(self, name: str = "") -> None:
        dice, count = self._dice, len(self.nodes)
        node_id = f"n{count}"
        info = messages.NodeInfo(
            node_id,
            host=f"host{dice.randint(0, 4)}",
            slots=dice.randint(1, 3),
            role=dice.choice(("default", "default", "reader")),
            rank=dice.randint(0, self.settings.max_nodes) if dice.random() < 0.1 else -1,
            name=name or (f"name{count}" if dice.random() < 0.3 else ""),
            order=f"rack-{dice.randint(0, 12)}" if dice.random() < 0.5 else "",
            min_nodes=self.settings.min_nodes,
            max_nodes=self.settings.max_nodes + (dice.random() < 0.02),
        )
        node = self.nodes[node_id] = Node(info, dice.choice((0.0, 1e6, -1e3)))
        self._connect(node)
        if dice.random() < 0.5:
            self._soon(lambda: self._trouble(node), 40.0)

    def _trouble(self, node: Node) -> None:
        """What befalls a node."""
        if not node.is_alive or node.phase == "ended" or self._now > CALM_AFTER_S:
            return
        dice = self._dice
        match dice.randint(0, 6):
            case 0:
                self._die(node)
            case 1:
                self._disconnect(node, "its connection was closed", is_noticed=True)
                self._soon(lambda: self._connect(node), 2.0)
            case 2:
                self._disconnect(node, "", is_noticed=False)
                self._soon(lambda: self._connect(node), 2.0)
            case 3:
                self._cut_off(node)
            case 4 | 5:
                self._drain(node)
            case 6:
                self._tell(node, messages.NodeWillLeave(node.generation, "spot reclaim", 30.0))
        if node.info.name and dice.random() < 0.4:
            self._soon(lambda: self._start_node(node.info.name), 3.0)
        if dice.random() < 0.5:
            self._soon(lambda: self._trouble(node), 20.0)

    def _die(self, node: Node) -> None:
        node.is_alive = False
        self._disconnect(node, "its connection was closed", is_noticed=True)

    def _cut_off(self, node: Node) -> None:
        """Its link is silent. It fences itself in time; if it is not back soon the coordinator declares it lost."""
        self._disconnect(node, "", is_noticed=False)
        link = node.link
        generation = node.generation

        def fence() -> None:
            if node.link == link and node.is_working and node.generation == generation:
                node.was_cut_off = True
                self._stopped_all(node)

        self._at(self._now + FENCE_S, fence)
        self._at(self._now + self._dice.choice((1.0, FENCE_S + 0.1, LEASE_S + 1)), lambda: self._connect_if(node, link))

    def _connect_if(self, node: Node, link: int) -> None:
        if node.link == link:
            self._connect(node)

    def _drain(self, node: Node) -> None:
        if node.phase == "running":
            node.is_draining = True
            self._tell(node, messages.NodeDraining(node.generation, 2.0, "asked to stop"))
            self._stop(node)
        elif node.phase in ("ready", "done"):
            self._leave(node)

    def _leave(self, node: Node) -> None:
        self._tell(node, messages.NodeLeft("asked to stop"))
        self._end(node)

    def _end(self, node: Node) -> None:
        """Its agent ends, and its link closes after its last words."""
        node.phase = "ended"
        link = node.link

        def close() -> None:
            if node.link == link and node.is_linked:
                self._disconnect(node, "its connection was closed", is_noticed=True)

        self._at(node.said_until + 0.01, close)

    def _hear(self, node: Node, event: events.FromCoordinator) -> None:
        match event:
            case events.GenerationFormed(part) if node.phase == "ready" and part.generation > node.generation:
                self._start_work(node, part)
            case events.GenerationEnded(generation) if generation == node.generation:
                node.has_generation_ended = True
                if node.phase == "running":
                    self._stop(node)
                elif node.phase == "done":
                    self._be_ready(node)
            case events.RunEnded(verdict):
                node.verdict = verdict
                self._stop_for_good(node)
            case events.StacksRequested(generation, number) if (
                generation == node.generation and node.phase == "running"
            ):
                if self._dice.random() < 0.8:
                    self._tell_stacks(node, number)
            case events.LeaveRequested():
                self._drain(node)
            case events.JoinRefused():
                node.is_refused = True
                self._stop_for_good(node)

    def _stop_for_good(self, node: Node) -> None:
        if node.phase == "running":
            self._stop(node)
        elif node.phase in ("ready", "done"):
            self._end(node)

    def _start_work(self, node: Node, part: Assignment) -> None:
        dice = self._dice
        node.part = part
        node.phase = "running"
        node.failures = []
        node.was_cut_off = node.has_generation_ended = False
        generation = part.generation
        is_calm = self._now > CALM_AFTER_S
        node.is_up, node.steps, node.is_quiet = False, None, False
        self._soon(lambda: self._come_up(node, generation))
        after = dice.choice((0.5, 3.0, 70.0)) * dice.random()
        if not is_calm and dice.random() < 0.25:
            self._at(self._now + after, lambda: self._fail(node, generation))
        else:
            self._at(self._now + after, lambda: self._succeed(node, generation))

    def _come_up(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        node.is_up = True
        self._tell(node, self._running(node))
        if self._dice.random() < 0.5:
            node.steps = (self._saved, self._now)
            self._soon(lambda: self._say_steps(node, generation), 5.0)

    def _say_steps(self, node: Node, generation: int) -> None:
        if node.phase == "running" and node.generation == generation and node.is_alive:
            self._tell_steps(node)

    def _succeed(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        self._tell_steps(node)
        node.phase = "done"
        self._tell(node, messages.NodeSucceeded(generation))
        if node.has_generation_ended:
            self._be_ready(node)

    def _fail(self, node: Node, generation: int) -> None:
        if node.phase != "running" or node.generation != generation or not node.is_alive:
            return
        node.failures = [self._failure(node, self._dice.randrange(node.info.slots))]
        self._tell(node, messages.FailureSeen(generation, node.failures[0], self._clock(node)))
        self._stop(node)

    def _failure(self, node: Node, local_rank: int) -> Failure:
        assert node.part is not None
        now = self._clock(node)
        kind = self._dice.choice(("", "RuntimeError", "ImportError", "RuntimeError"))
        evidence = Evidence(kind, f"{kind}: boom", raised_at=now - self._dice.random()) if kind else Evidence()
        rank = node.part.first_global_rank + local_rank
        return Failure(node.generation, local_rank, rank, 100 + rank, 1, now, evidence=evidence)

    def _stop(self, node: Node) -> None:
        node.phase = "stopping"
        generation = node.generation

        def stopped() -> None:
            if node.phase == "stopping" and node.generation == generation and node.is_alive:
                others = [rank for rank in range(node.info.slots) if rank not in {f.local_rank for f in node.failures}]
                if others and self._dice.random() < 0.15:
                    node.failures.append(self._failure(node, self._dice.choice(others)))
                self._stopped_all(node)

        self._soon(stopped, self._dice.choice((0.1, 2.0)))

    def _stopped(self, node: Node) -> messages.NodeStopped:
        assert node.part is not None
        failed = {failure.local_rank for failure in node.failures}
        first = node.part.first_global_rank
        stopped = [Stopped(rank, first + rank, 9, -15) for rank in range(node.info.slots) if rank not in failed]
        now = self._clock(node)
        return messages.NodeStopped(node.generation, now, tuple(node.failures), tuple(stopped), node.was_cut_off)

    def _stopped_all(self, node: Node) -> None:
        """No worker lives here any more."""
        self._tell_steps(node)
        node.phase = "ready"
        self._tell(node, self._stopped(node))
        if node.verdict is not None or node.is_refused:
            self._end(node)
        elif node.is_draining:
            self._leave(node)
        else:
            self._be_ready(node)

    def _be_ready(self, node: Node) -> None:
        node.phase = "ready"
        self._tell(node, self._ready(node))

    # --- another coordinator ------------------------------------------------------------------------------------------

    def _replace_coordinator(self) -> None:
        """It dies, and with it all links; a new one is opened that knows little or nothing."""
        state = self.machine.state
        if state.phase is RunPhase.OVER:
            return
        for node in self.nodes.values():
            self._disconnect(node, "", is_noticed=False)
            self._soon(lambda node=node: self._connect(node), 12.0)  # type: ignore[misc]
        dead_rank = -1
        if self.nodes and self._dice.random() < 0.3:
            victim = self._dice.choice(list(self.nodes.values()))
            victim.is_alive = False
            dead_rank = state.members.get(victim.node_id, -1)
        self._granted_before = self.policy.granted
        has_record = self._dice.random() < 0.5
        knows = has_record or self._dice.random() < 0.5
        self._inherited = state.restarts_used if knows else 0
        recover_s = self._dice.choice((5.0, 20.0) if has_record else (0.0, 5.0, 20.0))
        opened = run.Opened(recover_s, dead_rank, state.generation * knows, self._inherited)
        if has_record:
            opened = self._elected(state, recover_s)
        if recover_s == 0.0:
            # Nobody waits for the nodes of the past: they may be at work when the first generation is formed.
            self._lost |= {(node.node_id, node.generation) for node in self.nodes.values()}
        self._lost |= {(node.node_id, node.generation) for node in self.nodes.values() if not node.is_working}
        self._forgive_the_missing(recover_s)
        self.machine = self._make_machine(self.settings, self.policy, None)
        self._checker = RunChecker(self.settings)
        self._opened_at = len(self.steps)
        self._step(opened)
        if has_record:
            served_by = self._dice.choice([node.node_id for node in self.nodes.values() if not node.is_alive] or [""])
            self._soon(lambda: self._step(run.EarlierCoordinatorGone(served_by)), 12.0)

    def _elected(self, state: CoordinatorState, recover_s: float) -> run.Opened:
        """A successor that knows whatever was decided."""
        return run.Opened(
            recover_s,
            generation=state.generation,
            restarts_used=state.restarts_used,
            store=state.store,
            record=record_of(state),
            return_s=recover_s + 3.0,
            alone_s=recover_s + 9.0,
        )

    def _forgive_the_missing(self, recover_s: float) -> None:
        """Who is not back in time cannot be waited for."""

        def forgive() -> None:
            for node in self.nodes.values():
                if not node.is_linked or node.said_until > self._now:
                    self._lost.add((node.node_id, node.generation))

        self._at(self._now + recover_s - 1e-9, forgive)

    # --- lies ---------------------------------------------------------------------------------------------------------

    def _lie(self) -> AnyCoordinatorEvent:
        """A word that was said before, of another generation, of a stranger, or just wrong."""
        dice, state = self._dice, self.machine.state
        heard = [event for event, _, _ in self.steps[self._opened_at :] if isinstance(event, run.Received)]
        if heard and dice.random() < 0.5:
            return dice.choice(heard)
        node_id = dice.choice([*self.nodes, f"stranger{self._lies_left}"])
        generation = max(0, state.generation + dice.choice((-1, 0, 0, 1)))
        rank = dice.randint(0, 3)
        info = messages.NodeInfo(
            node_id, "host9", min_nodes=state.settings.min_nodes, max_nodes=state.settings.max_nodes
        )
        failure = Failure(generation, 0, rank, 9, 1, self._now)
        match dice.randint(0, 16):
            case 16:
                return run.Resumed(dice.choice((3.0, 60.0)))
            case 10:
                return run.RestartRequested("a whim")
            case 11:
                return run.DrainRequested(node_id, "a whim")
            case 12:
                return run.Received(node_id, messages.WorkersRunning(generation, (1, 2)))
            case 13:
                steps = messages.WorkerProgress(0, rank, dice.randint(-1, 99), self._now - 1e3, self._now + 1e3)
                return run.Received(node_id, messages.NodeProgress(generation, self._now, (steps,)))
            case 14:
                return run.Received(node_id, messages.NodeQuiet(generation, self._now, self._now - 1e3, "a lie"))
            case 15:
                locations = (messages.StackLocation((rank,), why="a lie"),)
                taken = messages.StacksTaken(generation, dice.randint(1, 3), locations)
                return run.Received(node_id, dice.choice((taken, messages.NodeBusy(generation))))
            case 0:
                return run.NodeLost(node_id, "somebody said so")
            case 1:
                return run.Tick()
            case 2 if node_id not in self.nodes:
                is_running = dice.random() < 0.5
                joined = messages.NodeJoined(
                    info, generation, is_running, not is_running and dice.random() < 0.5, rank, 2
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
                return run.Received(node_id, messages.NodeDraining(generation, 1.0, "a lie"))
            case _:
                return run.Received(node_id, messages.NodeLeft("a lie", is_clear=dice.random() < 0.8))


def tell(steps: list[Step]) -> str:
    """The story so far, for a person who must find out what went wrong."""
    return "\n".join(f"{now:9.4f} {event}\n            -> {says}" for event, now, says in steps)


OUTCOMES = {Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED, Outcome.BROKEN}  # what a coordinator can decide
