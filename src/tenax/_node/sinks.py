"""Sinks: where an agent's own metrics and events go.

Each handler has a ``BackgroundQueue``: it may raise, be slow or never return without affecting the job. Without a
handler there is no sink, and the metrics and events packages are not imported. The handlers configured at the start of
a run are used until its end.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tenax._core.agent import AgentState
    from tenax._core.model import AgentSettings
    from tenax._io.background_queue import BackgroundQueue
    from tenax._node.job import JobSpec
    from tenax._node.journal import Step
    from tenax.events import Event
    from tenax.events._view import EventView
    from tenax.metrics import MetricData
    from tenax.metrics._view import MetricView

_METRIC_GROUPS = ("torchelastic", "tenax")


class Sinks:
    """The handlers of one run. ``close`` flushes their queues, for a bounded time, and returns what was lost."""

    def __init__(
        self, event_log_handler: str = "null", metric_handlers: str = "", labels: Mapping[str, str] | None = None
    ) -> None:
        """``labels`` are added to every metric, for handlers with labels. Raises ValueError for an unknown name."""
        self._is_closed = False
        self._views: list[tuple[EventView | MetricView, Callable[[Any], None]]] = []  # with where their results go
        self._own: list[Any] = []  # handlers created here from their names
        self.locations: list[str] = []  # where to find their output, for people
        self._metrics: dict[str, list[BackgroundQueue]] = {}
        self._events = self._open_events(event_log_handler)
        self.has_events = bool(self._events)
        try:
            self._metrics = self._open_metrics(metric_handlers, labels or {})
        except BaseException:
            self.close()
            raise
        self.has_metrics = bool(self._metrics)

    def record(self, event: Event) -> None:
        for queue in self._events:
            queue.put(event)

    def emit(self, metric: MetricData) -> None:
        for queue in self._metrics.get(metric.group_name, ()):
            queue.put(metric)

    def redirect_console(self, print_line: Callable[[str], None]) -> None:
        """Print the lines of console handlers with ``print_line``, which is called in other threads."""
        for handler in self._own:
            if hasattr(handler, "print_line"):
                handler.print_line = print_line

    def new_errors(self) -> list[str]:
        """Return a message for each handler that has failed or hung for the first time since the last call."""
        return [error for queue in self._all() if (error := queue.first_problem())]

    def close(self) -> list[str]:
        """Flush and close the handlers within ``CLOSE_TIMEOUT_S`` in all. Returns messages about what was lost."""
        queues = self._all()
        if not queues or self._is_closed:
            return []
        self._is_closed = True
        from tenax._io.background_queue import CLOSE_TIMEOUT_S

        for queue in queues:
            queue.finish()
        until = time.monotonic() + CLOSE_TIMEOUT_S
        return [lost for queue in queues if (lost := queue.close(max(0.0, until - time.monotonic())))]

    def _all(self) -> list[BackgroundQueue]:
        metrics = {id(each): each for queues in self._metrics.values() for each in queues}
        return [*self._events, *metrics.values()]

    def _open_events(self, names: str) -> list[BackgroundQueue]:
        found: list[BackgroundQueue] = []
        if names and names != "null":
            from tenax.events.handlers import make_handlers

            found += [self._own_queue("event", handler, handler.record) for handler in make_handlers(names)]
        if "tenax.events" in sys.modules:  # otherwise no handler can be configured
            from tenax.events import configured_handlers

            found += [_queue("event", handler, handler.record) for handler in configured_handlers()]
        return found

    def _open_metrics(self, names: str, labels: Mapping[str, str]) -> dict[str, list[BackgroundQueue]]:
        """Return the queues by group. A handler of several groups has one queue."""
        own: list[BackgroundQueue] = []
        if names:
            from tenax.metrics import make_handlers

            own = [self._own_queue("metric", handler, handler.emit) for handler in make_handlers(names, labels)]
        found = {group: list(own) for group in _METRIC_GROUPS}
        if "tenax.metrics" in sys.modules:
            from tenax.metrics import handler_in_use

            by_handler: dict[int, BackgroundQueue] = {}
            for group in _METRIC_GROUPS:
                if (handler := handler_in_use(group)) is not None:
                    found[group].append(by_handler.setdefault(id(handler), _queue("metric", handler, handler.emit)))
        return {group: queues for group, queues in found.items() if queues}

    def _own_queue(self, kind: str, handler: Any, take: Callable[[Any], object]) -> BackgroundQueue:
        """Return a queue that closes its handler at the end; configured handlers are closed by their owners."""
        self._own.append(handler)
        if where := getattr(handler, "where", ""):
            self.locations.append(f"{kind}s: {where}")
        return _queue(kind, handler, take, getattr(handler, "close", None))

    # --- steps of a node ----------------------------------------------------------------------------------------------

    def follow(
        self,
        settings: AgentSettings,
        *,
        entrypoint: str,
        backend: str,
        records_end: bool,
        has_watchdog: bool,
        now: float,
    ) -> None:
        """Turn the steps of one node's machine into events and metrics.

        ``records_end``: whether the end of the agent is recorded as an event.
        """
        wall_offset = time.time() - now
        if self.has_events:
            from tenax.events._view import EventView

            view = EventView(settings, entrypoint, os.uname().nodename, backend, wall_offset, has_watchdog)
            self._views.append((view, self.record if records_end else self._record_unless_end))
        if self.has_metrics:
            from tenax.metrics._view import MetricView

            self._views.append((MetricView(settings, wall_offset), self.emit))

    def take(self, step: Step, state: AgentState) -> list[str]:
        """Process one step. Returns new errors of the handlers."""
        for view, put in self._views:
            for each in view.take(step.at, step.event, step.commands, state):
                put(each)
        return self.new_errors()

    def _record_unless_end(self, event: Event) -> None:
        if event.source.name != "AGENT" or event.metadata.get("state") not in ("SUCCEEDED", "FAILED"):
            self.record(event)


def open_sinks(job: JobSpec) -> Sinks:
    """Open the sinks of the job's metrics and events. Raises ValueError for an unknown handler."""
    return Sinks(job.event_log_handler, job.metrics, {"run_id": job.run_id, "role": job.role})


def _queue(
    kind: str, handler: object, take: Callable[[Any], object], end: Callable[[], object] | None = None
) -> BackgroundQueue:
    from tenax._io.background_queue import BackgroundQueue  # imports threading: only for a job with handlers

    return BackgroundQueue(f"the {kind} handler {type(handler).__name__!r}", take, end)
