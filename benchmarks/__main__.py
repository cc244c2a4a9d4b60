"""Measure tenax beside torchrun, in one run, on this machine.

    ./dev bench                      everything, about 14 minutes; writes benchmarks/REPORT.md
    ./dev bench --quick              a smoke run of everything; small samples, prints its report
    ./dev bench launch restart       only these; prints their report
    ./dev bench --launcher torchrun  only one of the two

    launch      command → first and last worker's first instruction; last worker done → launcher gone
    idle        memory, threads, wake-ups and system calls while the workers only wait
    restart     worker SIGKILL → agent's decision → next generation
    logs        tee of a million lines: how fast, and does every one arrive once, whole and in order
    orphans     agent SIGKILL: what of the job is alive a second later
    agents      three agents: one, its worker, the endpoint's agent or a host goes; a fourth comes
    fanout      worker failure on one of 64 nodes → all 64 have decided to stop
    rendezvous  8 to 1,000 nodes join at once, beside TorchElastic's dynamic rendezvous
    etcd        50 to 200 agents join at once through an etcd of three members
    store       our store's server beside torch's own, under torch's clients

Where there are launchers, both run the same instant C worker (`worker.c`, compiled into `bin/` at first use) with the
same flags, and take turns. Raw samples go to `results/`, as does the report of a run that was not complete. The status
is 0 when every bar was passed and every launch of tenax did its work. Run it on a quiet Linux machine with gcc; strace
is used where it is there, and hosts are cut off where root can make network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import agents, etcd, fanout, harness, idle, launch, logs, orphans, rendezvous, report, restart, store
from benchmarks.crew import CrewFailed
from benchmarks.report import seconds, spread
from benchmarks.running import HERE
from benchmarks.samples import Samples, summarize

MEASUREMENTS = {
    "launch": launch,
    "idle": idle,
    "restart": restart,
    "logs": logs,
    "orphans": orphans,
    "agents": agents,
    "fanout": fanout,
    "rendezvous": rendezvous,
    "etcd": etcd,
    "store": store,
}
METHOD = (
    "Both launchers ran the same instant C worker with the same flags, in turns (A B A B), each after a pause for the "
    "rest of the machine to become quiet. Where a measure is not of a whole launcher (many nodes, the store), the "
    "column torchrun is the part of TorchElastic or torch that does the same work, and the notes say which. Figures "
    "are medians [smallest, largest] with the number of samples; ratios are of medians and say how many times better "
    "tenax is, so that one below 1 is a loss. Times are the kernel's monotonic clock, read by harness and workers "
    "alike. With several nodes no name server is asked: torch's clients look up their peers' names, and the hosts file "
    "has to do. How each measure is taken stands at the top of its file in `benchmarks/`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then say and keep the result."""
    options = parse(arguments)
    try:
        harness.build_worker()
        settings = harness.Settings(harness.find_launchers(options.launcher), options.quick, options.reps)
    except harness.Unusable as reason:
        print(f"benchmarks: {reason}", file=sys.stderr)
        return 2
    names = [name for name in MEASUREMENTS if name in (options.names or MEASUREMENTS)]

    noise = Noise()
    taken: dict[str, Samples] = {}
    for name in names:
        print(f"benchmarks: {name} …", file=sys.stderr, flush=True)
        taken[name] = Samples()
        try:
            MEASUREMENTS[name].measure(settings, taken[name])
        except CrewFailed as failure:
            taken[name].fail(name, f"a process of the benchmark itself could not do its part: {failure}")
        print(report.table(MEASUREMENTS[name].rows(taken[name])), file=sys.stderr, flush=True)
        keep(name, taken[name])
        noise.observe()

    rows = [row for name in names for row in MEASUREMENTS[name].rows(taken[name])]
    text = report.render(
        machine=machine(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        method=METHOD,
        rows=rows,
        notes=[note for name in names for note in MEASUREMENTS[name].notes(taken[name])]
        + [noise.sentence(sum(samples.restless for samples in taken.values()))],
        failures=[failure for samples in taken.values() for failure in samples.failures],
    )
    complete = names == list(MEASUREMENTS) and len(settings.launchers) == 2 and not settings.quick
    path = HERE / "REPORT.md" if complete else harness.RESULTS / "report.md"
    path.write_text(text)
    print(text)
    broken = any(failure.startswith(report.OURS) for samples in taken.values() for failure in samples.failures)
    return int(broken or any(row.passed is False for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line as values."""
    parser = argparse.ArgumentParser(
        "benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[*MEASUREMENTS, []], metavar="NAME", help="what to measure (default: everything)"
    )
    parser.add_argument("--quick", action="store_true", help="small samples: does it work at all")
    parser.add_argument("--reps", type=int, help="repetitions of each measurement, in place of its own number")
    parser.add_argument("--launcher", action="append", choices=list(harness.LAUNCHERS), help="measure only this one")
    options = parser.parse_args(arguments)
    options.launcher = options.launcher or list(harness.LAUNCHERS)
    return options


def keep(name: str, samples: Samples) -> None:
    """Write the raw samples of one measurement."""
    harness.RESULTS.mkdir(exist_ok=True)
    (harness.RESULTS / f"{name}.json").write_text(json.dumps(vars(samples), indent=1) + "\n")


class Noise:
    """How steady the machine was: a fixed piece of work, repeated before, between and after the measurements."""

    def __init__(self) -> None:
        self._spins: list[float] = []
        self._loads: list[float] = []
        self.observe()

    def observe(self) -> None:
        """Take a few samples now."""
        self._spins += [harness.spin_s() for _ in range(9)]
        self._loads.append(os.getloadavg()[0])

    def sentence(self, restless: int) -> str:
        """What they say, and how many launches began although the machine did not become quiet."""
        spin = spread(summarize(self._spins), seconds)
        loads = f"{min(self._loads):.1f} to {max(self._loads):.1f}"
        return (
            f"Machine noise: a fixed piece of Python work took {spin}; load average {loads}; launches that began "
            f"without a quiet machine: {restless}."
        )


def machine() -> str:
    """This machine in a line, without its name."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    kernel = ".".join(platform.release().split(".")[:2])
    return (
        f"{model}, {cores} cores, Linux {kernel}, {platform.python_implementation()} "
        f"{platform.python_version()}, torch {installed('torch')}, tenax {installed('tenax')}"
    )


def installed(package: str) -> str:
    """The version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
