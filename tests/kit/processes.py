"""Helpers for tests of real processes: wait for conditions, collect the events of a keeper, check that nothing is left.

Nothing here sleeps to hide a race. ``until`` is for conditions that nothing announces (a file that appears, a state in
/proc); everything else waits for a descriptor.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

import tenax
from kit.descriptors import descriptors
from tenax._core.events import AnyEvent, WorkerExited, WorkerStartFailed
from tenax._io.interfaces import Launch, Processes

T = TypeVar("T")
E = TypeVar("E")

TIMEOUT_S = 100.0  # ends a wait for what never comes; on a busy machine torch takes half a minute to import
AT_ONCE_S = 1.0  # the documented limit after an agent was killed
UNPRIVILEGED_UID = 65534

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
# Python 3.12 and later warn about this; the tests do it on purpose.
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
# For tests whose other processes import torch. ``importorskip`` would import it here too, for two seconds.
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


def until(condition: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S, every_s: float = 0.002) -> T:
    """Poll until the condition is true, and return its value. Fails with a message after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"timed out after {timeout_s:g} s waiting for {what}"
        select.select([], [], [], every_s)
    return found


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(pids: list[int], within_s: float = TIMEOUT_S) -> bool:
    """Return whether all of these processes exit within the timeout."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
    return not any(is_alive(pid) for pid in pids)


class Pipe:
    """A pipe whose write end goes to workers; the test reads their lines."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._rest = b""

    def line(self, timeout_s: float = TIMEOUT_S) -> str:
        """Return the next line."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no line within {timeout_s:g} s; there is {self._rest!r}"
            data = os.read(self.reader, 1 << 16)
            assert data, f"all writers closed before the line; there is {self._rest!r}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def numbers(self, count: int) -> list[int]:
        """Return this many lines with a number each, sorted."""
        return sorted(int(self.line()) for _ in range(count))

    def rest(self, timeout_s: float = TIMEOUT_S) -> str:
        """Return everything until the last writer has closed. Closes our write end first."""
        self.close_writer()
        deadline = time.monotonic() + timeout_s
        while select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            data = os.read(self.reader, 1 << 16)
            if not data:
                text, self._rest = self._rest.decode(errors="surrogateescape"), b""
                return text
            self._rest += data
        pytest.fail(f"another process still holds the pipe; there is {self._rest!r}")

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


class EventCollector:
    """Opens ``Processes`` and collects their events, serving their descriptor as a loop would."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.events: list[AnyEvent] = []  # received and not yet taken
        self._opened_at = time.monotonic()
        self.ended_at = 0.0  # the time of the last exit, by the clock of the process that reported it
        processes.open(self._receive)

    def _receive(self, event: AnyEvent) -> None:
        """Keep an event. The time of an exit is checked here, so that tests can compare the rest."""
        if isinstance(event, WorkerExited | WorkerStartFailed) and event.ended_at is not None:
            self.ended_at = event.ended_at
            assert self._opened_at <= event.ended_at <= time.monotonic()
            event = msgspec.structs.replace(event, ended_at=None)
        self.events.append(event)

    def take(self, kind: type[E], timeout_s: float = TIMEOUT_S, **fields: object) -> E:
        """Wait for an event of this kind with these fields, and remove it."""
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    self.events.remove(event)
                    return event
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"timed out waiting for {kind.__name__} {fields}; received {self.events}"
            self.serve(left_s)

    def serve(self, timeout_s: float) -> None:
        """Run one round of a small loop."""
        processes = self.processes
        descriptor = processes.fileno()
        if descriptor < 0:
            return
        writers = [descriptor] if processes.wants_to_write else []
        readable, writable, _ = select.select([descriptor], writers, [], timeout_s)
        if writable:
            processes.on_writable()
        if readable:
            processes.on_readable()

    def receives_nothing(self, for_s: float = 0.05) -> bool:
        """Return whether no event comes for a moment. Only to check that something does not happen."""
        self.serve(for_s)
        return not self.events


def python(code: str, *args: object, flags: tuple[str, ...] = ("-I", "-S")) -> list[str]:
    """Return a command that runs this Python code in a fresh, fast interpreter."""
    return [sys.executable, *flags, "-c", textwrap.dedent(code), *map(str, args)]


def launch(argv: list[str], env: Mapping[str, str] | None = None, **options: Any) -> Launch:
    return Launch(env={"PATH": os.environ["PATH"]} if env is None else dict(env), argv=argv, **options)


# --- nothing is left behind -------------------------------------------------------------------------------------------


def children() -> set[int]:
    """Return every child of this process, dead or alive, except multiprocessing's resource tracker."""
    from multiprocessing import resource_tracker

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return found - {tracker}


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Check that the block leaves no descriptor, no thread and no child process (not even a zombie)."""
    from multiprocessing import resource_tracker

    tracker_before = getattr(resource_tracker._resource_tracker, "_fd", None)
    before, threads, alive = descriptors(), set(threading.enumerate()), children()
    yield
    # A thread may hand over its result a moment before it ends and closes its descriptors.
    until(lambda: not set(threading.enumerate()) - threads, f"threads to end: {set(threading.enumerate()) - threads}")
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    expected = set(before) | ({tracker} if tracker is not None and tracker != tracker_before else set())
    left = {number: what for number, what in descriptors().items() if number not in expected}
    assert not left, f"descriptors were left open: {left}"
    assert not children() - alive, f"children were left: {children() - alive}"


# --- programs in their own processes ----------------------------------------------------------------------------------


@lru_cache
def interpreter_for(user: int) -> str:
    """Return a Python of our version that this user may run; ours may be in a private home."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        check = [candidate, "-c", "import msgspec, pytest, tenax"]
        with suppress(OSError):
            if subprocess.run(check, user=user, group=user, extra_groups=[], env=ENV, cwd="/").returncode == 0:
                return candidate
    pytest.skip("no Python with the required packages can be run by another user")


# The import path of this process, for other interpreters of the same version.
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[1]), *(str(Path(module.__path__[0]).parent) for module in (tenax, msgspec))]
    ),
    "TMPDIR": "/tmp",
}


class Program:
    """A Python program in its own process; its stdout comes through ``pipe``, its stderr is in a file.

    It can import what the tests import. With ``user`` it runs as that user, who need not exist.
    """

    def __init__(self, code: str, folder: Path, *args: object, user: int | None = None, **options: Any) -> None:
        self.pipe = Pipe()
        self._errors = folder / f"stderr-{os.urandom(4).hex()}"
        env = {**ENV, "TMPDIR": str(folder), **options.pop("env", {})}
        interpreter = sys.executable
        if user is None:
            source = folder / f"program_{os.urandom(4).hex()}.py"
            source.write_text(textwrap.dedent(code))
            command, cwd = [str(source)], str(folder)
        else:  # the user cannot access our folder
            command, cwd = ["-c", textwrap.dedent(code)], "/"
            interpreter = interpreter_for(user)
            env["TMPDIR"] = "/tmp"
            options.update(user=user, group=user, extra_groups=[])
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [interpreter, *command, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=self.pipe.writer,
                stderr=errors,
                cwd=cwd,
                env=env,
                **options,
            )
        self.pipe.close_writer()
        self.pid = self.process.pid

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program still runs after {timeout_s:g} s\n{self.errors}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs, and kills the remaining ones after the test."""
    started: list[Program] = []

    def start(code: str, *args: object, **options: Any) -> Program:
        started.append(Program(code, tmp_path, *args, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


# The beginning of a program whose calls a signal handler interrupts with an exception.
INTERRUPTS = """
import random, signal

class Interrupt(Exception):
    pass

is_armed = False

def interrupt(*_):
    global is_armed
    if is_armed:
        is_armed = False
        raise Interrupt

def interrupt_often(times, after_s, call):
    global is_armed
    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(times):
        is_armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(after_s, 2 * after_s))
            while is_armed:
                call()
        except Interrupt:
            pass
"""
