"""PContext: a set of processes with blocking methods: start, wait, close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pcontext_functions import RAISE_AND_EXIT_SLOWLY, double, raise_and_exit_slowly, raise_if_odd, return_or_watch

from kit.processes import INTERRUPTS, TIMEOUT_S, forks_with_threads, gone, is_alive, leaving_nothing, on_linux, until
from tenax.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    RunProcsResult,
    Std,
    SubprocessContext,
    start_processes,
)
from tenax.timer._watchdog_pipe import WatchdogPipe

pytestmark = [on_linux, forks_with_threads]


class Starter:
    """Starts processes with logs in the test's folder, and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._contexts: list[PContext] = []

    def __call__(
        self,
        entrypoint: Callable[..., Any] | str,
        *args: tuple[Any, ...],
        redirects: Std = Std.ALL,
        tee: Std = Std.NONE,
        **options: Any,
    ) -> PContext:
        specs = DefaultLogsSpecs(log_dir=str(self.folder), redirects=redirects, tee=tee)
        envs: dict[int, dict[str, str]] = {rank: {"LABEL": str(rank)} for rank in range(len(args))}
        context = start_processes("test", entrypoint, dict(enumerate(args)), envs, specs, **options)
        self._contexts.append(context)
        return context

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with leaving_nothing():
        starter = Starter(tmp_path)
        yield starter
        starter.close()


def shell(*scripts: str) -> list[tuple[str, str]]:
    return [("-c", script) for script in scripts]


# --- success ----------------------------------------------------------------------------------------------------------


def test_programs_that_succeed_return_none(start: Starter) -> None:
    """For every local rank; their output is in files."""
    context = start("/bin/sh", *shell("echo out $LABEL; echo err $LABEL >&2", "echo out $LABEL"))
    assert isinstance(context, SubprocessContext)
    result = context.wait()
    assert result is not None
    assert not result.is_failed()
    assert (result.return_values, result.failures) == ({0: None, 1: None}, {})
    assert [Path(result.stdouts[rank]).read_text() for rank in (0, 1)] == ["out 0\n", "out 1\n"]
    assert [Path(result.stderrs[rank]).read_text() for rank in (0, 1)] == ["err 0\n", ""]
    assert result.stdouts == context.stdouts
    assert result.stderrs == context.stderrs
    assert not any(Path(path).exists() for path in context.error_files.values())


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_that_succeed_return_their_values(start: Starter, method: str) -> None:
    """By local rank; their output is in files."""
    context = start(double, (1,), (2,), start_method=method)
    assert isinstance(context, MultiprocessContext)
    result = context.wait()
    assert result is not None
    assert result.return_values == {0: 2, 1: 4}
    assert Path(result.stdouts[1]).read_text() == "doubling 2 in 1\n"


def test_without_redirects_there_are_no_files(start: Starter, capfd: pytest.CaptureFixture[str]) -> None:
    """Output goes to this process's stdout, and the paths are empty."""
    result = start("/bin/sh", *shell("echo hello"), redirects=Std.NONE).wait()
    assert result is not None
    assert (result.stdouts, result.stderrs) == ({0: ""}, {0: ""})
    assert capfd.readouterr().out == "hello\n"


@pytest.mark.parametrize(
    ("prefixes", "shown"),
    [
        (None, ["[test0]:hello", "[test1]:hello"]),
        ({0: "zero|", 1: "one|"}, ["one|hello", "zero|hello"]),
        ({1: "one|"}, ["[test0]:hello", "one|hello"]),
    ],
)
def test_teed_lines_have_a_prefix(
    start: Starter, capfd: pytest.CaptureFixture[str], prefixes: dict[int, str] | None, shown: list[str]
) -> None:
    """By default the name and the local rank."""
    context = start(
        "/bin/sh", *shell("echo hello", "echo hello"), redirects=Std.NONE, tee=Std.OUT, log_line_prefixes=prefixes
    )
    assert context.wait() is not None
    assert sorted(capfd.readouterr().out.splitlines()) == shown


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_wait_returns_none_after_its_timeout_and_else_the_result(start: Starter, tmp_path: Path) -> None:
    """A timeout of 0 does not wait. The result can be requested repeatedly."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    context = start("/bin/sh", *shell(f"read line < '{fifo}'"))
    assert context.wait(0) is None
    began = time.monotonic()
    assert context.wait(0.05, period=60) is None
    assert 0.04 < time.monotonic() - began < TIMEOUT_S
    fifo.write_text("go\n")
    result = context.wait()
    assert isinstance(result, RunProcsResult)
    assert context.wait(0) == result
    assert context.wait(-1) == result


def test_pids_are_known_when_start_returns(start: Starter) -> None:
    """By local rank."""
    pids = start("/bin/sleep", ("60",), ("60",)).pids()
    assert sorted(pids) == [0, 1]
    assert all(map(is_alive, pids.values()))


# --- failure ----------------------------------------------------------------------------------------------------------


def test_a_failure_stops_the_other_processes(start: Starter) -> None:
    """Only the failed process is in the failures, by local rank."""
    context = start("/bin/sh", *shell("exec sleep 60", "echo why >&2; exit 7"))
    pids = context.pids()
    result = context.wait()
    assert result is not None
    assert result.is_failed()
    assert list(result.failures) == [1]
    failure = result.failures[1]
    assert (failure.local_rank, failure.exitcode, failure.pid) == (1, 7, pids[1])
    assert result.return_values == {}
    assert gone(list(pids.values()), 0)
    assert Path(result.stderrs[1]).read_text() == "why\n"


def test_a_failure_contains_the_exception(start: Starter) -> None:
    """Message and error file, without a decorator."""
    context = start(raise_if_odd, (2,), (3,), start_method="fork")
    result = context.wait()
    assert result is not None
    failure = result.failures[1]
    assert failure.error_file == context.error_files[1]
    assert failure.message["message"] == "ValueError: 3 is odd"  # type: ignore[index]


def test_a_missing_program_is_a_failure_with_code_127(start: Starter) -> None:
    """With the system's error message."""
    result = start("/no/such/program", ()).wait()
    assert result is not None
    assert result.failures[0].exitcode == 127
    assert "No such file or directory" in str(result.failures[0].message)


def test_an_argument_that_cannot_be_pickled_is_a_failure(start: Starter) -> None:
    """With pickle's error message."""
    result = start(double, (1,), (threading.Lock(),)).wait()
    assert result is not None
    assert "pickle" in str(result.failures[1].message)


def test_a_killed_keeper_is_an_error(start: Starter) -> None:
    """Although no process has failed."""
    context = start("/bin/sleep", ("60",))
    (pid,) = context.pids().values()
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="it was killed by SIGKILL"):
        context.wait()
    with pytest.raises(RuntimeError, match="it was killed by SIGKILL"):
        context.wait(0)
    context.close()
    assert gone([pid], 0)


# --- close ------------------------------------------------------------------------------------------------------------

TRAP = """
import os, signal, sys
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, _: os._exit(number))
open(os.environ["READY"], "w").close()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("given", [None, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=str)
def test_close_sends_the_signal(start: Starter, tmp_path: Path, given: signal.Signals | None) -> None:
    """By default SIGTERM. Afterwards no process is alive."""
    ready = tmp_path / "ready"
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    os.environ["READY"] = str(ready)
    try:
        context = start(sys.executable, ("-ISc", TRAP, *map(int, numbers)))
    finally:
        del os.environ["READY"]
    until(ready.exists, "the process to be ready")
    pids = list(context.pids().values())
    context.close(given)
    assert gone(pids, 0)
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode == (given or signal.SIGTERM)


def test_close_kills_processes_after_its_timeout(start: Starter, tmp_path: Path) -> None:
    """A process that ignores the signal is killed with its children."""
    ready = tmp_path / "ready"
    context = start(
        "/bin/sh", *shell(f"trap '' TERM; sleep 60 & echo $! > '{ready}.half'; mv '{ready}.half' '{ready}'; wait; wait")
    )
    until(ready.exists, "the process to be ready")
    pids = [*context.pids().values(), int(ready.read_text())]
    began = time.monotonic()
    context.close(timeout=0)
    assert time.monotonic() - began < 20
    assert gone(pids, 0)
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode == -signal.SIGKILL


def test_close_can_be_called_before_the_start_after_the_end_and_twice(start: Starter, tmp_path: Path) -> None:
    never = SubprocessContext("never", "/bin/true", {0: ()}, {0: {}}, DefaultLogsSpecs(log_dir=str(tmp_path)))
    never.close()
    never.close()
    assert never.wait(0) is None
    assert never.pids() == {}
    ended = start("/bin/true", ())
    assert ended.wait() is not None
    ended.close()
    ended.close(signal.SIGKILL, 0)
    assert ended.wait(0) is not None


def test_a_second_start_is_an_error(start: Starter) -> None:
    context = start("/bin/true", ())
    with pytest.raises(RuntimeError, match="already started"):
        context.start()
    context.wait()
    context.close()
    with pytest.raises(RuntimeError, match="already started"):
        context.start()


def test_wait_returns_when_another_thread_closes_the_context(start: Starter) -> None:
    context = start("/bin/sleep", ("60",))
    results: list[RunProcsResult | None] = []
    waiter = threading.Thread(target=lambda: results.append(context.wait()))
    waiter.start()
    context.close()
    waiter.join(TIMEOUT_S)
    assert results[0] is not None
    assert results[0].failures[0].exitcode == -signal.SIGTERM


def test_without_close_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    with leaving_nothing():
        specs = DefaultLogsSpecs(log_dir=str(tmp_path))
        context = start_processes("test", "/bin/true", {0: ()}, {0: {}}, specs)
        assert context.wait() is not None
        with suppress(AttributeError):
            context._thread.join()  # type: ignore[union-attr]


# --- invalid arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "envs", "message"),
    [
        ({1: ()}, {0: {}}, "args has the keys"),
        ({0: ()}, {2: {}}, "envs has the keys"),
        ({}, {}, "args has the keys"),
        ({0: (), 1: ()}, {0: {}}, "envs has the keys .0.; expected the local ranks 0 to 1"),
    ],
)
def test_ranks_that_are_not_consecutive_are_rejected(tmp_path: Path, args: Any, envs: Any, message: str) -> None:
    with leaving_nothing(), pytest.raises(RuntimeError, match=message):
        start_processes("test", "/bin/true", args, envs, DefaultLogsSpecs(log_dir=str(tmp_path)))


def test_an_unknown_start_method_is_rejected(tmp_path: Path) -> None:
    with leaving_nothing(), pytest.raises(ValueError, match="start_method is 'teleport'"):
        start_processes(
            "test", double, {0: (1,)}, {0: {}}, DefaultLogsSpecs(log_dir=str(tmp_path)), start_method="teleport"
        )


def test_a_failed_start_restores_signal_handlers_and_closes_the_watchdog(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with leaving_nothing():
        context = MultiprocessContext("test", double, {0: (1,)}, {0: {}}, "teleport", DefaultLogsSpecs())
        context.scopes = WatchdogPipe(1, str(tmp_path / "pipe"))
        context.scopes.make()
        with pytest.raises(ValueError, match="start_method"):
            context.start()
        assert signal.getsignal(signal.SIGTERM) is before


# --- programs that use it ---------------------------------------------------------------------------------------------

_STOPPED = """
import os, signal, sys
from tenax.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

script = "trap 'echo saved > saved; exit 0' TERM; echo > ready; while :; do sleep 0.01; done"
before = signal.getsignal(signal.SIGTERM)
context = None
try:
    context = start_processes("job", "/bin/sh", {0: ("-c", script)}, {0: {}}, DefaultLogsSpecs("logs"))
    context.wait()
except SignalException as caught:
    if context is not None:  # otherwise it arrived during the start, and they were closed
        context.close(caught.sigval)
    print(caught.sigval.name, signal.getsignal(signal.SIGTERM) is before)
"""


def test_a_signal_raises_an_exception_so_that_processes_can_be_stopped(tmp_path: Path) -> None:
    """If the program has no handler of its own. The previous handlers are restored."""
    job = subprocess.Popen([sys.executable, "-c", _STOPPED], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    until((tmp_path / "ready").exists, "the process that is ready")
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=TIMEOUT_S)
    assert (job.returncode, output) == (0, "SIGTERM True\n")
    assert (tmp_path / "saved").read_text() == "saved\n"


_INTERRUPTED = """
from tenax.multiprocessing import DefaultLogsSpecs, start_processes

context = start_processes("job", "/bin/sleep", {0: ("60",)}, {0: {}}, DefaultLogsSpecs("logs"))
interrupt_often(2000, 0.0001, lambda: context.wait(0))
context.close()
print("closed")
"""


def test_a_signal_handler_may_raise_at_any_moment_of_a_wait(tmp_path: Path) -> None:
    """No lock stays locked: the processes can still be stopped."""
    program = INTERRUPTS + _INTERRUPTED
    job = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert job.communicate(timeout=TIMEOUT_S)[0] == "closed\n"
    finally:
        job.kill()


_HANDLED = """
import os, signal
from tenax.multiprocessing import DefaultLogsSpecs, start_processes

mine = []
signal.signal(signal.SIGTERM, lambda *_: mine.append(1))
context = start_processes("job", "/bin/sleep", {0: ("60",)}, {0: {}}, DefaultLogsSpecs("logs"))
os.kill(os.getpid(), signal.SIGTERM)
context.close()
print(mine)
"""


def test_a_program_that_handles_signals_keeps_its_handlers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HANDLED], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout == "[1]\n"


_RAISES = """
from tenax.multiprocessing import DefaultLogsSpecs, start_processes
context = start_processes("job", "/bin/sleep", {0: ("600",)}, {0: {}}, DefaultLogsSpecs("logs"))
print(context.pids()[0], flush=True)
raise RuntimeError("another error")
"""


def test_the_processes_of_a_program_that_raises_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _RAISES], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 1
    assert "another error" in done.stderr
    until(lambda: not is_alive(int(done.stdout)), "the end of its process")


def test_subprocess_handlers_show_pid_and_exit_code(start: Starter) -> None:
    """For third-party launchers."""
    context = start("/bin/sh", ("-c", "exit 7"))
    assert isinstance(context, SubprocessContext)
    context.wait()
    (handler,) = context.subprocess_handlers.values()
    assert (handler.local_rank_id, handler.proc.poll(), handler.proc.returncode) == (0, 7, 7)
    assert handler.proc.pid > 0


# --- functions that have returned wait for the others of their node ---------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_process_of_a_function_that_returned_stays_until_the_others_return(
    start: Starter, tmp_path: Path, method: str
) -> None:
    """Both values are returned."""
    args = [(rank, "return", str(tmp_path)) for rank in range(2)]
    result = start(return_or_watch, *args, start_method=method).wait(TIMEOUT_S)
    assert result is not None
    assert result.return_values == {0: "first", 1: True}


def test_a_process_that_exits_with_0_counts_as_returned(start: Starter, tmp_path: Path) -> None:
    """The others do not wait for it."""
    result = start(return_or_watch, *[(rank, "exit", str(tmp_path)) for rank in range(2)]).wait(TIMEOUT_S)
    assert result is not None
    assert result.return_values == {0: "first", 1: None}


def test_a_failure_stops_processes_whose_functions_returned_at_once(start: Starter, tmp_path: Path) -> None:
    """Before the end of the grace period, even if they have a handler for SIGTERM."""
    args = [(rank, "raise", str(tmp_path)) for rank in range(2)]
    context = start(return_or_watch, *args, grace_s=4 * TIMEOUT_S)
    result = context.wait(TIMEOUT_S)
    assert result is not None
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {1: 1}


def test_close_stops_processes_whose_functions_returned_at_once(start: Starter, tmp_path: Path) -> None:
    """The function that still runs gets the signal."""
    context = start(return_or_watch, *[(rank, "hang", str(tmp_path)) for rank in range(2)])
    until((tmp_path / "watched").exists, "rank 1 to check rank 0")
    began = time.monotonic()
    context.close(timeout=int(4 * TIMEOUT_S))
    assert time.monotonic() - began < TIMEOUT_S
    result = context.wait(0)
    assert result is not None
    assert result.failures[1].exitcode == -signal.SIGTERM


def test_a_process_killed_while_it_waits_is_a_failure(start: Starter, tmp_path: Path) -> None:
    """Although its function has returned, as with torch."""
    context = start(return_or_watch, *[(rank, "hang", str(tmp_path)) for rank in range(2)])
    until((tmp_path / "watched").exists, "rank 1 to check rank 0")
    os.kill(context.pids()[0], signal.SIGKILL)
    result = context.wait(TIMEOUT_S)
    assert result is not None
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: -signal.SIGKILL}


# --- the first failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["function", "program"])
def test_a_process_that_raised_and_was_stopped_while_exiting_has_exit_code_1(
    start: Starter, tmp_path: Path, kind: str
) -> None:
    """It failed with its exception, not by SIGTERM."""
    if kind == "function":
        context = start(raise_and_exit_slowly, *[(rank, str(tmp_path)) for rank in range(2)])
    else:
        script = tmp_path / "script.py"
        script.write_text(RAISE_AND_EXIT_SLOWLY)
        context = start(sys.executable, *[(str(script), str(rank), str(tmp_path)) for rank in range(2)])
    result = context.wait(TIMEOUT_S)
    assert result is not None
    first = min(result.failures.values(), key=lambda failure: failure.raised_at)
    assert (first.local_rank, first.exitcode) == (0, 1)
    assert isinstance(first.message, dict)
    assert first.message["message"] == "RuntimeError: the first"
