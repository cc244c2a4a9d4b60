"""The harness: starts one launcher with instant workers, hears their events, and leaves nothing behind.

It knows a launcher only as a command, a spelling of torchrun's flags and a share of the repetitions, so whatever it
does to one it does to all. Times are the kernel's monotonic clock, which Python and the worker read alike. Every wait
has a bound; everything that was started is ended by pid, and only while its start time still says that it is ours.
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
    """This machine lacks something the benchmarks need; the message says what to do."""


class LaunchFailed(Exception):
    """A launcher did not do what was measured; the message says what it did instead."""


@dataclass(frozen=True)
class Launcher:
    """A launcher to measure: its name in the report, the command that starts it, and how it wants its flags.

    `spell` takes flags as torchrun has them. `every`: it takes part in one of so many repetitions.
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
        """How often to repeat what a full run repeats `full` times."""
        return self.reps or (1 if self.quick else full)

    def interleaved(self, full: int) -> Iterator[tuple[int, Launcher]]:
        """A B A B …: each repetition takes every launcher in turn, so that the machine's drift hits them alike."""
        for repetition in range(self.repetitions(full)):
            for launcher in self.launchers:
                if repetition % launcher.every == 0:
                    yield repetition, launcher

    def settle(self, samples: Samples) -> None:
        """Wait for a quiet machine, which a smoke run does not: its figures say only that there are some."""
        if not self.quick:
            settle(samples, patience_s=5.0)


def find_launchers(names: Sequence[str]) -> tuple[Launcher, ...]:
    """The named launchers, from beside the interpreter that runs this."""
    found = []
    for name in names:
        program, *words = LAUNCHERS[name]
        path = Path(sys.executable).parent / program
        if not path.exists():
            raise Unusable(f"there is no {program} beside this interpreter; run ./dev setup, then ./dev bench.")
        found.append(Launcher(name, (str(path), *words)))
    return tuple(found)


def build_worker() -> None:
    """Compile the instant worker unless it is there and newer than its source."""
    source = HERE / "worker.c"
    if not hasattr(os, "pidfd_open") or not procfs.PROC.exists():
        raise Unusable("the benchmarks read /proc and wait on pidfds; run them on Linux.")
    if WORKER.exists() and WORKER.stat().st_mtime >= source.stat().st_mtime:
        return
    if shutil.which("gcc") is None:
        raise Unusable("the instant worker is written in C and there is no gcc here; install gcc and run this again.")
    WORKER.parent.mkdir(exist_ok=True)
    built = WORKER.with_suffix(f".{os.getpid()}")  # others may run the old one, or build one too
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(built), str(source)], check=True)
    built.replace(WORKER)


class Launch:
    """One launcher at work on this machine alone, until it and everything it started is gone."""

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
        """The moment before it was started."""
        return self._running.started_ns

    @property
    def gone_ns(self) -> int:
        """When it was gone; 0 while it is not."""
        return self._running.gone_ns

    def events(self) -> list[Event]:
        """Everything the workers have said so far, in the order they said it."""
        return self._events.all()

    def named(self, name: str) -> list[Event]:
        """The events of one name so far, earliest first."""
        return self._events.named(name)

    def wait_for(self, wanted: Mapping[str, int], timeout_s: float) -> None:
        """Hear events until there are that many of each name."""
        deadline = time.monotonic() + timeout_s
        while any(len(self.named(name)) < number for name, number in wanted.items()):
            descriptors = [self._events.fileno(), self._running.fileno()]
            ready = select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self.failure(f"its workers said too little in {timeout_s:.0f} s")
            if self._running.fileno() in ready:
                raise self.failure("ended early")

    def wait(self, timeout_s: float) -> None:
        """Wait until the launcher is gone, which it must be with status 0."""
        if not self._running.wait_until_gone(timeout_s):
            raise self.failure(f"still ran after {timeout_s:.0f} s")
        if self._running.status != 0:
            raise self.failure(f"ended with status {self._running.status}")

    def kill(self) -> None:
        """SIGKILL the agent, and it alone."""
        self._running.kill()

    def processes(self) -> set[Process]:
        """Every process of the job but the agent: what is below it, and what a worker told us of."""
        return {event.process for event in self.events() if event.process.alive()} | self._running.below()

    def failure(self, what: str) -> LaunchFailed:
        """What went wrong, with the launcher's last words."""
        return LaunchFailed(f"{what}; last words: {self._running.last_words()}")


def run_s(command: Sequence[str]) -> float:
    """How long a command takes from before its start until it is gone."""
    variables = environment()
    started_ns = time.monotonic_ns()
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=variables, check=True, timeout=60)
    return (time.monotonic_ns() - started_ns) / 1e9


def spin_s() -> float:
    """How long a fixed piece of work takes just now: its spread is the machine's noise."""
    started_ns = time.monotonic_ns()
    total = 0
    for number in range(300_000):
        total += number * number
    return (time.monotonic_ns() - started_ns) / 1e9


def settle(samples: Samples, patience_s: float) -> None:
    """Wait until everything else on the machine uses less than an eighth of one core; count it when that never came."""
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
