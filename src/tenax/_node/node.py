"""A node: one agent process, assembled and run.

The command line and ``LocalElasticAgent`` describe a run with a ``NodePlan``. ``Node`` creates the keeper, log writer,
journal, signal handlers and loop, passes them to the supervisor, and closes them at the end.
"""

from __future__ import annotations

import os
import sys

import msgspec

from tenax._core.environment import WorkerEnvironment, lasting_environment, worker_environment
from tenax._core.model import AgentSettings
from tenax._core.text import one_line
from tenax._io.helper_process import inheritable_environ
from tenax._io.interfaces import RequestRefused
from tenax._io.loop import Loop
from tenax._node.journal import Journal
from tenax._node.live_steps import LiveSteps
from tenax._node.notice_file import VARIABLE as NOTICE_VARIABLE
from tenax._node.notice_file import NoticeFile
from tenax._node.placements import Placements
from tenax._node.signals import DEFAULT_SIGNALS, SignalSource, parse_signals
from tenax._node.sinks import Sinks, Views
from tenax._node.supervisor import Supervisor, inherited_stdin
from tenax._node.watchdog import TORCHELASTIC_TIMER_FILE, watchdog_note
from tenax._node.worker_logs import WorkerLogs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._core.agent import AgentState
    from tenax._core.commands import StartWorkers
    from tenax._core.model import Verdict
    from tenax._core.policy import RestartPolicy
    from tenax._io.interfaces import Control
    from tenax._logs.specs import LogsSpecs
    from tenax._node.journal import Step
    from tenax._node.observers import Observers
    from tenax._node.run_journal import RunJournal
    from tenax._node.watchdog import WatchdogPlan
    from tenax._observe.health.check import HealthCheck
    from tenax._processes.entrypoint import CommandEntrypoint, FunctionEntrypoint
    from tenax.control_plane._sockets import WorkerSockets
    from tenax.timer._watchdog_pipe import WatchdogPipe

JOURNAL_NAME = "journal.jsonl"
# Variables that are set when a worker starts, besides those of ``_core.environment``.
_SET_AT_START = ("TORCHELASTIC_ERROR_FILE", NOTICE_VARIABLE, "TORCH_WORKER_SERVER_SOCKET", TORCHELASTIC_TIMER_FILE)


class NodePlan(msgspec.Struct, frozen=True):
    """Everything about a run that is fixed before it starts."""

    settings: AgentSettings
    entrypoint: CommandEntrypoint | FunctionEntrypoint
    control: Control
    logs_specs: LogsSpecs
    prefix_template: str | None = None
    stdout_filters: list[str] = []
    stderr_filters: list[str] = []
    signals: str = DEFAULT_SIGNALS
    notice_signals: str = ""  # a scheduler's advance notice; none of ``signals``
    notice_s: float | None = None  # seconds from the notice until the node must leave; None: unknown
    virtual_local_rank: bool = False
    preload: str = ""  # modules imported once in the template that workers are forked from; empty: no warm pool
    keep_standbys: bool = True  # keep one standby per worker for the next start
    placements: Placements = Placements()
    policy: RestartPolicy | None = None
    rdzv_backend: str = ""  # name of the backend, for events
    sinks: Sinks | None = None  # where metrics and events go; None: to the configured handlers
    records_end: bool = True  # whether the end of this agent is recorded as an event
    watchdog: WatchdogPlan | None = None  # None: scopes are not watched
    dashboard: str = ""  # HOST:PORT of the dashboard; empty: none
    trace: str = ""  # destination of the trace; empty: none
    health: HealthCheck | None = None  # opened before the rendezvous, closed last
    show_messages: bool = False  # print the agent's messages on the console
    live_line: bool = True  # ... with a live line, on a terminal
    exits_afterwards: bool = False  # this process exits after the run

    def __repr__(self) -> str:
        from tenax._core.text import concealed_repr

        return concealed_repr(self)


class Node:
    """One run. ``run`` may be called from any thread, once."""

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._keeper = plan.entrypoint.keeper()
        self.journal_path = ""
        self.log_dir = ""
        self._notice = NoticeFile()
        self._journal = Journal()
        self._warn_about_journal: Callable[[str], None] = _warn_on_stderr
        self._cold_reason = ""  # why workers are not forked from a template
        self._sockets: WorkerSockets | None = None  # the workers' control plane
        self.scopes: WatchdogPipe | None = None  # the pipe on which workers report the scopes they enter
        self._observers: Observers | None = None  # None: no observer is enabled

    def run(
        self,
        final_text: Callable[[Verdict], str] = lambda _: "",
        observe: Callable[[Step, AgentState], None] = lambda *_: None,
    ) -> Verdict:
        """Run to the verdict. ``final_text`` is printed on the console after all other output."""
        plan = self._plan
        numbers, notices = parse_signals(plan.signals), parse_signals(plan.notice_signals)
        loop = Loop()
        sinks = plan.sinks if plan.sinks is not None else Sinks()
        logs = WorkerLogs(
            plan.logs_specs,
            role=plan.settings.role,
            prefix_template=plan.prefix_template,
            stdout_filters=plan.stdout_filters,
            stderr_filters=plan.stderr_filters,
            show_messages=plan.show_messages,
            live_line=plan.live_line,
            now=loop.now,
        )
        text = ""
        try:
            self._keeper.spawn()  # first: it starts up while the rest is prepared
            if plan.preload:
                self._prepare_warm_pool(logs)
            with SignalSource(
                loop, numbers, notices=notices, notice_s=plan.notice_s, exits_afterwards=plan.exits_afterwards
            ) as signals:
                logs.open()
                loop.watch(signals)
                try:
                    views = Views(
                        sinks,
                        plan.settings,
                        entrypoint=plan.entrypoint.name,
                        backend=plan.rdzv_backend,
                        records_end=plan.records_end,
                        has_watchdog=plan.watchdog is not None,
                        now=loop.now(),
                    )
                    self._open_observers(loop, logs)
                    polls_progress = bool(plan.dashboard) or plan.settings.on_hang != "off"
                    steps = LiveSteps(loop, logs, lambda line: self._warn(line, logs), is_enabled=polls_progress)
                    supervisor = self._supervisor(
                        loop, logs, self._step_observer(views, logs, steps, observe), steps.enable
                    )
                    if plan.show_messages:
                        sinks.redirect_console(lambda line: loop.soon(lambda: logs.print_line(line)))
                    for location in sinks.locations:
                        logs.print_line(f"tenax: {location}")
                    self._open_health(loop, logs)
                    self._open_sockets(logs)
                    verdict = supervisor.run()
                    text = final_text(verdict)
                finally:
                    # Our signal handlers are still installed, so a second Ctrl-C cannot lose the report.
                    self._keeper.close()
                    if self._observers is not None:
                        self._observers.close()
                    lost = sinks.close()
                    loop.run_calls()  # print the last lines of console handlers
                    for line in lost:
                        self._warn(line, logs)
                    signals.discard()
                    logs.close(text, interrupt_descriptor=signals.fileno())
                return verdict
        finally:
            self._keeper.close()
            sinks.close()  # if the run did not start
            self._journal.close(loop.now())  # likewise
            if self._sockets is not None:
                self._sockets.close()
            if plan.health is not None:
                plan.health.close(_warn_on_stderr)  # the log writer is closed already
            if self.scopes is not None:
                self.scopes.close()
            loop.close()

    def _step_observer(
        self, views: Views, logs: WorkerLogs, steps: LiveSteps, observe: Callable[[Step, AgentState], None]
    ) -> Callable[[Step, AgentState], None]:
        """Return a function that passes each step to every observer of this run."""
        plan = self._plan

        def watch(step: Step, state: AgentState) -> None:
            for line in views.take(step, state):
                self._warn(line, logs)
            if plan.health is not None:
                plan.health.observe(state)
            if self._observers is not None:
                self._observers.observe(step, state)
            steps.observe(state)
            observe(step, state)

        return watch

    def _open_observers(self, loop: Loop, logs: WorkerLogs) -> None:
        plan = self._plan
        if plan.dashboard or plan.trace or plan.settings.on_hang != "off":
            from tenax._node.observers import Observers

            self._observers = Observers(
                plan,
                loop,
                logs,
                lambda line: self._warn(line, logs),
                lambda: self.scopes.scopes() if self.scopes is not None else {},
            )

    def _open_health(self, loop: Loop, logs: WorkerLogs) -> None:
        health = self._plan.health
        if health is not None:
            health.open(warn=lambda line: self._warn(line, logs), inform=lambda text: logs.print_line(f"tenax: {text}"))
            health.watch(loop)
            if self.scopes is not None:
                health.ask_watchdog(self.scopes.last_progress_time)

    def _open_sockets(self, logs: WorkerLogs) -> None:
        """Create the workers' control plane sockets if ``TORCH_WORKER_SERVER_SOCKET`` is set."""
        if not os.environ.get("TORCH_WORKER_SERVER_SOCKET"):
            return
        from tenax.control_plane._sockets import open_sockets

        self._sockets = open_sockets(os.environ)
        if self._sockets is not None:
            import shlex

            command = shlex.join(["tenax", "ask", self._sockets.folder])
            logs.print_line(f"tenax: to query workers that use worker_main: {command}")

    def _warn(self, line: str, logs: WorkerLogs) -> None:
        """Report a lost feature, on stderr if messages are off."""
        if self._plan.show_messages:
            logs.print_line(f"tenax: {line}")
        else:
            _warn_on_stderr(line)

    def _supervisor(
        self,
        loop: Loop,
        logs: WorkerLogs,
        observe: Callable[[Step, AgentState], None],
        enable_progress: Callable[[], bool],
    ) -> Supervisor:
        plan = self._plan
        self._warn_about_journal = lambda line: self._warn(line, logs)
        journal = self._open_journal()
        self._notice.directory = self.log_dir
        logs.print_line(f"tenax: run {plan.settings.run_id}" + (f", logs in {self.log_dir}" if self.log_dir else ""))
        if self.log_dir and os.stat(root := os.path.dirname(self.log_dir)).st_mode & 0o1002 == 0o002:
            logs.print_line(
                f"tenax: note: any user of this host can replace logs in {root}; to prevent it: chmod o-w {root}"
            )
        for note in plan.placements.notes:
            logs.print_line(f"tenax: {note}")
        if self._cold_reason:
            logs.print_line(f"tenax: workers start cold: {self._cold_reason}")
        if plan.watchdog is not None:
            self._open_scopes(plan.watchdog)
        elif note := watchdog_note(os.environ):
            self._warn(note, logs)
        return Supervisor(
            plan.settings,
            loop=loop,
            control=plan.control,
            processes=self._keeper,
            entrypoint=plan.entrypoint,
            logs=logs,
            journal=journal,
            policy=plan.policy,
            environments=self._environments,
            bind=plan.placements.bind,
            forward_notice=self._notice.write,
            run_journal=self._open_run_journal,
            observe=observe,
            scopes=self.scopes,
            log_dir=self.log_dir,
            has_control_socket=True,
            enable_progress=enable_progress,
            set_operator_api=self._observers.set_operator_api if self._observers is not None else lambda _: None,
        )

    def _open_scopes(self, watchdog: WatchdogPlan) -> None:
        from tenax.timer._watchdog_pipe import WatchdogPipe

        self.scopes = WatchdogPipe(self._plan.settings.local_world_size, watchdog.timer_file)
        try:
            self.scopes.make()
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    def _environments(self, command: StartWorkers) -> dict[int, dict[str, str]]:
        plan = self._plan
        options = WorkerEnvironment(plan.virtual_local_rank, plan.placements.omp_num_threads)
        return {
            rank: {
                **worker_environment(plan.settings, command.assignment, rank, os.environ, options),
                **self._notice.env(command.assignment.generation),
                **self._socket_env(command.assignment.first_global_rank + rank),
                **self._watchdog_env(),
            }
            for rank in range(plan.settings.local_world_size)
        }

    def _prepare_warm_pool(self, logs: WorkerLogs) -> None:
        """Start the template before workers are needed, also on a spare node."""
        from tenax._processes.template import Template, template_of

        plan = self._plan
        options = WorkerEnvironment(plan.virtual_local_rank, plan.placements.omp_num_threads)
        lasting, late = lasting_environment(plan.settings, os.environ, options)
        launches = [
            plan.placements.bind(rank, plan.entrypoint.launch(rank, {**inheritable_environ(), **lasting}))
            for rank in range(plan.settings.local_world_size)
        ]
        # A process cannot extend its command line, so the template is started with the longest one.
        longest = max(launches, key=lambda launch: sum(map(len, launch.argv or ())))
        first = msgspec.structs.replace(longest, descriptors=inherited_stdin())
        standbys = plan.settings.local_world_size if plan.keep_standbys else 0
        template = template_of(first, launches, plan.preload, [*late, *_SET_AT_START], standbys)
        if isinstance(template, Template):
            self._keeper.prepare(template, lambda message: logs.print_line(f"tenax: {message}"))
        else:
            self._cold_reason = template

    def _socket_env(self, global_rank: int) -> dict[str, str]:
        return {} if self._sockets is None else self._sockets.env(global_rank)

    def _watchdog_env(self) -> dict[str, str]:
        if self.scopes is None and self._plan.settings.on_hang == "off":
            return {}
        from tenax._processes.stacks import stacks_env

        pipe = {TORCHELASTIC_TIMER_FILE: self.scopes.path} if self.scopes is not None else {}
        return {**pipe, **stacks_env()}

    def return_values(self) -> dict[int, Any]:
        """Return the values of the last generation by local rank."""
        return self._plan.entrypoint.return_values()

    def _open_run_journal(self) -> RunJournal:
        from tenax._node.run_journal import NAME, RunJournal

        path = _unused_path(os.path.join(self.log_dir, NAME)) if self.log_dir else ""
        return RunJournal(path, self._warn_about_journal)

    def _open_journal(self) -> Journal:
        """Open the journal in the run's log directory, if the log specs have one.

        Raises RequestRefused if the directory chosen by the user cannot be created. If the default one cannot be
        created, the run keeps no logs.
        """
        open_run_log_dir = getattr(self._plan.logs_specs, "open_run_log_dir", None)
        if open_run_log_dir is None:
            return Journal()
        try:
            self.log_dir = open_run_log_dir(self._plan.settings.run_id)
        except OSError as error:
            if chosen := getattr(self._plan.logs_specs, "chosen_log_dir", ""):
                raise RequestRefused(
                    f"--log-dir {chosen}: {error.filename or chosen} cannot be created: {error.strerror}; "
                    "choose a writable folder"
                ) from error
            return Journal()  # reported by the worker logs, which need the same directory
        path = _unused_path(os.path.join(self.log_dir, JOURNAL_NAME)) if self.log_dir else ""
        journal = self._journal = Journal(path, warn=self._warn_about_journal)
        self.journal_path = journal.path
        return journal


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
