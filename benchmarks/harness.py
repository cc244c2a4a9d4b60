"""The harness: starts one launcher with instant workers, receives their events, and leaves no process behind.

To the harness a launcher is a command, a spelling of torchrun's flags and a share of the repetitions, so it treats all
alike. Times are the kernel's monotonic clock, read by Python and the worker. Every wait has a timeout; every process is
ended by pid, and only while its start time shows that it is the same process.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks import procfs
from benchmarks.events import Event, EventPipe
from benchmarks.procfs import Process
from benchmarks.running import HERE, NO_NAME_SERVER, Running, end_all, environment
from benchmarks.samples import Samples

RESULTS = HERE / "results"
WORKER = HERE / "bin" / "worker"
LAUNCHERS = {"torchrun": ("torchrun",), "tenax": ("tenax", "run")}


class Unusable(Exception):
    """This machine lacks something that the benchmarks need; the message names the remedy."""


class LaunchFailed(Exception):
    """A launcher did not do what was to be measured; the message describes what it did."""


@dataclass(frozen=True)
class Launcher:
    """A launcher to measure: its name in the report, its command, and the spelling of its flags.

    `spell` translates torchrun's flags. `every`: it takes part in each n-th repetition.
    """

    name: str
    command: tuple[str, ...]
    spell: Callable[[Sequence[str]], list[str]] = list
    every: int = 1


@dataclass(frozen=True)
class Settings:
    """What one run of the benchmarks measures, and how often."""

    launchers: tuple[Launcher, ...]
    quick: bool = False
    reps: int | None = None

    def repetitions(self, full: int) -> int:
        """Return the number of repetitions of what a full run repeats `full` times."""
        return self.reps or (1 if self.quick else full)

    def interleaved(self, full: int) -> Iterator[tuple[int, Launcher]]:
        """Yield the launchers in turns (A B A B …), so that drift of the machine affects all alike."""
        for repetition in range(self.repetitions(full)):
            for launcher in self.launchers:
                if repetition % launcher.every == 0:
                    yield repetition, launcher

    def settle(self, samples: Samples) -> None:
        """Wait for a quiet machine, except in a smoke run, whose figures mean nothing."""
        if not self.quick:
            settle(samples, patience_s=5.0)


def find_launchers(names: Sequence[str]) -> tuple[Launcher, ...]:
    """Return the named launchers from the environment of this interpreter."""
    found = []
    for name in names:
        program, *words = LAUNCHERS[name]
        path = Path(sys.executable).parent / program
        if not path.exists():
            raise Unusable(f"{program} was not found beside this interpreter; run ./dev setup, then ./dev bench.")
        found.append(Launcher(name, (str(path), *words)))
    return tuple(found)


def build_worker() -> None:
    """Compile the instant worker unless it exists and is newer than its source."""
    source = HERE / "worker.c"
    if not hasattr(os, "pidfd_open") or not procfs.PROC.exists():
        raise Unusable("the benchmarks read /proc and wait on pidfds; run them on Linux.")
    if WORKER.exists() and WORKER.stat().st_mtime >= source.stat().st_mtime:
        return
    if shutil.which("gcc") is None:
        raise Unusable("the instant worker is written in C, and gcc was not found; install gcc and try again.")
    WORKER.parent.mkdir(exist_ok=True)
    built = WORKER.with_suffix(f".{os.getpid()}")  # other processes may run the old one, or build one too
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(built), str(source)], check=True)
    built.replace(WORKER)


class Launch:
    """One run of a launcher on this machine, until it and all its processes have exited."""

    def __init__(
        self,
        launcher: Launcher,
        workers: int,
        mode: Sequence[str],
        *,
        options: Sequence[str] = (),
        stdout: IO[bytes] | int = subprocess.DEVNULL,
    ) -> None:
        self.name = launcher.name
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._events = EventPipe(self.folder)
        self._command = [
            *launcher.command,
            *launcher.spell(
                ["--standalone", f"--nproc-per-node={workers}", f"--log-dir={self.folder / 'logs'}", *options]
            ),
            "--no-python",
            str(WORKER),
            str(self._events.path),
            *mode,
        ]
        self._stdout = stdout

    def __enter__(self) -> Launch:
        self._running = Running(self._command, self.folder, variables=NO_NAME_SERVER, stdout=self._stdout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_all([self._running], set())
        procfs.end(event.process for event in self.events())  # also those that started meanwhile
        self._events.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The launcher's own process: the agent."""
        return self._running.pid

    @property
    def started_ns(self) -> int:
        """The time just before its start."""
        return self._running.started_ns

    @property
    def gone_ns(self) -> int:
        """When it exited; 0 while it runs."""
        return self._running.gone_ns

    def events(self) -> list[Event]:
        """Return all events of the workers so far, in order."""
        return self._events.all()

    def named(self, name: str) -> list[Event]:
        """Return the events of one name so far, earliest first."""
        return self._events.named(name)

    def wait_for(self, wanted: Mapping[str, int], timeout_s: float) -> None:
        """Wait until there are that many events of each name."""
        deadline = time.monotonic() + timeout_s
        while any(len(self.named(name)) < number for name, number in wanted.items()):
            descriptors = [self._events.fileno(), self._running.fileno()]
            ready = select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self.failure(f"its workers sent too few events in {timeout_s:.0f} s")
            if self._running.fileno() in ready:
                raise self.failure("ended early")

    def wait(self, timeout_s: float) -> None:
        """Wait until the launcher exits, which must be with status 0."""
        if not self._running.wait_until_gone(timeout_s):
            raise self.failure(f"still ran after {timeout_s:.0f} s")
        if self._running.status != 0:
            raise self.failure(f"ended with status {self._running.status}")

    def kill(self) -> None:
        """Send SIGKILL to the agent only."""
        self._running.kill()

    def processes(self) -> set[Process]:
        """Return all processes of the job except the agent: its descendants, and those that a worker reported."""
        return {event.process for event in self.events() if event.process.alive()} | self._running.below()

    def failure(self, what: str) -> LaunchFailed:
        """Return an error with the launcher's last output."""
        return LaunchFailed(f"{what}; last output: {self._running.last_output()}")


def run_s(command: Sequence[str]) -> float:
    """Return how long a command takes from its start to its exit."""
    variables = environment()
    started_ns = time.monotonic_ns()
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=variables, check=True, timeout=60)
    return (time.monotonic_ns() - started_ns) / 1e9


def spin_s() -> float:
    """Return how long a fixed piece of work takes now: its spread is the machine's noise."""
    started_ns = time.monotonic_ns()
    total = 0
    for number in range(300_000):
        total += number * number
    return (time.monotonic_ns() - started_ns) / 1e9


def settle(samples: Samples, patience_s: float) -> None:
    """Wait until the rest of the machine uses less than an eighth of one core; count the times that it does not."""
    deadline = time.monotonic() + patience_s
    window_s = 0.2
    while True:
        before = procfs.busy_s()
        time.sleep(window_s)
        if (procfs.busy_s() - before) / window_s < 0.125:
            return
        if time.monotonic() > deadline:
            samples.restless += 1
            return
