"""Idle: memory, threads, wake-ups and system calls of a launcher whose workers only wait.

The agent is the process that the command started. Helpers are its other descendants that are not
workers. They are counted too, since memory moved into a helper is not memory saved.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time

from benchmarks import procfs
from benchmarks.harness import Launch, LaunchFailed, Settings
from benchmarks.report import Row, compared, count, limited, megabytes, per_second
from benchmarks.samples import Samples

SIZE = 2
AGENT_RSS = "agent memory (RSS)"
TOGETHER_RSS = "agent and helpers together, RSS"
TOGETHER_PSS = "agent and helpers together, PSS"
AGENT_WAKEUPS = "wake-ups of the idle agent"
TOGETHER_WAKEUPS = "wake-ups of agent and helpers together"
AGENT_SYSCALLS = "system calls of the idle agent"
AGENT_THREADS = "threads of the agent"
HELPERS = "helper processes"


def measure(settings: Settings, samples: Samples) -> None:
    """Take every sample."""
    rest_s, window_s = (0.0, 0.5) if settings.quick else (2.0, 10.0)
    for _, launcher in settings.interleaved(3):
        settings.settle(samples)
        with Launch(launcher, SIZE, ["idle"]) as launch:
            try:
                launch.wait_for({"start": SIZE}, 60)
                time.sleep(rest_s)  # so that work left over from the start is not measured
                _observe(launch, window_s, samples)
            except (LaunchFailed, FileNotFoundError, ProcessLookupError) as failure:
                samples.fail(launcher.name, f"idle with {SIZE} workers: {failure}")


def _observe(launch: Launch, window_s: float, samples: Samples) -> None:
    workers = {event.process for event in launch.events()}
    helpers = [process.pid for process in procfs.descendants(launch.pid) - workers]
    pids = [launch.pid, *helpers]

    before, at = {pid: procfs.wakeups(pid) for pid in pids}, time.monotonic()
    time.sleep(window_s)
    after, took_s = {pid: procfs.wakeups(pid) for pid in pids}, time.monotonic() - at
    rate = {pid: (after[pid] - before[pid]) / took_s for pid in pids}
    memory = {pid: procfs.memory(pid) for pid in pids}

    who = launch.name
    samples.add(who, AGENT_RSS, memory[launch.pid].rss_mb)
    samples.add(who, TOGETHER_RSS, sum(one.rss_mb for one in memory.values()))
    samples.add(who, TOGETHER_PSS, sum(one.pss_mb for one in memory.values()))
    samples.add(who, AGENT_WAKEUPS, rate[launch.pid])
    samples.add(who, TOGETHER_WAKEUPS, sum(rate.values()))
    samples.add(who, AGENT_THREADS, len(procfs.threads(launch.pid)))
    samples.add(who, HELPERS, len(helpers))
    if shutil.which("strace"):
        samples.add(who, AGENT_SYSCALLS, _syscalls_per_s(launch, window_s))


def _syscalls_per_s(launch: Launch, window_s: float) -> float:
    """Count the system calls of the agent's threads with strace, which is never a child of the launcher."""
    table = launch.folder / "strace"
    with (launch.folder / "strace.stderr").open("wb") as stderr:
        strace = subprocess.Popen(["strace", "-c", "-f", "-o", str(table), "-p", str(launch.pid)], stderr=stderr)
        try:
            time.sleep(window_s)
        finally:
            strace.send_signal(signal.SIGINT)
            strace.wait(10)
    return parse_strace(table.read_text()) / window_s


def parse_strace(table: str) -> int:
    """Return the number of calls in the last line of `strace -c`; 0 if it printed nothing."""
    totals = [line.split() for line in table.splitlines() if line.endswith(" total")]
    return int(totals[-1][3]) if totals else 0


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    return [
        compared(samples, AGENT_RSS, megabytes, at_least=6),
        compared(samples, TOGETHER_RSS, megabytes),
        compared(samples, TOGETHER_PSS, megabytes),
        limited(samples, AGENT_WAKEUPS, per_second, below=2),
        compared(samples, TOGETHER_WAKEUPS, per_second),
        compared(samples, AGENT_SYSCALLS, per_second),
        compared(samples, AGENT_THREADS, count),
        compared(samples, HELPERS, count),
    ]


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        "The bars for memory and wake-ups are for the agent, as for torchrun; the rows with helpers show the whole "
        "launcher, with its small processes. RSS counts a shared page once for each process."
    ]
