"""TorchElastic's ``multiprocessing`` API: start a set of processes, wait for them, close them.

A ``PContext`` runs one generation of the agent machine, without restarts, in a thread: the same keeper, stop sequence
and evidence as an agent, behind blocking methods.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tenax._core.agent import AgentMachine
from tenax._core.commands import StartWorkers
from tenax._core.events import SignalReceived
from tenax._core.model import AgentSettings, Outcome, Verdict, WorkerPhase
from tenax._engines.local import LocalEngine
from tenax._failures.process_failure import ProcessFailure
from tenax._io.latch import Latch
from tenax._io.loop import Loop
from tenax._logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, line_prefix, to_map
from tenax._node.journal import Journal
from tenax._node.signals import DEFAULT_SIGNALS, parse_signals
from tenax._node.supervisor import Supervisor, Surroundings
from tenax._node.worker_logs import WorkerLogs
from tenax._node.workers import Placements, decide_placements, make_entrypoint
from tenax.multiprocessing.subprocess_handler import SubprocessHandler  # noqa: F401 - third-party code imports it

if TYPE_CHECKING:
    from tenax._processes.entrypoint import CommandEntrypoint, FunctionEntrypoint
    from tenax.numa.binding import NumaOptions
    from tenax.timer._watchdog_pipe import WatchdogPipe

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "start_processes",
    "to_map",
]


_DEFAULT_GRACE_S = 30.0
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)


class SignalException(Exception):
    """The agent received the signal ``sigval``."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


def _raise(number: int, _: object) -> None:
    name = signal.Signals(number)
    raise SignalException(f"the agent (pid {os.getpid()}) received {name.name}", name)


@contextmanager
def signals_as_exceptions(numbers: list[signal.Signals], *, only_defaults: bool = False) -> Iterator[None]:
    """Raise ``SignalException`` on these signals, in the main thread only: so they interrupt methods that block.

    Ignored signals stay ignored; with ``only_defaults``, signals keep a handler of the program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    replaced = [
        number
        for number, handler in before.items()
        if (handler in _DEFAULT_HANDLERS if only_defaults else handler != signal.SIG_IGN)
    ]
    try:
        for number in replaced:
            signal.signal(number, _raise)
        yield
    finally:
        for number in replaced:
            if signal.getsignal(number) is _raise:
                signal.signal(number, before[number] or signal.SIG_DFL)


@dataclass
class RunProcsResult:
    """The result of a set of processes, by local rank."""

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return len(self.failures) > 0


class PContext(ABC):
    """A set of processes that succeed or fail together."""

    _start_method = "spawn"  # how processes of a function are created
    _numa_options: NumaOptions | None = None

    @abstractmethod
    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        _validate_full_rank(args, max(1, len(args)), "args")
        _validate_full_rank(envs, len(args), "envs")
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = len(args)
        self._logs = WorkerLogs(
            logs_specs,
            role=name,
            prefixes=self._all_prefixes(log_line_prefixes),
            stdout_filters=duplicate_stdout_filters,
            stderr_filters=duplicate_stderr_filters,
            show_messages=False,
        )
        self.grace_s = _DEFAULT_GRACE_S  # grace period of the others when one fails
        self.scopes: WatchdogPipe | None = None  # None: scopes are not watched
        self._loop: Loop | None = None
        self._machine: AgentMachine | None = None
        self._outcome: RunProcsResult | None = None
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._started, self._ended = Latch(), Latch()
        self._signals = ExitStack()  # restores the program's signal handlers

    def _all_prefixes(self, prefixes: dict[int, str] | None) -> dict[int, str] | None:
        """Return a prefix for every rank. Ranks without a custom prefix get the default."""
        if not prefixes:
            return None
        defaults = (line_prefix(None, role_name=self.name, rank=rank, local_rank=rank) for rank in range(self.nprocs))
        return {**dict(enumerate(defaults)), **prefixes}

    # --- log files, set once started ----------------------------------------------------------------------------------

    @property
    def stdouts(self) -> dict[int, str]:
        return self._logs.destination.stdouts

    @property
    def stderrs(self) -> dict[int, str]:
        return self._logs.destination.stderrs

    @property
    def error_files(self) -> dict[int, str]:
        return self._logs.destination.error_files

    @property
    def filtered_stdout(self) -> str:
        return self._logs.destination.filtered_stdout

    @property
    def filtered_stderr(self) -> str:
        return self._logs.destination.filtered_stderr

    def start(self) -> None:
        """Start all processes. Returns when each has started or failed to start."""
        if self._thread is not None or self._ended.is_open:
            raise RuntimeError(f"the processes {self.name!r} were already started; create a new context")
        keeper = loop = None
        try:
            # Before there is a process that a signal could orphan.
            self._signals.enter_context(signals_as_exceptions(parse_signals(DEFAULT_SIGNALS), only_defaults=True))
            placements = decide_placements(self._numa_options, self.nprocs)
            if isinstance(self.entrypoint, str):
                name = os.path.basename(self.entrypoint)
            else:
                name = getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__name__)
            entrypoint = make_entrypoint(self.entrypoint, self.args, self._start_method, name)
            keeper = entrypoint.keeper()
            loop = self._loop = Loop()
            keeper.spawn()  # in this thread, because it may fork
            self._logs.open()
            supervisor = Supervisor(
                AgentSettings(self.name, self.name, self.nprocs, max_restarts=0, grace_s=self.grace_s),
                _Surroundings(self, placements),
                loop=loop,
                control=LocalEngine(self.name),
                processes=keeper,
                entrypoint=entrypoint,
                logs=self._logs,
                journal=Journal(),
                scopes=self.scopes,
            )
            self._machine = supervisor.machine
            # A daemon thread: if the program exits without closing this context, the keeper kills the processes.
            self._thread = threading.Thread(
                target=self._run, args=(supervisor, entrypoint), name=f"tenax {self.name}", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._restore_signals()
            self._thread = None
            for opened in (keeper, self._logs, self.scopes, loop):
                if opened is not None:
                    opened.close()
            raise
        self._started.wait()
        if self._broken is not None:
            raise self._broken

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():  # only there handlers can be set
            self._signals.close()

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:  # noqa: ARG002 - nothing is polled
        """Return the result once all succeeded, or one failed and the others are stopped; None after the timeout.

        A negative ``timeout`` waits without limit; 0 does not wait.
        """
        self._ended.wait(-1 if timeout < 0 else timeout)
        if self._ended.is_open:
            self._restore_signals()
        if self._broken is not None:
            raise self._broken
        return self._outcome

    def pids(self) -> dict[int, int]:
        """Return the pids by local rank."""
        if self._machine is None:
            return {}
        return {rank: worker.pid for rank, worker in self._machine.state.workers.items()}

    def _exit_code(self, local_rank: int) -> int | None:
        worker = self._machine.state.workers[local_rank] if self._machine is not None else None
        return worker.exit_code if worker is not None and worker.phase is WorkerPhase.ENDED else None

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop all processes: signal, grace period, SIGKILL. Returns when none is left, or the rest is stuck."""
        if self._thread is None:
            return
        loop, stop = self._loop, SignalReceived(int(death_sig or signal.SIGTERM), timeout)
        if loop is not None:
            loop.soon(lambda: loop.post(stop))
        self._thread.join()
        self._restore_signals()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, supervisor: Supervisor, entrypoint: CommandEntrypoint | FunctionEntrypoint) -> None:
        try:
            try:
                verdict = supervisor.run()
            finally:
                self._logs.close()
            self._outcome = self._to_result(verdict, entrypoint.return_values())
        except BaseException as error:
            self._broken = error
        finally:
            if self._loop is not None:
                self._loop.close()
            self._ended.open()
            self._started.open()

    def _to_result(self, verdict: Verdict, return_values: dict[int, Any]) -> RunProcsResult:
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        if verdict.outcome is Outcome.SUCCEEDED:
            result.return_values = return_values
            return result
        if verdict.outcome is Outcome.BROKEN:
            raise RuntimeError(verdict.why)
        clock_offset_s = time.monotonic() - time.time()
        for failure in verdict.failures:
            found = ProcessFailure.from_failure(failure, wall_to_agent_clock=clock_offset_s)
            result.failures[failure.local_rank] = found
        if not result.failures:  # stopped by ``close``: report how each one ended
            for ended in verdict.stopped:
                result.failures[ended.local_rank] = ProcessFailure(ended.local_rank, ended.pid, ended.exit_code, "")
        for local_rank, pid in self.pids().items():
            if pid in verdict.stuck_pids:
                stuck = result.failures[local_rank] = ProcessFailure(local_rank, pid, -signal.SIGKILL, "")
                stuck.message = verdict.why
        return result


class _Surroundings(Surroundings):
    def __init__(self, context: PContext, placements: Placements) -> None:
        self._context = context
        self.placements = placements

    def environments(self, _: StartWorkers) -> dict[int, dict[str, str]]:
        return self._context.envs

    def observe(self, *_: object) -> None:
        machine = self._context._machine
        workers = machine.state.workers if machine is not None else {}
        if workers and all(worker.phase is not WorkerPhase.REQUESTED for worker in workers.values()):
            self._context._started.open()


class MultiprocessContext(PContext):
    """Processes that call a function."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self.start_method = self._start_method = start_method
        self._numa_options = numa_options


class SubprocessContext(PContext):
    """Processes that run a program."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._numa_options = numa_options

    @property
    def subprocess_handlers(self) -> dict[int, Any]:
        """Handlers by local rank, for code that reads ``handler.proc``."""
        return {rank: SimpleNamespace(local_rank_id=rank, proc=_Process(self, rank)) for rank in self.pids()}


class _Process:
    """The part of ``subprocess.Popen`` that exists for a process started by the keeper."""

    def __init__(self, context: PContext, local_rank: int) -> None:
        self._context = context
        self._local_rank = local_rank

    @property
    def pid(self) -> int:
        return self._context.pids()[self._local_rank]

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._context._exit_code(self._local_rank)

    returncode = property(poll)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
    *,
    grace_s: float = _DEFAULT_GRACE_S,
    scopes: WatchdogPipe | None = None,
) -> PContext:
    """Start one process per entry of ``args`` and ``envs`` (keys 0 to n-1): a program if ``entrypoint`` is a string.

    When one fails, the others are stopped with a grace period of ``grace_s``. ``scopes`` watches whether they leave
    their scopes in time, and is closed at the end.
    """
    rest = (logs_specs, log_line_prefixes, numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, *rest)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, *rest)
    context.grace_s = grace_s
    context.scopes = scopes
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return a context that redirects a standard stream to the file, if one is given and the system supports it."""
    return redirect_fn(std_rd) if std_rd and os.name == "posix" else nullcontext()


def _validate_full_rank(d: dict[int, Any], nprocs: int, what: str) -> None:
    """Raise RuntimeError unless the keys are exactly the local ranks."""
    if set(d) != set(range(nprocs)):
        raise RuntimeError(f"{what} has the keys {sorted(d)}; expected the local ranks 0 to {nprocs - 1}")
