"""A node that obeys the agent machine's orders, and a coordinator that answers what it is told: each in its own time,
sometimes badly, and if asked for with lies.

Every choice is a throw of the dice that the caller gives, so a history is a function of its seed. The world knows the
truth about its processes and complains when the machine acts against it; ``InvariantChecker`` watches as well.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from tenax._core import commands as order
from tenax._core import events, messages
from tenax._core.agent import SIGINT, SIGKILL, SIGTERM, AgentMachine, Phase
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict
from tenax.testing.agent_invariants import InvariantChecker

SIGHUP = 1
MAX_STEPS = 500  # a history that needs more has lost its way
MAX_LIES = 60  # a world that only lies leads nowhere
MAX_GENERATIONS = 4

Step = tuple[AnyEvent, float, list[AnyCommand]]


class WorldBroken(AssertionError):
    """The machine acted against the truth, or never came to an end."""


class World:
    """One run of one node. ``play`` it, then read ``steps``."""

    def __init__(
        self,
        dice: random.Random,
        *,
        lies: bool = False,
        make_machine: Callable[[AgentSettings], AgentMachine] = AgentMachine,
    ) -> None:
        self._dice = dice
        self._lies = lies
        self._lies_left = MAX_LIES
        self.settings = AgentSettings(
            run_id="run",
            role="trainer",
            local_world_size=dice.randint(1, 3),
            max_restarts=dice.randint(0, 2),
            grace_s=dice.choice((0.0, 0.5, 3.0)),
            abandon_s=dice.choice((0.2, 3.0)),
            examine_s=dice.choice((0.0, 0.3, 3.0)),
        )
        self.machine = make_machine(self.settings)
        self._checker = InvariantChecker(self.machine.state)
        self.steps: list[Step] = []
        self._now = 0.0
        self._pending: list[tuple[float, float, int, AnyEvent]] = []  # what comes at the same time comes in any order
        self._planned = 0
        # The truth about the node.
        self._alive: set[int] = set()  # workers
        self._leftovers = False  # what they started and left behind
        self._asked = False  # somebody was asked to end
        self._started: set[int] = set()  # ... and the machine knows
        self._late: set[int] = set()  # did not leave a scope in time
        self._looked_at: set[int] = set()  # were asked for their stacks
        self._failed_before_stop: set[int] = set()
        self._all_succeeded = False
        self._signalled = False
        # The coordinator.
        self._formed = 0
        self._generations = 0
        self._restarts_used = 0
        self._ended: Verdict | None = None  # what it said first
        self._is_over = False
        self._clock = dice.choice((0.0, 1e6, -1e3))  # how far its clock is ahead of ours

    # --- the loop -----------------------------------------------------------------------------------------------------

    def play(self) -> Verdict:
        """From the request to the verdict, and a little beyond."""
        dice = self._dice
        self._soon(events.RunRequested())
        if dice.random() < 0.3:
            for _ in range(dice.randint(1, 3)):
                signal = events.SignalReceived(dice.choice((SIGTERM, SIGINT, SIGHUP)), dice.choice((None, None, 0.1)))
                self._soon(signal, dice.choice((0.5, 5.0)))
        if dice.random() < 0.05:
            self._soon(events.LeaveRequested("maintenance"), 5.0)
        if dice.random() < 0.05:
            self._soon(events.KeeperLost("it was killed"), 5.0)
        if dice.random() < 0.1:
            self._soon(events.NoticeReceived("spot reclaim", dice.choice((None, 120.0))), 3.0)
        state = self.machine.state
        while state.phase is not Phase.ENDED:
            if len(self.steps) > MAX_STEPS:
                raise WorldBroken(f"no verdict after {MAX_STEPS} steps; {state.phase.value}, {state.deadlines}")
            self._step(self._next())
        for event in self._echoes():
            self._step(event)
        assert state.verdict is not None
        return state.verdict

    def _next(self) -> AnyEvent:
        if self._lies and self._lies_left > 0 and self._dice.random() < 0.25:
            self._lies_left -= 1
            return self._lie()
        deadline = self.machine.state.next_deadline()
        late = self._dice.random() < 0.1  # a busy loop may see the next event before it looks at the clock
        if deadline is not None and not (self._pending and (late or self._pending[0][0] < deadline)):
            self._now = max(self._now, deadline)
            return events.Tick()
        while self._pending:
            at, _, _, event = heapq.heappop(self._pending)
            self._now = max(self._now, at)
            if self._happens(event):
                return event
        if deadline is not None:
            return events.Tick()
        raise WorldBroken(f"{self.machine.state.phase.value}: the machine waits for nothing")

    def _happens(self, event: AnyEvent) -> bool:
        """A worker that has died of something else meanwhile does not die again."""
        if isinstance(event, events.WorkerExited | events.WorkerStartFailed):
            if event.generation == self.machine.state.generation:
                if event.local_rank not in self._alive:
                    return False
                self._alive.remove(event.local_rank)
                bad = bool(event.exit_code) or isinstance(event, events.WorkerStartFailed) or bool(event.fault)
                self._all_succeeded &= not bad
                if bad and not self._asked:
                    self._failed_before_stop.add(event.local_rank)
        elif isinstance(event, events.WorkerStarted) and event.generation == self.machine.state.generation:
            self._started.add(event.local_rank)
        elif isinstance(event, events.SignalReceived | events.LeaveRequested):
            self._signalled = True
        return True

    def _step(self, event: AnyEvent) -> None:
        phase, generation = self.machine.state.phase, self.machine.state.generation
        if isinstance(event, events.RunEnded) and self._ended is None and self.machine.state.decided is None:
            self._ended = event.verdict
        commands = self.machine.step(event, self._now)
        self.steps.append((event, self._now, commands))
        self._checker.check(self.machine.state, event, commands)
        if phase is Phase.RUNNING and getattr(event, "generation", generation) == generation:
            self._check_obedience(event, commands)
        for command in commands:
            self._obey(command)

    def _check_obedience(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """What the coordinator decided has consequences at once."""
        has_killed = any(isinstance(command, order.KillNode) for command in commands)
        if isinstance(event, events.Fenced) and not has_killed:
            raise WorldBroken("fenced, and nobody was killed")
        if isinstance(event, events.GenerationEnded) and event.is_late and not has_killed:
            raise WorldBroken("late, and nobody was killed")
        self._looked_at.update(command.local_rank for command in commands if isinstance(command, order.DumpStacks))
        if isinstance(event, events.ScopeExpired) and self._is_news(event) and not self._looked_at >= self._up():
            raise WorldBroken("late, and nobody looks where all of them are")
        is_the_end = isinstance(event, events.GenerationEnded | events.RunEnded | events.JoinRefused)
        if is_the_end and self.machine.state.phase is Phase.RUNNING:
            raise WorldBroken(f"goes on after {event}")

    def _up(self) -> set[int]:
        return self._alive & self._started

    def _is_news(self, event: events.ScopeExpired) -> bool:
        if event.signal == 0 or event.local_rank in self._late or event.local_rank not in self._started:
            return False
        self._late.add(event.local_rank)
        return not self._lies and event.local_rank in self._alive

    def _soon(self, event: AnyEvent, within: float = 0.4) -> float:
        return self._plan(self._now + self._dice.random() * within, event)

    def _plan(self, at: float, event: AnyEvent) -> float:
        self._planned += 1
        heapq.heappush(self._pending, (at, self._dice.random(), self._planned, event))
        return at

    # --- orders -------------------------------------------------------------------------------------------------------

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case order.SendMessage(message):
                self._hear(message)
            case order.StartWorkers(assignment=assignment):
                self._start(assignment.generation)
            case order.ExamineFailure(generation=generation, local_rank=local_rank):
                if self._dice.random() < 0.85:
                    self._soon(events.FailureExamined(generation, local_rank, self._evidence()), 1.0)
            case order.SignalWorkers(generation=generation, signal=signal):
                self._asked = True
                for rank in self._alive:
                    if self._dice.random() < 0.7:
                        self._soon(
                            events.WorkerExited(generation, rank, self._dice.choice((-signal, -signal, 0, 1, 143)))
                        )
            case order.DumpStacks(generation=generation, local_rank=local_rank):
                if self._dice.random() < 0.3:
                    self._soon(events.StacksRefused(generation, local_rank, "it does not catch the signal"))
            case order.ReadStacks(generation=generation, number=number, local_ranks=local_ranks):
                if not set(local_ranks) <= self._up() and not self._lies:
                    raise WorldBroken(f"stacks of {local_ranks} are read, and {self._up()} are up")
                if self._dice.random() < 0.8:
                    read = tuple(events.WorkerStacks(rank, why="it wrote nothing") for rank in local_ranks)
                    self._soon(events.StacksRead(generation, number, read), 1.0)
            case order.EndWorker(generation=generation, local_rank=local_rank, signal=signal):
                if self._dice.random() < 0.7:
                    code = self._dice.choice((-signal, -signal, 0, 1, 143))
                    self._soon(events.WorkerExited(generation, local_rank, code, before_stop=self._dice.random() < 0.1))
            case order.ClearNode(generation=generation):
                if self._alive and not self._lies:
                    raise WorldBroken(f"told to clear while workers {self._alive} live")
                if not self._leftovers or self._dice.random() < 0.5:
                    self._soon(events.NodeCleared(generation))
                    self._alive.clear()
                    self._leftovers = False
            case order.KillNode(generation=generation):
                self._asked = True
                self._kill(generation)
            case order.ForwardNotice():
                if not self._alive and not self._lies:
                    raise WorldBroken("a notice is passed on and nobody is there")
            case order.Finish(verdict=verdict):
                self._judge(verdict)

    def _start(self, generation: int) -> None:
        if (self._alive or self._leftovers) and not self._lies:
            raise WorldBroken(f"generation {generation} starts beside {self._alive or 'leftovers'}")
        self._alive = set(range(self.settings.local_world_size))
        self._leftovers = self._dice.random() < 0.3
        self._asked = False
        self._started, self._late, self._looked_at = set(), set(), set()
        self._failed_before_stop = set()
        self._all_succeeded = True
        for rank in range(self.settings.local_world_size):
            if self._dice.random() < 0.05:
                self._soon(events.WorkerStartFailed(generation, rank, "no such file", 127))
                continue
            self._soon(events.WorkerStarted(generation, rank, 1000 * generation + rank))
            code = self._dice.choice((0, 0, 0, 0, 1, 3, -SIGKILL, -11))
            fault = "its result cannot be read" if code == 0 and self._dice.random() < 0.05 else ""
            self._soon(events.WorkerExited(generation, rank, code, fault), self._dice.choice((0.4, 4.0)))
            if self._dice.random() < 0.2:
                signal = self._dice.choice((0, SIGTERM, SIGKILL))
                late = events.ScopeExpired(generation, rank, 1000 * generation + rank, "step", 60.0, 1e9, signal)
                self._soon(late, self._dice.choice((0.4, 2.0)))
            if self._dice.random() < 0.2:
                self._soon(events.ProgressSeen(generation, (self._progress(rank),)), 4.0)
        self._befall(generation)

    def _progress(self, rank: int) -> messages.WorkerProgress:
        first = self._dice.randint(0, 9)
        return messages.WorkerProgress(rank, first, first + self._dice.randint(0, 9), self._now, self._now + 0.1)

    def _befall(self, generation: int) -> None:
        """What may come from the other nodes while our workers run."""
        dice = self._dice
        if dice.random() < 0.25:
            is_late = dice.random() < 0.2
            self._soon(events.GenerationEnded(generation, dice.choice(("b joined", "rank 9 failed")), is_late), 4.0)
        if dice.random() < 0.08:
            self._soon(events.Fenced(generation, "no word from the coordinator"), 4.0)
        if dice.random() < 0.1:
            self._soon(events.LeaveNoticed(generation, "b", "it was asked to stop", dice.choice((None, 30.0))), 2.0)
        if dice.random() < 0.2:
            self._hang(generation)
        if dice.random() < 0.03:
            self._soon(events.JoinRefused("the agent of this node was started again"), 4.0)
        if dice.random() < 0.06:
            self._end_run(Outcome.CANCELLED, "an operator ended it", 4.0)

    def _hang(self, generation: int) -> None:
        """Nothing moves, here and elsewhere, or so it seems."""
        dice = self._dice
        stopped = (0,) if dice.random() < 0.2 else ()
        self._soon(events.QuietSeen(generation, self._now, "no step", stopped), 1.0)
        self._soon(events.StacksRequested(generation, 1, "no step"), 1.5)
        self._soon(events.HangFound(generation, self._hang_report(generation)), 3.0)
        if dice.random() < 0.5:
            self._soon(events.MovementSeen(generation), 3.0)
            self._soon(events.HangOver(generation), 4.0)

    @staticmethod
    def _hang_report(generation: int) -> messages.HangReport:
        return messages.HangReport(generation, 1, 1, 60.0, "no step", (messages.StackLocation((0,), why="not asked"),))

    def _kill(self, generation: int) -> None:
        if self._dice.random() < 0.15:
            return  # stuck in the kernel
        last = self._now
        for rank in self._alive:
            last = max(last, self._soon(events.WorkerExited(generation, rank, -SIGKILL)))
        self._plan(last + 0.001 + self._dice.random() * 0.1, events.NodeCleared(generation))  # after the last of them
        self._leftovers = False

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def _hear(self, message: messages.FromNode) -> None:
        if not self._lies:
            self._check_truth(message)
        if self._is_over:
            return
        match message:
            case messages.NodeReady(generation):
                self._on_ready(generation)
            case messages.NodeStopped(failures=failures):
                self._restarts_used += bool(failures)
            case messages.FailureSeen(generation) if self._dice.random() < 0.5:
                self._soon(events.GenerationEnded(generation, "rank 0 on a failed"))
            case messages.NodeSucceeded(generation):
                if self._dice.random() < 0.2:
                    self._soon(events.GenerationEnded(generation, "rank 9 on b failed"), 2.0)
                else:
                    self._end_run(Outcome.SUCCEEDED, "all workers succeeded", 2.0)

    def _on_ready(self, generation: int) -> None:
        self._generations += 1
        self._formed = max(self._formed, generation) + self._dice.choice((1, 1, 1, 3))
        if self._dice.random() < 0.3:
            self._soon(events.Waiting("1 of 2 nodes ready"), 0.1)
        if self._dice.random() < 0.02:
            self._soon(events.JoinRefused("the run is over"))
        elif self._generations > MAX_GENERATIONS:
            self._end_run(Outcome.FAILED, "enough", 0.4)
        else:
            self._soon(events.GenerationFormed(self._assignment(self._formed)))

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
        return Verdict(outcome, why, tuple(failures), restarts_used=self._restarts_used)

    # --- the truth ----------------------------------------------------------------------------------------------------

    def _check_truth(self, message: messages.FromNode) -> None:
        name = type(message).__name__
        is_clear = isinstance(message, messages.NodeReady | messages.NodeStopped | messages.NodeSucceeded)
        is_clear |= isinstance(message, messages.NodeLeft) and message.is_clear
        if is_clear and (self._alive or self._leftovers):
            raise WorldBroken(f"{name} is told, but {self._alive or 'leftovers'} live")
        if isinstance(message, messages.NodeSucceeded) and not self._all_succeeded:
            raise WorldBroken("a success is told, but not every worker succeeded")
        if isinstance(message, messages.WorkersRunning):
            unknown = self._alive - self._started
            if unknown or len(message.pids) != self.settings.local_world_size:
                raise WorldBroken(f"all are said to run, and {unknown} were not started: {message.pids}")
        if isinstance(message, messages.NodeStopped):
            self._check_named({failure.local_rank for failure in message.failures})

    def _check_named(self, named: set[int]) -> None:
        forgotten = self._failed_before_stop - named
        if forgotten:
            raise WorldBroken(f"workers {forgotten} failed by themselves and are not named")

    def _judge(self, verdict: Verdict) -> None:
        if self._lies:
            return
        outcome = verdict.outcome
        if outcome not in (Outcome.ABANDONED, Outcome.BROKEN) and (self._alive or self._leftovers):
            raise WorldBroken(f"{outcome.value}, but {self._alive or 'leftovers'} live")
        if self._ended is not None:
            is_own = outcome in (Outcome.ABANDONED, Outcome.BROKEN)
            if not is_own and (outcome, verdict.why) != (self._ended.outcome, self._ended.why):
                raise WorldBroken(f"{verdict.why!r} is not what the coordinator said: {self._ended.why!r}")
            return
        if outcome in (Outcome.SUCCEEDED, Outcome.FAILED):
            raise WorldBroken(f"{outcome.value}, and the coordinator did not say so")
        if outcome is Outcome.CANCELLED and not self._signalled:
            raise WorldBroken("cancelled, but nobody asked for it")
        self._check_named({failure.local_rank for failure in verdict.failures})

    def _evidence(self) -> Evidence:
        if self._dice.random() < 0.4:
            return Evidence()
        return Evidence("RuntimeError", "RuntimeError: boom", raised_at=self._now - 2 * self._dice.random())

    # --- lies ---------------------------------------------------------------------------------------------------------

    def _echoes(self) -> list[AnyEvent]:
        """Some of what was still under way when the verdict fell, and what never was."""
        late = [event for _, _, _, event in self._pending[:3]]
        return [*late, self._lie(), self._lie()] if self._lies else late

    def _lie(self) -> AnyEvent:
        """A fact that is not one: told twice, of another generation, of nobody, or just wrong."""
        dice = self._dice
        if self.steps and dice.random() < 0.3:
            return dice.choice(self.steps)[0]
        generation = max(0, self.machine.state.generation + dice.choice((-1, 0, 0, 1)))
        rank = dice.randint(-1, self.settings.local_world_size)
        match dice.randint(0, 20):
            case 0:
                return events.RunRequested()
            case 1 | 2:
                return events.GenerationFormed(self._assignment(generation))
            case 3:
                return events.WorkerStarted(generation, rank, 99)
            case 4:
                return events.WorkerStartFailed(generation, rank, "no such file", 127)
            case 5 | 6:
                code, fault = dice.choice((0, 0, 1, -15)), dice.choice(("", "", "fault"))
                return events.WorkerExited(generation, rank, code, fault, dice.random() < 0.3, dice.random() < 0.3)
            case 7 | 8:
                return events.FailureExamined(generation, rank, self._evidence())
            case 9:
                return events.NodeCleared(generation)
            case 10 if dice.random() < 0.3:
                ends = (events.JoinRefused("no"), events.KeeperLost("gone"), events.SignalReceived(SIGINT))
                return dice.choice((*ends, events.LeaveRequested("maintenance")))
            case 11:
                return events.GenerationEnded(generation, "b joined", dice.random() < 0.2)
            case 12:
                return events.LeaveNoticed(generation, "b", "it was asked to stop")
            case 13 if dice.random() < 0.3:
                return events.Fenced(generation, "no word from the coordinator")
            case 14 if dice.random() < 0.2:
                return events.RunEnded(self._verdict(dice.choice(list(Outcome)), "a lie"), self._now + self._clock)
            case 15:
                return dice.choice((events.Waiting("nothing"), events.NoticeReceived("spot reclaim", 120.0)))
            case 16:
                pid = dice.choice((99, max(0, 1000 * generation + rank)))
                return events.ScopeExpired(generation, rank, pid, "step", 60.0, 1e9, dice.choice((0, SIGTERM, SIGKILL)))
            case 17:
                return events.StacksRefused(generation, rank, "it does not catch the signal")
            case 18:
                return events.ProgressSeen(generation, (self._progress(rank),))
            case 19:
                read = events.StacksRead(generation, dice.choice((1, 2)), (events.WorkerStacks(rank, "Stack:"),))
                return dice.choice((events.StacksRequested(generation, 2, "a lie"), read, events.HangOver(generation)))
            case 20:
                quiet = events.QuietSeen(generation, self._now, "a lie", (rank,))
                found = events.HangFound(generation, self._hang_report(generation))
                return dice.choice((quiet, events.MovementSeen(generation), found))
            case _:
                return events.Tick()


def tell(steps: list[Step]) -> str:
    """The story so far, for a person who must find out what went wrong."""
    return "\n".join(f"{now:9.4f} {event}\n            -> {commands}" for event, now, commands in steps)
