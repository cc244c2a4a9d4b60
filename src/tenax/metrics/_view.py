"""Derives a run's metrics from the steps of the agent machine. Pure.

- Spans of time have TorchElastic's function names. A completed span is ``.success``, an unfinished one ``.failure``;
  both have a ``.duration.ms``.
- TorchElastic repeats values whenever it polls its workers; here they are reported when they change. The previous state
  of the workers is set to 0, so that the last values are the current ones.
- The group ``tenax`` has metrics that TorchElastic lacks. ``_reading.py`` lists all names.

V1  No duration is negative.
V2  Every span ends once, at the latest with the run.
V3  Nothing is reported after the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenax._core import commands
from tenax._core.agent import AgentState, Phase
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Diagnosis, Outcome, Verdict, WorkerPhase, assert_never
from tenax.metrics._reading import CALLS
from tenax.metrics.api import TORCHELASTIC, MetricData

TENAX = "tenax"

RUN, RENDEZVOUS, ASSIGN, INITIALIZE, RESTART, START, STOP, MONITOR = CALLS
RECOVERY, MEMBERSHIP_CHANGE = "recovery_ms", "membership_change_ms"


class MetricView:
    """Call ``take`` for every step, in order. ``wall_offset``: seconds since the epoch minus the agent's clock."""

    def __init__(self, settings: AgentSettings, wall_offset: float) -> None:
        self._settings = settings
        self._wall_offset = wall_offset
        self._phase = Phase.NEW  # before the step
        self._spans: dict[str, float] = {}  # open spans, and their starts
        self._interrupted: tuple[str, float] | None = None  # metric for the time without workers, and its start
        self._worker_state = ""
        self._remaining_restarts: int | None = None
        self._restarts_used = 0
        self._is_running = False
        self._remembered = 0  # the last generation whose failures were ...
        self._failed: tuple[int, range, Diagnosis] | None = None  # ... not yet counted, with the ranks of this node
        self._at = 0.0
        self._found: list[MetricData] = []

    def take(self, at: float, event: AnyEvent, sent: Sequence[AnyCommand], state: AgentState) -> list[MetricData]:
        """Return the values of one step. ``sent``: its commands. ``state``: the state after it."""
        del event  # its effects are in the commands and the state
        before, self._phase = self._phase, state.phase
        self._at, self._found = at, []
        if before is Phase.ENDED:
            return []
        if RUN not in self._spans:
            self._spans[RUN] = at
            self._put("running", 0, TENAX)  # covers the time before the first generation
        for command in sent:
            if isinstance(command, commands.StartWorkers):
                self._count_failures()
                self._generation_formed(command.assignment)
        self._check_starting(state)
        if before is Phase.RUNNING and state.phase is not Phase.RUNNING:
            self._stopped_running(state)
        self._check_stopping(before, state)
        self._check_worker_state(state)
        if state.phase is Phase.JOINING and before is not Phase.JOINING:
            self._remember_failures(state)
            self._joining(before, state)
        if state.verdict is not None:
            self._remember_failures(state)
            self._count_failures(state.verdict)
            self._ended(state.verdict)
        return self._found

    def _joining(self, before: Phase, state: AgentState) -> None:
        """The node is ready for a generation: the first, or the next."""
        self._spans[INITIALIZE] = self._spans[RENDEZVOUS] = self._at
        if before is Phase.NEW:
            return
        # A node whose workers had all succeeded is called back without stopping any.
        stopped_at = state.last.stop.since if before is Phase.STOPPING else self._at
        self._spans[RESTART] = stopped_at
        if self._interrupted is None:
            first = min((failure.seen_at for failure in state.failures), default=stopped_at)
            since = max(state.last.formed_at, min(first, stopped_at))
            self._interrupted = (MEMBERSHIP_CHANGE if state.last.is_uncharged else RECOVERY, since)

    def _generation_formed(self, part: Assignment) -> None:
        self._put("forming_ms", self._ms_since(self._spans[RENDEZVOUS]), TENAX)
        self._end(RENDEZVOUS)
        self._spans[ASSIGN] = self._at
        self._end(ASSIGN)
        self._put("generation", part.generation, TENAX)
        self._put("world_size", part.world_size, TENAX)
        self._put("nodes", part.group_world_size, TENAX)
        self._check_budget(part.restarts_used, is_new=True)
        self._spans[START] = self._spans[MONITOR] = self._at

    def _check_starting(self, state: AgentState) -> None:
        """End the start spans once every worker has started or failed to."""
        if START not in self._spans:
            return
        workers = state.workers.values()
        if any(worker.phase is WorkerPhase.REQUESTED for worker in workers):
            if state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
                return  # an event for it will follow
            is_good = False
        else:
            is_good = all(worker.pid for worker in workers)
        for span in (START, INITIALIZE, RESTART):
            self._end(span, is_good)
        if is_good and state.phase is Phase.RUNNING:
            self._is_running = True
            self._put("running", 1, TENAX)
            if self._interrupted is not None:
                name, since = self._interrupted
                self._put(name, self._ms_since(since), TENAX)
                self._interrupted = None

    def _stopped_running(self, state: AgentState) -> None:
        self._end(MONITOR, is_good=state.phase is not Phase.ENDED)  # ENDED: control of the workers was lost
        self._put("running_s", round(max(0.0, self._at - state.last.formed_at), 3), TENAX)
        if self._is_running:
            self._is_running = False
            self._put("running", 0, TENAX)

    def _check_stopping(self, before: Phase, state: AgentState) -> None:
        if before is Phase.RUNNING and state.phase is Phase.STOPPING:
            self._spans[STOP] = state.last.stop.since
        if STOP in self._spans and state.cleared:
            self._end(STOP)

    def _check_worker_state(self, state: AgentState) -> None:
        now = _worker_state(state) or self._worker_state
        if now != self._worker_state:
            if self._worker_state:
                self._put_of_workers(self._worker_state, 0)
            self._put_of_workers(now, 1)
            self._worker_state = now

    def _remember_failures(self, state: AgentState) -> None:
        """Keep what this node knows of the failures of a generation, until more is known or the next one is formed."""
        if state.generation > self._remembered:
            self._remembered = state.generation
            first_rank = state.assignment.first_global_rank if state.assignment is not None else 0
            ranks = range(first_rank, first_rank + self._settings.local_world_size)
            self._failed = state.generation, ranks, Diagnosis(failures=tuple(state.failures))

    def _count_failures(self, verdict: Verdict | None = None) -> None:
        """Count the workers of this node that failed by themselves: by the verdict, if it is about their generation."""
        if self._failed is None:
            return
        from tenax._view.cause import cause_of, related

        (generation, ranks, diagnosis), self._failed = self._failed, None
        if verdict is not None and verdict.generation == generation and verdict.failures:
            diagnosis = verdict
        found = related(diagnosis)
        for failure in (*((found.first,) if found.first is not None else ()), *found.same, *found.others):
            if failure.global_rank in ranks:
                self._put(f"worker_failures.{cause_of(failure).kind}", 1, TENAX)

    def _check_budget(self, restarts_used: int, *, is_new: bool = False) -> None:
        if is_new or restarts_used != self._restarts_used:
            self._restarts_used = restarts_used
            self._put("restarts_used", restarts_used, TENAX)
        remaining = max(0, self._settings.max_restarts - restarts_used)
        if remaining != self._remaining_restarts:
            self._remaining_restarts = remaining
            self._put_of_workers("remaining_restarts", remaining)

    def _ended(self, verdict: Verdict) -> None:
        has_result = verdict.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
        if has_result:
            self._check_budget(verdict.restarts_used)
            self._result(verdict)
        for span in [*self._spans]:
            if span != RUN:
                self._end(span, is_good=False)
        self._end(RUN, has_result)
        self._put(f"run_ended.{verdict.outcome.value}", 1, TENAX)

    def _result(self, verdict: Verdict) -> None:
        """Report TorchElastic's metrics of a run that succeeded or failed."""
        failed, retried = verdict.outcome is Outcome.FAILED, verdict.restarts_used > 0
        budget = self._settings.max_restarts
        left = max(0, budget - verdict.restarts_used)
        self._put_of_workers("flakiness", 100 if failed else int(100 - 100 * (left + 1) / (budget + 1)))
        self._put_of_workers("run_total", 1)
        for end, is_so in (("success", not failed), ("failed", failed)):
            self._put_of_workers(f"run_{end}_with_retries", int(is_so and retried))
            self._put_of_workers(f"run_{end}_no_retries", int(is_so and not retried))

    def _end(self, span: str, is_good: bool = True) -> None:
        since = self._spans.pop(span, None)
        if since is not None:
            self._put(f"{span}.{'success' if is_good else 'failure'}", 1)
            self._put(f"{span}.duration.ms", self._ms_since(since))

    def _ms_since(self, at: float) -> int:
        return max(0, int(1000 * (self._at - at)))

    def _put_of_workers(self, name: str, value: float) -> None:
        self._put(f"workers.{self._settings.role}.{name}", value)

    def _put(self, name: str, value: float, group: str = TORCHELASTIC) -> None:
        self._found.append(MetricData(self._at + self._wall_offset, group, name, value))


def _worker_state(state: AgentState) -> str:
    """Return TorchElastic's name of the workers' state; empty if it has not changed."""
    match state.phase:
        case Phase.RUNNING:
            return "healthy"
        case Phase.STOPPING:
            return "failed" if state.failures else "stopped"
        case Phase.CLOSING | Phase.DONE:
            return "succeeded"
        case Phase.ENDED if not state.cleared:
            return "unknown"  # control of the workers was lost, or they could not be killed
        case Phase.NEW | Phase.JOINING | Phase.ENDED:
            return ""
        case _:
            return assert_never(state.phase)
