"""``tenax run``: parses the command line, prints errors and notes about it, and calls the launcher.

A user's mistake is an exit code and a message, never a stack trace.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from tenax.cli.arguments import HelpRequested, parse
from tenax.cli.flags import UsageError
from tenax.cli.host_checks import (
    check_files,
    check_host,
    current_folder,
    load_logs_specs_class,
    load_restart_policy,
    numa_options,
)
from tenax.cli.script import entrypoint_of
from tenax.launcher._config import LaunchConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from tenax._core.policy import RestartPolicy
    from tenax._node.sinks import Sinks
    from tenax.cli.options import Options
    from tenax.cli.script import Entrypoint
    from tenax.rendezvous.api import RendezvousHandler


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Execute ``tenax run ARGV`` and return the exit code."""
    try:
        options = parse(argv, environ)
        enable_compat(options)
        check_host(options, current_folder(), environ)
        print_notes(options)
        if options.dry_run:
            return print_dry_run(options, environ)
        config, entrypoint, args = launch_arguments(options, sys.executable)
        check_files(options, environ)
        handler = _handler(config)
        sinks = _sinks(config)
    except HelpRequested:
        return _print_help()
    except UsageError as error:
        return print_usage_error(error)
    from tenax._io.interfaces import RequestRefused
    from tenax.launcher.api import launch

    colour = options.colour_allowed and sys.stderr is not None and sys.stderr.isatty()
    try:
        return launch(
            config,
            entrypoint,
            args,
            handler=handler,
            sinks=sinks,
            report_path=options.report,
            colour=colour,
            live_line=options.live_line_allowed,
        )
    except RequestRefused as error:
        return print_usage_error(UsageError(str(error)))


def _handler(config: LaunchConfig) -> RendezvousHandler:
    from tenax.launcher.api import rendezvous_handler

    try:
        return rendezvous_handler(config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except Exception as error:  # raised by a third-party backend
        raise UsageError(
            f"--rdzv-backend {config.rdzv_backend}: could not create its handler ({type(error).__name__}: {error})"
        ) from error


def _sinks(config: LaunchConfig) -> Sinks:
    from tenax.launcher.api import sinks_of

    try:
        return sinks_of(config)
    except ValueError as error:
        raise UsageError(str(error)) from error


def enable_compat(options: Options) -> None:
    """Apply ``--compat`` in this process, for plug-ins written for torch, and in the workers' environment."""
    if not options.compat:
        return
    try:
        from tenax.compat import environment
    except ImportError as error:  # the calling program has already imported torch.distributed.elastic
        raise UsageError(f"could not enable --compat: {error}") from error
    os.environ.update(environment(os.environ))


def print_notes(options: Options) -> None:
    """Print the notes about a valid command line."""
    for note in options.notes:
        print_stderr(f"tenax run: note: {note}")


def print_usage_error(error: UsageError) -> int:
    """Print what is wrong with the command line and return the exit code for it."""
    from tenax._failures.exit_codes import WRONG_USAGE

    print_stderr(f"tenax run: {error}\ntry: tenax run --help")
    return WRONG_USAGE


def launch_arguments(options: Options, interpreter: str) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """Return the launcher's config, the entrypoint and the entrypoint's arguments."""
    enable_compat(options)
    entrypoint, args = entrypoint_of(options, interpreter)
    config = LaunchConfig(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        nproc_per_node=options.nproc_per_node,
        logs_specs=_logs_specs(options),
        run_id=options.run_id,
        role=options.role,
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_backend=options.rdzv_backend,
        rdzv_configs=options.rdzv_configs,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval_s,
        start_method=options.start_method,
        log_line_prefix_template=options.log_line_prefix_template,
        local_addr=options.local_addr,
        metrics_cfg={"handlers": options.metrics} if options.metrics else {},
        event_log_handler=options.event_log_handler,
        numa_options=numa_options(options),
        signals_to_handle=options.signals_to_handle,
        duplicate_stdout_filters=list(options.duplicate_stdout_filters),
        duplicate_stderr_filters=list(options.duplicate_stderr_filters),
        virtual_local_rank=options.virtual_local_rank,
        shutdown_timeout=options.shutdown_timeout_s,
        restart_policy=_restart_policy(options),
        notice_signals=options.notice_signals,
        notice_s=options.notice_s,
        preload=options.preload,
        dashboard=options.dashboard,
        on_hang=options.on_hang,
        hang_after=options.hang_after_s,
        trace=options.trace,
    )
    return config, entrypoint, args


def _restart_policy(options: Options) -> RestartPolicy | None:
    if options.restart_policy != "budget":
        return load_restart_policy(options.restart_policy)
    if not options.fatal_exit_codes and not options.fatal_errors:
        return None
    from tenax._core.policy import BudgetPolicy

    return BudgetPolicy(options.fatal_exit_codes, options.fatal_errors)


def _logs_specs(options: Options) -> Any:
    from tenax._logs.std import Std

    def streams(value: int | dict[int, int]) -> Any:
        return Std(value) if isinstance(value, int) else {rank: Std(number) for rank, number in value.items()}

    try:
        return load_logs_specs_class(options.logs_specs)(
            log_dir=options.log_dir,
            redirects=streams(options.redirects),
            tee=streams(options.tee),
            local_ranks_filter=set(options.local_ranks_filter) or None,
        )
    except OSError as error:
        raise UsageError(f"could not create the log files: {error}") from error
    except Exception as error:
        if options.logs_specs is None:
            raise
        raise UsageError(
            f"--logs-specs {options.logs_specs}: could not create it ({type(error).__name__}: {error})"
        ) from error


def print_dry_run(options: Options, environ: Mapping[str, str]) -> int:
    """Print what the run would do (``--dry-run``)."""
    from tenax.cli.dry_run import describe

    return print_page(describe(options, interpreter=sys.executable, cwd=os.getcwd(), environ=environ))


def _print_help() -> int:
    from shutil import get_terminal_size

    from tenax.cli.help import run_page

    return print_page(run_page(get_terminal_size((100, 24)).columns))


def print_stderr(text: str) -> None:
    """Print to stderr, escaped. A stderr that is closed or full is not an error, now or at exit."""
    if sys.stderr is None:
        return
    from tenax._core.text import harmless, without_passwords

    text = harmless(without_passwords(text))
    try:
        descriptor = sys.stderr.fileno()
    except OSError:  # an object in this process that has no descriptor
        print(text, file=sys.stderr)
        return
    with suppress(OSError):
        os.write(descriptor, f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))


def print_page(text: str, *, is_styled: bool = False) -> int:
    """Print to stdout, escaped, and return the exit code. A reader that closes the pipe (``| head``) is not an error.

    A styled page contains escape sequences; its caller has escaped everything else.
    """
    if sys.stdout is None:
        return 0
    if not is_styled:
        from tenax._core.text import harmless, without_passwords

        text = harmless(without_passwords(text))
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what this terminal's encoding does not have
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Otherwise the interpreter reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            from tenax._failures.exit_codes import FAILED

            print_stderr(f"tenax: could not write to stdout: {error.strerror}")
            return FAILED
    return 0
