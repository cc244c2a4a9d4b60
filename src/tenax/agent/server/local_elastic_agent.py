"""LocalElasticAgent: the agent that runs workers on its own host.

``run`` passes the spec to a ``Node`` (``tenax._node.node``), which is driven by events. A subclass that overrides one
of TorchElastic's hooks is run by ``SimpleElasticAgent``'s polling loop instead; the other hooks are implemented here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from tenax._core.environment import WorkerEnvironment, worker_environment
from tenax._core.model import Assignment, Outcome, Verdict, assert_never
from tenax._logs.specs import DefaultLogsSpecs, LogsSpecs, line_prefix
from tenax._node.job import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
    TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
    JobSpec,
    abandon_s_from,
    watchdog_file,
    watchdog_note,
)
from tenax._node.signals import DEFAULT_SIGNALS
from tenax._node.workers import decide_placements
from tenax._observe.health.check import TORCHELASTIC_HEALTH_CHECK_PORT, HealthCheck, health_check_of, health_check_port
from tenax.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    measured,
)
from tenax.multiprocessing.api import PContext, SignalException, start_processes
from tenax.rendezvous._engine_handler import EngineRendezvousHandler
from tenax.rendezvous.api import RendezvousClosedError, RendezvousHandler

if TYPE_CHECKING:
    from tenax._core.agent import AgentState
    from tenax._core.policy import RestartPolicy
    from tenax._node.journal import Step
    from tenax._node.node import Node
    from tenax._node.sinks import Sinks
    from tenax.control_plane._sockets import WorkerSockets
    from tenax.multiprocessing.errors import ProcessFailure
    from tenax.timer._watchdog_pipe import WatchdogPipe

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

_HOOKS = (
    "_start_workers",
    "_stop_workers",
    "_monitor_workers",
    "_shutdown",
    "_rendezvous",
    "_assign_worker_ranks",
    "_initialize_workers",
    "_restart_workers",
    "_invoke_run",
    "_exit_barrier",
    "_record_metrics",
    "_record_worker_events",
)


class LocalElasticAgent(SimpleElasticAgent):
    """Runs the workers of one node.

    ``logs_specs``: where their output goes; None: to the console, with files only for errors and the journal.
    ``start_method``: how processes of a function are created: spawn, fork or forkserver.
    ``exit_barrier_timeout``: for subclasses with their own hooks; otherwise unused.
    ``log_line_prefix_template``: prefix of a teed line.
    ``shutdown_timeout``: grace period in seconds between SIGTERM and SIGKILL.
    ``health_check_server``: started before the rendezvous and stopped last; None: tenax's own, if
    ``TORCHELASTIC_HEALTH_CHECK_PORT`` is set.
    ``uninterruptible_state_timeout``: seconds after which a process that survives SIGKILL is abandoned; None: the
    variable ``TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT``, or 10.
    ``restart_policy``: decides what follows a failure; None: restart at once while restarts are left.
    ``signals_to_handle``: names of the signals that stop the run gracefully.
    ``notice_signals``, ``notice_s``: names of the signals that announce such a stop, and how many seconds before.
    ``preload``: modules imported once for all workers of a Python script, or "auto"; empty: none.
    ``dashboard``, ``trace``, ``on_hang``, ``hang_after``: as in ``LaunchConfig``.
    ``log_dir``: an older alternative to ``logs_specs``.
    ``sinks``: where metrics and events go; None: ``spec.event_log_handler`` and the configured handlers.
    ``records_end``: whether to record the agent's end as an event; False for a launcher that records it itself.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs | str | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        restart_policy: RestartPolicy | None = None,
        signals_to_handle: str = DEFAULT_SIGNALS,
        notice_signals: str = "",
        notice_s: float | None = None,
        preload: str = "",
        dashboard: str = "",
        trace: str = "",
        on_hang: str = "report",
        hang_after: float = 300.0,
        log_dir: str | None = None,
        sinks: Sinks | None = None,
        records_end: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in JobSpec.__struct_fields__}
        super().__init__(
            spec,
            exit_barrier_timeout,
            shutdown_timeout,
            restart_policy=restart_policy,
            signals_to_handle=signals_to_handle,
            sinks=sinks,
            records_end=records_end,
        )
        if isinstance(logs_specs, str):  # the oldest documented form: LocalElasticAgent(spec, "spawn")
            start_method, logs_specs = logs_specs, None
        if logs_specs is None:
            logs_specs = DefaultLogsSpecs(log_dir=log_dir, redirects=spec.redirects, tee=spec.tee)
        given.update(logs_specs=logs_specs, start_method=start_method)
        # Without the fields of the spec, which may change until the run.
        self._job = JobSpec(**given, abandon_s=abandon_s_from(os.environ, uninterruptible_state_timeout))
        self._logs_specs = logs_specs
        self._start_method = start_method
        self._log_line_prefix_template = log_line_prefix_template
        if health_check_server is None:
            health_check_port(os.environ)  # raises for an invalid port
        self._health_check_server = health_check_server
        self._health: HealthCheck | None = None  # with hooks
        self._sockets: WorkerSockets | None = None  # with hooks: the workers' control plane
        self._pcontext: PContext | None = None
        self._generation = 0  # with hooks: the current generation

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        spec = self._worker_group.spec
        handler = self._handler(spec)
        if isinstance(handler, EngineRendezvousHandler) and not self._overrides_hooks():
            return self._run_node(handler)
        self._health = health_check_of(self._health_check_server, os.environ)
        if self._health is not None:
            self._health.open(warn=self._warn)
        try:
            from tenax.control_plane._sockets import open_sockets

            self._sockets = open_sockets(os.environ)
            return super().run(role)
        finally:
            if self._sockets is not None:
                self._sockets.close()
            if self._health is not None:
                self._health.close(self._warn)

    def _overrides_hooks(self) -> bool:
        """Return whether a hook is overridden: by a subclass, on this object, or by patching this class."""
        return any(name in vars(self) or getattr(type(self), name) is not _OWN_HOOKS[name] for name in _HOOKS)

    # --- without overridden hooks: a node -----------------------------------------------------------------------------

    def _run_node(self, handler: EngineRendezvousHandler) -> RunResult:
        from tenax._node.node import Node

        spec = self._worker_group.spec
        node = Node(
            self._described(handler),
            handler.engine(spec.master_addr or spec.local_addr, spec.master_port),
            os.environ,
            backend=self._backend_name(),
            sinks=self._open_sinks(),
            health_check_server=self._health_check_server,
            records_end=self._records_end,
        )
        try:
            return self._result(node.run(observe=self._mirror), node)
        finally:
            self._forget_sinks()  # the node has closed them; another run opens its own

    def _described(self, handler: RendezvousHandler) -> JobSpec:
        spec = self._worker_group.spec
        fields = {name: getattr(spec, name) for name in _SPEC_FIELDS}
        return msgspec.structs.replace(
            self._job,
            **fields,
            nproc_per_node=spec.local_world_size,
            name=self._job.name or spec.get_entrypoint_name(),
            run_id=handler.get_run_id(),
            max_nodes=handler.max_nodes if isinstance(handler, EngineRendezvousHandler) else self._job.max_nodes,
        )

    def _mirror(self, _: Step, state: AgentState) -> None:
        from tenax._core.agent import Phase

        group = self._worker_group
        self._remaining_restarts = group.spec.max_restarts - state.restarts_used
        if state.assignment is None:
            return
        part = state.assignment
        group.group_rank, group.group_world_size = part.group_rank, part.group_world_size
        group.master_addr, group.master_port = part.master_addr, part.master_port
        for worker in group.workers:
            worker.global_rank = part.first_global_rank + worker.local_rank
            worker.role_rank = part.first_role_rank + worker.local_rank
            worker.world_size, worker.role_world_size = part.world_size, part.role_world_size
            worker.id = state.workers[worker.local_rank].pid or None
        group.state = {
            Phase.RUNNING: WorkerState.HEALTHY,
            Phase.CLOSING: WorkerState.HEALTHY,
            Phase.STOPPING: WorkerState.UNHEALTHY,
        }.get(state.phase, WorkerState.STOPPED)

    def _result(self, verdict: Verdict, node: Node) -> RunResult:
        group = self._worker_group
        first = group.workers[0].global_rank
        match verdict.outcome:
            case Outcome.SUCCEEDED:
                group.state = WorkerState.SUCCEEDED
                values = {first + rank: value for rank, value in node.return_values().items()}
                return RunResult(group.state, return_values=values)
            case Outcome.CANCELLED:
                group.state = WorkerState.STOPPED
                if not verdict.signal:
                    raise RendezvousClosedError(f"the run was cancelled: {verdict.why}")
                number = signal.Signals(verdict.signal)
                raise SignalException(f"the agent (pid {os.getpid()}) received {number.name}", number)
            case Outcome.BROKEN:
                raise RuntimeError(verdict.why)
            case Outcome.FAILED | Outcome.ABANDONED:
                group.state = WorkerState.FAILED
                return RunResult(group.state, failures=_process_failures(verdict))
            case _:
                return assert_never(verdict.outcome)

    # --- with overridden hooks: defaults for the others ---------------------------------------------------------------

    @measured
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        handler = self._handler(spec)
        first = worker_group.workers[0]
        self._generation += 1
        part = Assignment(
            generation=self._generation,
            group_rank=worker_group.group_rank or 0,
            group_world_size=worker_group.group_world_size or 1,
            first_global_rank=first.global_rank,
            world_size=first.world_size,
            first_role_rank=first.role_rank,
            role_world_size=first.role_world_size,
            master_addr=worker_group.master_addr or "127.0.0.1",
            master_port=worker_group.master_port or 0,
            use_agent_store=bool(getattr(handler, "use_agent_store", False)),
            restarts_used=spec.max_restarts - self._remaining_restarts,
        )
        threads = decide_placements(spec.numa_options, spec.local_world_size).omp_num_threads
        options = WorkerEnvironment(spec.virtual_local_rank, threads)
        ranks = range(spec.local_world_size)
        settings = self._described(handler).settings
        envs = {rank: worker_environment(settings, part, rank, os.environ, options) for rank in ranks}
        if self._sockets is not None:
            for rank in ranks:
                envs[rank].update(self._sockets.env(first.global_rank + rank))
        scopes = self._watch_scopes(envs)
        prefixes, template = None, self._log_line_prefix_template
        if template is not None:
            prefixes = {
                rank: line_prefix(template, role_name=spec.role, rank=first.global_rank + rank, local_rank=rank)
                for rank in ranks
            }
        assert spec.entrypoint is not None
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=dict.fromkeys(ranks, spec.args),
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=prefixes,
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
            grace_s=self._shutdown_timeout,
            scopes=scopes,
        )
        return self._pcontext.pids()

    def _watch_scopes(self, envs: dict[int, dict[str, str]]) -> WatchdogPipe | None:
        """Open a watchdog pipe for the workers of this generation, if the environment enables the watchdog."""
        timer_file = watchdog_file(os.environ)
        if timer_file is None:
            note = watchdog_note(os.environ)
            if note and self._generation == 1:
                self._warn(note)
            return None
        from tenax._processes.stacks import stacks_env
        from tenax.timer._watchdog_pipe import WatchdogPipe

        pipe = WatchdogPipe(len(envs), timer_file, on_event=self._record_watchdog)
        pipe.make()
        for env in envs.values():
            env.update({TORCHELASTIC_TIMER_FILE: pipe.path, **stacks_env()})
        if self._health is not None:
            self._health.signs.ask_watchdog(pipe.last_progress_time)
        return pipe

    def _report_health(self, waits_for: str = "") -> None:
        if self._health is not None:
            state = self._worker_group.state
            is_ready = state is WorkerState.SUCCEEDED or (state is WorkerState.HEALTHY and not waits_for)
            self._health.turn(state.value.lower(), self._generation, is_ready=is_ready, waits_for=waits_for)

    @measured
    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - the hook's signature
        self._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
            self._pcontext = None

    @measured
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._pcontext is None:
            return RunResult(WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if result is None:
            return RunResult(WorkerState.HEALTHY)
        rank_of = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return RunResult(
            WorkerState.FAILED if result.is_failed() else WorkerState.SUCCEEDED,
            {rank_of[rank]: value for rank, value in result.return_values.items()},
            {rank_of[rank]: failure for rank, failure in result.failures.items()},
        )


_SPEC_FIELDS = [name for name in WorkerSpec.__dataclass_fields__ if name in JobSpec.__struct_fields__]
_OWN_HOOKS = {name: getattr(LocalElasticAgent, name) for name in _HOOKS}


def agent_of(job: JobSpec, handler: RendezvousHandler, sinks: Sinks, health_check_server: Any) -> LocalElasticAgent:
    """Return the agent that runs a launcher's job and records its end."""

    def fields(names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(job, name) for name in names if name in JobSpec.__struct_fields__}

    spec = WorkerSpec(**fields(_SPEC_FIELDS), local_world_size=job.nproc_per_node, rdzv_handler=handler)
    agent = LocalElasticAgent(
        spec,
        **fields(LocalElasticAgent.__init__.__annotations__),
        health_check_server=health_check_server,
        sinks=sinks,
        records_end=True,
    )
    agent._job = job  # also with what the parameters above do not have
    return agent


def _process_failures(verdict: Verdict) -> dict[int, ProcessFailure]:
    from tenax.multiprocessing.errors import ProcessFailure

    to_agent_clock = time.monotonic() - time.time()
    failures = {
        failure.global_rank: ProcessFailure.from_failure(failure, wall_to_agent_clock=to_agent_clock)
        for failure in verdict.failures
    }
    if not failures:  # no worker failed, but one could not be killed
        stuck = verdict.stuck_pids[0] if verdict.stuck_pids else 0
        failures[0] = ProcessFailure(0, stuck, -signal.SIGKILL, "")
        failures[0].message = verdict.why
    return failures
