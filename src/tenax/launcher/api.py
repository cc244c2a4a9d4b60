"""TorchElastic's launcher: runs an entrypoint as a ``LaunchConfig`` describes.

``elastic_launch`` and ``launch_agent`` return the workers' return values and raise ``ChildFailedError``.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from tenax._node.job import JobSpec, abandon_s_from, entrypoint_name, new_run_id, rendezvous_handler
from tenax.launcher._config import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tenax._node.sinks import Sinks
    from tenax.rendezvous.api import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_get_entrypoint_name = entrypoint_name  # the name that third-party launchers import


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
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run to the end. Raises ChildFailedError if workers failed, SignalException if a signal stopped the run."""
    from tenax._node.node import open_sinks
    from tenax._observe.health.port import health_check_port

    if health_check_server is None:
        health_check_port(os.environ)  # raises for an invalid port before anything starts
    job = job_of(config, entrypoint, args)
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
        leave = getattr(handler, "leave", None)  # a third-party handler may not have it
        if leave is not None:
            leave()  # the run continues without this node
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
