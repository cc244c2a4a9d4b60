"""SelfReport: TorchElastic's events and metrics of an agent with hooks.

For a ``Node`` they are derived from its steps (``tenax._node.sinks``). An agent with hooks has no steps, so the
hooks record them. Nothing is built without a handler, and no handler can block or fail the agent: each runs behind a
sink.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tenax._core.text import one_line
from tenax._node.sinks import Sinks

if TYPE_CHECKING:
    from tenax._core.commands import EndWorker
    from tenax._core.events import ScopeExpired
    from tenax.agent.server.api import RunResult, Worker, WorkerGroup
    from tenax.events import Event, EventSource
    from tenax.events._status import Moment, Origin

Hook = TypeVar("Hook", bound="Callable[..., Any]")
_GROUP = "torchelastic"


def measured(hook: Hook, name: str = "") -> Hook:
    """Emit metrics for each call of this hook, under its name or another: success or failure, and the duration."""
    name = name or hook.__qualname__

    @wraps(hook)
    def timed(self: SelfReport, *args: Any, **kwargs: Any) -> Any:
        began_at = time.monotonic()
        end = "failure"
        try:
            result = hook(self, *args, **kwargs)
            end = "success"
            return result
        finally:
            self._measure(f"{name}.{end}", 1)
            self._measure(f"{name}.duration.ms", int((time.monotonic() - began_at) * 1000))

    return timed  # type: ignore[return-value]


class SelfReport:
    """Part of ``SimpleElasticAgent``."""

    _worker_group: WorkerGroup
    _remaining_restarts: int

    def __init__(self, sinks: Sinks | None = None, records_end: bool = False) -> None:
        self._sinks = sinks
        self._at_exit: weakref.finalize[..., Any] | None = None
        self._records_end = records_end
        self._began_at = time.monotonic()

    # --- sinks --------------------------------------------------------------------------------------------------------

    def _open_sinks(self) -> Sinks:
        """Open the sinks on first use. If a subclass's ``run`` never closes them, the interpreter's exit does."""
        if self._sinks is None:
            self._sinks = Sinks(self._worker_group.spec.event_log_handler)
            self._at_exit = weakref.finalize(self, self._sinks.close)
        return self._sinks

    def _close_sinks(self) -> None:
        sinks = self._forget_sinks()
        if sinks is not None:
            self._warn(*sinks.close())

    def _forget_sinks(self) -> Sinks | None:
        sinks, self._sinks = self._sinks, None
        if self._at_exit is not None:
            self._at_exit.detach()
        return sinks

    def _warn(self, *lines: str) -> None:
        """Print warnings; an agent with hooks has no console messages of its own."""
        for line in lines:
            sys.stderr.write(f"tenax: {one_line(line)}\n")

    def _measure(self, name: str, value: int) -> None:
        sinks = self._open_sinks()
        if sinks.has_metrics:
            from tenax.metrics import MetricData

            sinks.emit(MetricData(time.time(), _GROUP, name, value))
            self._warn(*sinks.new_errors())

    def _record(self, make: Callable[[], Event]) -> None:
        sinks = self._open_sinks()
        if sinks.has_events:
            sinks.record(make())
            self._warn(*sinks.new_errors())

    # --- events -------------------------------------------------------------------------------------------------------

    def get_event_succeeded(self) -> Event:
        """Return the event that this agent succeeded, for a launcher to record."""
        return self._construct_event("SUCCEEDED", "AGENT")

    @property
    def _total_execution_time(self) -> int:
        """Seconds since this agent was created."""
        return int(time.monotonic() - self._began_at)

    def _record_end_of_agent(self, result: RunResult) -> None:
        if result.is_failed():
            from tenax._failures.process_failure import by_cause

            first = min(result.failures.values(), key=by_cause, default=None)
            why = "" if first is None else str(first.message)
            self._record(lambda: self._construct_event("FAILED", "AGENT", raw_error=why))
        else:
            self._record(self.get_event_succeeded)

    def get_event_failed(self) -> Event:
        """Return the event that this agent failed, with the exception being handled, for a launcher to record."""
        import traceback

        return self._construct_event("FAILED", "AGENT", raw_error=traceback.format_exc())

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event with the duration of the block, also when it raises."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            duration_ms = (time.perf_counter() - began_at) * 1000
            self._record(lambda: self._construct_event(state, "AGENT", duration_ms=duration_ms))

    def _construct_event(
        self,
        state: str,
        source: EventSource | str,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """Return an event in TorchElastic's form. ``source`` is ignored: it follows from ``worker``."""
        del source
        from tenax.events._status import WorkerOfGroup, status_event

        which = None
        if worker is not None:
            which = WorkerOfGroup(
                local_rank=worker.local_rank,
                global_rank=worker.global_rank,
                role_rank=worker.role_rank,
                role_world_size=worker.role_world_size,
                worker_id=None if worker.id is None else str(worker.id),
                pid=worker_pid,
                exit_code=exit_code,
            )
        return status_event(state, *self._where_and_when(), which, raw_error=raw_error, duration_ms=duration_ms)

    def _where_and_when(self) -> tuple[Origin, Moment]:
        from tenax.events._status import Moment, Origin

        group = self._worker_group
        spec = group.spec
        handler = spec.rdzv_handler
        origin = Origin(
            run_id=handler.get_run_id() if handler is not None else "",
            role=spec.role,
            hostname=os.uname().nodename,
            rdzv_backend=self._backend_name(),
            entry_point=spec.get_entrypoint_name(),
        )
        moment = Moment(
            timestamp_ms=int(time.time() * 1000),
            total_run_time_s=self._total_execution_time,
            group_rank=group.group_rank,
            group_world_size=group.group_world_size,
            restarts_used=spec.max_restarts - self._remaining_restarts,
        )
        return origin, moment

    def _record_watchdog(self, name: str, about: ScopeExpired | EndWorker | None) -> None:
        """Record an event of the watchdog. Called in the thread that watches the workers."""

        def make() -> Event:
            from tenax.events._status import status_event
            from tenax.events._view import watchdog_details

            return status_event("RUNNING", *self._where_and_when(), name=name, more=watchdog_details(name, about))

        self._record(make)

    def _backend_name(self) -> str:
        """Return the backend's name; a third-party handler may have none."""
        get_backend = getattr(self._worker_group.spec.rdzv_handler, "get_backend", None)
        return str(get_backend()) if get_backend is not None else ""

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            state = "TERMINATED" if result.failures and failure is None else result.state.value
            how: dict[str, Any] = {} if result.failures else {"exit_code": 0}
            if failure is not None:
                error = json.dumps(failure.error_file_data)
                how = {"raw_error": error, "exit_code": failure.exitcode, "worker_pid": failure.pid}
            self._record(partial(self._construct_event, state, "WORKER", worker, **how))

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _record_metrics(self, result: RunResult) -> None:
        spec = self._worker_group.spec
        has_failed, has_retried = result.is_failed(), self._remaining_restarts < spec.max_restarts
        self._record_flakiness_metric(has_failed)
        self._measure(f"workers.{spec.role}.run_total", 1)
        for end, is_so in (("success", not has_failed), ("failed", has_failed)):
            self._measure(f"workers.{spec.role}.run_{end}_with_retries", int(is_so and has_retried))
            self._measure(f"workers.{spec.role}.run_{end}_no_retries", int(is_so and not has_retried))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """Emit flakiness: 0 without restarts, 100 for a failed run."""
        spec = self._worker_group.spec
        flakiness = 100 - 100 * (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        self._measure(f"workers.{spec.role}.flakiness", 100 if is_failed else int(flakiness))
