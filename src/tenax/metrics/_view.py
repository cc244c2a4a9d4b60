"""The view: metrics of a run, derived from the steps of the agent machine.

Pure: facts and orders with their times in, values out. It is told every step and asks nobody. What it says:

- Spans of time under TorchElastic's function names. A span that came to its end is ``.success``, one that was begun and
  did not is ``.failure``; both have a ``.duration.ms``.
- Where TorchElastic repeats a value at every look at its workers, this says it when it changes: there is no tick here.
  The state that the workers left becomes 0, so that the last values are the present ones.
- The group ``tenax``: what TorchElastic does not tell. ``measured.py`` has every name.

V1  No duration is negative.
V2  Every span that begins ends once: at the latest with the run.
V3  Nothing is said after the verdict.
"""

from __future__ import annotations

from tenax._core import commands as order
from tenax._core import messages
from tenax._core.agent import Phase
from tenax._core.model import Outcome, WorkerPhase
from tenax.metrics.api import TORCHELASTIC, MetricData

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.agent import AgentState
    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent
    from tenax._core.model import AgentSettings, Assignment, Failure, Verdict

TENAX = "tenax"

RUN = "SimpleElasticAgent.run"
RENDEZVOUS = "SimpleElasticAgent._rendezvous"
ASSIGN = "SimpleElasticAgent._assign_worker_ranks"
INITIALIZE = "SimpleElasticAgent._initialize_workers"
RESTART = "SimpleElasticAgent._restart_workers"
START = "LocalElasticAgent._start_workers"
STOP = "LocalElasticAgent._stop_workers"
MONITOR = "LocalElasticAgent._monitor_workers"

RECOVERY, MEMBERSHIP_CHANGE = "recovery_ms", "membership_change_ms"


class MetricView:
    """Tell it every step, in order. ``wall_offset`` is what must be added to ``at`` to get seconds since 1970."""

    def __init__(self, settings: AgentSettings, wall_offset: float) -> None:
        self._settings = settings
        self._wall_offset = wall_offset
        self._phase = Phase.NEW  # before the step
        self._spans: dict[str, float] = {}  # since when
        self._interrupted: tuple[str, float] | None = None  # what the time without workers is called, since when
        self._worker_state = ""
        self._remaining_restarts: int | None = None
        self._restarts_used = 0
        self._is_running = False
        self._counted = 0  # the generation whose failures were told
        self._at = 0.0
        self._found: list[MetricData] = []

    def take(self, at: float, event: AnyEvent, commands: Sequence[AnyCommand], state: AgentState) -> list[MetricData]:
        """The values that this step gives. ``state`` is the state after it."""
        del event  # whatever it was, the orders and the state say what came of it
        before, self._phase = self._phase, state.phase
        self._at, self._found = at, []
        if before is Phase.ENDED:
            return []
        if RUN not in self._spans:
            self._begin(RUN, at)
            self._say("running", 0, TENAX)  # so that the time before the first generation counts as time without
        for command in commands:
            if isinstance(command, order.StartWorkers):
                self._generation_formed(command.assignment)
        self._look_at_starting(state)
        if before is Phase.RUNNING and state.phase is not Phase.RUNNING:
            self._stopped_running(state)
        self._look_at_stopping(before, state)
        self._look_at_worker_state(state)
        if any(
            isinstance(each, order.SendMessage) and isinstance(each.message, messages.NodeStopped) for each in commands
        ):
            self._count_failures(state)
        if state.phase is Phase.JOINING and before is not Phase.JOINING:
            self._joining(before, state)
        if state.verdict is not None:
            self._count_failures(state)
            self._ended(state.verdict)
        return self._found

    # --- what happened ------------------------------------------------------------------------------------------------

    def _joining(self, before: Phase, state: AgentState) -> None:
        """Ready for a generation: the first, or the next."""
        self._begin(INITIALIZE, self._at)
        self._begin(RENDEZVOUS, self._at)
        if before is Phase.NEW:
            return
        # A node whose workers had all succeeded stopped nothing: it was called back.
        stopped_at = state.stopping_since if before is Phase.STOPPING else self._at
        self._begin(RESTART, stopped_at)
        if self._interrupted is None:
            first = min((failure.seen_at for failure in state.failures), default=stopped_at)
            since = max(state.running_since, min(first, stopped_at))
            self._interrupted = (MEMBERSHIP_CHANGE if state.is_uncharged else RECOVERY, since)

    def _generation_formed(self, part: Assignment) -> None:
        self._say("forming_ms", self._ms_since(self._spans[RENDEZVOUS]), TENAX)
        self._end(RENDEZVOUS)
        self._begin(ASSIGN, self._at)
        self._end(ASSIGN)
        self._say("generation", part.generation, TENAX)
        self._say("world_size", part.world_size, TENAX)
        self._say("nodes", part.group_world_size, TENAX)
        self._look_at_budget(part.restarts_used, is_new=True)
        self._begin(START, self._at)
        self._begin(MONITOR, self._at)

    def _look_at_starting(self, state: AgentState) -> None:
        """Whether every worker came to life. One may have failed before the last did."""
        if START not in self._spans:
            return
        workers = state.workers.values()
        if any(worker.phase is WorkerPhase.REQUESTED for worker in workers):
            if state.phase in (Phase.RUNNING, Phase.STOPPING, Phase.CLOSING):
                return  # we shall hear of it
            is_good = False
        else:
            is_good = all(worker.pid for worker in workers)
        for span in (START, INITIALIZE, RESTART):
            self._end(span, is_good)
        if is_good and state.phase is Phase.RUNNING:
            self._is_running = True
            self._say("running", 1, TENAX)
            if self._interrupted is not None:
                name, since = self._interrupted
                self._say(name, self._ms_since(since), TENAX)
                self._interrupted = None

    def _stopped_running(self, state: AgentState) -> None:
        self._end(MONITOR, is_good=state.phase is not Phase.ENDED)  # straight to the end: our hold on them was lost
        self._say("running_s", round(max(0.0, self._at - state.running_since), 3), TENAX)
        if self._is_running:
            self._is_running = False
            self._say("running", 0, TENAX)

    def _look_at_stopping(self, before: Phase, state: AgentState) -> None:
        if before is Phase.RUNNING and state.phase is Phase.STOPPING:
            self._begin(STOP, state.stopping_since)
        if STOP in self._spans and state.cleared:
            self._end(STOP)

    def _look_at_worker_state(self, state: AgentState) -> None:
        now = _worker_state(state) or self._worker_state
        if now != self._worker_state:
            if self._worker_state:
                self._say_of_workers(self._worker_state, 0)
            self._say_of_workers(now, 1)
            self._worker_state = now

    def _count_failures(self, state: AgentState) -> None:
        """Once per generation, when the evidence is in: before that nobody can tell an exception from an exit code."""
        if state.generation > self._counted:
            self._counted = state.generation
            for failure in state.failures:
                self._say(f"worker_failures.{failure_kind(failure)}", 1, TENAX)

    def _look_at_budget(self, restarts_used: int, *, is_new: bool = False) -> None:
        if is_new or restarts_used != self._restarts_used:
            self._restarts_used = restarts_used
            self._say("restarts_used", restarts_used, TENAX)
        remaining = max(0, self._settings.max_restarts - restarts_used)
        if remaining != self._remaining_restarts:
            self._remaining_restarts = remaining
            self._say_of_workers("remaining_restarts", remaining)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _ended(self, verdict: Verdict) -> None:
        has_result = verdict.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
        if has_result:
            self._look_at_budget(verdict.restarts_used)
            self._result(verdict)
        for span in [*self._spans]:
            if span != RUN:
                self._end(span, is_good=False)
        self._end(RUN, has_result)
        self._say(f"run_ended.{verdict.outcome.value}", 1, TENAX)

    def _result(self, verdict: Verdict) -> None:
        """What TorchElastic says of a run that came to a result. One that was cancelled has none."""
        failed, retried = verdict.outcome is Outcome.FAILED, verdict.restarts_used > 0
        budget = self._settings.max_restarts
        left = max(0, budget - verdict.restarts_used)
        self._say_of_workers("flakiness", 100 if failed else int(100 - 100 * (left + 1) / (budget + 1)))
        self._say_of_workers("run_total", 1)
        self._say_of_workers("run_success_with_retries", int(not failed and retried))
        self._say_of_workers("run_success_no_retries", int(not failed and not retried))
        self._say_of_workers("run_failed_with_retries", int(failed and retried))
        self._say_of_workers("run_failed_no_retries", int(failed and not retried))

    # --- saying it ----------------------------------------------------------------------------------------------------

    def _begin(self, span: str, at: float) -> None:
        self._spans[span] = at

    def _end(self, span: str, is_good: bool = True) -> None:
        since = self._spans.pop(span, None)
        if since is not None:
            self._say(f"{span}.{'success' if is_good else 'failure'}", 1)
            self._say(f"{span}.duration.ms", self._ms_since(since))

    def _ms_since(self, at: float) -> int:
        return max(0, int(1000 * (self._at - at)))

    def _say_of_workers(self, name: str, value: float) -> None:
        self._say(f"workers.{self._settings.role}.{name}", value)

    def _say(self, name: str, value: float, group: str = TORCHELASTIC) -> None:
        self._found.append(MetricData(self._at + self._wall_offset, group, name, value))


def _worker_state(state: AgentState) -> str:
    """As TorchElastic names it; empty where it is the one before."""
    match state.phase:
        case Phase.RUNNING:
            return "healthy"
        case Phase.STOPPING:
            return "failed" if state.failures else "stopped"
        case Phase.CLOSING | Phase.DONE:
            return "succeeded"
        case Phase.ENDED if not state.cleared:
            return "unknown"  # we lost our hold on them, or could not end them
    return ""


def failure_kind(failure: Failure) -> str:
    """One word for how a worker failed."""
    evidence = failure.evidence
    if failure.pid == 0 and failure.reason:
        return "not_started"
    if failure.was_late:
        return "late"
    if evidence.out_of_memory:
        return "out_of_memory"
    if evidence.error_type or evidence.raised_at is not None:
        return "exception"
    if failure.exit_code < 0:
        return "signal"
    return "exit_code" if failure.exit_code else "result"
