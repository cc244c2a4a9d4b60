"""A node: one agent process, assembled from the description of a job, and run.

``Node`` is the only place that puts an agent together. It creates the keeper, log writer, journal, signal handlers,
observers and loop, passes them to the supervisor, and closes them at the end, whatever happens.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress

import msgspec

from tenax._core.environment import (
    WorkerEnvironment,
    lasting_environment,
    lasting_of_worker,
    worker_environment,
)
from tenax._core.text import one_line
from tenax._io.helper_process import inheritable_environ
from tenax._io.interfaces import RequestRefused
from tenax._io.loop import Loop
from tenax._logs.specs import DefaultLogsSpecs
from tenax._node.job import TORCHELASTIC_TIMER_FILE, JobSpec, watchdog_file, watchdog_note
from tenax._node.journal import RUN_NAME, Journal, RunJournal, Step
from tenax._node.live_steps import LiveSteps, running_pids
from tenax._node.signals import SignalSource, parse_signals
from tenax._node.sinks import Sinks, open_sinks
from tenax._node.supervisor import SURVIVOR_VARIABLE, Supervisor, Surroundings, inherited_stdin
from tenax._node.worker_logs import WorkerLogs
from tenax._node.workers import decide_placements, make_entrypoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tenax._core.agent import AgentState
    from tenax._core.commands import ForwardNotice, ReadStacks, StartWorkers
    from tenax._core.model import Assignment, Verdict
    from tenax._core.requests import StacksRequest
    from tenax._io.interfaces import Control, OperatorService, Reply
    from tenax._node.link_journal import LinkJournal
    from tenax._node.observers import Observers
    from tenax._observe.health.check import HealthCheck
    from tenax.control_plane._sockets import WorkerSockets
    from tenax.timer._watchdog_pipe import WatchdogPipe

JOURNAL_NAME = "journal.jsonl"
NOTICE_VARIABLE = "TENAX_NOTICE_FILE"
# Variables that are set when a worker starts, besides those of ``_core.environment``.
_SET_AT_START = (
    "TORCHELASTIC_ERROR_FILE",
    NOTICE_VARIABLE,
    "TORCH_WORKER_SERVER_SOCKET",
    TORCHELASTIC_TIMER_FILE,
    SURVIVOR_VARIABLE,
)

_SAMPLE_AFTER_S = 1.0  # when hang detection starts


class Node(Surroundings):
    """One run. ``run`` may be called from any thread, once.

    ``control``: the connection to the coordinator. ``environ``: the environment of this process.
    ``backend``: the name of the rendezvous backend, for events.
    ``sinks``: where metrics and events go; None: to those that the job names. The node closes them.
    ``health_check_server``: opened before the rendezvous, closed last; None: tenax's own, if a variable enables it.
    ``is_command``: this process only runs the node (``tenax run``): print messages, and ignore signals after the run.
    ``records_end``: whether the end of this agent is recorded as an event.
    ``processes``: starts the workers; None: a keeper.
    """

    _loop: Loop  # these exist during the run
    _logs: WorkerLogs
    _steps: LiveSteps

    def __init__(
        self,
        job: JobSpec,
        control: Control,
        environ: Mapping[str, str],
        *,
        backend: str = "",
        sinks: Sinks | None = None,
        health_check_server: Any = None,
        is_command: bool = False,
        records_end: bool = True,
        processes: Any = None,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._control = control
        self._environ = environ
        self._backend = backend
        self._is_command = is_command
        self.shares_console = job.allocation is not None and job.allocation.is_step and job.max_nodes > 1
        self._records_end = records_end
        args = dict.fromkeys(range(job.nproc_per_node), job.args)
        self._entrypoint = make_entrypoint(job.entrypoint, args, job.start_method, job.entrypoint_name)
        self.placements = decide_placements(job.numa_options, job.nproc_per_node, environ)
        job_restarts = job.allocation.restarts if job.allocation is not None else 0
        self._options = WorkerEnvironment(job.virtual_local_rank, self.placements.omp_num_threads, job_restarts)
        self._timer_file = watchdog_file(environ)  # None: the watchdog is off
        self._health: HealthCheck | None = None
        if health_check_server is not None or environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"):
            from tenax._observe.health.check import health_check_of

            self._health = health_check_of(health_check_server, environ)
        self._logs_specs = job.logs_specs or DefaultLogsSpecs()
        self._signals = parse_signals(job.signals_to_handle)
        self._notices = parse_signals(job.notice_signals)
        self._keeper = processes if processes is not None else self._entrypoint.keeper()
        self._sinks = sinks if sinks is not None else open_sinks(job)
        self.journal_path = ""
        self.log_dir = ""
        self._final_text = ""
        self._notice = NoticeFile()
        self._journal = Journal()
        self._journals: list[str] = []  # paths of all journals of this run
        self._on_step: Callable[[Step, AgentState], None] = lambda *_: None
        self._cold_note = ""  # why workers are not forked from a template
        self._sockets: WorkerSockets | None = None  # the workers' control plane
        self.scopes: WatchdogPipe | None = None  # the pipe on which workers report the scopes they enter
        self._observers: Observers | None = None  # None: no observer is enabled
        self._last_step: tuple[Step, AgentState] | None = None

    @property
    def part(self) -> Assignment | None:
        return self._last_step[1].assignment if self._last_step is not None else None

    def run(
        self,
        final_text: Callable[[Verdict], str] = lambda _: "",
        observe: Callable[[Step, AgentState], None] = lambda *_: None,
    ) -> Verdict:
        """Run to the verdict. ``final_text`` is printed on the console after all other output."""
        job, sinks = self._job, self._sinks
        self._on_step = observe
        with ExitStack() as stack:
            stack.push(self._discard_if_refused)  # last
            loop = self._loop = Loop()
            stack.callback(loop.close)
            stack.callback(sinks.close)
            if self._health is not None:
                stack.callback(self._health.close, _warn_on_stderr)
            stack.callback(self._close_opened)
            logs = self._logs = WorkerLogs(
                self._logs_specs,
                role=job.role,
                prefix_template=job.log_line_prefix_template,
                stdout_filters=list(job.duplicate_stdout_filters or ()),
                stderr_filters=list(job.duplicate_stderr_filters or ()),
                show_messages=self._is_command,
                live_line=job.live_line,
                colours=job.colours,
                now=loop.now,
            )
            self._keeper.spawn()  # first: it starts up while the rest is prepared
            if job.warm_modules:
                self._prepare_warm_pool()
            signals = stack.enter_context(
                SignalSource(
                    loop,
                    self._signals,
                    notices=self._notices,
                    notice_s=job.notice_s,
                    ask_notice_s=self._ask_notice_s if job.allocation is not None else None,
                    exits_afterwards=self._is_command,
                )
            )
            logs.open()
            loop.watch(signals)
            stack.callback(self._close_console, signals)  # with our signal handlers still installed
            sinks.follow(
                self._settings,
                entrypoint=self._entrypoint.name,
                backend=self._backend,
                records_end=self._records_end,
                has_watchdog=self._timer_file is not None,
                now=loop.now(),
            )
            self._open_observers()
            self._steps = LiveSteps(loop, logs, self._warn, is_enabled=bool(job.dashboard))
            supervisor = self._supervisor()
            if self._is_command:
                sinks.redirect_console(lambda line: loop.soon(lambda: logs.print_line(line)))
            for location in sinks.locations:
                self._print(location)
            self._open_health()
            self._open_sockets()
            verdict = supervisor.run()
            self._final_text = final_text(msgspec.structs.replace(verdict, goodput=supervisor.goodput))
        return verdict

    def _ask_notice_s(self) -> float | None:
        """Return the seconds until the scheduler stops the job; None: unknown. May take seconds."""
        from tenax.scheduler import find_scheduler

        allocation, scheduler = self._job.allocation, find_scheduler(self._environ)
        return scheduler.seconds_left(allocation.job) if allocation is not None and scheduler is not None else None

    def _close_console(self, signals: SignalSource) -> None:
        """Print the last lines and the final text. A second Ctrl-C cannot lose them."""
        self._keeper.close()
        if self._observers is not None:
            self._observers.close()
        lost = self._sinks.close()
        self._loop.run_calls()  # print the last lines of console handlers
        for line in lost:
            self._warn(line)
        signals.take()
        self._logs.close(self._final_text, interrupt_descriptor=signals.fileno())

    def _close_opened(self) -> None:
        """Close what the supervisor closes, if it did not run, and what it does not know."""
        self._keeper.close()
        self._journal.close(self._loop.now())
        for part in (self._sockets, self.scopes):
            if part is not None:
                part.close()

    def _discard_if_refused(self, _: object, error: BaseException | None, __: object) -> None:
        """Remove the journals of a run that was refused: it never began."""
        if isinstance(error, RequestRefused):
            for path in self._journals:
                with suppress(OSError):
                    os.unlink(path)

    def observe(self, step: Step, state: AgentState) -> None:
        self._last_step = step, state
        for line in self._sinks.take(step, state):
            self._warn(line)
        if self._health is not None:
            self._health.observe(state)
        if self._observers is not None:
            self._observers.observe(step, state)
        self._steps.observe(state)
        self._on_step(step, state)

    def forward_notice(self, notice: ForwardNotice) -> None:
        self._notice.write(notice)

    def read_stacks(self, command: ReadStacks) -> None:
        if self._observers is not None:
            self._observers.with_sampler(lambda sampler: sampler.read_stacks(command))

    def answer_stacks(self, request: StacksRequest, dump: Callable[[int], None], reply: Reply) -> None:
        is_off, program = self._job.on_hang == "off", ""
        if is_off or request.native:
            from tenax._processes.py_spy import MISSING, find_py_spy

            program = find_py_spy()
            if not program and is_off:
                reply(None, f"workers write no stacks with --on-hang off, and {MISSING}")
                return
        if not is_off:
            self._make_observers()
        if program:
            self._read_stacks_from_outside(program, request, reply)
            return
        assert self._observers is not None, "made before"
        note = f"no native frames: {MISSING}" if request.native else ""
        self._observers.answer_stacks(request, dump, reply, note)

    def _read_stacks_from_outside(self, program: str, request: StacksRequest, reply: Reply) -> None:
        from tenax._core.agent_state import global_rank
        from tenax._processes.py_spy import read_in_background

        pids: dict[int, int] = {}
        if self._last_step is not None:
            state, wanted = self._last_step[1], request.local_rank
            running = running_pids(state).items()
            pids = {global_rank(state, rank): pid for rank, pid in running if wanted in (-1, rank)}
        if not pids:
            reply(None, "this worker does not run now" if request.local_rank >= 0 else "no worker runs here now")
            return
        if self._observers is not None:
            # Ignore the next activity of the workers: another program stops and reads them.
            self._observers.with_sampler(lambda sampler: sampler.expect_disturbance())
        read_in_background(program, pids, request.native, lambda found: self._loop.soon(lambda: reply(found, "")))

    def report_activity(self, done: Callable[[], None]) -> None:
        self._steps.report(done)

    def set_operator_api(self, make_operator_api: Callable[[], OperatorService] | None) -> None:
        if self._observers is not None:
            self._observers.set_operator_api(make_operator_api)

    def _open_observers(self) -> None:
        if self._job.dashboard or self._job.trace:
            self._make_observers()
        elif self._job.on_hang != "off":  # later, so that no worker waits for these imports
            self._loop.at(self._loop.now() + min(_SAMPLE_AFTER_S, self._job.hang_after / 4), self._make_observers)

    def _make_observers(self) -> None:
        if self._observers is not None:  # a request for stacks came before the timer
            return
        from tenax._node.observers import Observers

        self._observers = Observers(
            self._job,
            self._control,
            self._environ,
            self._loop,
            self._logs,
            self._warn,
            lambda: self.scopes.scopes() if self.scopes is not None else {},
        )
        if self._last_step is not None:
            self._observers.observe(*self._last_step)

    def _open_health(self) -> None:
        health = self._health
        if health is not None:
            health.open(warn=self._warn, inform=self._print)
            health.watch(self._loop)
            if self.scopes is not None:
                health.signs.ask_watchdog(self.scopes.last_progress_time)

    def _open_sockets(self) -> None:
        if not self._environ.get("TORCH_WORKER_SERVER_SOCKET"):
            return
        from tenax.control_plane._sockets import open_sockets

        self._sockets = open_sockets(self._environ)
        if self._sockets is not None:
            import shlex

            command = shlex.join(["tenax", "ask", self._sockets.folder])
            self._print(f"to query workers that use worker_main: {command}")

    def _print(self, text: str) -> None:
        self._logs.print_line(f"tenax: {text}")

    def _warn(self, line: str) -> None:
        """Report a lost feature, on stderr if messages are off."""
        if self._is_command:
            self._print(line)
        else:
            _warn_on_stderr(line)

    def _supervisor(self) -> Supervisor:
        journal = self._open_journal()
        self._notice.directory = self.log_dir
        self._print(f"run {self._settings.run_id}" + (f", logs in {self.log_dir}" if self.log_dir else ""))
        if self.log_dir and os.stat(root := os.path.dirname(self.log_dir)).st_mode & 0o1002 == 0o002:
            self._print(f"note: any user of this host can replace logs in {root}; to prevent it: chmod o-w {root}")
        for note in filter(None, (*self.placements.notes, self._cold_note)):
            self._print(note)
        if self._timer_file is not None:
            from tenax.timer._watchdog_pipe import WatchdogPipe

            self.scopes = WatchdogPipe(self._job.nproc_per_node, self._timer_file)
            try:
                self.scopes.make()
            except ValueError as error:
                raise RequestRefused(str(error)) from error
        elif note := watchdog_note(self._environ):
            self._warn(note)
        return Supervisor(
            self._settings,
            self,
            loop=self._loop,
            control=self._control,
            processes=self._keeper,
            entrypoint=self._entrypoint,
            logs=self._logs,
            journal=journal,
            policy=self._job.restart_policy,
            scopes=self.scopes,
            log_dir=self.log_dir,
            has_control_socket=True,
            has_survivors=True,
        )

    def environments(self, command: StartWorkers) -> dict[int, dict[str, str]]:
        sockets, first = self._sockets, command.assignment.first_global_rank
        return {
            rank: {
                **worker_environment(self._settings, command.assignment, rank, self._environ, self._options),
                **self._notice.env(command.assignment.generation),
                **({} if sockets is None else sockets.env(first + rank)),
                **self._watchdog_env(),
            }
            for rank in range(self._job.nproc_per_node)
        }

    def _prepare_warm_pool(self) -> None:
        """Start the template before workers are needed, also on a spare node."""
        from tenax._processes.template import Template, template_of

        job = self._job
        lasting, late = lasting_environment(self._settings, self._environ, self._options)
        launches = [
            self.placements.bind(rank, self._entrypoint.launch(rank, {**inheritable_environ(), **lasting}))
            for rank in range(job.nproc_per_node)
        ]
        # A process cannot extend its command line, so the template is started with the longest one.
        longest = max(launches, key=lambda launch: sum(map(len, launch.argv or ())))
        first = msgspec.structs.replace(longest, descriptors=inherited_stdin())
        standbys = job.nproc_per_node if job.may_start_again else 0
        template = template_of(first, launches, job.warm_modules, [*late, *_SET_AT_START], standbys)
        if isinstance(template, Template):
            setups = []  # with what each worker's environment has in every generation
            for rank, launch in enumerate(launches) if job.standby_setup else ():
                own = lasting_of_worker(self._settings, rank, self._environ, self._options)
                setups.append(msgspec.structs.replace(launch, env={**launch.env, **own}))
            self._keeper.prepare(template, self._print, job.standby_setup, setups)
        elif template:
            self._cold_note = f"workers start cold: {template}"
        elif job.standby_setup:
            self._cold_note = "--standby-setup is not used: the script imports nothing that could be preloaded"

    def _watchdog_env(self) -> dict[str, str]:
        if self.scopes is None and self._job.on_hang == "off":
            return {}
        from tenax._processes.stacks import stacks_env

        pipe = {TORCHELASTIC_TIMER_FILE: self.scopes.path} if self.scopes is not None else {}
        return {**pipe, **stacks_env()}

    def return_values(self) -> dict[int, Any]:
        return self._entrypoint.return_values()

    def open_run_journal(self) -> RunJournal:
        return RunJournal(self._new_journal(RUN_NAME), warn=self._warn)

    def open_link_journal(self) -> LinkJournal | None:
        if not self.log_dir:
            return None
        from tenax._node.link_journal import NAME, LinkJournal

        return LinkJournal(self._new_journal(NAME), self._loop, self._warn)

    def _new_journal(self, name: str) -> str:
        """Return the path of a new journal; empty without a log directory."""
        if not self.log_dir:
            return ""
        self._journals.append(_unused_path(os.path.join(self.log_dir, name)))
        return self._journals[-1]

    def _open_journal(self) -> Journal:
        """Open the journal in the run's log directory, if the log specs have one.

        Raises RequestRefused if the directory chosen by the user cannot be created. If the default one cannot be
        created, the run keeps no logs.
        """
        open_run_log_dir = getattr(self._logs_specs, "open_run_log_dir", None)
        if open_run_log_dir is None:
            return Journal()
        try:
            self.log_dir = open_run_log_dir(self._job.run_id)
        except OSError as error:
            if chosen := getattr(self._logs_specs, "chosen_log_dir", ""):
                raise RequestRefused(
                    f"--log-dir {chosen}: {error.filename or chosen} cannot be created: {error.strerror}; "
                    "choose a writable folder"
                ) from error
            return Journal()  # reported by the worker logs, which need the same directory
        journal = self._journal = Journal(self._new_journal(JOURNAL_NAME), warn=self._warn)
        self.journal_path = journal.path
        return journal


class NoticeFile:
    """Informs workers that a node of their generation will leave. Without a directory it does nothing.

    One file per generation, named by ``TENAX_NOTICE_FILE`` in every worker's environment. It is created with the first
    notice and replaced atomically. ``tenax.preemption`` reads it, and so can any language. If it cannot be written, the
    notice is lost and the run continues.
    """

    def __init__(self, directory: str = "") -> None:
        self.directory = directory

    def env(self, generation: int) -> dict[str, str]:
        """Remove a stale file and return the variable for the workers of a new generation."""
        if not self.directory:
            return {}
        path = self._path(generation)
        with suppress(OSError):  # usually missing; an earlier run in the same folder may have left one
            os.unlink(path)
        return {NOTICE_VARIABLE: path}

    def _path(self, generation: int) -> str:
        return os.path.join(self.directory, f"notice-{generation}.json")

    def write(self, notice: ForwardNotice) -> None:
        if not self.directory:
            return
        from tenax._io.safe_open import replace_file

        content = {
            "version": 1,
            "generation": notice.generation,
            "host": notice.host or os.uname().nodename,
            "is_this_host": not notice.host,
            "why": notice.why,
            # On this host's monotonic clock, which its workers share; null: unknown.
            "leaves_at": None if notice.in_s is None else time.monotonic() + notice.in_s,
        }
        with suppress(OSError):  # disk full: the workers still get the stop signal itself
            replace_file(self._path(notice.generation), msgspec.json.encode(content), 0o644)


def _warn_on_stderr(line: str) -> None:
    sys.stderr.write(f"tenax: {one_line(line)}\n")


def _unused_path(path: str) -> str:
    """Return ``path`` or a numbered variant, since runs with the same log specs share a directory."""
    stem, extension = os.path.splitext(path)
    number = 0
    while os.path.exists(path):
        number += 1
        path = f"{stem}.{number}{extension}"
    return path
