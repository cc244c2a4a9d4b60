"""Observers: the dashboard, the trace and the hang sampler of a run. Created only if one of them is enabled.

    dashboard (``--dashboard``), trace (``--trace``)   on the node that serves the coordinator, while it serves
    hang sampler (``--on-hang``)                       on every node

Training depends on none of them: a failure is reported once and the run continues. If one cannot be opened at the start
of a single-node run, the run is refused (``RequestRefused``). With several nodes it is only reported, because the
serving node may change and the others depend on it.
"""

from __future__ import annotations

from tenax._io.interfaces import RequestRefused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tenax._core.agent import AgentState
    from tenax._core.hang import Scopes
    from tenax._core.requests import StacksRequest
    from tenax._io.interfaces import Control, OperatorService, Reply
    from tenax._io.loop import Loop
    from tenax._node.job import JobSpec
    from tenax._node.journal import Step
    from tenax._node.worker_logs import WorkerLogs
    from tenax._observe.dashboard.live import Dashboard
    from tenax._observe.hangs.sampler import Sampler
    from tenax._observe.tracing.run_trace import RunTrace


class Observers:
    """The observers of one node. ``print_line`` prints even if messages are off."""

    def __init__(
        self,
        job: JobSpec,
        control: Control,
        environ: Mapping[str, str],
        loop: Loop,
        logs: WorkerLogs,
        print_line: Callable[[str], None],
        scopes: Callable[[], Mapping[int, Scopes]],
    ) -> None:
        self._job = job
        self._control = control
        self._environ = environ
        self._loop = loop
        self._print = print_line
        self._served: list[Dashboard | RunTrace] = []  # open while this process serves the coordinator
        self._sampler: Sampler | None = None
        if job.on_hang == "off":
            return
        try:
            from tenax._observe.hangs.sampler import Sampler

            self._sampler = Sampler(job.settings, loop, logs, scopes)
        except Exception as error:
            print_line(f"could not start sampling workers for hangs: {type(error).__name__}: {error}")

    def observe(self, step: Step, state: AgentState) -> None:
        self.with_sampler(lambda sampler: sampler.observe(step, state))

    def answer_stacks(self, request: StacksRequest, dump: Callable[[int], None], reply: Reply, note: str = "") -> None:
        if self._sampler is None:
            reply(None, "hang detection stopped on this node, so its workers' stacks cannot be read")
        else:
            self._sampler.answer_stacks(request, dump, reply, note)

    def with_sampler(self, call: Callable[[Sampler], None]) -> None:
        if self._sampler is not None:
            try:
                call(self._sampler)
            except Exception as error:
                self._sampler = None
                self._print(f"stopped sampling workers for hangs: {type(error).__name__}: {error}")

    def set_operator_api(self, make_operator_api: Callable[[], OperatorService] | None) -> None:
        """Open the dashboard and the trace if this process now serves the coordinator; close them if it stopped."""
        self._close_served()
        if make_operator_api is None:
            return
        dashboard = "--dashboard", self._job.dashboard, self._open_dashboard
        trace = "--trace", self._job.trace, self._open_trace
        for flag, value, open_part in (dashboard, trace):
            try:
                if value:
                    self._served.append(open_part(make_operator_api()))
            except Exception as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                failure = f"{flag} {value}: {reason or type(error).__name__}"
                if not self._control.where:  # the only node
                    raise RequestRefused(failure) from error
                self._print(f"{failure}; the job continues without it")

    def _open_dashboard(self, operator_api: OperatorService) -> Dashboard:
        from tenax._observe.dashboard.live import Dashboard

        dashboard = Dashboard(self._job.dashboard, operator_api, self._loop, self._print, environ=self._environ)
        self._print(f"dashboard: {dashboard.link}")
        return dashboard

    def _open_trace(self, operator_api: OperatorService) -> RunTrace:
        from tenax._observe.tracing.run_trace import RunTrace

        return RunTrace(self._job.trace, operator_api, self._print, env=self._environ)

    def _close_served(self) -> None:
        while self._served:
            try:
                self._served.pop(0).close()
            except Exception as error:
                self._print(f"could not close the dashboard or the trace: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._close_served()
        if self._sampler is not None:
            self._sampler.close()
