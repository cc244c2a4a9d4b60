"""The supervisor: feeds events to the agent machine and executes its commands through the ports. It decides nothing.

One mailbox, one loop, one thread. Every step is written to the journal before its commands are executed, so that the
journal of an agent that died shows what it was about to do.
"""

from __future__ import annotations

import _socket  # `socket` itself is a slow import
import os
import time
from abc import ABC, abstractmethod

import msgspec

from tenax._core import commands, events
from tenax._core.agent import SIGKILL, AgentMachine, AgentState, Phase, messages_on_connecting
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Verdict, assert_never
from tenax._core.text import harmless
from tenax._io.helper_process import inheritable_environ
from tenax._io.interfaces import Entrypoint, Logs, Processes, RequestRefused, Watchable, create_machine
from tenax._node.journal import Journal, RunJournal, Step
from tenax._node.messages import Repetitions, lines_for, live_line
from tenax._node.workers import Placements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import RunSettings
    from tenax._core.ledger import Goodput
    from tenax._core.messages import FromNode, NodeInfo
    from tenax._core.policy import RestartPolicy
    from tenax._core.requests import AnyRequest, OfNode, StacksRequest
    from tenax._io.interfaces import Control, CreateMachine, OperatorService, RecordRun, Reply
    from tenax._io.loop import Loop
    from tenax._node.control_socket import ControlSocket
    from tenax._node.error_files import ErrorFiles
    from tenax._node.link_journal import LinkJournal
    from tenax._node.worker_channel import WorkerChannel
    from tenax.timer._watchdog_pipe import WatchdogPipe


_CONTROL_SOCKET_AFTER_S = 0.25  # starting workers comes first
# A worker finds the number of its channel's descriptor in this variable. High, so that it replaces no file that modules
# of a warm worker have opened.
SURVIVOR_VARIABLE, SURVIVOR_DESCRIPTOR = "TENAX_ELASTIC_FD", 199
_MIN_OPEN_FILES = 256  # below that limit workers have no channel: its descriptor and those moved aside must fit
_FOLLOWERS_S = 3.0  # maximum time for log followers to receive the last lines


class Surroundings(ABC):
    """What a supervisor needs of the agent around it. An agent overrides what it has."""

    placements = Placements()  # which CPUs the workers may use
    shares_console = False  # other agents of the run print to the same console, so each prints only what it does

    @abstractmethod
    def environments(self, command: commands.StartWorkers) -> dict[int, dict[str, str]]:
        """Return the additional variables of each worker, by local rank."""

    def forward_notice(self, notice: commands.ForwardNotice) -> None:  # noqa: B027
        """Inform the workers that a node will leave."""

    def read_stacks(self, command: commands.ReadStacks) -> None:  # noqa: B027
        """Post the stacks that the workers have written."""

    def answer_stacks(self, request: StacksRequest, dump: Callable[[int], None], reply: Reply) -> None:  # noqa: ARG002
        """Answer with the stacks of the workers. ``dump`` makes a worker write them."""
        reply(None, "this agent does not read stacks")

    def open_run_journal(self) -> RunJournal:
        """Open the journal of a coordinator in this process."""
        return RunJournal()

    def open_link_journal(self) -> LinkJournal | None:
        """Open the journal of the node's links. None: no journal."""
        return None

    def observe(self, step: Step, state: AgentState) -> None:  # noqa: B027
        """Follow a step of the agent machine, after its commands were executed."""

    def report_activity(self, done: Callable[[], None]) -> None:
        """Post the workers' progress, then call ``done``."""
        done()

    def set_operator_api(self, make_operator_api: Callable[[], OperatorService] | None) -> None:  # noqa: B027
        """Learn that this process starts, or with None stops, to serve the coordinator."""


class Supervisor:
    """One run of one node. The engine sees it as its ``ControlledNode``."""

    def __init__(
        self,
        settings: AgentSettings,
        around: Surroundings,
        *,
        loop: Loop,
        control: Control,
        processes: Processes,
        entrypoint: Entrypoint,
        logs: Logs,
        journal: Journal,
        policy: RestartPolicy | None = None,
        scopes: WatchdogPipe | None = None,
        log_dir: str = "",
        has_control_socket: bool = False,
        has_survivors: bool = False,
    ) -> None:
        """``has_survivors``: workers may opt in to take part in several generations."""
        self.settings = settings
        self.policy = policy
        self.machine = AgentMachine(settings)
        self._around = around
        self._loop = loop
        self._control = control
        self._processes = processes
        self.keep, self.release = processes.keep, processes.release
        self._lease_ends_at: float | None = None
        self._entrypoint = entrypoint
        self._logs = logs
        self._journal = journal
        self._run_journal: RunJournal | None = None
        self._link_journal: LinkJournal | None = None
        self._scopes = scopes  # None: scopes are not watched
        self._error_files: ErrorFiles | None = None  # opened when workers are stopped
        self._verdict: Verdict | None = None
        self.goodput: Goodput | None = None  # of the run, when it has ended
        # Absolute, because readers of these paths may have another working directory.
        self._log_dir, self._journal_path = (path and os.path.abspath(path) for path in (log_dir, journal.path))
        self._operator_api: Callable[[], OperatorService] | None = None  # None: this process is not the coordinator
        self._has_control_socket = has_control_socket
        # Read here: a server in this process raises the limit later, and workers do not inherit that.
        has_descriptors = not 0 <= os.sysconf("SC_OPEN_MAX") < _MIN_OPEN_FILES
        self._has_survivors = has_survivors and entrypoint.can_survive and has_descriptors
        self._channels: dict[int, WorkerSocket] = {}  # by local rank
        self._control_socket: ControlSocket | None = None
        self._since = time.time()  # when it began
        self._repetitions = Repetitions()

    def run(self) -> Verdict:
        """Run from the first join to the verdict, and close everything that was opened."""
        loop = self._loop
        loop.watch(self._logs)
        loop.watch(self._processes)
        if self._scopes is not None:
            loop.watch(self._scopes)
            self._scopes.open(loop.now, self.print_line)
        self._processes.open(self._from_processes)
        self._journal.begin(self.machine.state.settings, self._entrypoint.name, loop.now())
        loop.post(events.RunRequested())
        try:
            if self._has_control_socket:
                loop.at(loop.now() + _CONTROL_SOCKET_AFTER_S, self._open_control_socket)
            self._control.open(loop, loop.post, self)
            while self._verdict is None:
                event = loop.next_event(self._next_deadline)
                if isinstance(event, events.GenerationFormed) and loop.has_posted(
                    (events.RunEnded, events.JoinRefused)
                ):
                    continue  # the run ended before this node started the generation
                if event is not None:
                    self._read_channels(event)
                    self._step(event)
                else:
                    self._on_deadline()
            followed_for = self._logs.answer_final_requests()  # first: other nodes may wait for these answers
            if self._stay_for_others():
                self._stay_for_followers(followed_for)
            self.goodput = self._final_goodput(self._verdict)
        except RequestRefused:
            self._has_control_socket = False  # the run never began: leave no note about it
            raise
        finally:
            self._processes.close()
            for local_rank in list(self._channels):
                self._close_channel(local_rank)
            self._entrypoint.close()
            if self._error_files is not None:
                self._error_files.close()
            self._control.close()
            if self._has_control_socket:
                self._write_note(self._control_socket.path if self._control_socket is not None else "", time.time())
            if self._control_socket is not None:
                self._control_socket.close()
            if self._scopes is not None:
                loop.unwatch(self._scopes)
                self._scopes.close()
            for journal in (self._run_journal, self._link_journal, self._journal):
                if journal is not None:
                    journal.close(loop.now())
        return self._verdict

    def _final_goodput(self, verdict: Verdict) -> Goodput | None:
        """Return the goodput of the run, also if this node is the only one and ended it, for example on a signal."""
        if verdict.goodput is not None or self._operator_api is None or self._control.where:
            return verdict.goodput
        return self._operator_api().status().goodput

    def _next_deadline(self) -> float | None:
        of_scopes = self._scopes.next_deadline() if self._scopes is not None else None
        deadlines = (self.machine.state.next_deadline(), of_scopes)
        return min((each for each in deadlines if each is not None), default=None)

    def _on_deadline(self) -> None:
        deadline = self.machine.state.next_deadline()
        if deadline is not None and deadline <= self._loop.now():
            self._step(events.Tick())
        elif self._scopes is not None:
            for expired in self._scopes.expired():
                self._loop.post(expired)

    # --- for the engine -----------------------------------------------------------------------------------------------

    def messages_on_connecting(self, node: NodeInfo) -> list[FromNode]:
        return messages_on_connecting(self.machine.state, node, self._loop.now())

    def hold(self, seconds: float) -> None:
        self._lease_ends_at = self._loop.now() + seconds if seconds else None
        self._processes.hold(seconds)

    def print_line(self, text: str, *, after_output: bool = False, colour: str = "") -> None:
        self._logs.print_line(f"tenax: {harmless(text)}", after_output=after_output, colour=colour)

    def record_run(self, settings: RunSettings) -> RecordRun:
        if self._run_journal is not None:
            self._run_journal.close(self._loop.now())
        self._run_journal = self._around.open_run_journal()
        self._run_journal.begin_run(settings, self._loop.now())
        return self._run_journal.run_step

    @property
    def create(self) -> CreateMachine:
        if self._link_journal is None:
            self._link_journal = self._around.open_link_journal()
        return create_machine if self._link_journal is None else self._link_journal.recorder.create

    def answer(self, request: OfNode, reply: Reply) -> None:
        from tenax._core.requests import ActivityRequest, LogsRequest

        generation = self.machine.state.generation
        if isinstance(request, LogsRequest):
            self._logs.answer(request, reply)
        elif isinstance(request, ActivityRequest):
            # Reply after the progress is sent: it is posted before this call.
            self._around.report_activity(lambda: self._loop.soon(lambda: reply("reported", "")))
        else:
            self._around.answer_stacks(request, lambda rank: self._processes.dump_stacks(generation, rank), reply)

    def set_operator_api(self, make_operator_api: Callable[[], OperatorService] | None) -> None:
        self._operator_api = make_operator_api
        self._around.set_operator_api(make_operator_api)

    # --- operators ----------------------------------------------------------------------------------------------------

    def _open_control_socket(self) -> None:
        from tenax._node.control_socket import ControlSocket

        self._control_socket = ControlSocket(self._answer, self.print_line, self._write_note)
        self._control_socket.open(self._loop)

    def _write_note(self, socket_path: str, ended: float = 0.0) -> None:
        from tenax._node.run_notes import write_note

        outcome = self._verdict.outcome.value if self._verdict is not None else ""
        write_note(self._agent_info() | {"since": self._since, "ended": ended, "outcome": outcome}, socket_path)

    def _answer(self, request: AnyRequest, reply: Reply) -> None:
        from tenax._core.requests import AgentRequest

        if isinstance(request, AgentRequest):
            reply(self._agent_info(), "")
        else:
            self._control.submit(request, reply)

    def _agent_info(self) -> dict[str, object]:
        state = self.machine.state
        return {
            "run_id": state.settings.run_id,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "role": state.settings.role,
            "entrypoint": self._entrypoint.name,
            "phase": state.phase.value,
            "generation": state.generation,
            "workers": state.settings.local_world_size,
            "rank": state.assignment.group_rank if state.assignment is not None else -1,
            "is_coordinator": self._operator_api is not None,
            "coordinator": self._control.where,
            "log_dir": self._log_dir,
            "journal": self._journal_path,
        }

    def _stay_for_others(self) -> bool:
        """Keep serving while other nodes need the coordinator in this process. Returns False on a signal."""
        while self._control.stays_for_others():
            if isinstance(self._loop.next_event(lambda: None), events.SignalReceived):
                return False
        return True

    def _stay_for_followers(self, followed_for: Callable[[], float] | None) -> None:
        """Let log followers receive the last lines: of this node's workers through any agent, and of all workers
        through our control socket. Followers disconnect by themselves; bounded by time and by the next signal."""
        until = self._loop.now() + _FOLLOWERS_S
        if followed_for is not None and followed_for():
            answers: list[object] = []
            if not self._stay(until, followed_for):
                return
            self._query_own_logs(lambda *answer: answers.append(answer))
            if not self._stay(until, lambda: 0.0 if answers else _FOLLOWERS_S):
                return
        if self._verdict is not None and self._verdict.goodput is not None:  # else the run continues without this node
            self._stay(until, lambda: _FOLLOWERS_S if self._control_socket and self._control_socket.followers else 0.0)

    def _stay(self, until: float, needed_s: Callable[[], float]) -> bool:
        """Run the loop while ``needed_s`` returns more than 0. Returns False if a signal interrupted the wait."""
        now = self._loop.now
        while (deadline := min(until, now() + needed_s())) > now():
            if isinstance(self._loop.next_event(lambda: min(deadline, now() + needed_s())), events.SignalReceived):
                return False
        return True

    def _query_own_logs(self, reply: Reply) -> None:
        """Send a log request to this node through the coordinator, if that is in this process.

        Our link is ordered, so this answer arrives after all earlier ones. A coordinator elsewhere needs no such check:
        it sees our link close.
        """
        from tenax._core.requests import LogsRequest, StatusRequest
        from tenax._view.status import RunStatus

        def on_status(status: object, error: str) -> None:
            nodes = status.nodes if isinstance(status, RunStatus) else ()
            if own := [node.node_id for node in nodes if node.is_coordinator]:
                self._control.submit(LogsRequest(own[0], last=0), reply)
            else:
                reply(None, error)

        if self._operator_api is not None:
            self._control.submit(StatusRequest(), on_status)
        else:
            reply(None, "")

    def _from_processes(self, event: AnyEvent) -> None:
        """Post an event of the processes, after collecting the result of a worker that exited."""
        match event:
            case events.NodeCleared(generation):
                if self._error_files is not None:
                    self._error_files.end()
                # Post the final progress before the end of the generation.
                if progress := self._logs.progress():
                    self._loop.post(events.ProgressSeen(generation, progress))
            case events.WorkerStarted(_, local_rank):
                self._entrypoint.release(local_rank)
            case events.WorkerStartFailed(generation, local_rank):
                self._close_channel(local_rank, generation)
                self._entrypoint.release(local_rank)
            case events.WorkerExited(generation, local_rank, exit_code):
                self._close_channel(local_rank, generation)
                fault = self._entrypoint.collect(local_rank, exit_code)
                channel = self._channels.get(local_rank)
                if channel is not None and channel.is_lost and not event.before_stop:
                    fault = fault or "its channel was closed before it could continue in this generation"
                wrote_error = exit_code != 0 and self._logs.has_error_file(local_rank)
                event = msgspec.structs.replace(event, fault=fault, wrote_error=wrote_error)
        self._loop.post(event)

    def _step(self, event: AnyEvent) -> None:
        now = self._loop.now()
        state = self.machine.state
        if self._lease_ends_at is not None and now >= self._lease_ends_at and state.must_be_fenced(event):
            self._step(events.Fenced(state.generation, "this agent was suspended for too long"))
        issued = self.machine.step(event, now)
        self._journal.step(now, event, issued)
        # Send before printing: what the console shows has been sent to the coordinator.
        for command in issued:
            if isinstance(command, commands.SendMessage):
                self._control.send(command.message)
        # Print before executing: the console shows a command before the workers' reaction to it.
        is_end = any(isinstance(command, commands.Finish) for command in issued)
        is_shown = self._repetitions.is_shown(event, now)
        for line in lines_for(event, issued, state) if is_shown else ():
            if line.important and not (self._around.shares_console and isinstance(event, events.LeaveNoticed)):
                self.print_line(line.text, after_output=is_end, colour=line.colour)
        if self._scopes is not None:
            self._scopes.on_step(event, issued)
        for command in issued:
            self._execute(command)
        self._around.observe(Step(now, event, issued), state)
        self._logs.live(*live_line(state))

    def _execute(self, command: AnyCommand) -> None:
        match command:
            case commands.ForwardNotice():
                self._around.forward_notice(command)
            case commands.StartWorkers():
                self._start_workers(command)
            case commands.ExamineFailure(generation, local_rank):
                post = self._loop.post
                self._logs.examine(command, lambda found: post(events.FailureExamined(generation, local_rank, found)))
            case commands.SignalWorkers(generation, number):
                self._entrypoint.end_wait()
                self._processes.signal(generation, number)
                for each in self._channels.values():
                    each.stop()
                if self._error_files is None:
                    from tenax._node.error_files import ErrorFiles

                    self._error_files = ErrorFiles(self._loop, self._loop.post)
                self._error_files.watch(generation, self._logs.error_files())
                self._logs.read_last_lines(generation, self._loop.post)
            case commands.DumpStacks(generation, local_rank):
                self._processes.dump_stacks(generation, local_rank)
            case commands.EndWorker() | commands.StopWorker():
                self._processes.end(command.generation, command.local_rank, command.signal)
            case commands.HoldWorkers(generation, local_ranks, why):
                for local_rank in local_ranks:
                    if (channel := self._channels.get(local_rank)) is not None:
                        channel.opened().end(generation, why)
            case commands.ClearNode(generation, held, number):
                self._processes.clear(generation, held, number)
            case commands.KillNode(generation):
                self._processes.kill(generation)
            case commands.Finish(verdict):
                self._verdict = verdict
            case commands.ReadStacks():
                self._around.read_stacks(command)
            case commands.SendMessage() | commands.ReportHang() | commands.ReportMovement():
                pass  # already sent or printed
            case _:
                assert_never(command)

    def _start_workers(self, command: commands.StartWorkers) -> None:
        generation, survivors = command.assignment.generation, command.survivors
        added = self._around.environments(command)
        for rank in survivors:  # first: a survivor goes on while the others start
            self._continue_worker(generation, rank, added[rank])
        try:
            outputs = self._logs.prepare(generation, added, survivors)
        except OSError as error:
            reason = f"could not create a pipe for its output: {error.strerror} (see 'ulimit -n')"
            for rank in added.keys() - set(survivors):
                self._loop.post(events.WorkerStartFailed(generation, rank, reason))
            return
        inherited = inheritable_environ()
        for rank, output in outputs.items():
            channel = self._open_channel(generation, rank)
            variable = {} if channel is None else {SURVIVOR_VARIABLE: str(SURVIVOR_DESCRIPTOR)}
            env = {**inherited, **added[rank], **output.env, **variable}
            try:
                launch = self._around.placements.bind(rank, self._entrypoint.launch(rank, env))
                streams = {**inherited_stdin(), 1: output.stdout, 2: output.stderr}
                if channel is not None:
                    streams[SURVIVOR_DESCRIPTOR] = channel.fileno()
                launch = msgspec.structs.replace(launch, descriptors={**launch.descriptors, **streams})
                self._processes.start(generation, rank, launch)
            except Exception as error:
                # For example, the arguments cannot be pickled. The report shows the reason.
                self._entrypoint.release(rank)
                reason = f"{type(error).__name__}: {error}"
                self._loop.post(events.WorkerStartFailed(generation, rank, reason))
            finally:
                os.close(output.stdout)
                os.close(output.stderr)
                if channel is not None:
                    channel.close()

    # --- survivors ----------------------------------------------------------------------------------------------------

    def _read_channels(self, event: AnyEvent) -> None:
        """Before an event that ends the generation here: handle what workers sent before, so that they are held."""
        if self.machine.state.phase is not Phase.RUNNING:
            return
        match event:
            case events.GenerationEnded() | events.WorkerStartFailed():
                pass
            case events.WorkerExited(exit_code=exit_code, fault=fault) if exit_code != 0 or fault:
                pass
            case _:
                return
        for sent in self._loop.take_posted((events.WorkerOptedIn, events.WorkerOptedOut)):
            self._step(sent)
        for channel in self._channels.values():
            for sent in channel.read_all():
                self._step(sent)

    def _open_channel(self, generation: int, local_rank: int) -> _socket.socket | None:
        """Open the channel to a new worker. Return its end, which the caller closes; None: there is none."""
        self._close_channel(local_rank)
        if not self._has_survivors:
            return None
        try:
            ours, theirs = _socket.socketpair()
        except OSError:  # too many open files: the worker cannot opt in
            return None
        self._channels[local_rank] = WorkerSocket(ours, generation, local_rank, self._loop)
        return theirs

    def _close_channel(self, local_rank: int, generation: int | None = None) -> None:
        channel = self._channels.get(local_rank)
        if channel is not None and generation in (None, channel.generation):
            channel.close()

    def _continue_worker(self, generation: int, local_rank: int, env: dict[str, str]) -> None:
        channel = self._channels[local_rank]  # closed if the worker has just exited, which ``adopt`` reports
        self._processes.adopt(channel.generation, local_rank, generation)
        channel.generation = generation
        if not channel.opened().begin(generation, env):
            channel.is_lost = True
            self._processes.end(generation, local_rank, SIGKILL)


class WorkerSocket(Watchable):
    """The agent's end of the channel to one worker. Most workers never use it; ``worker_channel`` has its meaning."""

    def __init__(self, sock: _socket.socket, generation: int, local_rank: int, loop: Loop) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.generation = generation  # of the worker
        self.local_rank = local_rank
        self.is_lost = False  # the worker was ended, because it could not be sent the begin of its generation
        self.post: Callable[[AnyEvent], None] = loop.post
        self._loop = loop
        self._channel: WorkerChannel | None = None
        loop.watch(self)

    def read_all(self) -> list[AnyEvent]:
        """Read what the worker has sent so far; return the events."""
        found: list[AnyEvent] = []
        self.post = found.append
        try:
            is_read = True
            while is_read and self.fileno() >= 0:
                is_read = self.opened().on_readable() if self._channel is not None or self._is_readable() else False
        finally:
            self.post = self._loop.post
        return found

    def _is_readable(self) -> bool:
        """Return whether the worker has sent something: most never do."""
        try:
            return bool(self.sock.recv(1, _socket.MSG_PEEK))
        except OSError:  # nothing, or the connection is closed, which changes nothing for a worker that sent nothing
            return False

    def opened(self) -> WorkerChannel:
        if self._channel is None:
            from tenax._node.worker_channel import WorkerChannel

            self._channel = WorkerChannel(self)
        return self._channel

    def stop(self) -> None:
        """The worker is being stopped. One that never used its channel is not held."""
        if self._channel is not None:
            self._channel.stop()

    def fileno(self) -> int:
        return self.sock.fileno()

    def on_readable(self) -> None:
        self.opened().on_readable()

    @property
    def wants_to_write(self) -> bool:
        return self._channel is not None and bool(self._channel.outgoing)

    def on_writable(self) -> None:
        self.opened().flush()

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self._loop.unwatch(self)
            self.sock.close()


def inherited_stdin() -> dict[int, int]:
    """Return the descriptor mapping that gives workers the agent's stdin, if it has one."""
    import sys

    try:
        # If stdin was closed at startup, descriptor 0 may be another file now.
        return {0: 0} if sys.__stdin__ is not None and os.fstat(0) else {}
    except OSError:
        return {}
