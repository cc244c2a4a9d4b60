"""The supervisor on fake processes and a fake clock: every path from the first join to the verdict, without waiting.

Each run is also replayed from its journal: the same events give the same decisions.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import leaving_nothing
from tenax._core import commands, events, messages
from tenax._core.agent import AgentState, Phase
from tenax._core.coordinator import Opened, Received, RunSettings, Send
from tenax._core.environment import worker_environment
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Verdict, WorkerPhase
from tenax._core.policy import AnyDecision, GiveUp, History, RestartPolicy, Wait
from tenax._core.requests import AnyRequest, DrainRequest, LogsRequest, RestartRequest
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.local import LocalEngine
from tenax._failures.exit_codes import exit_code_for
from tenax._io.interfaces import Control, ControlledNode, EventLoop, Launch, Output
from tenax._io.loop import Loop
from tenax._node.journal import Journal, RunJournal, Step, read_journal, read_run_journal, replay_run
from tenax._node.supervisor import SURVIVOR_DESCRIPTOR, Supervisor, Surroundings
from tenax.testing.clock import FakeClock
from tenax.testing.processes import FakeProcesses
from tenax.testing.replay import replay

HOUR_S = 3600.0

Emit = Callable[[events.AnyEvent], None]
Reply = Callable[[Any, str], None]


class QuietLogs:
    """Implements ``ports.Logs``: records printed lines and returns the given evidence."""

    wants_to_write = False

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.printed_after_output: list[str] = []
        self.evidence: dict[int, Evidence | None] = {}  # None: no answer ever
        self.refuses = False
        self.steps: tuple[messages.WorkerProgress, ...] = ()

    def open(self) -> None: ...

    def prepare(
        self, generation: int, envs: dict[int, dict[str, str]], survivors: tuple[int, ...] = ()
    ) -> dict[int, Output]:
        if self.refuses:
            raise OSError(24, "Too many open files")
        started = [rank for rank in envs if rank not in survivors]
        return {rank: Output(os.dup(2), os.dup(2), {"STREAM": f"{generation}.{rank}"}) for rank in started}

    def error_files(self) -> dict[int, str]:
        return {}

    def has_error_file(self, local_rank: int) -> bool:
        return bool(self.evidence.get(local_rank))

    def progress(self) -> tuple[messages.WorkerProgress, ...]:
        return self.steps

    def output_times(self, done: Callable[[dict[int, float]], None]) -> None:
        done({})

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        reply(f"lines of {request.node}", "")

    def answer_final_requests(self) -> None: ...

    def read_last_lines(self, generation: int, post: Callable[[events.LastLinesRead], None]) -> None:
        pass

    def examine(self, command: commands.ExamineFailure, done: Callable[[Evidence], None]) -> None:
        evidence = self.evidence.get(command.local_rank, Evidence())
        if evidence is not None:
            done(evidence)

    def print_line(self, text: str, *, after_output: bool = False, colour: str = "") -> None:
        self.printed.append(text)
        if after_output:
            self.printed_after_output.append(text)

    def live(self, text: str, since: float | None = None, until: float | None = None) -> None: ...

    def close(self, final_text: str = "") -> None: ...

    def fileno(self) -> int:
        return -1

    def on_readable(self) -> None: ...

    def on_writable(self) -> None: ...


class FakeEntrypoint:
    """Implements ``ports.Entrypoint``: returns a value for every worker and records the calls."""

    name = "train"
    can_survive = True

    def __init__(self) -> None:
        self.launched: list[tuple[int, dict[str, str]]] = []
        self.released: list[int] = []
        self.faults: dict[int, str] = {}
        self.cannot_launch: set[int] = set()
        self.values: dict[int, Any] = {}
        self.is_closed = False

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch:
        if local_rank in self.cannot_launch:
            raise TypeError("cannot pickle '_thread.lock' object")
        self.launched.append((local_rank, env))
        return Launch(env=env, argv=["train"])

    def release(self, local_rank: int) -> None:
        self.released.append(local_rank)

    def collect(self, local_rank: int, exit_code: int) -> str:
        self.values[local_rank] = exit_code
        return self.faults.get(local_rank, "")

    def end_wait(self) -> None: ...

    def return_values(self) -> dict[int, Any]:
        return self.values

    def close(self) -> None:
        self.is_closed = True


class Stage(Surroundings):
    """A supervisor and everything around it."""

    def __init__(self, path: str, policy: RestartPolicy | None = None, **settings: Any) -> None:
        chosen = {"run_id": "run", "role": "trainer", "local_world_size": 2, "max_restarts": 0, **settings}
        self.settings = AgentSettings(**chosen)
        self.clock = FakeClock(1000.0)
        self.processes = FakeProcesses()
        self.entrypoint = FakeEntrypoint()
        self.logs = QuietLogs()
        self.control: Control = LocalEngine("run")
        self.notices: list[commands.ForwardNotice] = []
        self.acts: dict[int, Callable[[], None]] = {}  # by generation: called when all its workers run
        self._path = path
        self._policy = policy
        self._seen: set[int] = set()

    def run(self) -> Verdict:
        loop = Loop(self.clock, selector=self.clock.selector())
        supervisor = Supervisor(
            self.settings,
            self,
            loop=loop,
            control=self.control,
            processes=self.processes,
            entrypoint=self.entrypoint,
            logs=self.logs,
            journal=Journal(self._path),
            policy=self._policy,
            has_survivors=True,
        )
        try:
            verdict = supervisor.run()
        finally:
            loop.close()
        assert self.entrypoint.is_closed
        assert self.processes.fileno() == -1
        self._check_replay(verdict)
        return verdict

    def forward_notice(self, notice: commands.ForwardNotice) -> None:
        self.notices.append(notice)

    def open_run_journal(self) -> RunJournal:
        return RunJournal(f"{self._path}.run")

    def environments(self, command: commands.StartWorkers) -> dict[int, dict[str, str]]:
        return {
            rank: worker_environment(self.settings, command.assignment, rank, {})
            for rank in range(self.settings.local_world_size)
        }

    def observe(self, _: Step, state: AgentState) -> None:
        up = all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())
        if state.phase is Phase.RUNNING and up and state.generation not in self._seen:
            self._seen.add(state.generation)
            self.acts.get(state.generation, self._succeed)()

    def _succeed(self) -> None:
        for rank in range(self.settings.local_world_size):
            self.processes.exit(rank, 0)

    def _check_replay(self, verdict: Verdict) -> None:
        replayed = replay(*read_journal(self._path))
        assert replayed.differences == []
        assert replayed.verdict == verdict
        assert replayed.is_complete


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with leaving_nothing():
        yield lambda **options: Stage(str(tmp_path / "journal.jsonl"), **options)


def test_all_workers_succeed(stage: Callable[..., Stage]) -> None:
    """They start once, with their environment and streams; the verdict follows when the node is clear."""
    made = stage()
    verdict = made.run()
    assert (verdict.outcome, verdict.generation, verdict.restarts_used) == (Outcome.SUCCEEDED, 1, 0)
    assert [rank for rank, _ in made.entrypoint.launched] == [0, 1]
    for rank, env in made.entrypoint.launched:
        assert (env["RANK"], env["WORLD_SIZE"], env["STREAM"]) == (str(rank), "2", f"1.{rank}")
    assert made.entrypoint.released == [0, 1]
    assert made.entrypoint.return_values() == {0: 0, 1: 0}
    descriptors = made.processes[0].launch.descriptors
    assert {1, 2} <= set(descriptors)
    assert exit_code_for(verdict) == 0


def test_a_failed_generation_is_restarted(stage: Callable[..., Stage]) -> None:
    """The other workers are stopped, the node is cleared, and the next generation has the next number."""
    made = stage(max_restarts=1)
    made.acts[1] = lambda: made.processes.exit(1, 3)
    verdict = made.run()
    assert (verdict.outcome, verdict.generation, verdict.restarts_used) == (Outcome.SUCCEEDED, 2, 1)
    assert made.processes.workers[1, 0].signals == [signal.SIGTERM]
    counts = [env["TORCHELASTIC_RESTART_COUNT"] for _, env in made.entrypoint.launched]
    assert counts == ["0", "0", "1", "1"]
    assert made.clock() == 1000.0, "without waiting"


def test_the_run_fails_after_the_last_restart(stage: Callable[..., Stage]) -> None:
    """With the first cause and the exit code of the last generation."""
    made = stage(max_restarts=1)
    made.acts[1] = lambda: made.processes.exit(0, 3)
    made.acts[2] = lambda: made.processes.exit(1, 4)
    made.logs.evidence[1] = Evidence(message="ValueError: boom")
    verdict = made.run()
    assert (verdict.outcome, verdict.why) == (Outcome.FAILED, "the only restart is used")
    assert [failure.evidence.message for failure in verdict.failures] == ["ValueError: boom"]
    assert [stopped.global_rank for stopped in verdict.stopped] == [0]
    assert exit_code_for(verdict) == 4


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(stage: Callable[..., Stage]) -> None:
    """Not earlier and not later."""
    made = stage(grace_s=30.0)
    made.processes.will_ignore(0, signal.SIGTERM)
    made.acts[1] = lambda: made.processes.exit(1, 3)
    verdict = made.run()
    assert made.processes[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert made.clock() == 1030.0
    assert [(stopped.local_rank, stopped.exit_code) for stopped in verdict.stopped] == [(0, -signal.SIGKILL)]


def test_a_worker_that_survives_sigkill_is_abandoned(stage: Callable[..., Stage]) -> None:
    """The run ends after the bound with its own exit code and names the process."""
    made = stage(grace_s=30.0, abandon_s=10.0, max_restarts=5)
    made.processes.will_be_stuck(0)
    made.acts[1] = lambda: made.processes.exit(1, 3)
    verdict = made.run()
    assert verdict.outcome is Outcome.ABANDONED
    assert verdict.stuck_pids == (made.processes.workers[1, 0].pid,)
    assert str(made.processes[0].pid) in verdict.why
    assert made.clock() == 1040.0
    assert exit_code_for(verdict) == 72


def test_leftovers_of_successful_workers_are_killed_at_once(stage: Callable[..., Stage]) -> None:
    """A child that outlives its worker does not delay the verdict."""
    made = stage()

    def leave_and_succeed() -> None:
        made.processes.leave_behind(0, in_group=False, ignores_term=True)
        made._succeed()

    made.acts[1] = leave_and_succeed
    assert made.run().outcome is Outcome.SUCCEEDED
    assert made.clock() == 1000.0


class WaitAnHour:
    """Waits an hour before each restart, and gives up on exit code 42."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if failure.exit_code == 42:
            return GiveUp("42 means: do not try again")
        return Wait("the machine needs to cool down", seconds=HOUR_S)


def test_a_policy_may_wait(stage: Callable[..., Stage]) -> None:
    """The wait is a deadline, not a sleep, so it takes no time on the fake clock."""
    made = stage(policy=WaitAnHour(), max_restarts=0)
    made.acts[1] = lambda: made.processes.exit(1, 3)
    made.acts[2] = lambda: made.processes.exit(1, 42)
    verdict = made.run()
    assert (verdict.outcome, verdict.why) == (Outcome.FAILED, "42 means: do not try again")
    assert verdict.restarts_used == 1
    assert made.clock() == 1000.0 + HOUR_S


def test_a_worker_whose_arguments_cannot_be_pickled_fails_the_generation(stage: Callable[..., Stage]) -> None:
    """It could not be started; the others are stopped, and the reason is reported."""
    made = stage()
    made.entrypoint.cannot_launch.add(0)
    verdict = made.run()
    assert verdict.outcome is Outcome.FAILED
    assert verdict.failures[0].reason == "could not be started: TypeError: cannot pickle '_thread.lock' object"
    assert made.processes[1].signals == [signal.SIGTERM]
    assert 0 in made.entrypoint.released


def test_a_failed_start_has_the_exit_code_of_a_shell(stage: Callable[..., Stage]) -> None:
    made = stage(local_world_size=1)
    made.processes.refuse(0, "No such file or directory: 'train'", 127)
    assert exit_code_for(made.run()) == 127


def test_without_pipes_for_output_no_worker_starts(stage: Callable[..., Stage]) -> None:
    """The failure has the reason."""
    made = stage()
    made.logs.refuses = True
    verdict = made.run()
    assert verdict.outcome is Outcome.FAILED
    assert "Too many open files" in verdict.failures[0].reason
    assert made.processes.workers == {}


def test_an_unreadable_return_value_is_a_failure(stage: Callable[..., Stage]) -> None:
    """Even with exit code 0."""
    made = stage()
    made.entrypoint.faults[1] = "its return value cannot be unpickled in the agent"
    verdict = made.run()
    assert (verdict.outcome, verdict.failures[0].reason) == (Outcome.FAILED, made.entrypoint.faults[1])
    assert exit_code_for(verdict) == 1


def test_a_lost_keeper_breaks_the_run(stage: Callable[..., Stage]) -> None:
    """Without a keeper no worker can be restarted safely."""
    made = stage(max_restarts=5)
    made.acts[1] = made.processes.lose
    verdict = made.run()
    assert (verdict.outcome, exit_code_for(verdict)) == (Outcome.BROKEN, 71)
    assert "it was killed by SIGKILL" in verdict.why


def test_missing_evidence_is_awaited_for_a_bounded_time(stage: Callable[..., Stage]) -> None:
    """After two seconds the decision is made without it."""
    made = stage(examine_s=2.0)
    made.logs.evidence[1] = None
    made.acts[1] = lambda: made.processes.exit(1, 3)
    assert made.run().outcome is Outcome.FAILED
    assert made.clock() == 1002.0


def test_every_command_is_in_the_journal_before_it_is_executed(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """The journal of an agent that died shows what it was about to do."""
    made = stage()
    seen: list[list[str]] = []
    launch = made.entrypoint.launch

    def look(local_rank: int, env: dict[str, str]) -> Launch:
        _, steps, _ = read_journal(str(tmp_path / "journal.jsonl"))
        seen.append([type(command).__name__ for step in steps for command in step.commands])
        return launch(local_rank, env)

    made.entrypoint.launch = look  # type: ignore[method-assign]
    made.run()
    assert seen == [["SendMessage", "StartWorkers"]] * 2


def test_an_internal_exception_closes_everything(stage: Callable[..., Stage]) -> None:
    """No process is left running."""
    made = stage()
    made.acts[1] = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert made.entrypoint.is_closed
    assert made.processes.fileno() == -1
    assert not any(worker.is_alive for worker in made.processes.workers.values())


def test_each_event_prints_one_line(stage: Callable[..., Stage]) -> None:
    """Start, failure, stop, restart, end; unimportant events print nothing."""
    made = stage(max_restarts=1)
    made.acts[1] = lambda: made.processes.exit(1, 3)
    made.run()
    pid = made.processes.workers[1, 1].pid
    assert made.logs.printed == [
        "tenax: generation 1: starting 2 workers, ranks 0 to 1 of 2",
        f"tenax: rank 1 (pid {pid}) exited with code 3; stopping all workers (SIGTERM, 30 s grace)",
        "tenax: generation 2 (restart 1 of 1): starting 2 workers, ranks 0 to 1 of 2",
        "tenax: the run succeeded: all 2 workers succeeded",
    ]
    assert made.logs.printed_after_output == made.logs.printed[-1:]


def test_an_irrelevant_event_is_recorded_and_ignored(stage: Callable[..., Stage]) -> None:
    """It is in the journal and changes nothing."""
    made = stage()

    def echo() -> None:
        made.processes._queue(events.NodeCleared(7))
        made._succeed()

    made.acts[1] = echo
    assert made.run().outcome is Outcome.SUCCEEDED


# --- a coordinator elsewhere ------------------------------------------------------------------------------------------


class FakeControl:
    """Implements ``ports.Control``: a coordinator that sends the given event after the first message of a kind."""

    def __init__(
        self, answers: dict[type, list[events.AnyEvent]] | None = None, after: list[events.AnyEvent] | None = None
    ) -> None:
        self.sent: list[messages.FromNode] = []
        self.answers = answers or {}
        self.after = after or []  # arrives together with each answer
        self.asked: list[AnyRequest] = []
        self.needed_by_others = 0
        self.closed = 0
        self.loop: EventLoop
        self.emit: Emit
        self.node: ControlledNode

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        self.loop, self.emit, self.node = loop, emit, node

    def send(self, message: messages.FromNode) -> None:
        self.sent.append(message)
        answers = self.answers.get(type(message), [])
        if answers:
            self.emit(answers.pop(0))
            for event in self.after:
                self.emit(event)

    def cancel(self, why: str) -> None: ...

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        self.asked.append(request)
        reply("asked", "")

    where = "elsewhere:29400"

    def stays_for_others(self) -> bool:
        self.needed_by_others -= 1
        return self.needed_by_others >= 0

    def close(self) -> None:
        self.closed += 1

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.sent]


def formed(generation: int, **fields: Any) -> events.GenerationFormed:
    return events.GenerationFormed(Assignment(generation, 1, 2, 2, 4, 2, 4, **fields))


WELL = Verdict(Outcome.SUCCEEDED, "all 4 workers succeeded", generation=1)


def test_a_node_of_several_ends_with_the_coordinators_verdict(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """It reports that it is ready and that it succeeded, and waits for the verdict."""
    made = stage()
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    assert made.run() == WELL
    assert not list(tmp_path.glob("*.run"))
    pids = tuple(worker.pid for worker in made.processes.workers.values())
    assert control.sent == [messages.NodeReady(0), messages.WorkersRunning(1, pids), messages.NodeSucceeded(1)]
    assert [env["RANK"] for _, env in made.entrypoint.launched] == ["2", "3"]
    assert control.closed == 1


def test_a_generation_that_ends_elsewhere_is_left_and_joined_again(stage: Callable[..., Stage]) -> None:
    """The workers are stopped, the node clears and is ready again; generation numbers may be skipped."""
    made = stage()
    control = made.control = FakeControl(
        {
            messages.NodeReady: [formed(1), formed(3, why="b joined")],
            messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)],
        }
    )
    made.acts[1] = lambda: control.emit(events.GenerationEnded(1, "b joined"))
    assert made.run() == WELL
    assert control.kinds == [
        *("NodeReady", "WorkersRunning", "NodeStopped"),
        *("NodeReady", "WorkersRunning", "NodeSucceeded"),
    ]
    assert [worker.signals for worker in made.processes.workers.values()] == [[15], [15], [], []]
    assert sorted(made.processes.workers) == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_a_generation_received_together_with_the_end_of_the_run_is_not_started(stage: Callable[..., Stage]) -> None:
    """After a stall of the link both arrive at once."""
    made = stage()
    ended = events.RunEnded(Verdict(Outcome.CANCELLED, "an operator ended the run"), 5.0)
    made.control = FakeControl({messages.NodeReady: [formed(1)]}, after=[ended])
    assert made.run().outcome is Outcome.CANCELLED
    assert made.processes.workers == {}


def test_a_node_refused_before_it_started_its_generation_reports_that_it_has_left(stage: Callable[..., Stage]) -> None:
    """The coordinator waits for it. If it is in the same process, the link stays open."""
    made = stage()
    control = made.control = FakeControl({messages.NodeReady: [formed(1)]}, after=[events.JoinRefused("replaced")])
    assert made.run().outcome is Outcome.BROKEN
    assert made.processes.workers == {}
    assert control.sent == [messages.NodeReady(0), messages.NodeLeft("replaced", was_refused=True)]


def test_a_verdict_is_converted_to_this_nodes_clock(stage: Callable[..., Stage]) -> None:
    """A failure three seconds before the verdict is so on this node's clock, too."""
    made = stage()
    elsewhere = Failure(1, 0, 0, 77, 3, 47.0, evidence=Evidence(message="boom", raised_at=46.5), host="b")
    verdict = Verdict(Outcome.FAILED, "no restarts are allowed", failures=(elsewhere,), generation=1)
    control = made.control = FakeControl({messages.NodeReady: [formed(1)]})
    made.acts[1] = lambda: control.emit(events.RunEnded(verdict, 50.0))
    (failure,) = made.run().failures
    assert (failure.seen_at, failure.evidence.raised_at, failure.host) == (997.0, 996.5, "b")
    assert made.clock() == 1000.0


def test_a_refused_join_ends_the_node_with_the_reason(stage: Callable[..., Stage]) -> None:
    """No worker was started."""
    made = stage()
    made.control = FakeControl({messages.NodeReady: [events.JoinRefused("the run is over")]})
    verdict = made.run()
    assert verdict.outcome is Outcome.BROKEN
    assert verdict.why == "the run is over"
    assert made.processes.workers == {}


def test_a_fenced_node_kills_its_workers_and_joins_again(stage: Callable[..., Stage]) -> None:
    """Without a grace period, because other nodes may already have replaced its workers."""
    made = stage(grace_s=30.0)
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1), formed(2)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )

    def cut_off() -> None:
        made.processes.hold(4.3)
        made.processes.end_lease()
        made.processes.hold(4.3)  # linked again

    made.acts[1] = cut_off
    assert made.run() == WELL
    assert control.kinds == [
        *("NodeReady", "WorkersRunning", "NodeStopped"),
        *("NodeReady", "WorkersRunning", "NodeSucceeded"),
    ]
    assert [worker.signals for worker in made.processes.workers.values()] == [[9], [9], [], []]
    assert made.clock() == 1000.0, "without waiting"


def test_notices_are_forwarded_before_workers_are_stopped(stage: Callable[..., Stage]) -> None:
    """Notices of another node, an advance notice of this node and its stop, each with the remaining time."""
    made = stage(grace_s=30.0)
    control = made.control = FakeControl({messages.NodeReady: [formed(1)]})
    asked_after: list[int] = []
    signal_workers = made.processes.signal

    def note_and_signal(generation: int, number: int) -> None:
        asked_after.append(len(made.notices))
        signal_workers(generation, number)

    made.processes.signal = note_and_signal  # type: ignore[method-assign]

    def leave() -> None:
        control.emit(events.LeaveNoticed(1, "b", "maintenance", 60.0))
        control.emit(events.NoticeReceived("spot"))
        control.emit(events.SignalReceived(signal.SIGTERM))

    made.acts[1] = leave
    assert made.run().outcome is Outcome.CANCELLED
    assert made.notices == [
        commands.ForwardNotice(1, "b", "maintenance", 60.0),
        commands.ForwardNotice(1, "", "spot"),
        commands.ForwardNotice(1, "", "the agent received SIGTERM", 30.0),
    ]
    assert asked_after == [3]
    expected = ["NodeReady", "WorkersRunning", "NodeWillLeave", "NodeDraining", "NodeStopped", "NodeLeft"]
    assert control.kinds == expected


def test_an_engine_can_limit_the_workers_print_and_announce_the_node(stage: Callable[..., Stage]) -> None:
    """Through ``ControlledNode``: set the lease, print a line, get the messages for a new connection."""
    policy = WaitAnHour()
    made = stage(policy=policy)
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    info = messages.NodeInfo("me", "a", slots=2)
    announced: list[messages.FromNode] = []

    def look() -> None:
        announced.extend(control.node.messages_on_connecting(info))
        control.node.hold(4.3)
        control.node.print_line("the coordinator was lost\x1b[2J")
        made._succeed()

    made.acts[1] = look
    made.run()
    assert control.node.settings == made.settings
    assert control.node.policy is policy
    assert control.loop.now() == 1000.0
    joined, running = announced
    assert isinstance(joined, messages.NodeJoined)
    assert running == messages.WorkersRunning(1, tuple(worker.pid for worker in made.processes.workers.values()))
    assert (joined.node, joined.generation, joined.is_running) == (info, 1, True)
    assert (joined.group_rank, joined.group_world_size) == (1, 2)
    assert made.processes.held_s == 4.3
    (line,) = [line for line in made.logs.printed if "lost" in line]
    assert line.startswith("tenax: the coordinator was lost")
    assert "\x1b" not in line


def test_the_final_progress_is_sent_before_the_end_of_the_generation(stage: Callable[..., Stage]) -> None:
    """Steps can be charged only to a generation that has not ended."""
    made = stage()
    steps = (messages.WorkerProgress(1, 3, 9, 990.0, 999.0),)
    made.logs.steps = steps
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    made.run()
    assert control.sent[-2:] == [messages.NodeProgress(1, 1000.0, steps), messages.NodeSucceeded(1)]


def test_a_forwarded_log_request_is_answered_by_the_logs(stage: Callable[..., Stage]) -> None:
    """Once."""
    made = stage()
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    answers: list[tuple[Any, str]] = []

    def ask() -> None:
        control.node.answer(LogsRequest("a"), lambda value, error: answers.append((value, error)))
        made._succeed()

    made.acts[1] = ask
    made.run()
    assert answers == [("lines of a", "")]


def test_an_operator_drains_the_only_node(stage: Callable[..., Stage]) -> None:
    """As with SIGTERM: the workers have their grace period, and the run of one node ends."""
    made = stage()

    def drain() -> None:
        made.control.submit(DrainRequest("0", "maintenance"), lambda value, error: answers.append((value, error)))

    answers: list[tuple[Any, str]] = []
    made.acts[1] = drain
    verdict = made.run()
    assert (verdict.outcome, verdict.signal) == (Outcome.CANCELLED, 0), "no signal did it"
    assert verdict.why == "an operator drained this node: maintenance"
    ((value, error),) = answers
    assert value
    assert error == ""
    assert [worker.signals for worker in made.processes.workers.values()] == [[15], [15]]


def test_an_operator_restarts_the_workers(stage: Callable[..., Stage]) -> None:
    """Uncharged, even without restarts in the budget; the verdict counts the request."""
    made = stage(max_restarts=0)
    made.acts[1] = lambda: made.control.submit(RestartRequest("new data"), lambda *_: None)
    verdict = made.run()
    assert (verdict.outcome, verdict.generation) == (Outcome.SUCCEEDED, 2)
    assert (verdict.requests, verdict.restarts_used) == (1, 0)
    assert verdict.goodput is not None


class Serving(FakeControl):
    """Serves the coordinator in this process."""

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        super().open(loop, emit, node)
        settings = RunSettings("run", max_restarts=node.settings.max_restarts)
        self.host = CoordinatorHost(settings, node.policy, loop, self._deliver, node.record_run(settings))
        self.host.step(Opened())
        self.send(messages.NodeJoined(messages.NodeInfo("me", "a", slots=2)))

    def _deliver(self, sent: Send) -> None:
        self.emit(sent.event)

    def send(self, message: messages.FromNode) -> None:
        self.host.step(Received("me", message))

    def close(self) -> None:
        super().close()
        self.host.close()


def test_the_agent_that_serves_the_coordinator_writes_its_journal(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """It replays without differences."""
    made = stage(max_restarts=1)
    made.control = Serving()
    made.acts[1] = lambda: made.processes.exit(1, 3)
    assert made.run().restarts_used == 1
    header, steps, footer = read_run_journal(str(tmp_path / "journal.jsonl.run"))
    story, differences = replay_run(header, steps)
    assert differences == []
    assert footer is not None
    assert story[-1] == (0.0, "  to a: the run succeeded: all 2 workers succeeded")


def test_an_agent_stays_while_others_need_its_coordinator(stage: Callable[..., Stage]) -> None:
    """After the verdict the loop runs until no other node needs it."""
    made = stage()
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    control.needed_by_others = 3
    served: list[float] = []

    def serve() -> None:
        served.append(made.clock())
        control.emit(events.Tick())  # another node has left

    def begin() -> None:
        for later_s in (10.0, 20.0, 30.0, 40.0):
            control.loop.at(1000.0 + later_s, serve)
        made._succeed()

    made.acts[1] = begin
    assert made.run() == WELL
    assert served == [1010.0, 1020.0, 1030.0]
    assert control.closed == 1


def test_a_signal_ends_the_stay(stage: Callable[..., Stage]) -> None:
    """After a second stop request the agent does not wait for other nodes."""
    made = stage()
    control = made.control = FakeControl(
        {messages.NodeReady: [formed(1)], messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)]}
    )
    control.needed_by_others = 1000

    def begin() -> None:
        control.loop.at(1050.0, lambda: control.emit(events.SignalReceived(signal.SIGINT)))
        made._succeed()

    made.acts[1] = begin
    assert made.run() == WELL
    assert made.clock() == 1050.0


class Unopenable(FakeControl):
    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        raise OSError("no such network")


def test_a_control_that_cannot_be_opened_is_closed_with_everything_else(stage: Callable[..., Stage]) -> None:
    made = stage()
    control = made.control = Unopenable()
    with pytest.raises(OSError, match="no such network"):
        made.run()
    assert control.closed == 1
    assert made.entrypoint.is_closed
    assert made.processes.fileno() == -1


class Survivors(FakeProcesses):
    """Workers that opt in."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[int, socket.socket] = {}

    def start(self, generation: int, local_rank: int, launch: Launch) -> None:
        super().start(generation, local_rank, launch)
        if generation == 1:
            self.channels[local_rank] = socket.socket(fileno=os.dup(launch.descriptors[SURVIVOR_DESCRIPTOR]))
            self.channels[local_rank].sendall(b'{"type": "opt_in", "generation": 1}\n')

    def close(self) -> None:
        super().close()
        for channel in self.channels.values():
            channel.close()


class UnsentBegin(Stage):
    """Workers that acknowledge the end of generation 1. The variables of generation 2 are too long for a channel."""

    def observe(self, step: Step, state: AgentState) -> None:
        super().observe(step, state)
        if any(isinstance(command, commands.HoldWorkers) for command in step.commands):
            assert isinstance(self.processes, Survivors)
            self.processes.channels[0].sendall(b'{"type": "held", "generation": 1}\n')

    def environments(self, command: commands.StartWorkers) -> dict[int, dict[str, str]]:
        long = {"LONG": "x" * (1 << 16)} if command.survivors else {}
        return {rank: {**env, **long} for rank, env in super().environments(command).items()}


def test_a_survivor_that_cannot_be_sent_the_next_generation_is_ended(tmp_path: Path) -> None:
    """Otherwise it waits for that, and the other ranks for it."""
    with leaving_nothing():
        made = UnsentBegin(str(tmp_path / "journal.jsonl"), max_restarts=1)
        made.processes = Survivors()
        made.acts[1] = lambda: made.processes.exit(1, 3)
        made.acts[2] = made.processes.lose  # all workers run
        verdict = made.run()
    assert made.processes.workers[2, 0].signals == [signal.SIGKILL]
    (failure,) = verdict.failures
    assert (failure.global_rank, failure.generation) == (0, 2)
    assert failure.reason == "its channel was closed before it could continue in this generation"


class Suspended(Stage):
    """A held worker exits, the next generation is formed, and the agent does not run until its lease is over."""

    def observe(self, step: Step, state: AgentState) -> None:
        super().observe(step, state)
        assert isinstance(self.processes, Survivors)
        assert isinstance(self.control, FakeControl)
        if any(isinstance(command, commands.HoldWorkers) for command in step.commands):
            self.processes.channels[0].sendall(b'{"type": "held", "generation": 1}\n')
        elif isinstance(step.event, events.NodeCleared) and step.event.held:
            self.control.node.hold(4.3)
            self.processes.exit(0, 1)
        elif isinstance(step.event, events.WorkerExited) and state.phase is Phase.JOINING:
            self.control.emit(formed(2))
            self.clock.advance(60.0)
        elif isinstance(step.event, events.Fenced):
            self.control.node.hold(4.3)
            self.control.answers = {
                messages.NodeReady: [formed(3)],
                messages.NodeSucceeded: [events.RunEnded(WELL, 5.0)],
            }


def test_an_agent_that_was_suspended_is_fenced_before_it_starts_a_generation(tmp_path: Path) -> None:
    """Others may have replaced it. The keeper's report was waiting, and is read before the end of the lease is seen."""
    with leaving_nothing():
        made = Suspended(str(tmp_path / "journal.jsonl"))
        made.processes = Survivors()
        made.control = FakeControl({messages.NodeReady: [formed(1)]})
        made.acts[1] = lambda: made.processes.exit(1, 3)
        made.acts[2] = made.processes.lose
        assert made.run() == WELL
    assert {generation for generation, _ in made.processes.workers} == {1, 3}
