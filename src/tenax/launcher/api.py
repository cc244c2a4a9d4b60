"""TorchElastic's launcher: runs an entrypoint as a ``LaunchConfig`` describes.

``elastic_launch`` and ``launch_agent`` return the workers' return values and raise ``ChildFailedError``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tenax._node.job import (
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    JobSpec,
    abandon_s_from,
    check_ranges,
    entrypoint_name,
    new_run_id,
    rendezvous_handler,
)
from tenax._node.signals import DEFAULT_SIGNALS

if TYPE_CHECKING:
    from tenax._core.policy import RestartPolicy
    from tenax._node.sinks import Sinks
    from tenax.numa.binding import NumaOptions
    from tenax.rendezvous.api import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_DEFAULT_RENDEZVOUS_TIMEOUT_S = 900
_get_entrypoint_name = entrypoint_name  # the name that third-party launchers import


@dataclass(repr=False)
class LaunchConfig:
    """One launch: nodes and workers, rendezvous, restarts, output.

    ``min_nodes``, ``max_nodes``: number of nodes. Several nodes meet at ``rdzv_endpoint``.
    ``nproc_per_node``: workers on each node.
    ``logs_specs``: where output goes. None: ``DefaultLogsSpecs()``, which creates a temporary folder.
    ``run_id``: the job's id. Empty: a random one.
    ``role``: role of the workers, in their environment and in the prefix of their lines.
    ``rdzv_endpoint``, ``rdzv_backend``, ``rdzv_configs``, ``rdzv_timeout``: the rendezvous of the nodes; unused by a
    single node. ``rdzv_timeout`` (seconds, -1: 900) becomes ``rdzv_configs["timeout"]``.
    ``max_restarts``: maximum number of restarts after failures, counted once for all nodes.
    ``monitor_interval``: no effect; exits are detected at once.
    ``start_method``: how processes of a function are created: spawn, fork or forkserver.
    ``log_line_prefix_template``: prefix of a worker's line, with ``${role_name}``, ``${rank}``, ``${local_rank}``.
    ``metrics_cfg``: ``{"handlers": "prometheus:9400,statsd"}`` names metric handlers, besides configured ones.
    ``local_addr``: the address at which other nodes and workers reach this node.
    ``event_log_handler``: names of event handlers, besides configured ones: ``"console,jsonl:PATH"``.
    ``numa_options``: how to bind workers to CPUs. None: no binding.
    ``signals_to_handle``: names of the signals that stop the job gracefully.
    ``duplicate_stdout_filters``, ``duplicate_stderr_filters``: lines that contain one of these texts are copied to one
    file per node.
    ``virtual_local_rank``: every worker gets LOCAL_RANK=0 and only its own GPU.
    ``shutdown_timeout``: grace period in seconds between SIGTERM and SIGKILL. None: the variable
    ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or 30.

    TorchElastic has none of the following fields:

    ``restart_policy``: decides what follows a failure: a policy, or its name as for ``--restart-policy``. None: restart
    at once while restarts are left. With several nodes, the policy of the coordinator's node decides for all.
    ``notice_signals``: names of the signals with which a scheduler announces that it will take this node.
    ``notice_s``: how many seconds after the notice it does. None: unknown.
    ``preload``: modules imported once on each node, ``"torch,numpy"``, in a template that workers are forked from.
    ``"auto"``: the script's imports. ``"none"``: no template. For Python scripts only.
    ``dashboard``: address of the dashboard on the coordinator's node, ``"127.0.0.1:8080"``. Empty: no dashboard.
    ``on_hang``: what follows when no worker makes progress for ``hang_after`` seconds: ``"report"``, ``"restart"``, or
    ``"off"``.
    ``trace``: destination of the trace, ``"otel"`` or ``"otel:URL"``. Empty: no trace.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = DEFAULT_SIGNALS
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    restart_policy: RestartPolicy | str | None = None
    notice_signals: str = ""
    notice_s: float | None = None
    preload: str = "none"
    dashboard: str = ""
    on_hang: str = "report"
    hang_after: float = 300.0
    trace: str = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        self.rdzv_configs = dict(self.rdzv_configs or {})  # do not change the caller's dict
        self.metrics_cfg = {} if self.metrics_cfg is None else self.metrics_cfg
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _DEFAULT_RENDEZVOUS_TIMEOUT_S)
        self.shutdown_timeout = _shutdown_timeout(self.shutdown_timeout)
        if isinstance(self.restart_policy, str):
            from tenax.policy import load_policy

            self.restart_policy = load_policy(self.restart_policy)

    def __repr__(self) -> str:
        from tenax._core.text import conceal

        shown = ", ".join(f"{each.name}={conceal(each.name, getattr(self, each.name))!r}" for each in fields(self))
        return f"{type(self).__qualname__}({shown})"


def _shutdown_timeout(given: int | None) -> int:
    if given is None:
        text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or str(DEFAULT_SHUTDOWN_TIMEOUT_S)
        name, value = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", int(text) if text.strip().isdecimal() else -1
    else:
        text, name, value = str(given), "shutdown_timeout", given
    if value < 0:
        raise ValueError(f"{name} must be a whole number of seconds, at least 0, not {text!r}")
    return value


class elastic_launch:
    """``elastic_launch(config, entrypoint)(*args)`` runs the entrypoint and returns {global rank: return value}."""

    def __init__(
        self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any], health_check_server: Any = None
) -> dict[int, Any]:
    """Run to the end. Raises ChildFailedError if workers failed, SignalException if a signal stopped the run."""
    return run_job(job_of(config, entrypoint, args), health_check_server)


def run_job(job: JobSpec, health_check_server: Any = None) -> dict[int, Any]:
    """Run a job to the end, as ``launch_agent`` does."""
    from tenax._node.sinks import open_sinks
    from tenax._observe.health.check import health_check_port

    if health_check_server is None:
        health_check_port(os.environ)  # raises for an invalid port before anything starts
    handler = rendezvous_handler(job)
    sinks = open_sinks(job)
    try:
        return run_agent(job, handler, sinks, health_check_server)
    finally:
        sinks.close()  # if the run did not start


def job_of(config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> JobSpec:
    """Return the description of a job. A config without a run id gets a random one."""
    config.run_id = config.run_id or new_run_id()
    metrics = getattr(config.metrics_cfg, "params", config.metrics_cfg)  # a MetricsConfig is accepted too
    return JobSpec(
        **{name: value for name, value in vars(config).items() if name in JobSpec.__struct_fields__},
        entrypoint=entrypoint or "",
        args=tuple(args),
        name=entrypoint_name(entrypoint, args),
        metrics=metrics.get("handlers", ""),
        abandon_s=abandon_s_from(os.environ),
    )


def run_agent(
    job: JobSpec, handler: RendezvousHandler, sinks: Sinks, health_check_server: Any = None
) -> dict[int, Any]:
    """Run a job with ``LocalElasticAgent``, then shut down its rendezvous."""
    from tenax.agent.server.local_elastic_agent import agent_of
    from tenax.multiprocessing.api import SignalException
    from tenax.multiprocessing.errors import ChildFailedError

    try:
        result = agent_of(job, handler, sinks, health_check_server).run()
    except SignalException:
        if hasattr(handler, "leave"):  # a third-party handler may not have it
            handler.leave()  # the run continues without this node
        raise
    except BaseException:
        _shut_down(handler)
        raise
    _shut_down(handler)
    if result.is_failed():
        raise ChildFailedError(job.entrypoint_name, result.failures)
    return result.return_values


def _shut_down(handler: RendezvousHandler) -> None:
    """Shut down the handler; an error is only a warning, so that it cannot hide the result of the run."""
    try:
        handler.shutdown()
    except Exception as error:
        warnings.warn(f"could not shut down the rendezvous: {error}", RuntimeWarning, stacklevel=3)
