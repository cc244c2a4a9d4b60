"""The agent's end of the pipe: a real pipe, a real loop and a supervisor, with fake workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import UNPRIVILEGED_UID, leaving_nothing, needs_root
from tenax._core import commands, events
from tenax._core.messages import WorkerProgress
from tenax._core.model import AgentSettings, Assignment, Evidence, Outcome, Verdict
from tenax._core.requests import LogsRequest
from tenax._engines.local import LocalEngine
from tenax._io.interfaces import Launch, Output
from tenax._io.loop import Loop
from tenax._node.journal import Journal
from tenax._node.supervisor import Supervisor, Surroundings
from tenax.testing.processes import FakeProcesses
from tenax.timer import FileTimerRequest
from tenax.timer._watchdog_pipe import WatchdogPipe, check_path

Reply = Callable[[Any, str], None]
SIGKILL, SIGTERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[WatchdogPipe]:
    """A pipe whose workers have the pids 100 and 101."""
    with leaving_nothing():
        pipe = WatchdogPipe(2, str(tmp_path / "timers"))
        pipe.make()
        pipe.open(time.monotonic, lambda _: None)
        begin(pipe)
        yield pipe
        pipe.close()


def begin(pipe: WatchdogPipe, generation: int = 1) -> None:
    part = Assignment(generation)
    pipe.on_step(events.GenerationFormed(part), [commands.StartWorkers(part)])
    for rank in range(2):
        pipe.on_step(events.WorkerStarted(generation, rank, 100 * generation + rank), [])


def write(path: str, *requests: FileTimerRequest | bytes) -> None:
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    for each in requests:
        os.write(writer, each if isinstance(each, bytes) else each.to_json().encode() + b"\n")
    os.close(writer)


def late(pid: int, scope: str = "step", number: int = SIGKILL) -> FileTimerRequest:
    return FileTimerRequest(pid, scope, time.time() - 1, number)


def test_opening_and_reading_never_block(pipe: WatchdogPipe) -> None:
    """An empty pipe, and clients that connect and disconnect."""
    pipe.on_readable()
    for _ in range(3):
        write(pipe.path, FileTimerRequest(100, "step", time.time() + 60, 9))
        pipe.on_readable()
        pipe.on_readable()
    assert pipe.watchdog.taken == 3
    assert pipe.watchdog.malformed == 0


def test_pending_input_is_read_before_scopes_expire(pipe: WatchdogPipe) -> None:
    """So that a busy or stopped agent does not miss a release."""
    write(pipe.path, late(100), late(101))
    pipe.on_readable()
    deadline = pipe.next_deadline()
    assert deadline is not None
    assert deadline <= time.monotonic()
    write(pipe.path, FileTimerRequest(100, "step", -1))
    assert [expired.local_rank for expired in pipe.expired()] == [1]


def test_a_full_pipe_is_read_in_one_round(pipe: WatchdogPipe) -> None:
    """Including a release at its end."""
    write(pipe.path, late(100))
    filler = late(4711).to_json().encode().ljust(127) + b"\n"
    write(pipe.path, *[filler] * 400, FileTimerRequest(100, "step", -1))
    assert pipe.expired() == []
    assert pipe.watchdog.unknown_senders == 400


def test_leftover_requests_do_not_reach_the_next_generation(pipe: WatchdogPipe) -> None:
    """Its workers may have the same pids."""
    pipe.on_step(events.Tick(), [commands.KillNode(1, "cut off")])
    write(pipe.path, late(200), b"half a line")
    begin(pipe, 2)
    assert pipe.expired() == []
    write(pipe.path, late(201))
    assert [expired.pid for expired in pipe.expired()] == [201]


def test_a_distant_deadline_is_limited_to_what_the_system_can_wait(pipe: WatchdogPipe) -> None:
    write(pipe.path, FileTimerRequest(100, "step", 1e300, 9))
    pipe.on_readable()
    deadline = pipe.next_deadline()
    assert deadline is not None
    assert 0 < deadline - time.monotonic() <= 86_400


def test_a_pipe_that_was_created_and_never_opened_is_removed(tmp_path: Path) -> None:
    with leaving_nothing():
        pipe = WatchdogPipe(1)
        path = pipe.make()
        assert os.path.exists(path)
        pipe.close()
        pipe.close()
        assert not os.path.exists(os.path.dirname(path))


def test_a_path_is_in_use_from_its_creation(tmp_path: Path) -> None:
    """Not only from the first read, so another agent cannot replace the pipe."""
    path = str(tmp_path / "timers")
    with leaving_nothing():
        first, second = WatchdogPipe(1, path), WatchdogPipe(1, path)
        first.make()
        with pytest.raises(ValueError, match="another process already reads from that pipe"):
            second.make()
        second.close()
        write(path, FileTimerRequest(100, "step", time.time() + 60, 9))  # there is still a reader
        first.close()
        assert not os.path.exists(path)


def test_a_pipe_replaced_by_another_agent_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "timers")
    with leaving_nothing():
        pipe = WatchdogPipe(1, path)
        pipe.make()
        os.remove(path)
        os.mkfifo(path)
        pipe.close()
    assert os.path.exists(path)


def test_after_a_full_pipe_expiry_is_delayed_once(tmp_path: Path) -> None:
    """A release may still wait for room. A continuous flood does not delay expiry further."""
    clock = [100.0]
    with leaving_nothing():
        pipe = WatchdogPipe(2, str(tmp_path / "timers"))
        pipe.make()
        pipe.open(lambda: clock[0], lambda _: None)
        begin(pipe)
        filler = [b"\n" * 4096] * 14
        write(pipe.path, late(100), *filler)
        pipe.on_readable()
        assert pipe.next_deadline() == 101.0
        assert pipe.expired() == []
        write(pipe.path, FileTimerRequest(100, "step", -1), late(101), *filler)
        clock[0] = 101.0
        assert [expired.local_rank for expired in pipe.expired()] == [1]
        pipe.close()


def test_an_unusable_path_is_rejected_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path, message in (
        (tmp_path / "file", "which is not a pipe"),
        (tmp_path / "missing" / "timers", "the folder .* does not exist; create it"),
        (tmp_path / "file" / "timers", "Not a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            check_path(str(path))
        with pytest.raises(ValueError, match=message):
            WatchdogPipe(1, str(path)).make()
    assert (tmp_path / "file").read_text() == "precious"
    check_path(str(tmp_path / "free"))


@needs_root
def test_an_unwritable_folder_is_rejected_with_a_message(tmp_path: Path) -> None:
    """As a user without write permission."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "theirs"
    folder.mkdir(0o755)
    os.seteuid(UNPRIVILEGED_UID)
    try:
        with pytest.raises(ValueError, match=r"Permission denied|may not be written to"):
            WatchdogPipe(1, str(folder / "timers")).make()
    finally:
        os.seteuid(0)


# --- in a supervisor --------------------------------------------------------------------------------------------------


class SilentLogs:
    """Implements ``interfaces.Logs``: records printed lines, and has no evidence."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def open(self) -> None: ...

    def fileno(self) -> int:
        return -1

    wants_to_write = False

    def on_readable(self) -> None: ...

    def on_writable(self) -> None: ...

    def prepare(
        self, generation: int, envs: dict[int, dict[str, str]], survivors: tuple[int, ...] = ()
    ) -> dict[int, Output]:
        return {rank: Output(os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)) for rank in envs}

    def error_files(self) -> dict[int, str]:
        return {}

    def has_error_file(self, local_rank: int) -> bool:
        return False

    def progress(self) -> tuple[WorkerProgress, ...]:
        return ()

    def output_times(self, done: Callable[[dict[int, float]], None]) -> None:
        done({})

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        reply(None, "not supported")

    def answer_final_requests(self) -> None: ...

    def read_last_lines(self, generation: int, post: Callable[[events.LastLinesRead], None]) -> None:
        pass

    def examine(self, command: commands.ExamineFailure, done: Callable[[Evidence], None]) -> None:
        done(Evidence(stacks="here"))

    def print_line(self, text: str, *, after_output: bool = False, colour: str = "") -> None:
        self.lines.append(text)

    def live(self, text: str, since: float | None = None, until: float | None = None) -> None: ...

    def close(self, final_text: str = "") -> None: ...


class Program:
    name = "train.py"

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch:
        return Launch(env=env, argv=["train"])

    def release(self, local_rank: int) -> None: ...

    def collect(self, local_rank: int, exit_code: int) -> str:
        return ""

    def end_wait(self) -> None: ...

    def return_values(self) -> dict[int, Any]:
        return {}

    def close(self) -> None: ...


class Run(Surroundings):
    """A run on fake processes; ``on`` is called after each step of the machine."""

    def __init__(self, tmp_path: Path, on: Callable[[Run, Any], None], *, workers: int = 2, **settings: Any) -> None:
        self.processes = FakeProcesses()
        self.logs = SilentLogs()
        self.pipe = WatchdogPipe(workers, str(tmp_path / "timers"))
        self.pipe.make()
        self.steps: list[Any] = []
        self._on = on
        self._ranks = range(workers)
        self._loop = Loop()
        self._supervisor = Supervisor(
            AgentSettings("run", "trainer", workers, 0, **{"grace_s": 0.05, "stacks_s": 0.05, **settings}),
            self,
            loop=self._loop,
            control=LocalEngine("run"),
            processes=self.processes,
            entrypoint=Program(),
            logs=self.logs,
            journal=Journal(),
            scopes=self.pipe,
        )

    def environments(self, _: Any) -> dict[int, dict[str, str]]:
        return {rank: {} for rank in self._ranks}

    def observe(self, step: Any, _: Any) -> None:
        self.steps.append(step)
        self._on(self, step.event)

    def write(self, *requests: FileTimerRequest | bytes) -> None:
        write(self.pipe.path, *requests)

    def run(self) -> Verdict:
        try:
            return self._supervisor.run()
        finally:
            self._loop.close()

    def issued(self, kind: type) -> list[Any]:
        return [command for step in self.steps for command in step.commands if isinstance(command, kind)]


def hangs(*ranks: int, number: int = SIGKILL) -> Callable[[Run, Any], None]:
    def on(run: Run, event: Any) -> None:
        if isinstance(event, events.WorkerStarted) and event.local_rank in ranks:
            run.write(late(event.pid, number=number))

    return on


def test_a_worker_that_hangs_dumps_its_stacks_and_is_killed(tmp_path: Path) -> None:
    """The other worker is stopped as after any failure; the verdict has the scope and the stacks."""
    with leaving_nothing():
        run = Run(tmp_path, hangs(1))
        verdict = run.run()
        assert verdict.outcome is Outcome.FAILED
        (failure,) = verdict.failures
        assert (failure.local_rank, failure.exit_code) == (1, -SIGKILL)
        assert failure.reason == "did not leave the scope 'step' in time"
        assert failure.evidence.stacks == "here"
        assert [stopped.local_rank for stopped in verdict.stopped] == [0]
        assert run.processes[1].dumps == 1
        assert run.processes[1].signals == [SIGKILL]
        assert run.processes[0].signals == [SIGTERM]
        assert not os.path.exists(run.pipe.path)


def test_a_worker_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    with leaving_nothing():
        run = Run(tmp_path, hangs(0, number=SIGTERM), workers=1)
        run.processes.will_ignore(0, SIGTERM)
        verdict = run.run()
        assert verdict.failures[0].exit_code == -SIGKILL
        assert run.processes[0].signals == [SIGTERM, SIGKILL]


def test_a_worker_that_cannot_dump_its_stacks_is_killed_at_once(tmp_path: Path) -> None:
    """Without waiting for the time limit of stack dumps."""

    def on(run: Run, event: Any) -> None:
        if isinstance(event, events.WorkerStarted):
            run.processes[0].shows_stacks = False
            run.write(late(event.pid))

    with leaving_nothing():
        run = Run(tmp_path, on, workers=1, stacks_s=3600.0)
        (failure,) = run.run().failures
        assert "no stacks: it is not a Python program" in failure.reason


def test_a_worker_that_leaves_in_time_succeeds(tmp_path: Path) -> None:
    """Open timers do not delay the end of the run."""

    def on(run: Run, event: Any) -> None:
        if isinstance(event, events.WorkerStarted):
            soon = FileTimerRequest(event.pid, "soon", time.time() + 3600, SIGKILL)
            run.write(late(event.pid), FileTimerRequest(event.pid, "step", -1), soon)
            run.processes.exit(event.local_rank)

    with leaving_nothing():
        run = Run(tmp_path, on)
        assert run.run().outcome is Outcome.SUCCEEDED
        assert run.issued(commands.DumpStacks) == []


def test_the_machine_gets_ticks_only_for_its_own_deadlines(tmp_path: Path) -> None:
    """Deadlines of scopes add no ticks to the journal."""

    def on(run: Run, event: Any) -> None:
        if isinstance(event, events.WorkerStarted):
            run.write(*(FileTimerRequest(event.pid, f"{n}", time.time() + n / 1000, 0) for n in range(20)))
        if isinstance(event, events.ScopeExpired) and event.scope == "19":
            run.processes.exit(0)

    with leaving_nothing():
        run = Run(tmp_path, on, workers=1)
        assert run.run().outcome is Outcome.SUCCEEDED
        assert sum(isinstance(step.event, events.ScopeExpired) for step in run.steps) == 20
        assert not any(isinstance(step.event, events.Tick) for step in run.steps)


def test_invalid_input_is_reported_once(tmp_path: Path) -> None:
    def on(run: Run, event: Any) -> None:
        if isinstance(event, events.WorkerStarted):
            for _ in range(10):
                run.write(b"this is not a request\n", late(1), late(2))
            run.write(late(event.pid))

    with leaving_nothing():
        run = Run(tmp_path, on, workers=1)
        run.run()
        assert sum("invalid request" in line for line in run.logs.lines) == 1
        assert sum("not a worker of this node" in line for line in run.logs.lines) == 1
