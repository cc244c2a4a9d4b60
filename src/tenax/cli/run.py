"""``tenax run``: parses the command line, prints errors and notes about it, runs the node, and prints the report.

A user's mistake is an exit code and a message, never a stack trace.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

import msgspec

from tenax._core.model import Outcome, Verdict
from tenax._core.policy import BudgetPolicy, RestartPolicy
from tenax._core.text import harmless, without_passwords
from tenax._io.interfaces import RequestRefused
from tenax._logs.specs import Std
from tenax._node.job import JobSpec, new_run_id, rendezvous_handler
from tenax._node.sinks import Sinks, open_sinks
from tenax.cli.arguments import HelpRequested, parse
from tenax.cli.flags import UsageError, usage_errors
from tenax.cli.host_checks import check_files, check_host, load_logs_specs_class
from tenax.cli.script import Entrypoint, entrypoint_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._node.node import Node
    from tenax.cli.options import Options
    from tenax.launcher.api import LaunchConfig
    from tenax.rendezvous.api import RendezvousHandler


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], *, before_run: Callable[[], None] = lambda: None
) -> int:
    """Execute ``tenax run ARGV`` and return the exit code. ``before_run`` is called once the node is assembled."""
    try:
        options = parse(argv, environ)
        if options.allocation is not None:
            from tenax.cli.scheduled_run import with_secret

            options = with_secret(options, environ)
        check(options, environ)
        if options.dry_run:
            return print_dry_run(options, environ)
        job = resolve(options, sys.executable)
        check_files(options, environ)
        return launch(job, environ, options.report, colour=allows_colour(sys.stderr), before_run=before_run)
    except HelpRequested:
        from shutil import get_terminal_size

        from tenax.cli.help import run_page

        return print_page(run_page(get_terminal_size((100, 24)).columns))
    except (UsageError, RequestRefused) as error:
        return print_usage_error(error)


def check(options: Options, environ: Mapping[str, str]) -> None:
    """Check that this host can run the job, and print the notes about it. Raises ``UsageError``."""
    enable_compat(options)
    check_host(options, environ)
    for note in options.notes:
        print_stderr(f"tenax run: note: {note}")


def resolve(options: Options, interpreter: str) -> JobSpec:
    """Return the job that can be started: with its entrypoint, a run id, and plug-ins instead of their names."""
    enable_compat(options)
    entrypoint, args = entrypoint_of(options, interpreter)
    return msgspec.structs.replace(
        options,
        entrypoint=entrypoint,
        args=tuple(args),
        run_id=options.run_id or new_run_id(),
        logs_specs=_logs_specs(options),
        restart_policy=_restart_policy(options),
    )


def launch_arguments(options: Options, interpreter: str) -> tuple[LaunchConfig, Entrypoint, list[str]]:
    """Return the job as the arguments of ``tenax.launcher``: the config, the entrypoint and its arguments."""
    from tenax.launcher.api import LaunchConfig

    job = resolve(options, interpreter)
    fields = {name: getattr(job, name) for name in LaunchConfig.__dataclass_fields__ if hasattr(job, name)}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    fields.update(run_id=options.run_id, metrics_cfg={"handlers": job.metrics} if job.metrics else {})
    return LaunchConfig(**fields), job.entrypoint, list(job.args)


def launch(
    job: JobSpec,
    environ: Mapping[str, str],
    report_path: str = "",
    *,
    colour: bool = False,
    before_run: Callable[[], None] = lambda: None,
) -> int:
    """Run with messages and a report on the console. Returns the exit code."""
    from tenax._node.node import Node
    from tenax.rendezvous._engine_handler import EngineRendezvousHandler

    with usage_errors():
        try:
            handler = rendezvous_handler(job)
        except ValueError:
            raise
        except Exception as error:  # raised by a third-party backend
            what = f"could not create its handler ({type(error).__name__}: {error})"
            raise UsageError(f"--rdzv-backend {job.rdzv_backend}: {what}") from error
        sinks = open_sinks(job)
    if not isinstance(handler, EngineRendezvousHandler):
        before_run()
        return _launch_with_polling(job, handler, sinks)
    node = Node(job, handler.engine(), environ, backend=handler.get_backend(), sinks=sinks, is_command=True)
    before_run()

    def report(verdict: Verdict) -> str:
        return _report(verdict, node, job, report_path, colour)

    if job.allocation is not None:
        from tenax.cli.scheduled_run import run_scheduled

        verdict, code = run_scheduled(node, job.allocation, environ, report)
    else:
        verdict = node.run(final_text=report)
        from tenax._failures.exit_codes import exit_code_for

        code = exit_code_for(verdict)
    _forward_first_cause(verdict, environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return code


def _forward_first_cause(verdict: Verdict, path: str) -> None:
    """If this process is itself a worker, write the first cause to its own error file."""
    if not path or not verdict.failures:
        return
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


def _launch_with_polling(job: JobSpec, handler: RendezvousHandler, sinks: Sinks) -> int:
    """Launch with a third-party handler, which the agent polls: no messages, but the same exit codes."""
    import signal

    from tenax._failures.exit_codes import FAILED, SIGNAL_BASE, SUCCEEDED
    from tenax.launcher.api import run_agent
    from tenax.multiprocessing.api import SignalException
    from tenax.multiprocessing.errors import ChildFailedError

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set during startup; this handler may need to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_agent(job, handler, sinks)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        code = error.get_first_failure()[1].exitcode
        return SIGNAL_BASE - code if code < 0 else code or FAILED
    except SignalException as error:
        return SIGNAL_BASE + error.sigval
    return SUCCEEDED


def _report(verdict: Verdict, node: Node, job: JobSpec, report_path: str, colour: bool) -> str:
    """Return the report for the console; write it as JSON to ``report_path``, if given."""
    if verdict.outcome is Outcome.SUCCEEDED and not report_path:
        return ""
    from shutil import get_terminal_size

    from tenax._failures.report import Report, brief, is_in_full, render, to_json, wall_clock_of

    # This host as the verdict names it: with the node's name, if it has one.
    first = node.part.first_global_rank if node.part is not None else -1
    host = next((each.host for each in verdict.members if each.first_rank == first), os.uname().nodename)
    report = Report(
        verdict=verdict,
        entrypoint=job.entrypoint_name,
        host=host,
        run_id=job.run_id,
        role=job.role,
        max_restarts=job.max_restarts,
        log_dir=node.log_dir,
        journal=node.journal_path,
        clock=wall_clock_of(node.journal_path),
    )
    text = ""
    if verdict.outcome is not Outcome.SUCCEEDED:
        is_full = is_in_full(verdict, node.part, job.nproc_per_node)
        text = render(report, colour, get_terminal_size().columns) if is_full else brief(report)
    if report_path:
        try:
            from tenax._io.safe_open import create_safely

            with create_safely(report_path) as file:
                file.write(to_json(report) + b"\n")
        except OSError as error:
            text += f"\ntenax: could not write the report to {report_path!r}: {error.strerror}\n"
    return text


def enable_compat(options: Options) -> None:
    """Apply ``--compat`` in this process, for plug-ins written for torch, and in the workers' environment."""
    if options.compat:
        os.environ.update(compat_variables(os.environ))


def compat_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that apply ``--compat`` in a worker. Raises ``UsageError``."""
    try:
        from tenax.compat import environment
    except ImportError as error:  # the calling program has already imported torch.distributed.elastic
        raise UsageError(f"could not enable --compat: {error}") from error
    return environment(environ)


def print_usage_error(error: ValueError) -> int:
    """Print what is wrong with the command line and return the exit code for it."""
    from tenax._failures.exit_codes import WRONG_USAGE

    if str(error):  # empty if another process of the scheduler's step prints it
        print_stderr(f"tenax run: {error}{getattr(error, 'hint', UsageError.hint)}")
    return WRONG_USAGE


def _restart_policy(options: Options) -> RestartPolicy | None:
    if options.policy_name is not None:
        from tenax.policy import load_policy

        with usage_errors():
            return load_policy(options.policy_name)
    if not options.fatal_exit_codes and not options.fatal_errors:
        return None
    return BudgetPolicy(options.fatal_exit_codes, options.fatal_errors)


def _logs_specs(options: Options) -> Any:
    def streams(value: int | dict[int, int]) -> Any:
        return Std(value) if isinstance(value, int) else {rank: Std(number) for rank, number in value.items()}

    try:
        return load_logs_specs_class(options.logs_specs_name)(
            log_dir=options.log_dir,
            redirects=streams(options.redirects),
            tee=streams(options.tee),
            local_ranks_filter=set(options.local_ranks_filter) or None,
        )
    except OSError as error:
        raise UsageError(f"could not create the log files: {error}") from error
    except Exception as error:
        if options.logs_specs_name is None:
            raise
        what = f"could not create it ({type(error).__name__}: {error})"
        raise UsageError(f"--logs-specs {options.logs_specs_name}: {what}") from error


def print_dry_run(options: Options, environ: Mapping[str, str]) -> int:
    from tenax.cli.dry_run import describe

    return print_page(describe(options, interpreter=sys.executable, cwd=os.getcwd(), environ=environ))


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def allows_colour(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal with colours and the user has not disabled them."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_stderr(text: str) -> None:
    """Print to stderr, escaped. A stderr that is closed or full is not an error, now or at exit."""
    if sys.stderr is None:
        return
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
