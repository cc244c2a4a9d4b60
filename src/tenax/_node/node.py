"""A node: the runtime and its adapters, put together for one run.

Who wants a run (the command line, ``LocalElasticAgent``) describes it with values; this is where the real keeper,
scribe, journal, signals and loop are made and given to the supervisor, and where they end.
"""

from __future__ import annotations

import os
import sys

import msgspec

from tenax._core.environment import WorkerEnvironment, lasting_environment, worker_environment
from tenax._core.model import AgentSettings
from tenax._core.text import one_line
from tenax._io.helper_process import inheritable_environ
from tenax._io.loop import Loop
from tenax._io.ports import RequestRefused
from tenax._node.journal import Journal
from tenax._node.live_steps import LiveSteps
from tenax._node.notice_file import VARIABLE as NOTICE_VARIABLE
from tenax._node.notice_file import NoticeFile
from tenax._node.placements import Places
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
    from tenax._io.ports import Control
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
# What a worker finds in its environment besides what ``core.environment`` knows.
_LATE = ("TORCHELASTIC_ERROR_FILE", NOTICE_VARIABLE, "TORCH_WORKER_SERVER_SOCKET", TORCHELASTIC_TIMER_FILE)


class NodePlan(msgspec.Struct, frozen=True):
    """Everything about a run that is known before it starts."""

    settings: AgentSettings
    entrypoint: CommandEntrypoint | FunctionEntrypoint
    control: Control
    logs_specs: LogsSpecs
    prefix_template: str | None = None
    stdout_filters: list[str] = []
    stderr_filters: list[str] = []
    signals: str = DEFAULT_SIGNALS
    notice_signals: str = ""  # a scheduler's advance notice; none of ``signals``
    notice_s: float | None = None  # how soon after it the node must leave
    virtual_local_rank: bool = False
    preload: str = ""  # modules that are imported once for all workers, which are forked from there; empty: none
    keep_standbys: bool = True  # have as many more ready, for the next start
    places: Places = Places()
    policy: RestartPolicy | None = None
    rdzv_backend: str = ""  # its name, for events
    outlets: Sinks | None = None  # where metrics and events go; None: to the handlers that are configured
    tells_its_end: bool = True  # whether the end of this agent is an event
    watchdog: WatchdogPlan | None = None  # None: nobody watches whether workers leave their scopes in time
    dashboard: str = ""  # where the page of the run is served, HOST:PORT; empty: nowhere
    trace: str = ""  # where a trace of the run goes; empty: nowhere
    health: HealthCheck | None = None  # opened before this node meets others, closed last
    narrate: bool = False  # tell the story on the console while it happens
    live_line: bool = True  # ... with a live line, on a terminal
    is_last_act: bool = False  # this process does nothing else afterwards

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
        self._journal_complains: Callable[[str], None] = _say_on_stderr
        self._cold_because = ""  # why workers are not forked from what was preloaded
        self._sockets: WorkerSockets | None = None  # where workers can be asked
        self.scopes: WatchdogPipe | None = None  # where they say which scopes they enter
        self._seeing: Observers | None = None  # what people watch the run with, if anything is switched on

    def run(
        self,
        last_words: Callable[[Verdict], str] = lambda _: "",
        observe: Callable[[Step, AgentState], None] = lambda *_: None,
    ) -> Verdict:
        """Run to the verdict. ``last_words`` are said on the console after everything else."""
        plan = self._plan
        numbers, notices = parse_signals(plan.signals), parse_signals(plan.notice_signals)
        loop = Loop()
        outlets = plan.outlets if plan.outlets is not None else Sinks()
        logs = WorkerLogs(
            plan.logs_specs,
            role=plan.settings.role,
            prefix_template=plan.prefix_template,
            stdout_filters=plan.stdout_filters,
            stderr_filters=plan.stderr_filters,
            narrate=plan.narrate,
            live_line=plan.live_line,
            now=loop.now,
        )
        words = ""
        try:
            self._keeper.spawn()  # it comes up while the rest is made ready
            if plan.preload:
                self._warm_up(logs)
            with SignalSource(
                loop, numbers, notices=notices, notice_s=plan.notice_s, is_last_act=plan.is_last_act
            ) as signals:
                logs.open()
                loop.watch(signals)
                try:
                    views = Views(
                        outlets,
                        plan.settings,
                        entrypoint=plan.entrypoint.name,
                        backend=plan.rdzv_backend,
                        tells_end=plan.tells_its_end,
                        has_watchdog=plan.watchdog is not None,
                        now=loop.now(),
                    )
                    self._open_seeing(loop, logs)
                    is_watched = bool(plan.dashboard) or plan.settings.on_hang != "off"
                    steps = LiveSteps(loop, logs, lambda line: self._complain(line, logs), is_wanted=is_watched)
                    supervisor = self._supervisor(loop, logs, self._watcher(views, logs, steps, observe), steps.want)
                    if plan.narrate:
                        outlets.speak_through(lambda line: loop.soon(lambda: logs.say(line)))
                    for place in outlets.places:
                        logs.say(f"tenax: {place}")
                    self._open_health(loop, logs)
                    self._open_sockets(logs)
                    verdict = supervisor.run()
                    words = last_words(verdict)
                finally:
                    # Still under our signal handlers: an impatient Ctrl-C must not cost the report.
                    self._keeper.close()
                    if self._seeing is not None:
                        self._seeing.close()
                    lost = outlets.close()
                    loop.run_calls()  # what console handlers had to say
                    for line in lost:
                        self._complain(line, logs)
                    signals.forget()
                    logs.close(words, hurry_descriptor=signals.fileno())
                return verdict
        finally:
            self._keeper.close()
            outlets.close()  # if it did not come to a run
            self._journal.close(loop.now())  # likewise
            if self._sockets is not None:
                self._sockets.close()
            if plan.health is not None:
                plan.health.close(_say_on_stderr)  # the console is closed already
            if self.scopes is not None:
                self.scopes.close()
            loop.close()

    def _watcher(
        self, views: Views, logs: WorkerLogs, steps: LiveSteps, observe: Callable[[Step, AgentState], None]
    ) -> Callable[[Step, AgentState], None]:
        """Everybody who looks at the steps of this run."""
        plan = self._plan

        def watch(step: Step, state: AgentState) -> None:
            for line in views.take(step, state):
                self._complain(line, logs)
            if plan.health is not None:
                plan.health.observe(state)
            if self._seeing is not None:
                self._seeing.observe(step, state)
            steps.observe(state)
            observe(step, state)

        return watch

    def _open_seeing(self, loop: Loop, logs: WorkerLogs) -> None:
        plan = self._plan
        if plan.dashboard or plan.trace or plan.settings.on_hang != "off":
            from tenax._node.observers import Observers

            self._seeing = Observers(
                plan,
                loop,
                logs,
                lambda line: self._complain(line, logs),
                lambda: self.scopes.scopes() if self.scopes is not None else {},
            )

    def _open_health(self, loop: Loop, logs: WorkerLogs) -> None:
        health = self._plan.health
        if health is not None:
            health.open(warn=lambda line: self._complain(line, logs), tell=lambda text: logs.say(f"tenax: {text}"))
            health.watch(loop)
            if self.scopes is not None:
                health.ask_watchdog(self.scopes.last_progress_time)

    def _open_sockets(self, logs: WorkerLogs) -> None:
        """Where the environment asks for it, every worker gets a socket at which it can be asked."""
        if not os.environ.get("TORCH_WORKER_SERVER_SOCKET"):
            return
        from tenax.control_plane._sockets import open_sockets

        self._sockets = open_sockets(os.environ)
        if self._sockets is not None:
            import shlex

            command = shlex.join(["tenax", "ask", self._sockets.folder])
            logs.say(f"tenax: workers that use worker_main can be asked with: {command}")

    def _complain(self, line: str, logs: WorkerLogs) -> None:
        """Something that was asked for is lost: worth a line also where no story is told."""
        if self._plan.narrate:
            logs.say(f"tenax: {line}")
        else:
            _say_on_stderr(line)

    def _supervisor(
        self,
        loop: Loop,
        logs: WorkerLogs,
        observe: Callable[[Step, AgentState], None],
        want_steps: Callable[[], bool],
    ) -> Supervisor:
        plan = self._plan
        self._journal_complains = lambda line: self._complain(line, logs)
        journal = self._open_journal()
        self._notice.directory = self.log_dir
        logs.say(f"tenax: run {plan.settings.run_id}" + (f", logs in {self.log_dir}" if self.log_dir else ""))
        if self.log_dir and os.stat(root := os.path.dirname(self.log_dir)).st_mode & 0o1002 == 0o002:
            logs.say(f"tenax: note: every user of this host may replace logs in {root}; restrict it (chmod o-w {root})")
        for note in plan.places.notes:
            logs.say(f"tenax: {note}")
        if self._cold_because:
            logs.say(f"tenax: workers start cold, because {self._cold_because}")
        if plan.watchdog is not None:
            self._open_scopes(plan.watchdog)
        elif note := watchdog_note(os.environ):
            self._complain(note, logs)
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
            place=plan.places.place,
            pass_on_notice=self._notice.write,
            run_journal=self._open_run_journal,
            observe=observe,
            scopes=self.scopes,
            log_dir=self.log_dir,
            has_door=True,
            want_steps=want_steps,
            serves=self._seeing.serves if self._seeing is not None else lambda _: None,
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
        options = WorkerEnvironment(plan.virtual_local_rank, plan.places.omp_num_threads)
        return {
            rank: {
                **worker_environment(plan.settings, command.assignment, rank, os.environ, options),
                **self._notice.env(command.assignment.generation),
                **self._socket_of(command.assignment.first_global_rank + rank),
                **self._watched(),
            }
            for rank in range(plan.settings.local_world_size)
        }

    def _warm_up(self, logs: WorkerLogs) -> None:
        """Import what the workers need before they are needed: also on a node that is only a spare as yet."""
        from tenax._processes.template import Template, template_of

        plan = self._plan
        options = WorkerEnvironment(plan.virtual_local_rank, plan.places.omp_num_threads)
        lasting, late = lasting_environment(plan.settings, os.environ, options)
        launches = [
            plan.places.place(rank, plan.entrypoint.launch(rank, {**inheritable_environ(), **lasting}))
            for rank in range(plan.settings.local_world_size)
        ]
        # The command line of a process cannot grow: the template has the longest.
        longest = max(launches, key=lambda launch: sum(map(len, launch.argv or ())))
        first = msgspec.structs.replace(longest, descriptors=inherited_stdin())
        standbys = plan.settings.local_world_size if plan.keep_standbys else 0
        template = template_of(first, launches, plan.preload, [*late, *_LATE], standbys)
        if isinstance(template, Template):
            self._keeper.prepare(template, lambda sentence: logs.say(f"tenax: {sentence}"))
        else:
            self._cold_because = template

    def _socket_of(self, global_rank: int) -> dict[str, str]:
        return {} if self._sockets is None else self._sockets.env(global_rank)

    def _watched(self) -> dict[str, str]:
        if self.scopes is None and self._plan.settings.on_hang == "off":
            return {}
        from tenax._processes.stacks import stacks_env

        pipe = {TORCHELASTIC_TIMER_FILE: self.scopes.path} if self.scopes is not None else {}
        return {**pipe, **stacks_env()}

    def return_values(self) -> dict[int, Any]:
        """By local rank, of the last generation."""
        return self._plan.entrypoint.return_values()

    def _open_run_journal(self) -> RunJournal:
        from tenax._node.run_journal import NAME, RunJournal

        path = _unused(os.path.join(self.log_dir, NAME)) if self.log_dir else ""
        return RunJournal(path, self._journal_complains)

    def _open_journal(self) -> Journal:
        """In the run's own directory, where the log specs have one. Raises RequestRefused if the user chose one that
        cannot be created; without a temporary directory the run keeps no logs."""
        open_run_log_dir = getattr(self._plan.logs_specs, "open_run_log_dir", None)
        if open_run_log_dir is None:
            return Journal()
        try:
            self.log_dir = open_run_log_dir(self._plan.settings.run_id)
        except OSError as error:
            if chosen := getattr(self._plan.logs_specs, "chosen_log_dir", ""):
                raise RequestRefused(
                    f"--log-dir {chosen}: {error.filename or chosen} cannot be created: {error.strerror}; "
                    "name a folder that can be created and written"
                ) from error
            return Journal()  # reported by the worker logs, which need the same directory
        path = _unused(os.path.join(self.log_dir, JOURNAL_NAME)) if self.log_dir else ""
        journal = self._journal = Journal(path, complain=self._journal_complains)
        self.journal_path = journal.path
        return journal


def _say_on_stderr(line: str) -> None:
    sys.stderr.write(f"tenax: {one_line(line)}\n")


def _unused(path: str) -> str:
    """Two runs may be given the same log specs, and so the same directory: each has a journal of its own."""
    stem, extension = os.path.splitext(path)
    number = 0
    while os.path.exists(path):
        number += 1
        path = f"{stem}.{number}{extension}"
    return path
