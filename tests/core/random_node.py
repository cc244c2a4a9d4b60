"""A random environment of the agent machine: a node that executes its commands, and a coordinator that answers it.

Delays and failures are random; on request, invalid events are mixed in. All randomness comes from the caller's ``rng``,
so a history is a function of its seed. ``RandomNode`` knows which processes are alive and raises ``ExpectationBroken``
if the machine contradicts it; ``InvariantChecker`` checks every step as well.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from tenax._core import commands as command_types
from tenax._core import events, messages
from tenax._core.agent import SIGINT, SIGKILL, SIGTERM, AgentMachine, Phase
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.testing.agent_invariants import InvariantChecker

SIGHUP = 1
MAX_STEPS = 500  # a longer history is taken as endless
MAX_INVALID_EVENTS = 60  # else they could keep the run from ending
MAX_GENERATIONS = 4

Step = tuple[AnyEvent, float, list[AnyCommand]]


class ExpectationBroken(AssertionError):
    """The machine contradicted the state of the processes, or did not end the run."""


class RandomNode:
    """One run of one node: call ``run``, then read ``steps``."""

    def __init__(
        self,
        rng: random.Random,
        *,
        invalid_events: bool = False,
        make_machine: Callable[[AgentSettings], AgentMachine] = AgentMachine,
    ) -> None:
        self._rng = rng
        self._has_invalid_events = invalid_events
        self._invalid_events_left = MAX_INVALID_EVENTS
        self.settings = AgentSettings(
            run_id="run",
            role="trainer",
            local_world_size=rng.randint(1, 3),
            max_restarts=rng.randint(0, 2),
            grace_s=rng.choice((0.0, 0.5, 3.0)),
            abandon_s=rng.choice((0.2, 3.0)),
            examine_s=rng.choice((0.0, 0.3, 3.0)),
        )
        self.machine = make_machine(self.settings)
        self._checker = InvariantChecker(self.machine.state)
        self.steps: list[Step] = []
        self._now = 0.0
        # (when, random order of events of the same time, serial number, event)
        self._pending: list[tuple[float, float, int, AnyEvent]] = []
        self._planned = 0
        # The real state of the node.
        self._alive: set[int] = set()  # workers
        self._pids: dict[int, int] = {}
        self._leftovers = False  # workers left processes behind
        self._was_signalled = False  # workers were sent a stop signal
        self._started: set[int] = set()  # the machine has received WorkerStarted
        self._overdue: set[int] = set()  # a scope has expired
        self._dumped: set[int] = set()  # their stacks were requested
        self._failed_before_stop: set[int] = set()
        self._all_succeeded = False
        self._was_stop_requested = False
        # Survivors.
        self._opts_in = rng.random() < 0.4
        self._opted_in: set[int] = set()
        self._held: set[int] = set()  # acknowledged the end of their generation
        self._spared: set[int] = set()  # stay alive when the node is cleared
        self._cut_off: set[int] = set()  # opted out when they had been spared: the next ClearNode kills them
        self._stopped_alone: set[int] = set()
        self._died_held: set[int] = set()
        self._survived: set[tuple[int, int]] = set()  # (generation, local rank) whose process continued in a later one
        # The coordinator.
        self._formed = 0
        self._started_last = 0
        self._ready_after = -1  # the generation after which the node was ready
        self._is_stopping_held = False  # it forms no generation before the node has no held workers
        self._failed_in: list[int] = []  # generations with failures of this node
        self._generations = 0
        self._restarts_used = 0
        self._ended: Verdict | None = None  # the first verdict that it sent
        self._is_over = False
        self._clock = rng.choice((0.0, 1e6, -1e3))  # how far its clock is ahead of the node's

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Step the machine from the request to the verdict, and with some late events after it."""
        rng = self._rng
        self._soon(events.RunRequested())
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 3)):
                signal = events.SignalReceived(rng.choice((SIGTERM, SIGINT, SIGHUP)), rng.choice((None, None, 0.1)))
                self._soon(signal, rng.choice((0.5, 5.0)))
        if rng.random() < 0.05:
            self._soon(events.LeaveRequested("maintenance"), 5.0)
        if rng.random() < 0.05:
            self._soon(events.KeeperLost("it was killed"), 5.0)
        if rng.random() < 0.1:
            self._soon(events.NoticeReceived("spot reclaim", rng.choice((None, 120.0))), 3.0)
        state = self.machine.state
        while state.phase is not Phase.ENDED:
            if len(self.steps) > MAX_STEPS:
                raise ExpectationBroken(f"no verdict after {MAX_STEPS} steps; {state.phase.value}, {state.deadlines}")
            self._step(self._next())
        for event in self._late_events():
            self._step(event)
        assert state.verdict is not None
        return state.verdict

    def _next(self) -> AnyEvent:
        if self._has_invalid_events and self._invalid_events_left > 0 and self._rng.random() < 0.25:
            self._invalid_events_left -= 1
            return self._invalid_event()
        deadline = self.machine.state.next_deadline()
        late = self._rng.random() < 0.1  # a busy loop may handle the next event before a due deadline
        if deadline is not None and not (self._pending and (late or self._pending[0][0] < deadline)):
            self._now = max(self._now, deadline)
            return events.Tick()
        while self._pending:
            at, _, _, event = heapq.heappop(self._pending)
            self._now = max(self._now, at)
            if isinstance(event, events.NodeCleared):
                event = self._cleared(event)
            if self._apply(event):
                return event
        if deadline is not None:
            return events.Tick()
        raise ExpectationBroken(f"{self.machine.state.phase.value}: the machine waits for no event or deadline")

    def _apply(self, event: AnyEvent) -> bool:
        """Update the state of the processes; return False if the event cannot happen, because the worker is dead."""
        is_current = getattr(event, "generation", None) == self.machine.state.generation
        if isinstance(event, events.WorkerExited | events.WorkerStartFailed):
            if is_current:
                if event.local_rank not in self._alive:
                    return False
                self._exit(event)
            return (event.generation, event.local_rank) not in self._survived
        if isinstance(event, events.WorkerOptedIn | events.WorkerOptedOut | events.WorkerHeld) and is_current:
            return self._apply_to_survivor(event)
        if isinstance(event, events.WorkerStarted) and is_current:
            self._started.add(event.local_rank)
        elif isinstance(event, events.SignalReceived | events.LeaveRequested):
            self._was_stop_requested = True
        return True

    def _exit(self, event: events.WorkerExited | events.WorkerStartFailed) -> None:
        rank = event.local_rank
        self._alive.remove(rank)
        is_failure = bool(event.exit_code) or isinstance(event, events.WorkerStartFailed) or bool(event.fault)
        self._all_succeeded &= not is_failure
        if rank in self._held:
            self._died_held.add(rank)
            is_killed = self._was_signalled or rank in self._cut_off
            self._leftovers |= not is_killed and self._rng.random() < 0.3
        elif is_failure and not self._was_signalled and rank not in self._stopped_alone:
            self._failed_before_stop.add(rank)

    def _apply_to_survivor(self, event: events.WorkerOptedIn | events.WorkerOptedOut | events.WorkerHeld) -> bool:
        rank = event.local_rank
        if rank not in self._alive or (rank not in self._opted_in and not isinstance(event, events.WorkerOptedIn)):
            return False
        if isinstance(event, events.WorkerOptedIn):
            self._opted_in.add(rank)
        elif isinstance(event, events.WorkerOptedOut):
            self._opted_in.discard(rank)
            if rank in self._spared:
                self._cut_off.add(rank)
        elif not self._was_signalled and rank not in self._stopped_alone:
            self._held.add(rank)
            self._forget_exits(event.generation, rank)
            if self._rng.random() < 0.3:
                self._soon(self._own_exit(event.generation, rank), self._rng.choice((0.4, 2.0)))
            if self._rng.random() < 0.1:
                self._soon(events.WorkerOptedOut(event.generation, rank, "connection closed"), 2.0)
        return True

    def _forget_exits(self, generation: int, rank: int) -> None:
        """Remove the planned exits of a worker: a held one runs nothing that could end it."""
        self._pending = [
            each
            for each in self._pending
            if not (
                isinstance(each[-1], events.WorkerExited)
                and (each[-1].generation, each[-1].local_rank) == (generation, rank)
            )
        ]
        heapq.heapify(self._pending)

    def _cleared(self, planned: events.NodeCleared) -> events.NodeCleared:
        """Return the reply with the workers that are held now, or the planned one, which was sent earlier."""
        is_true = self._alive <= self._spared and not self._leftovers
        if is_true and planned.generation == self.machine.state.generation and self._rng.random() < 0.5:
            return events.NodeCleared(planned.generation, tuple(sorted(self._alive)))
        return planned

    def _step(self, event: AnyEvent) -> None:
        phase, generation = self.machine.state.phase, self.machine.state.generation
        if isinstance(event, events.RunEnded) and self._ended is None and self.machine.state.decided is None:
            self._ended = event.verdict
        self._checker.expect(self.machine.state, event)
        commands = self.machine.step(event, self._now)
        self.steps.append((event, self._now, commands))
        self._checker.check(self.machine.state, event, commands)
        if phase is Phase.RUNNING and getattr(event, "generation", generation) == generation:
            self._check_reaction(event, commands)
        is_current = phase is not Phase.ENDED and getattr(event, "generation", generation) == generation
        must_stop = is_current and self._must_stop_held(event)
        for command in commands:
            self._execute(command)
        if must_stop and not self._was_signalled:
            raise ExpectationBroken(f"{event}, but the held workers {self._alive} were not stopped")

    def _must_stop_held(self, event: AnyEvent) -> bool:
        """Whether workers are held that must be stopped because of this event."""
        if self._has_invalid_events or not self._held & self._alive or self._was_signalled:
            return False
        if isinstance(event, events.GenerationEnded):
            return event.stops
        ends = events.RunEnded | events.JoinRefused | events.Fenced | events.SignalReceived | events.LeaveRequested
        return isinstance(event, ends)

    def _check_reaction(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Check that the machine reacts at once to a fence, an expired scope and an end."""
        has_killed = any(isinstance(command, command_types.KillNode) for command in commands)
        if isinstance(event, events.Fenced) and not has_killed:
            raise ExpectationBroken("fenced, but the workers were not killed")
        if isinstance(event, events.GenerationEnded) and event.is_late and not has_killed:
            raise ExpectationBroken("the end arrived late, but the workers were not killed")
        self._dumped.update(command.local_rank for command in commands if isinstance(command, command_types.DumpStacks))
        if (
            isinstance(event, events.ScopeExpired)
            and self._is_first_expiry(event)
            and not self._dumped >= self._running()
        ):
            raise ExpectationBroken("a scope has expired, but not all stacks were requested")
        has_held = any(isinstance(command, command_types.HoldWorkers) for command in commands)
        if has_held and isinstance(event, events.GenerationEnded) and event.stops:
            raise ExpectationBroken("the workers were to be stopped, but are to be held")
        is_end = isinstance(event, events.GenerationEnded | events.RunEnded | events.JoinRefused)
        if is_end and self.machine.state.phase is Phase.RUNNING:
            raise ExpectationBroken(f"continues after {event}")

    def _running(self) -> set[int]:
        return self._alive & self._started

    def _is_first_expiry(self, event: events.ScopeExpired) -> bool:
        if event.signal == 0 or event.local_rank in self._overdue or event.local_rank not in self._started:
            return False
        self._overdue.add(event.local_rank)
        return not self._has_invalid_events and event.local_rank in self._alive

    def _soon(self, event: AnyEvent, within: float = 0.4) -> float:
        return self._plan(self._now + self._rng.random() * within, event)

    def _plan(self, at: float, event: AnyEvent) -> float:
        self._planned += 1
        heapq.heappush(self._pending, (at, self._rng.random(), self._planned, event))
        return at

    # --- commands -----------------------------------------------------------------------------------------------------

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case command_types.SendMessage(message):
                self._receive(message)
            case command_types.StartWorkers(assignment=assignment, survivors=survivors):
                self._start(assignment.generation, set(survivors))
            case command_types.ExamineFailure(generation=generation, local_rank=local_rank):
                if self._rng.random() < 0.85:
                    self._soon(events.FailureExamined(generation, local_rank, self._evidence()), 1.0)
            case command_types.SignalWorkers(generation=generation, signal=signal):
                self._was_signalled = True
                self._spared = set()
                for rank in self._alive:
                    if self._rng.random() < 0.7:
                        self._soon(
                            events.WorkerExited(generation, rank, self._rng.choice((-signal, -signal, 0, 1, 143)))
                        )
            case command_types.DumpStacks(generation=generation, local_rank=local_rank):
                if self._rng.random() < 0.3:
                    self._soon(events.StacksRefused(generation, local_rank, "it does not catch the signal"))
            case command_types.ReadStacks(generation=generation, number=number, local_ranks=local_ranks):
                if not set(local_ranks) <= self._running() and not self._has_invalid_events:
                    raise ExpectationBroken(f"stacks of {local_ranks} are read, but {self._running()} are running")
                if self._rng.random() < 0.8:
                    read = tuple(events.WorkerStacks(rank, why="it wrote nothing") for rank in local_ranks)
                    self._soon(events.StacksRead(generation, number, read), 1.0)
            case command_types.EndWorker(generation=generation, local_rank=local_rank, signal=signal):
                if self._rng.random() < 0.7:
                    code = self._rng.choice((-signal, -signal, 0, 1, 143))
                    self._soon(events.WorkerExited(generation, local_rank, code, before_stop=self._rng.random() < 0.1))
            case command_types.HoldWorkers(generation=generation, local_ranks=local_ranks):
                self._hold(generation, set(local_ranks))
            case command_types.StopWorker(generation=generation, local_rank=local_rank, pid=pid, signal=signal):
                self._stop_alone(generation, local_rank, pid, signal)
            case command_types.ClearNode(generation=generation, held=held):
                self._clear(generation, set(held))
            case command_types.KillNode(generation=generation):
                self._was_signalled = True
                self._spared = set()
                self._kill(generation)
            case command_types.ForwardNotice():
                if not self._alive and not self._has_invalid_events:
                    raise ExpectationBroken("a notice is forwarded, but no worker is alive")
            case command_types.Finish(verdict=verdict):
                self._check_verdict(verdict)

    def _hold(self, generation: int, ranks: set[int]) -> None:
        """Let the workers acknowledge the end of their generation in time, late or never, opt out, or exit."""
        if not ranks <= self._alive & self._opted_in and not self._has_invalid_events:
            raise ExpectationBroken(f"{ranks} are to be held, but {self._alive & self._opted_in} can be")
        for rank in sorted(ranks):
            match self._rng.choice(("held", "held", "held", "held", "held", "late", "never", "opted out", "exited")):
                case "held":
                    self._soon(events.WorkerHeld(generation, rank, self._rng.choice((-1, 40))), 0.2)
                case "late":
                    self._soon(events.WorkerHeld(generation, rank), 8.0)
                case "opted out":
                    self._soon(events.WorkerOptedOut(generation, rank, "connection closed"))
                case "exited":
                    self._soon(self._own_exit(generation, rank))

    def _own_exit(self, generation: int, rank: int) -> events.WorkerExited:
        return events.WorkerExited(generation, rank, self._rng.choice((0, 1, -SIGKILL)), before_stop=True)

    def _stop_alone(self, generation: int, rank: int, pid: int, signal: int) -> None:
        if not self._has_invalid_events:
            if rank not in self._alive or rank in self._held & self._opted_in:
                raise ExpectationBroken(f"worker {rank} is stopped alone, but is dead or held")
            if pid not in (0, self._pids[rank]):
                raise ExpectationBroken(f"worker {rank} is stopped as process {pid}, but is {self._pids[rank]}")
        self._stopped_alone.add(rank)
        if self._rng.random() < 0.7:
            self._soon(events.WorkerExited(generation, rank, self._rng.choice((-signal, -signal, 0, 1, 143))))

    def _clear(self, generation: int, held: set[int]) -> None:
        if not self._has_invalid_events:
            others = self._alive - held - self._cut_off
            if others:
                raise ExpectationBroken(f"ClearNode while workers {others} are alive")
            if not held <= self._alive & self._held & self._opted_in:
                raise ExpectationBroken(f"ClearNode spares {held}, but {self._held & self._alive} are held")
        self._spared = held
        last = self._now
        for rank in sorted(self._alive & self._cut_off):
            last = max(last, self._soon(events.WorkerExited(generation, rank, -SIGKILL, before_stop=True), 0.2))
        if not self._leftovers or self._rng.random() < 0.5:
            self._plan(last + self._rng.random() * 0.4, events.NodeCleared(generation, tuple(sorted(held))))
            self._leftovers = False
            if self._has_invalid_events:
                self._alive &= held

    def _start(self, generation: int, survivors: set[int]) -> None:
        if not self._has_invalid_events:
            if self._alive != survivors or self._leftovers:
                alive = self._alive - survivors or "leftovers"
                raise ExpectationBroken(f"generation {generation} starts with {survivors} while {alive} are alive")
            if not survivors <= self._held & self._opted_in:
                raise ExpectationBroken(f"{survivors} survive, but {self._held} acknowledged the end")
        self._survived |= {(earlier, rank) for earlier in range(generation) for rank in survivors}
        self._started_last = generation
        self._opted_in &= survivors
        self._held, self._spared, self._cut_off = set(), set(), set()
        self._stopped_alone, self._died_held = set(), set()
        for rank in range(self.settings.local_world_size):
            if rank not in survivors:
                self._pids[rank] = 1000 * generation + rank
        self._alive = set(range(self.settings.local_world_size))
        self._leftovers = self._rng.random() < 0.3
        self._was_signalled = False
        self._started, self._overdue, self._dumped = set(), set(), set()
        self._failed_before_stop = set()
        self._all_succeeded = True
        for rank in range(self.settings.local_world_size):
            if self._rng.random() < 0.05:
                is_survivor = rank in survivors  # which has just exited
                failed = events.WorkerStartFailed(generation, rank, "no such file", 127)
                self._soon(self._own_exit(generation, rank) if is_survivor else failed)
                continue
            self._soon(events.WorkerStarted(generation, rank, self._pids[rank]))
            if self._opts_in and self._rng.random() < 0.9:
                self._soon(events.WorkerOptedIn(generation, rank, self._rng.choice((0.1, 1.0, 5.0))), 0.5)
                if self._rng.random() < 0.05:
                    self._soon(events.WorkerOptedOut(generation, rank, "invalid message"), 4.0)
            code = self._rng.choice((0, 0, 0, 0, 1, 3, -SIGKILL, -11))
            fault = "its result cannot be read" if code == 0 and self._rng.random() < 0.05 else ""
            within = self._rng.choice((4.0, 20.0) if self._opts_in else (0.4, 4.0))
            self._soon(events.WorkerExited(generation, rank, code, fault), within)
            if self._rng.random() < 0.2:
                signal = self._rng.choice((0, SIGTERM, SIGKILL))
                late = events.ScopeExpired(generation, rank, self._pids[rank], "step", 60.0, 1e9, signal)
                self._soon(late, self._rng.choice((0.4, 2.0)))
            if self._rng.random() < 0.2:
                self._soon(events.ProgressSeen(generation, (self._progress(rank),)), 4.0)
        self._plan_outside_events(generation)

    def _progress(self, rank: int) -> messages.WorkerProgress:
        first = self._rng.randint(0, 9)
        return messages.WorkerProgress(rank, first, first + self._rng.randint(0, 9), self._now, self._now + 0.1)

    def _plan_outside_events(self, generation: int) -> None:
        """Plan events from the coordinator and other nodes while workers run."""
        rng = self._rng
        if rng.random() < (0.5 if self._opts_in else 0.25):
            is_late, stops = rng.random() < 0.2, rng.random() < 0.2
            why = rng.choice(("b joined", "rank 9 failed"))
            at = self._soon(events.GenerationEnded(generation, why, is_late, stops=stops), 4.0)
            if rng.random() < 0.2:
                self._plan(at + rng.random() * 2, events.GenerationEnded(generation, "an operator", stops=True))
        if rng.random() < 0.08:
            self._soon(events.Fenced(generation, "no answer from the coordinator"), 4.0)
        if rng.random() < 0.1:
            self._soon(
                events.LeaveNoticed(generation, "b", "its agent received SIGTERM", rng.choice((None, 30.0))), 2.0
            )
        if rng.random() < 0.2:
            self._hang(generation)
        if rng.random() < 0.03:
            self._soon(events.JoinRefused("the agent of this node was started again"), 4.0)
        if rng.random() < 0.06:
            self._end_run(Outcome.CANCELLED, "an operator ended it", 4.0)

    def _hang(self, generation: int) -> None:
        """Plan the events of a suspected hang."""
        rng = self._rng
        stopped = (0,) if rng.random() < 0.2 else ()
        self._soon(events.QuietSeen(generation, self._now, "no step", stopped), 1.0)
        self._soon(events.StacksRequested(generation, 1, "no step"), 1.5)
        self._soon(events.HangFound(generation, self._hang_report(generation)), 3.0)
        if rng.random() < 0.5:
            self._soon(events.MovementSeen(generation), 3.0)
            self._soon(events.HangOver(generation), 4.0)

    @staticmethod
    def _hang_report(generation: int) -> messages.HangReport:
        return messages.HangReport(
            generation, 1, 1, 60.0, "no step", (messages.StackLocation((0,), why="not requested"),)
        )

    def _kill(self, generation: int) -> None:
        if self._rng.random() < 0.15:
            return  # stuck in the kernel
        last = self._now
        for rank in self._alive:
            last = max(last, self._soon(events.WorkerExited(generation, rank, -SIGKILL)))
        self._plan(last + 0.001 + self._rng.random() * 0.1, events.NodeCleared(generation))  # after the last exit
        self._leftovers = False

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def _receive(self, message: messages.FromNode) -> None:
        if not self._has_invalid_events:
            self._check_message(message)
        if self._is_over:
            return
        match message:
            case messages.NodeReady(generation, held=held):
                self._on_ready(generation, held)
            case messages.NodeStopped(generation, failures=failures):
                if failures and generation not in self._failed_in:
                    self._failed_in.append(generation)
                    self._restarts_used += 1
            case messages.FailureSeen(generation) if self._rng.random() < 0.5:
                self._soon(events.GenerationEnded(generation, "rank 0 on a failed", stops=self._rng.random() < 0.1))
            case messages.NodeSucceeded(generation):
                if self._rng.random() < 0.2:
                    self._soon(events.GenerationEnded(generation, "rank 9 on b failed"), 2.0)
                else:
                    self._end_run(Outcome.SUCCEEDED, "all workers succeeded", 2.0)

    def _on_ready(self, generation: int, held: int) -> None:
        if generation == self._ready_after:  # the next generation was formed, or is when no worker is held any more
            if self._is_stopping_held and not held:
                self._is_stopping_held = False
                self._form(generation)
            return
        self._ready_after, self._is_stopping_held = generation, held > 0 and self._rng.random() < 0.15
        if held and self._rng.random() < 0.05:
            self._soon(events.Fenced(generation, "no answer from the coordinator"), 1.0)
        if self._is_stopping_held:
            self._soon(events.GenerationEnded(generation, "the policy keeps no survivors", stops=True), 2.0)
        else:
            self._form(generation, within=self._rng.choice((0.4, 3.0)) if held else 0.4)

    def _form(self, generation: int, within: float = 0.4) -> None:
        self._generations += 1
        self._formed = max(self._formed, generation) + self._rng.choice((1, 1, 1, 3))
        if self._rng.random() < 0.3:
            self._soon(events.Waiting("1 of 2 nodes ready"), 0.1)
        if self._rng.random() < 0.02:
            self._soon(events.JoinRefused("the run is over"))
        elif self._generations > MAX_GENERATIONS:
            self._end_run(Outcome.FAILED, "enough", within)
        else:
            at = self._soon(events.GenerationFormed(self._assignment(self._formed)), within)
            if self._rng.random() < (0.2 if self._opts_in else 0.05):
                ended = events.GenerationEnded(self._formed, "rank 9 failed", stops=self._rng.random() < 0.5)
                fenced = events.Fenced(self._formed, "no answer from the coordinator")
                self._plan(at + 0.001 + self._rng.random() * 0.2, self._rng.choice((ended, ended, fenced)))

    def _assignment(self, generation: int) -> Assignment:
        return Assignment(generation, first_global_rank=2, restarts_used=self._restarts_used)

    def _end_run(self, outcome: Outcome, why: str, within: float) -> None:
        self._is_over = True
        self._soon(events.RunEnded(self._verdict(outcome, why), self._now + self._clock), within)

    def _verdict(self, outcome: Outcome, why: str) -> Verdict:
        failures = []
        if outcome is Outcome.FAILED:
            at = self._now + self._clock
            failures = [Failure(1, 0, 9, 900, 1, at), Failure(1, 1, 8, 901, 1, at, "", Evidence(raised_at=at + 1))]
        return Verdict(outcome, why, failures=tuple(failures), restarts_used=self._restarts_used)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_message(self, message: messages.FromNode) -> None:
        name = type(message).__name__
        is_clear = isinstance(message, messages.NodeReady | messages.NodeStopped | messages.NodeSucceeded)
        is_clear |= isinstance(message, messages.NodeLeft) and message.is_clear
        others = self._alive - (self._spared & self._opted_in)
        if is_clear and (others or self._leftovers):
            raise ExpectationBroken(f"{name} is sent, but {others or 'leftovers'} are alive")
        held = {messages.NodeReady: len(self._alive), messages.NodeStopped: {2 + rank for rank in self._alive}}
        told = getattr(message, "held", 0)
        if is_clear and (set(told) if isinstance(told, tuple) else told) != held.get(type(message), 0):
            raise ExpectationBroken(f"{message} is sent, but {self._alive} are held")
        if isinstance(message, messages.NodeSucceeded) and not self._all_succeeded:
            raise ExpectationBroken("success is sent, but not every worker succeeded")
        if isinstance(message, messages.WorkersRunning):
            unknown = self._alive - self._started
            if unknown or len(message.pids) != self.settings.local_world_size:
                raise ExpectationBroken(f"WorkersRunning is sent, but {unknown} were not started: {message.pids}")
            if any(pid not in (0, self._pids[rank]) for rank, pid in enumerate(message.pids)):
                raise ExpectationBroken(f"WorkersRunning is sent with {message.pids}, but they are {self._pids}")
        if isinstance(message, messages.NodeStopped):
            self._check_reported(message.generation, {failure.local_rank for failure in message.failures})

    def _check_reported(self, generation: int, reported: set[int]) -> None:
        if generation != self._started_last:
            return  # it ended before it could start here
        if reported & self._died_held:
            raise ExpectationBroken(f"workers {reported & self._died_held} exited while held and are reported")
        forgotten = self._failed_before_stop - reported
        if forgotten:
            raise ExpectationBroken(f"workers {forgotten} failed by themselves and are not reported")

    def _check_verdict(self, verdict: Verdict) -> None:
        if self._has_invalid_events:
            return
        outcome, state = verdict.outcome, self.machine.state
        known = {failure.generation for failure in (*state.failures, *state.earlier)}
        if not known >= set(self._failed_in):
            raise ExpectationBroken(f"workers failed in generations {self._failed_in}, but it knows of {known}")
        if outcome not in (Outcome.ABANDONED, Outcome.BROKEN) and (self._alive or self._leftovers):
            raise ExpectationBroken(f"{outcome.value}, but {self._alive or 'leftovers'} are alive")
        if self._ended is not None:
            is_own = outcome in (Outcome.ABANDONED, Outcome.BROKEN)
            if not is_own and (outcome, verdict.why) != (self._ended.outcome, self._ended.why):
                raise ExpectationBroken(f"{verdict.why!r} differs from the coordinator's verdict: {self._ended.why!r}")
            return
        if outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
            raise ExpectationBroken(f"{outcome.value}, but the coordinator sent no verdict")
        if outcome is Outcome.CANCELLED and not self._was_stop_requested:
            raise ExpectationBroken("cancelled, but no stop was requested")
        self._check_reported(verdict.generation, {failure.local_rank for failure in verdict.failures})

    def _evidence(self) -> Evidence:
        if self._rng.random() < 0.4:
            return Evidence()
        return Evidence("RuntimeError", "RuntimeError: boom", raised_at=self._now - 2 * self._rng.random())

    # --- invalid events -----------------------------------------------------------------------------------------------

    def _late_events(self) -> list[AnyEvent]:
        """Return some events that were pending at the verdict, and some invalid ones."""
        late = [event for _, _, _, event in self._pending[:3]]
        return [*late, self._invalid_event(), self._invalid_event()] if self._has_invalid_events else late

    def _invalid_event(self) -> AnyEvent:
        """Return an event that is a duplicate, of another generation, of an unknown worker, or wrong."""
        rng = self._rng
        if self.steps and rng.random() < 0.3:
            return rng.choice(self.steps)[0]
        generation = max(0, self.machine.state.generation + rng.choice((-1, 0, 0, 1)))
        rank = rng.randint(-1, self.settings.local_world_size)
        match rng.randint(0, 22):
            case 0:
                return events.RunRequested()
            case 1 | 2:
                return events.GenerationFormed(self._assignment(generation))
            case 3:
                return events.WorkerStarted(generation, rank, 99)
            case 4:
                return events.WorkerStartFailed(generation, rank, "no such file", 127)
            case 5 | 6:
                code, fault = rng.choice((0, 0, 1, -15)), rng.choice(("", "", "fault"))
                return events.WorkerExited(generation, rank, code, fault, rng.random() < 0.3, rng.random() < 0.3)
            case 7 | 8:
                if rng.random() < 0.5:
                    return events.LastLinesRead(generation, rank, ("step 1",))
                if rng.random() < 0.3:
                    return events.WorkerRaised(generation, rank)
                return events.FailureExamined(generation, rank, self._evidence())
            case 9:
                return events.NodeCleared(generation, rng.choice(((), (), (0,), (rank,))))
            case 10 if rng.random() < 0.3:
                ends = (events.JoinRefused("no"), events.KeeperLost("gone"), events.SignalReceived(SIGINT))
                return rng.choice((*ends, events.LeaveRequested("maintenance")))
            case 11:
                return events.GenerationEnded(generation, "b joined", rng.random() < 0.2, stops=rng.random() < 0.3)
            case 12:
                return events.LeaveNoticed(generation, "b", "its agent received SIGTERM")
            case 13 if rng.random() < 0.3:
                return events.Fenced(generation, "no answer from the coordinator")
            case 14 if rng.random() < 0.2:
                return events.RunEnded(
                    self._verdict(rng.choice(list(Outcome)), "an invalid event"), self._now + self._clock
                )
            case 15:
                return rng.choice((events.Waiting("nothing"), events.NoticeReceived("spot reclaim", 120.0)))
            case 16:
                pid = rng.choice((99, max(0, 1000 * generation + rank)))
                return events.ScopeExpired(generation, rank, pid, "step", 60.0, 1e9, rng.choice((0, SIGTERM, SIGKILL)))
            case 17:
                return events.StacksRefused(generation, rank, "it does not catch the signal")
            case 18:
                return events.ProgressSeen(generation, (self._progress(rank),))
            case 19:
                read = events.StacksRead(generation, rng.choice((1, 2)), (events.WorkerStacks(rank, "Stack:"),))
                return rng.choice(
                    (events.StacksRequested(generation, 2, "an invalid event"), read, events.HangOver(generation))
                )
            case 20:
                quiet = events.QuietSeen(generation, self._now, "an invalid event", (rank,))
                found = events.HangFound(generation, self._hang_report(generation))
                return rng.choice((quiet, events.MovementSeen(generation), found))
            case 21:
                return events.WorkerOptedIn(generation, rank, rng.choice((0.1, 5.0)))
            case 22:
                opted_out = events.WorkerOptedOut(generation, rank, "an invalid event")
                return rng.choice((opted_out, events.WorkerHeld(generation, rank, 3)))
            case _:
                return events.Tick()


def format_steps(steps: list[Step]) -> str:
    """Format a history for the message of a failed test."""
    return "\n".join(f"{now:9.4f} {event}\n            -> {commands}" for event, now, commands in steps)
