"""Derives TorchElastic's events from the steps of an agent machine. Pure.

Invariants (tests cite the numbers):

V1  A rendezvous is reported when it is over: as RENDEZVOUS and ASSIGN_WORKER_RANKS if this node got an assignment, as
    RENDEZVOUS alone if it did not. A verdict about workers that have run is not a rendezvous.
V2  START is reported once for each started worker, and every START has exactly one end: SUCCEEDED, FAILED, TERMINATED,
    or UNHEALTHY if the worker may still be alive. The end comes before the next RENDEZVOUS.
V3  A worker that could not be started is FAILED, without START.
V4  A failure is reported once its evidence is complete, with the time at which the worker ended.
V5  The last event is the agent's own, once: SUCCEEDED or FAILED, with the diagnosis of the run.
V6  With a watchdog, the first event is its start and the last but one its end. In between, each expired timer scope is
    reported, and each worker that is killed because of it.

TorchElastic reports the ends of the last group of workers only; here every generation's are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenax._core import commands, events, messages
from tenax._core.agent import AgentState, Phase, global_rank
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Failure, Outcome, Verdict, WorkerPhase, WorkerRecord, failure_began_at
from tenax.events._status import Moment, Origin, WorkerOfGroup, error_as_json, status_event
from tenax.events.api import Event

_SETTLED = (Phase.JOINING, Phase.DONE, Phase.ENDED)  # no more events about the generation's workers follow


class EventView:
    """Call ``take`` for every step of one run, in order.

    ``wall_offset``: seconds since the epoch minus the agent's clock. ``has_watchdog``: whether timer scopes are
    watched.
    """

    def __init__(
        self,
        settings: AgentSettings,
        entrypoint: str,
        host: str,
        rdzv_backend: str,
        wall_offset: float,
        has_watchdog: bool = False,
    ) -> None:
        self._has_watchdog = has_watchdog
        self._origin = Origin(settings.run_id, settings.role, host, rdzv_backend, entrypoint)
        self._wall_offset = wall_offset
        self._began_at: float | None = None
        self._joins_since: float | None = None  # None: not joining
        self._is_over = False
        # Of this step:
        self._at = 0.0
        self._state: AgentState
        # Of this generation:
        self._generation = 0
        self._formed_at = 0.0
        self._started_at: dict[int, float] = {}  # by local rank
        self._end_reported: set[int] = set()  # local ranks
        self._why_ended = ""

    def take(self, at: float, event: AnyEvent, sent: list[AnyCommand], state: AgentState) -> list[Event]:
        """Return the events of one step, in order. ``sent``: its commands. ``state``: the state after it."""
        if self._is_over:
            return []
        self._at, self._state = at, state
        found: list[Event] = []
        if self._began_at is None:
            self._began_at = at
            if self._has_watchdog:
                found.append(self._of_watchdog("watchdog started"))
        if isinstance(event, events.ScopeExpired):
            found.append(self._of_watchdog("timer expired", event))
        if state.generation != self._generation:
            found += self._formed()
        for command in sent:
            if isinstance(command, commands.SignalWorkers | commands.KillNode):
                self._why_ended = self._why_ended or command.why
            if isinstance(command, commands.EndWorker):
                found.append(self._of_watchdog("kill worker process", command))
        found += self._starts()
        found += self._ends()
        for command in sent:
            match command:
                case commands.SendMessage(messages.NodeReady()):
                    self._joins_since = at
                case commands.Finish(verdict):
                    found += self._finished(verdict)
        return found

    def _formed(self) -> list[Event]:
        """Return both events of a rendezvous. Ranks come with the generation, so assigning them takes no time."""
        state = self._state
        self._generation, self._formed_at = state.generation, self._at
        self._started_at, self._end_reported, self._why_ended = {}, set(), ""
        why = state.assignment.why if state.assignment is not None else ""
        return [self._of_rendezvous(why), self._event("ASSIGN_WORKER_RANKS", duration_ms=0.0)]

    def _of_rendezvous(self, why: str, error: str = "") -> Event:
        since, self._joins_since = self._joins_since, None
        duration_ms = _ms(self._at if since is None else since, self._at)
        return self._event("RENDEZVOUS", {"why": why}, duration_ms=duration_ms, error=error)

    def _starts(self) -> list[Event]:
        found = []
        for rank, worker in self._state.workers.items():
            if worker.pid and rank not in self._started_at:
                self._started_at[rank] = self._at
                found.append(self._event("START", worker=worker, duration_ms=_ms(self._formed_at, self._at)))
        return found

    def _ends(self) -> list[Event]:
        state = self._state
        is_settled = state.phase in _SETTLED
        found = []
        for rank, worker in state.workers.items():
            if rank in self._end_reported:
                continue
            if worker.phase is WorkerPhase.ENDED and (is_settled or rank not in state.last.examination.ranks):
                found.append(self._of_end(worker))
            elif is_settled and rank in self._started_at:
                found.append(self._of_unseen_end(worker))
            else:
                continue
            self._end_reported.add(rank)
        return found

    def _of_end(self, worker: WorkerRecord) -> Event:
        failure = next((each for each in self._state.failures if each.local_rank == worker.local_rank), None)
        # The agent may receive the start after the worker has exited: no event is dated before it.
        ended_at = max(worker.ended_at, self._started_at.get(worker.local_rank, 0.0))
        if failure is not None:
            how = {"exit_code": failure.exit_code, "error": self._error(failure)}
            return self._of_worker("FAILED", worker, ended_at, _cause(failure), **how)
        if not worker.was_stopped and worker.exit_code == 0:
            return self._of_worker("SUCCEEDED", worker, ended_at, {}, exit_code=0)
        return self._of_worker("TERMINATED", worker, ended_at, {"why": self._why_ended}, exit_code=worker.exit_code)

    def _of_unseen_end(self, worker: WorkerRecord) -> Event:
        """Return the end of a worker without a recorded exit. If the node is cleared, the worker is gone."""
        state = self._state
        why = state.verdict.why if state.verdict is not None and not state.cleared else self._why_ended
        name = "TERMINATED" if state.cleared else "UNHEALTHY"
        return self._of_worker(name, worker, self._at, {"why": why})

    def _of_worker(
        self, state: str, worker: WorkerRecord, ended_at: float, more: Mapping[str, object], **how: Any
    ) -> Event:
        since = self._started_at.get(worker.local_rank)
        ran_ms = None if since is None else _ms(since, ended_at)
        return self._event(state, more, worker=worker, happened_at=ended_at, duration_ms=ran_ms, **how)

    def _error(self, failure: Failure) -> str:
        evidence, code = failure.evidence, failure.exit_code
        ended = f"it was killed by signal {-code}" if code < 0 else f"it exited with code {code}"
        message = evidence.message or evidence.out_of_memory or failure.reason or ended
        began_at = failure_began_at(failure) + self._wall_offset
        return error_as_json(message, evidence.traceback or evidence.stacks, began_at)

    def _finished(self, verdict: Verdict) -> list[Event]:
        self._is_over = True
        is_success = verdict.outcome is Outcome.SUCCEEDED
        error = "" if is_success else verdict.why
        found = []
        is_about_workers = self._state.generation > 0 and verdict.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
        if self._joins_since is not None and not is_about_workers:
            found.append(self._of_rendezvous(verdict.why, error))
        if self._has_watchdog:
            found.append(self._of_watchdog("watchdog stopped"))
        details = {"outcome": verdict.outcome.value, "why": verdict.why, "signal": verdict.signal or None}
        found.append(
            self._event(
                "SUCCEEDED" if is_success else "FAILED",
                {**details, **_first_cause(verdict)},
                duration_ms=_ms(self._began_at or 0.0, self._at),
                error=error,
                restarts_used=max(verdict.restarts_used, self._state.restarts_used),
            )
        )
        return found

    def _event(
        self,
        state: str,
        more: Mapping[str, object] = {},
        *,
        worker: WorkerRecord | None = None,
        happened_at: float | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        error: str = "",
        restarts_used: int | None = None,
    ) -> Event:
        """Return an event about the worker, or about the agent. ``happened_at``: None: in this step."""
        now, part = self._state, self._state.assignment
        which = None
        if worker is not None:
            which = WorkerOfGroup(
                local_rank=worker.local_rank,
                global_rank=global_rank(now, worker.local_rank),
                role_rank=(part.first_role_rank if part is not None else 0) + worker.local_rank,
                role_world_size=part.role_world_size if part is not None else 1,
                worker_id=str(worker.pid) if worker.pid else None,
                pid=worker.pid or None,
                exit_code=exit_code,
            )
        moment = self._moment(self._at if happened_at is None else happened_at, restarts_used)
        details = {"generation": now.generation, **more}
        return status_event(
            state, self._origin, moment, which, raw_error=error or None, duration_ms=duration_ms, more=details
        )

    def _of_watchdog(self, name: str, about: events.ScopeExpired | commands.EndWorker | None = None) -> Event:
        more = watchdog_details(name, about)
        return status_event("RUNNING", self._origin, self._moment(self._at), name=name, more=more)

    def _moment(self, happened_at: float, restarts_used: int | None = None) -> Moment:
        state, part = self._state, self._state.assignment
        began_at = self._at if self._began_at is None else self._began_at
        return Moment(
            timestamp_ms=int((happened_at + self._wall_offset) * 1000),
            total_run_time_s=max(0, int(self._at - began_at)),
            group_rank=part.group_rank if part is not None else None,
            group_world_size=part.group_world_size if part is not None else None,
            restarts_used=state.restarts_used if restarts_used is None else restarts_used,
        )


def _cause(failure: Failure) -> dict[str, object]:
    """Return what the worker did and why, in the words of the report."""
    from tenax._view.cause import cause_of, what_happened

    cause = cause_of(failure)
    return {"cause": cause.kind, "what": what_happened(failure), "is_consequence": cause.is_consequence}


def _first_cause(verdict: Verdict) -> dict[str, object]:
    """Return the diagnosis: the first cause, and how many workers failed by themselves and as a consequence."""
    from tenax._view.cause import related

    found = related(verdict)
    if not verdict.failures:
        return {}
    details: dict[str, object] = {
        "failed": len(verdict.failures) - len(found.victims),
        "consequences": len(found.victims),
    }
    if found.first is not None:
        who = {"rank": found.first.global_rank, "host": found.first.host}
        details["first_cause"] = who | _cause(found.first)
    return details


def _ms(since: float, until: float) -> float:
    """Return a duration in milliseconds, rounded to microseconds."""
    return round(max(0.0, until - since) * 1000, 3)


def watchdog_details(name: str, about: events.ScopeExpired | commands.EndWorker | None) -> dict[str, object]:
    """Return the nested metadata of TorchElastic's watchdog events."""
    details: dict[str, object] = {"watchdog_event": name}
    if about is not None:
        details |= {
            "worker_pid": about.pid,
            "scope_id": about.scope,
            "expiration_time": about.expiration_time,
            "signal": about.signal,
            "generation": about.generation,
        }
    return details
