"""Functions as workers: every way to end is defined, for spawn, fork and forkserver."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from worker_functions import (
    Callable_,
    add,
    do_nothing,
    environment,
    fail,
    finish_in_a_thread,
    interrupt,
    kill_this_process,
    leave_files_open,
    make_bytes,
    print_to,
    process_state,
    read_at_import,
    return_a_lambda,
    return_an_unknown_class,
    use,
    write_half_a_result,
    write_to_a_closed_pipe,
)

from kit.processes import (
    EventCollector,
    Pipe,
    Program,
    descriptors,
    forks_with_threads,
    leaving_nothing,
    on_linux,
    program,
)
from tenax._core import events
from tenax._failures.error_handler import record
from tenax._processes.entrypoint import START_METHODS, FunctionEntrypoint

pytestmark = [on_linux, forks_with_threads]
__all__ = ["program"]

FRESH = ("spawn", "forkserver")  # the function arrives as a pickle


class Ended(msgspec.Struct):
    """How a call ended, as the agent sees it."""

    code: int
    fault: str
    values: dict[int, Any]
    out: str
    err: str
    error: dict[str, Any]


class Caller:
    """Calls a function in its own worker, as the supervisor does."""

    def __init__(self, folder: Path, method: str) -> None:
        self._folder = folder
        self._environ = dict(os.environ)
        self.method = method

    def __call__(self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> Ended:
        with self.running(function, *args, env=env) as (_, finish):
            return finish()

    @contextlib.contextmanager
    def running(
        self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
    ) -> Iterator[tuple[EventCollector, Callable[[], Ended]]]:
        """Start a call; yields its events and a function that waits for its end."""
        error_file = self._folder / f"error-{os.urandom(4).hex()}.json"
        given = {**self._environ, "TORCHELASTIC_ERROR_FILE": str(error_file), **(env or {})}
        with leaving_nothing():
            entrypoint = FunctionEntrypoint(function, {0: args}, wrap=record, start_method=self.method)
            keeper = entrypoint.keeper()
            hearing = EventCollector(keeper)  # before the pipes, which a forked keeper would hold open
            out, err = Pipe(), Pipe()
            try:
                launch = entrypoint.launch(0, given)
                streams = {**launch.descriptors, 1: out.writer, 2: err.writer}
                keeper.start(1, 0, msgspec.structs.replace(launch, descriptors=streams))

                def finish() -> Ended:
                    hearing.take(events.WorkerStarted)
                    entrypoint.release(0)
                    code = hearing.take(events.WorkerExited).exit_code
                    fault = entrypoint.collect(0, code)
                    error = json.loads(error_file.read_text()) if error_file.exists() else {}
                    return Ended(code, fault, entrypoint.return_values(), out.rest(), err.rest(), error)

                yield hearing, finish
            finally:
                keeper.close()
                entrypoint.close()
                out.close()
                err.close()


@pytest.fixture(params=START_METHODS)
def call(request: pytest.FixtureRequest, tmp_path: Path) -> Caller:
    return Caller(tmp_path, request.param)


@pytest.fixture(params=FRESH)
def call_fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Caller:
    return Caller(tmp_path, request.param)


@pytest.fixture
def call_fork(tmp_path: Path) -> Caller:
    return Caller(tmp_path, "fork")


# --- values -----------------------------------------------------------------------------------------------------------


def test_the_return_value_is_delivered(call: Caller) -> None:
    """Nothing is printed and no error is recorded."""
    assert call(add, 2, 3) == Ended(0, "", {0: {"sum": 5}}, "", "", {})


def test_none_is_a_return_value(call: Caller) -> None:
    """A function without a return statement has a result."""
    assert call(do_nothing).values == {0: None}


def test_a_large_return_value_is_delivered(call: Caller) -> None:
    """50 MB do not block the worker or the agent."""
    assert call(make_bytes, 50).values[0] == bytes(50 << 20)


@pytest.mark.parametrize(
    ("function", "name"),
    [(functools.partial(add, 1), "partial"), (Callable_(1), "Callable_"), (Callable_(1).method, "Callable_.method")],
    ids=["partial", "instance", "method"],
)
def test_any_callable_can_be_a_worker(tmp_path: Path, function: Callable[..., Any], name: str) -> None:
    """A partial, an instance, a bound method; each has a name."""
    assert Caller(tmp_path, "spawn")(function, 2).code == 0
    assert FunctionEntrypoint(function, {}, wrap=record).name == name


def test_a_forked_function_need_not_be_picklable(call_fork: Caller) -> None:
    """Closures, open files and locks are inherited."""
    inherited = threading.Lock()
    assert call_fork(lambda word: (word, inherited.locked()), "hello").values == {0: ("hello", False)}


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_exception_is_recorded(call: Caller) -> None:
    """Exit code 1; the error file holds message and traceback; stderr shows the traceback as any program would."""
    ended = call(fail, "boom")
    assert (ended.code, ended.fault, ended.values) == (1, "", {})
    message = ended.error["message"]
    assert message["message"] == "ValueError: boom"
    assert "in fail\n    raise ValueError(text)" in message["extraInfo"]["py_callstack"]
    assert ended.err.endswith("ValueError: boom\n")
    assert ended.err.startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize("code", [0, None], ids=str)
def test_exit_with_success(call: Caller, code: int | None) -> None:
    """``sys.exit()`` and ``sys.exit(0)`` are a success that returns None."""
    assert call(sys.exit, code) == Ended(0, "", {0: None}, "", "", {})


@pytest.mark.parametrize(("code", "seen"), [(3, 3), (-1, 255)], ids=str)
def test_exit_with_a_code(call: Caller, code: int, seen: int) -> None:
    """The code is the worker's, and no exception is recorded."""
    assert call(sys.exit, code) == Ended(seen, "", {}, "", "", {})


def test_exit_with_a_text(call: Caller) -> None:
    """As in any program: the text goes to stderr and the code is 1."""
    assert call(sys.exit, "not today") == Ended(1, "", {}, "", "not today\n", {})


@pytest.mark.parametrize(("code", "values"), [(0, {0: None}), (7, {})], ids=str)
def test_os_exit_has_only_its_exit_code(call: Caller, code: int, values: dict[int, None]) -> None:
    """The agent does not wait for a return value."""
    assert call(os._exit, code) == Ended(code, "", values, "", "", {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_worker_killed_by_a_signal_has_its_negative_number(call: Caller, number: int) -> None:
    """SIGINT too, after Python's KeyboardInterrupt."""
    ended = call(kill_this_process, number)
    assert (ended.code, ended.values, ended.error) == (-number, {}, {})
    assert ("KeyboardInterrupt" in ended.err) == (number == signal.SIGINT)


def test_a_raised_keyboard_interrupt_ends_as_sigint(call: Caller) -> None:
    """As in any Python program."""
    ended = call(interrupt)
    assert (ended.code, ended.error) == (-signal.SIGINT, {})
    assert ended.err.endswith("KeyboardInterrupt\n")


def test_sigterm_before_the_function_runs_is_not_lost(call: Caller) -> None:
    """It arrives while the process starts."""
    with call.running(signal.pause) as (hearing, finish):
        hearing.processes.signal(1, signal.SIGTERM)
        assert finish().code == -signal.SIGTERM


def test_a_return_value_that_cannot_be_pickled_is_a_failure(call: Caller) -> None:
    """It is recorded like an exception of the function, with the next step."""
    ended = call(return_a_lambda)
    assert (ended.code, ended.values) == (1, {})
    text = ended.error["message"]["message"]
    assert text.startswith("TypeError: the return value of return_a_lambda is a function that cannot be pickled")
    assert text.endswith("return plain data")


def test_a_return_value_whose_class_the_agent_cannot_import_is_a_failure(call: Caller) -> None:
    """Although the exit code is 0; the message has the reason."""
    ended = call(return_an_unknown_class)
    assert ended.code == 0
    assert ended.fault == (
        "its return value cannot be unpickled in the agent: ModuleNotFoundError: No module named 'only_in_the_worker'"
    )
    assert ended.values == {}


def test_a_worker_that_dies_while_writing_its_result_fails(call: Caller) -> None:
    """With a message if the exit code is 0, else with the exit code."""
    ended = call(write_half_a_result, 0)
    assert (ended.code, ended.fault) == (0, "the worker exited while writing its return value")
    assert ended.values == {}
    assert call(write_half_a_result, -signal.SIGKILL).code == -signal.SIGKILL


@pytest.mark.parametrize("argument", [lambda: 1, threading.Lock()], ids=["lambda", "lock"])
def test_an_argument_that_cannot_be_pickled_fails_the_start(call_fresh: Caller, argument: object) -> None:
    """In the agent, with pickle's message; no descriptor is left open."""
    entrypoint = FunctionEntrypoint(add, {0: (argument, 1)}, wrap=record, start_method=call_fresh.method)
    with leaving_nothing():
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="pickle"):
            entrypoint.launch(0, {})
        entrypoint.close()


def test_an_unknown_start_method_is_rejected() -> None:
    """The message lists the known ones."""
    with pytest.raises(ValueError, match="start_method is 'teleport'; expected one of spawn, fork, forkserver"):
        FunctionEntrypoint(add, {}, wrap=record, start_method="teleport")


# --- what multiprocessing offers --------------------------------------------------------------------------------------


def test_queues_locks_values_and_pipes_as_arguments(call: Caller) -> None:
    """As for ``multiprocessing.Process``; nothing that a worker puts is lost."""
    context = multiprocessing.get_context(call.method)
    queue, lock, total, event = context.Queue(), context.Lock(), context.Value("i", 1), context.Event()
    ours, theirs = context.Pipe()
    queue.put("from the agent")  # its feeder thread exists here, and must not be missed there
    assert queue.get(timeout=30) == "from the agent"
    try:
        ended = call(use, queue, lock, total, theirs, event)
        assert ended.values == {0: "done"}, ended.err
        assert [queue.get(timeout=30) for _ in range(100)] == list(range(100))
        assert total.value == 42
        assert ours.recv() == "through a pipe"
        assert event.is_set()
    finally:
        queue.close()
        queue.join_thread()
        ours.close()
        theirs.close()


@pytest.fixture
def module(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "reads_its_environment.py").write_text("import os\nSEEN = os.environ.get('WORD')\n")
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))


@pytest.mark.usefixtures("module")
def test_variables_are_set_before_modules_are_imported(call: Caller) -> None:
    """A module that reads the environment at import sees the worker's; ``sys.path`` is the agent's."""
    assert call(read_at_import, env={"WORD": "mine"}).values == {0: "mine"}


def test_the_environment_is_exactly_the_given_one(call: Caller) -> None:
    """Other variables of the agent are not inherited."""
    os.environ["ONLY_IN_THE_AGENT"] = "1"
    try:
        seen = call(environment, env={"ONLY_IN_THE_WORKER": "2"}).values[0]
    finally:
        del os.environ["ONLY_IN_THE_AGENT"]
    assert seen["ONLY_IN_THE_WORKER"] == "2"
    assert "ONLY_IN_THE_AGENT" not in seen


# --- like a program ---------------------------------------------------------------------------------------------------


def test_threads_and_exit_handlers_finish_before_the_end(call: Caller) -> None:
    """As in any Python program: first the threads end, then exit handlers run."""
    assert call(finish_in_a_thread).out == "late\nat exit\n"


def test_exit_handlers_of_the_agent_do_not_run_in_its_workers(call: Caller) -> None:
    """A forked worker does not run the agent's cleanup."""
    output = Pipe()
    handler = functools.partial(os.write, output.writer, b"cleaned up")
    atexit.register(handler)
    try:
        call(do_nothing)
    finally:
        atexit.unregister(handler)
    assert output.rest() == ""
    output.close()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_last_line_without_a_newline_is_kept(call: Caller, stream: str) -> None:
    """Streams are flushed."""
    ended = call(print_to, stream)
    assert {"stdout": ended.out, "stderr": ended.err}[stream] == f"to {stream}"


def test_files_that_a_fresh_worker_left_open_are_written(tmp_path: Path) -> None:
    """The interpreter is not finalized, but buffers of open files are flushed."""
    assert Caller(tmp_path, "spawn")(leave_files_open, str(tmp_path)).code == 0
    assert [(tmp_path / name).read_text() for name in ("text", "bytes", "both")] == ["last"] * 3


def test_a_broken_pipe_is_an_exception(call: Caller) -> None:
    """Python ignores SIGPIPE, also in a forked worker."""
    assert call(write_to_a_closed_pipe).values == {0: "an exception"}


@pytest.mark.parametrize("from_main_thread", [True, False], ids=["main thread", "other thread"])
def test_a_function_runs_in_a_clean_process(call: Caller, from_main_thread: bool) -> None:
    """Own session, no blocked signals, Python's signal handlers, no descriptors of the agent beyond the needed ones."""
    before = set(descriptors())
    answers: list[Ended] = []

    def ask() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a host may have done that to its threads
        answers.append(call(process_state))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    if from_main_thread:
        ask()
    else:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    found = answers[0].values[0]
    held = found.pop("descriptors")
    inherited = before if call.method == "fork" else {0, 1, 2}
    strange = [number for number in held if number not in inherited]
    assert len(strange) <= 3, f"besides the result, the barrier and the listing itself: {strange}"
    assert found == {
        "session": True,
        "blocked": [],
        "sigint": True,
        "sigterm": True,
        "wakeup": -1,
        "main": True,
    }


def test_files_of_the_agent_are_not_replaced_in_a_forked_worker(call_fork: Caller, tmp_path: Path) -> None:
    """The agent's open files keep their numbers in the worker, and the return value is still delivered."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(number)).open("w")) for number in range(20)]

        def write_all() -> str:
            for number, file in enumerate(files):
                print(number, file=file, flush=True)
            return "written"

        assert call_fork(write_all).values == {0: "written"}
    assert [(tmp_path / str(number)).read_text() for number in range(20)] == [f"{number}\n" for number in range(20)]


MAIN = """
import os, sys
def function():
    return {flags}
class Mine:
    pass
def mine(given):
    return isinstance(given, Mine), __name__
if __name__ == "__main__":
    from tenax.agent.server import LocalElasticAgent, WorkerSpec
    def run(function, *args):
        return LocalElasticAgent(WorkerSpec(entrypoint=function, args=args), start_method=sys.argv[1]).run()
    print("once", end="")
    print(run(function).return_values, run(mine, Mine()).return_values)
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_a_function_of_the_main_script(program: Callable[..., Program], method: str) -> None:
    """Functions and classes of ``__main__`` work; unflushed output of the agent is printed once."""
    done = program(MAIN.replace("{flags}", "42"), method)
    text = done.pipe.rest()
    name = "__main__" if method == "fork" else "__mp_main__"
    assert text == f"once{{0: 42}} {{0: (True, {name!r})}}\n", done.errors
    assert done.wait() == 0


def test_a_spawned_worker_has_the_interpreters_options(tmp_path: Path) -> None:
    """``python -O -W error -X dev``: the same options as the agent's."""
    import subprocess

    script = tmp_path / "main.py"
    script.write_text(MAIN.replace("{flags}", "sys.flags.optimize, sys.warnoptions, sys.flags.dev_mode"))
    command = [sys.executable, "-O", "-W", "error::UserWarning", "-X", "dev", str(script), "spawn"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert "(1, ['default', 'error::UserWarning'], True)" in done.stdout, done.stderr
