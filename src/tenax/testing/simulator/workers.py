"""Fake workers, and a model of the keeper.

All checks compare with when these workers are alive, not with the state of a machine. The keeper executes commands in
order, outlives its agent, and ends all workers when the agent is dead or the lease has expired. A killed worker that is
stuck in the kernel counts as ended, because it executes no further instruction, but the node does not become clear.

A ``Worker`` is the part of one process in one generation. A held one does not act; if it survives, its process gets
another ``Worker``. The channel to a process is in order, but its order with the keeper's messages is random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenax._core import events
from tenax._core.agent import SIGKILL
from tenax._core.commands import ExamineFailure
from tenax._core.messages import WorkerProgress
from tenax._core.model import Evidence
from tenax.testing.simulator.scheduler import Plan, cancel

if TYPE_CHECKING:
    from tenax._core.events import AnyEvent
    from tenax._core.model import Assignment
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.checks import Formation

_SEGV = 11
_CHANNEL_S = 0.002  # until a message of the agent has reached its keeper


class Worker:
    """One training process."""

    def __init__(self, keeper: Keeper, formation: Formation, assignment: Assignment, local_rank: int, pid: int) -> None:
        self.keeper = keeper
        self.formation = formation
        self.assignment = assignment
        self.local_rank = local_rank
        self.global_rank = assignment.first_global_rank + local_rank
        self.pid = pid
        self.is_alive = False
        self.is_held = False  # it acknowledged the end of its generation, and does not act
        self.is_deaf = False  # it closed its channel, or will not acknowledge the end
        self.channel_at = 0.0  # when all messages to it so far have arrived
        self.was_signalled = False
        self.has_lost_peer = False  # a peer has died, which may make this one fail
        self.failed_by_itself = False
        self.failed_at: float | None = None  # when its error was raised
        self.wrote_error = False
        self.is_stuck = False
        self.began_at: float | None = None
        self.ended_at: float | None = None

    @property
    def generation(self) -> int:
        return self.assignment.generation

    @property
    def acts(self) -> bool:
        return self.is_alive and not self.is_held

    @property
    def awaits_begin(self) -> bool:
        """Whether it is a survivor that has not received the begin of its generation."""
        return self.is_alive and self.is_held and self.began_at is None

    @property
    def counts(self) -> bool:
        """Whether it reports its steps, as some scripts do."""
        return self.began_at is not None and self.global_rank % 2 == 0

    def progress(self, now: float) -> WorkerProgress:
        """Return progress at ten steps per second; the last two seconds of a generation are not in its checkpoint."""
        assert self.began_at is not None
        until = now if self.ended_at is None else self.ended_at
        first, count, ahead = int(10 * self.began_at), int(10 * (until - self.began_at)), self.keeper.agent.host.offset
        began_at = self.began_at + ahead
        return WorkerProgress(self.local_rank, first - 20, first - 20 + count, began_at, began_at + count / 10)

    def __str__(self) -> str:
        return f"rank {self.global_rank} of generation {self.generation} on {self.keeper.agent.label}"


class Keeper:
    """Starts, signals, clears and kills the workers of one agent, and reports events to it."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent
        self.cluster = agent.cluster
        self.workers: dict[int, Worker] = {}
        self.leftovers: Formation | None = None  # the generation whose workers left live processes behind
        self._starting: list[Plan] = []
        self._free_at = 0.0  # when all commands so far are executed
        self._has_stuck = False
        self._is_clearing = 0  # the generation for which NodeCleared is due
        self._spared: tuple[int, ...] = ()  # local ranks that stay
        self._unadopted: list[Worker] = []  # held workers that are about to continue
        self._lease_plan: Plan | None = None
        self._is_lease_expired = False

    # --- commands -----------------------------------------------------------------------------------------------------

    def start(self, assignment: Assignment, survivors: tuple[int, ...] = ()) -> None:
        cluster = self.cluster
        formation = cluster.checks.granted(self.agent, assignment)
        before, self.workers = self.workers, {}
        cluster.checks.kept(
            self.agent, assignment, [worker for worker in before.values() if worker.is_alive], survivors
        )
        self._starting, self._unadopted = [], [before[local_rank] for local_rank in survivors]
        if self.leftovers is not None and not all(worker.is_alive for worker in self._unadopted):
            self.leftovers = formation  # a held worker has exited meanwhile, which is reported for the next generation
        at = cluster.schedule.now
        for local_rank in survivors:
            worker = Worker(self, formation, assignment, local_rank, before[local_rank].pid)
            self.workers[local_rank] = worker
            at += 0.001
            self._starting.append(cluster.schedule.at(at, self._adopt, before[local_rank], worker))
        for local_rank in set(range(self.agent.plan.slots)) - set(survivors):
            at += 0.001 + cluster.rng.random() * cluster.behaviour.start_s
            worker = Worker(self, formation, assignment, local_rank, cluster.new_pid())
            self.workers[local_rank] = worker
            self._starting.append(cluster.schedule.at(at, self._begin, worker))
        self._free_at = at
        if self._is_lease_expired:
            self._fence()

    def signal(self, signal: int) -> None:
        self._in_turn(self._signalled, signal)

    def clear(self, generation: int, held: tuple[int, ...]) -> None:
        self._is_clearing = generation
        self._in_turn(self._clear_after_signal, generation, held)

    def stop(self, local_rank: int, signal: int) -> None:
        self._in_turn(self._stopped_alone, self.workers[local_rank], signal)

    def kill(self, generation: int) -> None:
        self._is_clearing = generation
        self._in_turn(self._killed, generation, within=self.cluster.behaviour.kill_s)

    def hold(self, seconds: float) -> None:
        """Kill the workers in that many seconds unless this is repeated; 0: never."""
        cancel(self._lease_plan)
        self._is_lease_expired = False
        if seconds and self.cluster.setup.engine.keeper_enforces_lease:
            at = self.cluster.schedule.now + seconds + _CHANNEL_S
            self._lease_plan = self.cluster.schedule.at(at, self._on_lease_expired)

    def _on_lease_expired(self) -> None:
        self._is_lease_expired = True
        is_occupied = not self.agent.state.cleared or any(worker.is_held for worker in self.workers.values())
        if self.agent.is_alive and is_occupied:
            self._fence()

    def _fence(self) -> None:
        why = "disconnected from the coordinator for too long"
        generation = self.agent.state.generation
        self._emit(events.Fenced(generation, why))
        self._in_turn(self._killed, generation, within=self.cluster.behaviour.kill_s)

    def agent_died(self) -> None:
        for plan in self._starting:
            cancel(plan)
        self._free_at = 0.0
        self._in_turn(self._after_agent_death, within=self.cluster.behaviour.kill_s)

    def vanish(self) -> None:
        """Disappear with the host's power."""
        for plan in self._starting:
            cancel(plan)
        for worker in (*self._unadopted, *self.workers.values()):
            self._ends(worker)
        self.leftovers = None

    def _in_turn(self, call: object, *arguments: object, within: float = 0.002) -> None:
        at = max(self.cluster.schedule.now, self._free_at) + within * self.cluster.rng.random()
        self.cluster.schedule.at(at, call, *arguments)  # type: ignore[arg-type]

    # --- processes ----------------------------------------------------------------------------------------------------

    def _begin(self, worker: Worker) -> None:
        cluster, behaviour, rng = self.cluster, self.cluster.behaviour, self.cluster.rng
        if cluster.has_faults and rng.random() < behaviour.fails * 0.05:
            cluster.checks.failed(worker)
            at = cluster.schedule.now + self.agent.host.offset
            self._emit(events.WorkerStartFailed(worker.generation, worker.local_rank, "no such file", 127, at))
            self._spread(worker)
            return
        worker.is_alive, worker.began_at = True, cluster.schedule.now
        cluster.checks.began(worker)
        if rng.random() < behaviour.leaves_behind:
            self.leftovers = worker.formation
        worker.is_stuck = cluster.has_faults and rng.random() < behaviour.stuck
        self._emit(events.WorkerStarted(worker.generation, worker.local_rank, worker.pid))
        self._plan(worker)
        if behaviour.opts_in and cluster.survivor_rng.random() < behaviour.opts_in:
            self._plan_opt_in(worker)

    def _plan(self, worker: Worker) -> None:
        """Plan how the worker ends: it succeeds, or it fails before."""
        cluster, behaviour, rng = self.cluster, self.cluster.behaviour, self.cluster.rng
        ends_at = max(worker.formation.succeeds_at, cluster.schedule.now) + 0.3 * rng.random()
        cluster.schedule.at(ends_at, self._succeed, worker)
        if cluster.has_faults and rng.random() < behaviour.fails:
            cluster.schedule.after(behaviour.fails_within_s * rng.random(), self._fail_unless_calm, worker)

    # --- survivors ----------------------------------------------------------------------------------------------------

    def _plan_opt_in(self, worker: Worker) -> None:
        cluster, behaviour, rng = self.cluster, self.cluster.behaviour, self.cluster.survivor_rng
        cluster.schedule.after(behaviour.opts_in_within_s * rng.random(), self._opt_in, worker)
        if rng.random() < behaviour.closes_channel:
            cluster.schedule.after(behaviour.fails_within_s * rng.random(), self._close_channel, worker)

    def _opt_in(self, worker: Worker) -> None:
        if worker.acts and worker.failed_at is None and not worker.is_deaf:
            timeout_s = self.cluster.behaviour.hold_timeout_s
            self._emit_from(worker, events.WorkerOptedIn(worker.generation, worker.local_rank, timeout_s))

    def _close_channel(self, worker: Worker) -> None:
        if worker.is_alive and self.workers.get(worker.local_rank) is worker and not worker.is_deaf:
            worker.is_deaf = True
            self._emit_from(
                worker, events.WorkerOptedOut(worker.generation, worker.local_rank, "it closed its channel")
            )

    def end(self, generation: int, local_ranks: tuple[int, ...]) -> None:
        """Send workers the end of their generation."""
        for local_rank in local_ranks:
            worker = self.workers[local_rank]
            assert worker.generation == generation, "the machine drops events of other generations"
            self._send(worker, self._on_end, worker)

    def _on_end(self, worker: Worker) -> None:
        cluster, behaviour, rng = self.cluster, self.cluster.behaviour, self.cluster.survivor_rng
        if not worker.is_deaf and rng.random() >= behaviour.deaf:
            cluster.schedule.after(behaviour.acknowledges_within_s * rng.random(), self._acknowledge, worker)

    def _acknowledge(self, worker: Worker) -> None:
        cluster, behaviour, rng = self.cluster, self.cluster.behaviour, self.cluster.survivor_rng
        if not worker.acts or worker.failed_at is not None or worker.is_deaf or not self._is_reachable:
            return
        worker.is_held = True
        cluster.checks.ended(worker)
        cluster.counts["held"] += 1
        self._emit_from(worker, events.WorkerHeld(worker.generation, worker.local_rank, 7))
        if cluster.has_faults and rng.random() < behaviour.dies_held:
            cluster.schedule.after(rng.choice((0.01, 2.0)) * rng.random(), self._die_held, worker)

    def _die_held(self, worker: Worker) -> None:
        if worker.is_alive and worker.is_held and self._is_reachable:
            if self.cluster.survivor_rng.random() < 0.5:
                self.leftovers = self.workers[worker.local_rank].formation  # the next one, if that was ordered already
            worker.failed_at = self.cluster.schedule.now
            self._exit(worker, -SIGKILL)

    def _adopt(self, before: Worker, worker: Worker) -> None:
        """Make a held worker one of the next generation; if it has exited, report that for the next one."""
        if before.is_alive:
            before.is_alive = False  # its process goes on as the new one, which is held until it is sent the begin
            worker.is_alive = worker.is_held = True
            worker.is_deaf, worker.is_stuck, worker.channel_at = before.is_deaf, before.is_stuck, before.channel_at
            self._emit(events.WorkerStarted(worker.generation, worker.local_rank, worker.pid))
            self._send(worker, self._continue, worker)
        else:
            at = self.cluster.schedule.now + self.agent.host.offset
            self.cluster.checks.failed(worker)
            exited = events.WorkerExited(worker.generation, worker.local_rank, -SIGKILL, before_stop=True, ended_at=at)
            self._emit(exited)
        if self._is_lease_expired:
            self._fence()

    def _continue(self, worker: Worker) -> None:
        """Take part in the next generation."""
        if not worker.is_alive or not self._is_reachable:
            return
        worker.is_held, worker.began_at = False, self.cluster.schedule.now
        self.cluster.checks.began(worker)
        self.cluster.counts["survivors"] += 1
        self._plan(worker)
        self._plan_opt_in(worker)

    def _send(self, worker: Worker, call: object, *arguments: object) -> None:
        """Send a message on the channel of this worker, which is in order."""
        delay_s = 0.005 * self.cluster.survivor_rng.random()
        worker.channel_at = max(self.cluster.schedule.now + delay_s, worker.channel_at)
        self.cluster.schedule.at(worker.channel_at, call, *arguments)  # type: ignore[arg-type]

    def _emit_from(self, worker: Worker, event: AnyEvent) -> None:
        """Send an event that the worker caused, through its channel."""
        self._send(worker, self.agent.do, self.agent.step, event)

    def _stopped_alone(self, worker: Worker, signal: int) -> None:
        rng, behaviour = self.cluster.survivor_rng, self.cluster.behaviour
        if not worker.is_alive:
            return
        worker.was_signalled = True
        if signal != SIGKILL and rng.random() >= behaviour.ignores_term:
            self.cluster.schedule.after(behaviour.ends_within_s * rng.random(), self._exit, worker, -signal)
        elif signal == SIGKILL and worker.is_stuck:
            self._has_stuck = True
            self._ends(worker)
        elif signal == SIGKILL:
            self._exit(worker, -SIGKILL)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _succeed(self, worker: Worker) -> None:
        if not worker.is_held and worker.failed_at is None:
            self._exit(worker, 0)

    def _fail_unless_calm(self, worker: Worker) -> None:
        if self.cluster.has_faults:
            self.fail(worker)

    def fail(self, worker: Worker) -> None:
        """Let the worker fail by itself: raise, exit or crash. One that waits for the begin can only crash."""
        can_fail = worker.acts or worker.awaits_begin
        if not can_fail or worker.failed_at is not None or not self._is_reachable:
            return
        self.cluster.checks.failed(worker)
        if worker.awaits_begin:
            self._exit(worker, -_SEGV)
            return
        rng = self.cluster.rng
        kind = rng.random()
        if kind < 0.5:
            worker.wrote_error = True
            self.cluster.schedule.after(rng.choice((0.01, 1.0)) * rng.random(), self._exit, worker, 1)
            self._spread(worker)
        else:
            self._exit(worker, 3 if kind < 0.8 else -_SEGV)

    def _fail_after_peer(self, worker: Worker) -> None:
        """Let the worker fail because a peer is gone."""
        if worker.acts and worker.failed_at is None:
            worker.failed_at = self.cluster.schedule.now
            worker.wrote_error = self.cluster.rng.random() < 0.7
            self.cluster.schedule.after(0.05 * self.cluster.rng.random(), self._exit, worker, 1)

    def _exit(self, worker: Worker, exit_code: int) -> None:
        if not worker.is_alive:
            return
        self._ends(worker)
        self._emit(
            events.WorkerExited(
                worker.generation,
                worker.local_rank,
                exit_code,
                before_stop=not worker.was_signalled,
                wrote_error=worker.wrote_error,
                ended_at=self.cluster.schedule.now + self.agent.host.offset,
            )
        )
        if exit_code != 0:
            self._spread(worker)

    def _ends(self, worker: Worker) -> None:
        if worker.is_alive:
            acted, worker.is_alive, worker.ended_at = worker.acts, False, self.cluster.schedule.now
            if acted:
                self.cluster.checks.ended(worker)

    def _spread(self, worker: Worker) -> None:
        """Let some peers fail as a consequence; the others wait for it forever."""
        rng, behaviour = self.cluster.rng, self.cluster.behaviour
        for peer in worker.formation.workers:
            if peer.acts and not peer.has_lost_peer and peer is not worker:
                peer.has_lost_peer = True
                if rng.random() < behaviour.collateral:
                    seconds = 0.005 + behaviour.collateral_s * rng.random()
                    self.cluster.schedule.after(seconds, peer.keeper._fail_after_peer, peer)

    def _signalled(self, signal: int) -> None:
        rng, behaviour = self.cluster.rng, self.cluster.behaviour
        for worker in self.workers.values():
            if worker.is_alive:
                worker.was_signalled = True
                if rng.random() >= behaviour.ignores_term:
                    code = rng.choice((-signal, 128 + signal, 1, 0))
                    if worker.failed_at is not None and code == 0:
                        code = -signal  # it was exiting with an error
                    self.cluster.schedule.after(behaviour.ends_within_s * rng.random(), self._exit, worker, code)

    def _has_workers_of(self, generation: int) -> bool:
        return any(worker.generation == generation for worker in self.workers.values())

    def _clear_after_signal(self, generation: int, held: tuple[int, ...]) -> None:
        if not self._has_workers_of(generation):
            return  # done already
        self._spared = held
        for worker in self.workers.values():
            if worker.local_rank not in held:
                self._exit(worker, -SIGKILL)
        if self.leftovers is not None and self.cluster.rng.random() < 0.5:
            return  # they ignore SIGTERM
        if held:
            clears_s = self.cluster.behaviour.clears_within_s * self.cluster.survivor_rng.random()
            self.cluster.schedule.after(clears_s, self._finish_clearing, generation, held)
            return
        self.leftovers = None
        self._report_if_clear()

    def _finish_clearing(self, generation: int, held: tuple[int, ...]) -> None:
        if (generation, held) == (self._is_clearing, self._spared):  # else there was another command
            self.leftovers = None
            self._report_if_clear()

    def _killed(self, generation: int) -> None:
        if not self._has_workers_of(generation):
            return  # done already
        for worker in self.workers.values():
            worker.was_signalled = True
            if worker.is_alive and worker.is_stuck:
                self._has_stuck = True
                self._ends(worker)
                self._spread(worker)
            else:
                self._exit(worker, -SIGKILL)
        self.leftovers, self._spared = None, ()
        self._report_if_clear()

    def _after_agent_death(self) -> None:
        if self.agent.host.is_up:
            for worker in (*self._unadopted, *self.workers.values()):
                if worker.is_alive:
                    self._ends(worker)
                    self._spread(worker)
            self.leftovers = None
            self.agent.on_cleared()

    def _report_if_clear(self) -> None:
        if self._is_clearing and not self._has_stuck:
            generation, self._is_clearing = self._is_clearing, 0
            if sent := tuple(each.progress(self.cluster.schedule.now) for each in self.workers.values() if each.counts):
                self._emit(events.ProgressSeen(generation, sent))
            held = tuple(rank for rank in self._spared if self.workers[rank].is_alive)
            self._emit(events.NodeCleared(generation, held))

    def examine(self, command: ExamineFailure) -> None:
        """Look for an error file and the last lines."""
        worker, rng = self.workers[command.local_rank], self.cluster.rng
        if worker.wrote_error and worker.failed_at is not None:
            what = f"RuntimeError: rank {worker.global_rank} {'failed' if worker.failed_by_itself else 'lost a peer'}"
            evidence = Evidence("RuntimeError", what, raised_at=worker.failed_at + self.agent.host.offset)
        elif self.cluster.has_faults and rng.random() < 0.1:
            return  # the disk does not answer
        else:
            evidence = Evidence(last_lines=("the end",))
        self._emit(events.FailureExamined(command.generation, command.local_rank, evidence), 0.3)

    @property
    def _is_reachable(self) -> bool:
        return self.agent.host.is_up

    def _emit(self, event: AnyEvent, within: float = 0.003) -> None:
        """Send an event to the agent through a pipe: in order, with a short delay."""
        agent = self.agent
        at = max(self.cluster.schedule.now + within * self.cluster.rng.random(), agent.last_event_at)
        if isinstance(event, events.FailureExamined):
            at = self.cluster.schedule.now + within * self.cluster.rng.random()
        else:
            agent.last_event_at = at
        self.cluster.schedule.at(at, agent.do, agent.step, event)
