"""The launcher: runs an entrypoint as a ``LaunchConfig`` describes.

``elastic_launch`` and ``launch_agent`` are TorchElastic's: they return the workers' return values and raise
``ChildFailedError``. ``launch`` is for the command line: it prints messages and a report, and returns an exit code.
"""

from __future__ import annotations

import os

from tenax.launcher._config import LaunchConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._core.model import Verdict
    from tenax._logs.specs import LogsSpecs
    from tenax._node.node import Node
    from tenax._node.sinks import Sinks
    from tenax._observe.health.check import HealthCheck
    from tenax.rendezvous.api import RendezvousHandler

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


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
    if health_check_server is None:
        from tenax._observe.health.port import health_check_port

        health_check_port(os.environ)  # raises for an invalid port before anything starts
    handler = rendezvous_handler(config)
    sinks = sinks_of(config)
    try:
        return _run_agent(handler, config, entrypoint, args, sinks, health_check_server)
    finally:
        sinks.close()  # if the run did not start


def sinks_of(config: LaunchConfig) -> Sinks:
    """Open the sinks of the run's metrics and events. Raises ValueError for an unknown handler."""
    from tenax._node.sinks import Sinks

    _ensure_run_id(config)
    labels = {"run_id": config.run_id, "role": config.role}
    settings = getattr(config.metrics_cfg, "params", config.metrics_cfg)  # a MetricsConfig is accepted too
    return Sinks(config.event_log_handler, settings.get("handlers", ""), labels)


def _ensure_run_id(config: LaunchConfig) -> None:
    if not config.run_id:
        config.run_id = new_run_id()


def _run_agent(
    handler: RendezvousHandler,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    sinks: Sinks,
    health_check_server: Any = None,
) -> dict[int, Any]:
    from tenax.agent.server.api import WorkerSpec
    from tenax.agent.server.local_elastic_agent import LocalElasticAgent
    from tenax.multiprocessing.api import SignalException
    from tenax.multiprocessing.errors import ChildFailedError

    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = LocalElasticAgent(
        spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=_grace(config),
        health_check_server=health_check_server,
        restart_policy=config.restart_policy,
        signals_to_handle=config.signals_to_handle,
        notice_signals=config.notice_signals,
        notice_s=config.notice_s,
        preload=config.preloads if isinstance(entrypoint, str) else "",
        dashboard=config.dashboard,
        trace=config.trace,
        on_hang=config.on_hang,
        hang_after=config.hang_after,
        sinks=sinks,
        records_end=True,
    )
    try:
        result = agent.run()
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
        raise ChildFailedError(entrypoint_name(entrypoint, args), result.failures)
    return result.return_values


def launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: list[Any],
    *,
    handler: RendezvousHandler | None = None,
    sinks: Sinks | None = None,
    report_path: str = "",
    colour: bool = False,
    live_line: bool = True,
) -> int:
    """Run with messages and a report on the console. Returns the exit code."""
    from tenax._core.model import AgentSettings
    from tenax._failures.exit_codes import exit_code_for
    from tenax._node.abandonment import abandon_s_from
    from tenax._node.entrypoints import make_entrypoint
    from tenax._node.node import Node, NodePlan
    from tenax._node.placements import decide_placements
    from tenax._node.watchdog import watchdog_plan
    from tenax.rendezvous._engine_handler import EngineRendezvousHandler

    if handler is None:
        handler = rendezvous_handler(config)
    run_id = config.run_id
    if sinks is None:
        sinks = sinks_of(config)
    if not isinstance(handler, EngineRendezvousHandler):
        return _launch_with_polling(handler, config, entrypoint, args, sinks)
    name = entrypoint_name(entrypoint, args)
    node = Node(
        NodePlan(
            settings=AgentSettings(
                run_id=run_id,
                role=config.role,
                local_world_size=config.nproc_per_node,
                max_restarts=config.max_restarts,
                grace_s=_grace(config),
                abandon_s=abandon_s_from(os.environ),
                on_hang=config.on_hang,
                hang_after_s=config.hang_after,
            ),
            entrypoint=make_entrypoint(
                entrypoint, dict.fromkeys(range(config.nproc_per_node), tuple(args)), config.start_method, name
            ),
            control=handler.engine(),
            logs_specs=config.logs_specs or _default_logs_specs(),
            prefix_template=config.log_line_prefix_template,
            stdout_filters=config.duplicate_stdout_filters or [],
            stderr_filters=config.duplicate_stderr_filters or [],
            signals=config.signals_to_handle,
            notice_signals=config.notice_signals,
            notice_s=config.notice_s,
            virtual_local_rank=config.virtual_local_rank,
            preload=config.preloads if isinstance(entrypoint, str) else "",
            keep_standbys=config.may_start_again,
            placements=decide_placements(config.numa_options, config.nproc_per_node),
            policy=config.restart_policy,
            watchdog=watchdog_plan(os.environ),
            dashboard=config.dashboard,
            trace=config.trace,
            health=_health_check(),
            rdzv_backend=handler.get_backend(),
            sinks=sinks,
            show_messages=True,
            live_line=live_line,
            exits_afterwards=True,
        )
    )
    verdict = node.run(final_text=lambda verdict: _report(verdict, node, config, name, report_path, colour))
    _forward_first_cause(verdict)
    return exit_code_for(verdict)


def _health_check() -> HealthCheck | None:
    if not os.environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
        return None
    from tenax._observe.health.check import health_check_of

    return health_check_of(None, os.environ)


def _forward_first_cause(verdict: Verdict) -> None:
    """If this process is itself a worker, write the first cause to its own error file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or not verdict.failures:
        return
    import sys

    from tenax._failures import error_file
    from tenax._failures.error_handler import get_error_handler
    from tenax._failures.process_failure import ProcessFailure

    first = verdict.failures[0]
    data = ProcessFailure.from_failure(first).error_file_data
    get_error_handler().override_error_code_in_rootcause_data(first.evidence.error_file, data, first.exit_code)
    try:
        error_file.write(path, data)
    except OSError as error:
        sys.stderr.write(f"tenax: could not write the first cause to the error file {path!r}: {error.strerror}\n")


def _launch_with_polling(
    handler: RendezvousHandler,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: list[Any],
    sinks: Sinks,
) -> int:
    """Launch with a third-party handler, which the agent polls: no messages, but the same exit codes."""
    import signal
    import sys

    from tenax._failures.exit_codes import FAILED, SIGNAL_BASE, SUCCEEDED
    from tenax.multiprocessing.api import SignalException
    from tenax.multiprocessing.errors import ChildFailedError

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set during startup; this handler may need to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run_agent(handler, config, entrypoint, args, sinks)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        code = error.get_first_failure()[1].exitcode
        return SIGNAL_BASE - code if code < 0 else code or FAILED
    except SignalException as error:
        return SIGNAL_BASE + error.sigval
    return SUCCEEDED


def _shut_down(handler: RendezvousHandler) -> None:
    """Shut down the handler; an error is only a warning, so that it cannot hide the result of the run."""
    try:
        handler.shutdown()
    except Exception as error:
        import warnings

        warnings.warn(f"could not shut down the rendezvous: {error}", RuntimeWarning, stacklevel=3)


def rendezvous_handler(config: LaunchConfig) -> RendezvousHandler:
    """Return the rendezvous handler of the config."""
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.rendezvous.registry import get_rendezvous_handler

    _ensure_run_id(config)
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )


def new_run_id() -> str:
    """Return a random run id."""
    return os.urandom(4).hex()


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """Return a name for people: the script rather than its interpreter."""
    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__qualname__", type(entrypoint).__name__)
    if os.path.basename(entrypoint).startswith("python"):
        for arg in args:
            if isinstance(arg, str) and not arg.startswith("-"):
                return arg
    return entrypoint


_get_entrypoint_name = entrypoint_name  # the name that third-party launchers import


def _grace(config: LaunchConfig) -> int:
    assert config.shutdown_timeout is not None, "LaunchConfig fills it in"
    return config.shutdown_timeout


def _default_logs_specs() -> LogsSpecs:
    from tenax._logs.specs import DefaultLogsSpecs

    return DefaultLogsSpecs()


def _report(verdict: Verdict, node: Node, config: LaunchConfig, name: str, report_path: str, colour: bool) -> str:
    """Return the report for the console; write it as JSON to ``report_path``, if given."""
    from tenax._core.model import Outcome

    if verdict.outcome is Outcome.SUCCEEDED and not report_path:
        return ""
    from shutil import get_terminal_size

    from tenax._failures.report import Report, render, to_json
    from tenax._failures.wall_clock import wall_clock_of

    report = Report(
        verdict=verdict,
        entrypoint=name,
        host=os.uname().nodename,
        run_id=config.run_id,
        role=config.role,
        max_restarts=config.max_restarts,
        log_dir=node.log_dir,
        journal=node.journal_path,
        clock=wall_clock_of(node.journal_path),
    )
    text = "" if verdict.outcome is Outcome.SUCCEEDED else render(report, colour, get_terminal_size((80, 24)).columns)
    if report_path:
        try:
            from tenax._io.safe_open import create_safely

            with create_safely(report_path) as file:
                file.write(to_json(report) + b"\n")
        except OSError as error:
            text += f"\ntenax: could not write the report to {report_path!r}: {error.strerror}\n"
    return text
