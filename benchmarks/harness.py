"""The harness: starts one launcher with instant workers, hears their events, and leaves nothing behind.

It knows both launchers only as commands with the same flags, so whatever it does to one it does to the other. Times
are the kernel's monotonic clock, which Python and the worker read alike. Every wait has a bound; everything that was
started is ended by pid, and only while its start time still says that it is ours.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks import procfs
from benchmarks.procfs import Process
from benchmarks.samples import Samples

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WORKER = HERE / "bin" / "worker"
LAUNCHERS = {"torchrun": ("torchrun",), "tenax": ("tenax", "run")}
# Set by an outer launcher or by a developer's shell, these would change what is measured.
FOREIGN_VARIABLES = (
    "PYTHON",
    "OMP_",
    "RANK",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "PET_",
    "TENAX_",
)


class Unusable(Exception):
    """This machine lacks something the benchmarks need; the message says what to do."""


class LaunchFailed(Exception):
    """A launcher did not do what was measured; the message says what it did instead."""


@dataclass(frozen=True)
class Launcher:
    """A launcher to measure: its name in the report and the command that starts it."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What one run of the benchmarks measures, and how often."""

    launchers: tuple[Launcher, ...]
    quick: bool = False
    reps: int | None = None

    def repetitions(self, full: int) -> int:
        """How often to repeat what a full run repeats `full` times."""
        return self.reps or (min(full, 2) if self.quick else full)

    def interleaved(self, full: int) -> Iterator[tuple[int, Launcher]]:
        """A B A B …: each repetition takes every launcher in turn, so that the machine's drift hits them alike."""
        for repetition in range(self.repetitions(full)):
            for launcher in self.launchers:
                yield repetition, launcher


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
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(WORKER), str(source)], check=True)


@dataclass(frozen=True)
class Event:
    """One line of a worker: when, what, who, and in which attempt."""

    at_ns: int
    name: str
    process: Process
    rank: int
    restarts: int


def parse_event(line: str) -> Event:
    """The event that one line of the worker says."""
    at_ns, name, pid, started_ticks, rank, restarts = line.split()
    return Event(int(at_ns), name, Process(int(pid), int(started_ticks)), int(rank), int(restarts))


class Launch:
    """One launcher at work, from the moment before it is started until it and everything it started is gone."""

    def __init__(
        self,
        launcher: Launcher,
        workers: int,
        mode: Sequence[str],
        *,
        options: Sequence[str] = (),
        stdout: IO[bytes] | int | None = None,
    ) -> None:
        self.name = launcher.name
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.started_ns = 0
        self.gone_ns = 0
        self._events: list[Event] = []
        self._unread = ""
        fifo = self.folder / "events"
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self._command = [
            *launcher.command,
            "--standalone",
            f"--nproc-per-node={workers}",
            f"--log-dir={self.folder / 'logs'}",
            *options,
            "--no-python",
            str(WORKER),
            str(fifo),
            *mode,
        ]
        self._stdout = stdout

    def __enter__(self) -> Launch:
        with (self.folder / "stderr").open("wb") as stderr:
            self.started_ns = time.monotonic_ns()
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self._stdout is None else self._stdout,
                stderr=stderr,
                cwd=self.folder,
                # What a launcher leaves in the folder for temporary files goes with ours.
                env=environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)},
            )
        self._pidfd = os.pidfd_open(self._popen.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = self.processes()
        for step in (signal.SIGTERM, signal.SIGKILL):
            if not self.gone_ns:
                self._popen.send_signal(step)
                self._wait_until_gone(10)
        end(below | {event.process for event in self.events()})
        os.close(self._pidfd)
        os.close(self._fifo)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The launcher's own process: the agent."""
        return self._popen.pid

    def events(self) -> list[Event]:
        """Everything the workers have said so far, in the order they said it."""
        while True:
            try:
                self._unread += os.read(self._fifo, 1 << 16).decode()
            except BlockingIOError:
                break
        *lines, self._unread = self._unread.split("\n")
        self._events += map(parse_event, lines)
        return list(self._events)

    def named(self, name: str) -> list[Event]:
        """The events of one name so far, earliest first."""
        return sorted((event for event in self.events() if event.name == name), key=lambda event: event.at_ns)

    def wait_for(self, wanted: Mapping[str, int], timeout_s: float) -> None:
        """Hear events until there are that many of each name."""
        deadline = time.monotonic() + timeout_s
        while any(len(self.named(name)) < number for name, number in wanted.items()):
            ready = select.select([self._fifo, self._pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise self.failure(f"its workers said too little in {timeout_s:.0f} s")
            if self._pidfd in ready:
                raise self.failure("ended early")

    def wait(self, timeout_s: float) -> None:
        """Wait until the launcher is gone, which it must be with status 0."""
        if not self._wait_until_gone(timeout_s):
            raise self.failure(f"still ran after {timeout_s:.0f} s")
        if self._popen.returncode != 0:
            raise self.failure(f"ended with status {self._popen.returncode}")

    def kill(self) -> None:
        """SIGKILL the agent, and it alone."""
        self._popen.kill()
        self._wait_until_gone(10)

    def processes(self) -> set[Process]:
        """Every process of the job but the agent: what is below it, and what a worker told us of."""
        told = {event.process for event in self.events() if event.process.alive()}
        return told | (set() if self.gone_ns else procfs.descendants(self.pid))

    def failure(self, what: str) -> LaunchFailed:
        """What went wrong, with the launcher's last words, in which no path says where this machine keeps things."""
        lines = (self.folder / "stderr").read_text(errors="replace").splitlines()
        words = " / ".join(lines[-2:]).replace(str(self.folder), "(scratch)").replace(str(HERE.parent), ".")
        return LaunchFailed(f"{what}; last words: {words or 'none'}")

    def _wait_until_gone(self, timeout_s: float) -> bool:
        if not self.gone_ns and select.select([self._pidfd], [], [], timeout_s)[0]:
            self.gone_ns = time.monotonic_ns()
            self._popen.wait()
        return bool(self.gone_ns)


def end(processes: set[Process]) -> None:
    """SIGKILL those that still run."""
    for process in processes:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):  # it went by itself, just now
                os.kill(process.pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """Our environment, less what would change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


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


def settle(samples: Samples, patience_s: float = 5.0) -> None:
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
