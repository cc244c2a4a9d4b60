"""The supervisor: carries facts to the agent machine and its orders to the ports. It decides nothing.

One mailbox, one loop, one thread. Every step is written to the journal before its orders are carried out, so that
the journal of an agent that died shows what it was about to do.
"""

from __future__ import annotations

import os

from tenax._core import commands as order
from tenax._core import events
from tenax._core.agent import AgentMachine, Phase, is_started, messages_on_connecting
from tenax._core.text import harmless
from tenax._io.helper_process import inheritable_environ
from tenax._io.ports import ControlledNode
from tenax._node.journal import Step
from tenax._node.messages import live_line, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.agent import AgentState
    from tenax._core.commands import AnyCommand
    from tenax._core.coordinator import RunSettings
    from tenax._core.events import AnyEvent
    from tenax._core.messages import FromNode, NodeInfo
    from tenax._core.model import AgentSettings, Evidence, Verdict
    from tenax._core.policy import RestartPolicy
    from tenax._core.requests import AnyRequest, OfNode
    from tenax._io.loop import Loop
    from tenax._io.ports import Control, Entrypoint, Launch, Logs, OperatorApi, Processes, RecordRun, Reply, ScopeWatch
    from tenax._node.control_socket import ControlSocket
    from tenax._node.journal import Journal
    from tenax._node.run_journal import RunJournal


_DOOR_AFTER_S = 0.25  # nobody asks sooner, and until then there is more important work
_FOLLOWERS_S = 3.0  # how long those who follow lines of workers may take to hear the last of them


class Supervisor:
    """One run of one node."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        loop: Loop,
        control: Control,
        processes: Processes,
        entrypoint: Entrypoint,
        logs: Logs,
        journal: Journal,
        environments: Callable[[order.StartWorkers], dict[int, dict[str, str]]],
        policy: RestartPolicy | None = None,
        place: Callable[[int, Launch], Launch] = lambda _, launch: launch,
        pass_on_notice: Callable[[order.ForwardNotice], None] = lambda _: None,
        run_journal: Callable[[], RunJournal] | None = None,
        observe: Callable[[Step, AgentState], None] = lambda *_: None,
        scopes: ScopeWatch | None = None,
        serves: Callable[[Callable[[], OperatorApi] | None], None] = lambda _: None,
        log_dir: str = "",
        has_door: bool = False,
        want_steps: Callable[[], bool] = lambda: False,
    ) -> None:
        self.machine = AgentMachine(settings)
        self._loop = loop
        self._control = control
        self._policy = policy
        self._processes = processes
        self._entrypoint = entrypoint
        self._logs = logs
        self._journal = journal
        self._environments = environments  # what is added for each worker, by local rank
        self._place = place
        self._pass_on_notice = pass_on_notice
        self._make_run_journal = run_journal
        self._run_journal: RunJournal | None = None
        self._observe = observe
        self._scopes = scopes  # which workers must leave in time; None: nobody watches
        self._verdict: Verdict | None = None
        self._serves = serves  # what else happens when the coordinator is here
        # Whoever hears of these may be in another folder.
        self._log_dir, self._journal_path = (path and os.path.abspath(path) for path in (log_dir, journal.path))
        self._is_coordinator = False
        self._has_door = has_door
        self._want_steps = want_steps  # somebody asks about the run; whether there is something new of steps
        self._door: ControlSocket | None = None

    def run(self) -> Verdict:
        """From the first join to the verdict. Everything that was opened here is closed here."""
        loop = self._loop
        loop.watch(self._logs)
        loop.watch(self._processes)
        if self._scopes is not None:
            loop.watch(self._scopes)
            self._scopes.open(loop.now, self._say)
        self._processes.open(self._from_processes)
        self._journal.begin(self.machine.state.settings, self._entrypoint.name, loop.now())
        loop.post(events.RunRequested())
        try:
            if self._has_door:
                loop.at(loop.now() + _DOOR_AFTER_S, self._open_door)
            self._control.open(loop, loop.post, self._node())
            while self._verdict is None:
                event = loop.next_event(self._next_deadline)
                if isinstance(event, events.GenerationFormed) and loop.has_posted(
                    (events.RunEnded, events.JoinRefused)
                ):
                    continue  # the run ended before this node heard of the generation: start nothing
                if event is not None:
                    self._step(event)
                else:
                    self._on_time()
            followed_for = self._logs.answer_the_last()  # first: others may stay until we have answered
            if self._stay_for_others():
                self._stay_for_followers(followed_for)
        finally:
            self._processes.close()
            self._entrypoint.close()
            self._control.close()
            if self._door is not None:
                self._door.close()
                self._door = None
            if self._scopes is not None:
                loop.unwatch(self._scopes)
                self._scopes.close()
            if self._run_journal is not None:
                self._run_journal.close(loop.now())
            self._journal.close(loop.now())
        return self._verdict

    def _next_deadline(self) -> float | None:
        deadline = self.machine.state.next_deadline()
        if self._scopes is None:
            return deadline
        moments = [moment for moment in (deadline, self._scopes.next_deadline()) if moment is not None]
        return min(moments, default=None)

    def _on_time(self) -> None:
        """Some deadline has come: the machine's, or that of a scope."""
        deadline = self.machine.state.next_deadline()
        if deadline is not None and deadline <= self._loop.now():
            self._step(events.Tick())
        elif self._scopes is not None:
            for expired in self._scopes.expired():
                self._loop.post(expired)

    def _say(self, text: str, *, after_output: bool = False) -> None:
        self._logs.say(f"tenax: {harmless(text)}", after_output=after_output)

    def _node(self) -> ControlledNode:
        return ControlledNode(
            settings=self.machine.state.settings,
            policy=self._policy,
            words=self._words,
            hold=self._processes.hold,
            keep=self._processes.keep,
            release=self._processes.release,
            say=self._say,
            record_run=self._record_run,
            answer=self._answer_of_node,
            serves=self._on_serving,
        )

    # --- operators ----------------------------------------------------------------------------------------------------

    def _open_door(self) -> None:
        state = self.machine.state
        if state.phase is Phase.RUNNING and not is_started(state):  # they come first
            self._loop.at(self._loop.now() + _DOOR_AFTER_S, self._open_door)
            return
        from tenax._node.control_socket import ControlSocket

        self._door = ControlSocket(self._answer, self._say)
        self._door.open(self._loop)

    def _on_serving(self, make_desk: Callable[[], OperatorApi] | None) -> None:
        self._is_coordinator = make_desk is not None
        self._serves(make_desk)

    def _answer(self, request: AnyRequest, reply: Reply) -> None:
        """To somebody at the door."""
        from tenax._core.requests import AgentRequest, StatusRequest, answer_safely

        if isinstance(request, AgentRequest):
            reply(self._who_we_are(), "")
        elif isinstance(request, StatusRequest) and self._want_steps():
            self._loop.soon(lambda: answer_safely(self._control.ask, request, reply))  # after the steps were told
        else:
            self._control.ask(request, reply)

    def _who_we_are(self) -> dict[str, object]:
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
            "is_coordinator": self._is_coordinator,
            "coordinator": self._control.where,
            "log_dir": self._log_dir,
            "journal": self._journal_path,
        }

    def _answer_of_node(self, request: OfNode, reply: Reply) -> None:
        """What only this node knows, to the coordinator."""
        self._logs.answer(request, self.machine.state.generation, reply)

    def _record_run(self, settings: RunSettings) -> RecordRun:
        """This node begins to serve the coordinator: its journal is kept here too. One each time, should it resign."""
        if self._make_run_journal is None:
            return lambda *_: None
        if self._run_journal is not None:
            self._run_journal.close(self._loop.now())
        self._run_journal = self._make_run_journal()
        self._run_journal.begin_run(settings, self._loop.now())
        return self._run_journal.run_step

    def _words(self, node: NodeInfo) -> list[FromNode]:
        return messages_on_connecting(self.machine.state, node, self._loop.now())

    def _stay_for_others(self) -> bool:
        """The coordinator may live in this process, and others may still need it. Whether no signal ended that."""
        while self._control.stays_for_others():
            if isinstance(self._loop.next_event(lambda: None), events.SignalReceived):
                return False
        return True

    def _stay_for_followers(self, followed_for: Callable[[], float] | None) -> None:
        """Whoever follows lines hears the last of them while there is a way: those of our workers, wherever that is;
        at our door, those of others too. They go by themselves, or do not: bounded, and until the next signal."""
        until = self._loop.now() + _FOLLOWERS_S
        if followed_for is not None and followed_for():
            has_arrived = False

            def on_arrival(value: object, error: str) -> None:  # noqa: ARG001 - whatever it is
                nonlocal has_arrived
                has_arrived = True

            if not self._stay(until, followed_for):
                return
            self._ask_ourselves(on_arrival)
            if not self._stay(until, lambda: 0.0 if has_arrived else _FOLLOWERS_S):
                return
        if self._verdict is not None and self._verdict.goodput is not None:  # else the run goes on without us
            self._stay(until, lambda: _FOLLOWERS_S if self._door is not None and self._door.is_followed else 0.0)

    def _stay(self, until: float, wanted_for: Callable[[], float]) -> bool:
        """As long as somebody wants us to. Whether no signal ended that."""
        now = self._loop.now
        while (deadline := min(until, now() + wanted_for())) > now():
            if isinstance(self._loop.next_event(lambda: min(deadline, now() + wanted_for())), events.SignalReceived):
                return False
        return True

    def _ask_ourselves(self, reply: Reply) -> None:
        """If the coordinator is here, it has our answers over a link of ours. When this one arrives, all before it
        have. Elsewhere the end of our link tells."""
        from tenax._core.requests import LogsRequest, StatusRequest
        from tenax._view.status import RunStatus

        def on_status(status: object, error: str) -> None:
            nodes = status.nodes if isinstance(status, RunStatus) else ()
            if ours := [node.node_id for node in nodes if node.is_coordinator]:
                self._control.ask(LogsRequest(ours[0], last=0), reply)
            else:
                reply(None, error)

        if self._is_coordinator:
            self._control.ask(StatusRequest(), on_status)
        else:
            reply(None, "")

    def _from_processes(self, event: AnyEvent) -> None:
        """A worker that ended is asked for its result before anybody judges it."""
        match event:
            case events.NodeCleared(generation):
                # How far they got is told before their end is.
                if progress := self._logs.progress():
                    self._loop.post(events.ProgressSeen(generation, progress))
            case events.WorkerStarted(_, local_rank) | events.WorkerStartFailed(_, local_rank):
                self._entrypoint.release(local_rank)
            case events.WorkerExited(generation, local_rank, exit_code):
                fault = self._entrypoint.collect(local_rank, exit_code)
                wrote_error = exit_code != 0 and self._logs.has_error_file(local_rank)
                event = events.WorkerExited(
                    generation, local_rank, exit_code, fault, event.unasked, wrote_error, event.ended_at
                )
        self._loop.post(event)

    def _step(self, event: AnyEvent) -> None:
        now = self._loop.now()
        state = self.machine.state
        commands = self.machine.step(event, now)
        self._journal.step(now, event, commands)
        # The coordinator hears before the person at the console does: what the console says has been passed on.
        for command in commands:
            if isinstance(command, order.SendMessage):
                self._control.tell(command.message)
        # The person hears before the workers do, so that the console shows an order before what they answer to it.
        is_end = any(isinstance(command, order.Finish) for command in commands)
        for line in tell(event, commands, state):
            if line.important:
                self._say(line.text, after_output=is_end)
        if self._scopes is not None:
            self._scopes.heard(event, commands)
        for command in commands:
            self._perform(command)
        self._observe(Step(now, event, commands), state)
        self._logs.live(live_line(state) if state.phase is not Phase.ENDED else "")

    def _perform(self, command: AnyCommand) -> None:
        match command:
            case order.ForwardNotice():
                self._pass_on_notice(command)
            case order.StartWorkers():
                self._start_workers(command)
            case order.ExamineFailure(generation, local_rank):
                self._logs.examine(command, self._examined(generation, local_rank))
            case order.SignalWorkers(generation, number):
                self._entrypoint.end_wait()
                self._processes.signal(generation, number)
            case order.DumpStacks(generation, local_rank):
                self._processes.dump_stacks(generation, local_rank)
            case order.EndWorker(generation=generation, local_rank=local_rank, signal=number):
                self._processes.end(generation, local_rank, number)
            case order.ClearNode(generation):
                self._processes.clear(generation)
            case order.KillNode(generation):
                self._processes.kill(generation)
            case order.Finish(verdict):
                self._verdict = verdict

    def _examined(self, generation: int, local_rank: int) -> Callable[[Evidence], None]:
        return lambda evidence: self._loop.post(events.FailureExamined(generation, local_rank, evidence))

    def _start_workers(self, command: order.StartWorkers) -> None:
        generation = command.assignment.generation
        added = self._environments(command)
        try:
            outputs = self._logs.prepare(generation, added)
        except OSError as error:
            reason = f"there is no pipe for its output: {error.strerror} (see 'ulimit -n')"
            for rank in added:
                self._loop.post(events.WorkerStartFailed(generation, rank, reason))
            return
        inherited = inheritable_environ()
        for rank, own in added.items():
            output = outputs[rank]
            env = {**inherited, **own, **output.env}
            try:
                launch = self._place(rank, self._entrypoint.launch(rank, env))
                self._processes.start(generation, rank, _with_streams(launch, output.stdout, output.stderr))
            except Exception as error:
                # For example arguments that cannot be pickled: this worker cannot start, and the report will say why.
                self._entrypoint.release(rank)
                reason = f"{type(error).__name__}: {error}"
                self._loop.post(events.WorkerStartFailed(generation, rank, reason))
            finally:
                os.close(output.stdout)
                os.close(output.stderr)


def _with_streams(launch: Launch, stdout: int, stderr: int) -> Launch:
    import msgspec

    return msgspec.structs.replace(
        launch, descriptors={**launch.descriptors, **inherited_stdin(), 1: stdout, 2: stderr}
    )


def inherited_stdin() -> dict[int, int]:
    """The workers read what the agent would read: a file, a pipe, a person with a debugger."""
    import sys

    try:
        # Closed when we started: the number may be another's by now.
        return {0: 0} if sys.__stdin__ is not None and os.fstat(0) else {}
    except OSError:
        return {}
