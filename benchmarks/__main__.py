"""Compares tenax with torchrun, and with other installed launchers, in one run on this machine.

    ./dev bench                      everything, under 20 minutes; writes benchmarks/REPORT.md and plots
    ./dev bench --quick              a smoke run of everything, one minute; small samples, prints its report
    ./dev bench launch restart       only these; prints their report
    ./dev bench --launcher torchrun  only this one; may be repeated

    launch         command → first and last worker's first instruction; last worker done → launcher gone
    idle           memory, threads, wake-ups and system calls while the workers only wait
    restart        worker SIGKILL → agent's decision → next generation
    torch_workers  the same with workers that import torch, from command or SIGKILL until all are in `main`
    survivors      worker or agent SIGKILL → next completed step of all, with workers that survive
    memory         PSS of a whole job of idle workers that import torch
    logs           tee of a million lines: how fast, and whether each arrives once, whole and in order
    orphans        agent SIGKILL: which processes of the job are alive a second later
    agents         several agents start; a worker, an agent, the endpoint's agent or a host is lost; one more joins
    fanout         worker failure on one of 64 nodes → all 64 have decided to stop
    rendezvous     8 to 1,000 nodes join at once, compared with TorchElastic's dynamic rendezvous
    etcd           50 to 200 agents join at once through an etcd of three members
    store          tenax's store server and torch's own, with torch's clients

All launchers run the same instant C worker (`worker.c`, compiled into `bin/` at first use) or the same script with the
same flags, in turns. Other launchers (`peers.py`) take part in the measurements on one machine. Raw samples go to
`results/`, as does the report of an incomplete run. The exit code is 0 if every launch of tenax and every process of a
measurement succeeded and every bar was passed. A smoke run has no bars, takes two measurements at a time, and includes
only the floor (`bare.py`) of the other launchers, unless they are named. Run it on a quiet Linux machine with gcc;
strace is used if installed, and hosts are cut off if root can create network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import (
    agents,
    etcd,
    fanout,
    harness,
    idle,
    launch,
    logs,
    memory,
    orphans,
    peers,
    plots,
    rendezvous,
    report,
    restart,
    store,
    survivors,
    torch_workers,
)
from benchmarks.crew import CrewFailed
from benchmarks.report import seconds, spread
from benchmarks.running import HERE
from benchmarks.samples import Samples, summarize

MEASUREMENTS = {
    "launch": launch,
    "idle": idle,
    "restart": restart,
    "torch_workers": torch_workers,
    "survivors": survivors,
    "memory": memory,
    "logs": logs,
    "orphans": orphans,
    "agents": agents,
    "fanout": fanout,
    "rendezvous": rendezvous,
    "etcd": etcd,
    "store": store,
}
# Written by hand and copied into the report.
SECTIONS = {"Profiles": HERE / "PROFILES.md", "On a real GPU": HERE / "GPU.md"}
METHOD = (
    "Both launchers ran the same workers (an instant C program, or a script that imports torch) with the same "
    "flags, in turns (A B A B), each after the machine had become quiet. Where a measure is not of a whole launcher "
    "(many nodes, the store), the column torchrun is the corresponding part of TorchElastic or torch, as the notes "
    "explain. Figures are medians [smallest, largest] with the number of samples; a ratio of medians shows how many "
    "times better tenax is, so less than 1 is a loss. Times are of the kernel's monotonic clock, read by harness "
    "and workers. Names are resolved by the hosts file only, because torch's clients resolve the names of their "
    "peers. The top of each file in `benchmarks/` describes its measurement."
)
SMOKE = (
    "This was a smoke run, which takes two measurements at a time and does not wait for a quiet machine: its figures "
    "mean nothing. "
)
LANES = 2  # in a smoke run, which mostly waits


def main(arguments: Sequence[str] | None = None, measurements: Mapping[str, Any] = MEASUREMENTS) -> int:
    """Measure, then print and save the report."""
    options = parse(arguments)
    try:
        harness.build_worker()
        compared = harness.find_launchers([name for name in options.launcher if name in harness.LAUNCHERS])
    except harness.Unusable as reason:
        print(f"benchmarks: {reason}", file=sys.stderr)
        return 2
    asked = [name for name in peers.NAMES if name in options.launcher]
    others = peers.find(asked)
    settings = harness.Settings(compared, options.quick, options.reps)
    names = [name for name in measurements if name in (options.names or measurements)]

    noise = Noise()
    began = time.monotonic()
    taken: dict[str, Samples] = {}

    def take(name: str) -> Samples:
        return measured(name, measurements[name], replace(settings, launchers=(*compared, *peers.able(name, others))))

    with ThreadPoolExecutor(LANES) as lanes:
        for name, samples in zip(names, (lanes.map if settings.quick else map)(take, names), strict=True):
            taken[name] = samples
            keep(name, samples, options.results)
            noise.observe()
    took_s = time.monotonic() - began

    has_all_launchers = {*harness.LAUNCHERS, *peers.NAMES} <= set(options.launcher)
    complete = names == list(MEASUREMENTS) and has_all_launchers and not settings.quick
    path = HERE / "REPORT.md" if complete else options.results / "report.md"
    rows = {name: measurements[name].rows(taken[name]) for name in names}
    notes = [note for name in names for note in measurements[name].notes(taken[name])]
    try:
        drawn = plots.draw({name: (rows[name], taken[name]) for name in names}, path.parent / "plots")
    except plots.Undrawn as reason:
        drawn = {}
        notes.append(str(reason))
    notes.append(noise.sentence(None if settings.quick else sum(samples.restless for samples in taken.values())))
    notes.append(f"The whole run took {took_s / 60:.1f} minutes.")
    there = [launcher.name for launcher in others]
    text = report.render(
        machine=machine(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        method=f"{SMOKE if settings.quick else ''}{METHOD}",
        rows=[row for name in names for row in rows[name]],
        notes=notes,
        failures=[failure for samples in taken.values() for failure in samples.failures],
        others=[line for name in names for line in report.other_lines(rows[name], taken[name], there)],
        names=there,
        others_notes=peers.notes(asked, others),
        plots={f"plots/{file}": title for file, title in drawn.items()},
        sections={heading: text.read_text() for heading, text in SECTIONS.items() if text.exists()},
    )
    path.write_text(text)
    print(text)
    problems = [problem for name in names for problem in found_problems(name, taken[name])]
    for problem in problems:
        print(f"benchmarks: failed: {problem}", file=sys.stderr)
    below = not settings.quick and any(row.passed is False for name in names for row in rows[name])
    return int(bool(problems) or below)


def measured(name: str, case: Any, settings: harness.Settings) -> Samples:
    """Return the samples of one case, and print them at once."""
    print(f"benchmarks: {name} …", file=sys.stderr, flush=True)
    samples = Samples(unable=peers.unable(name))
    began = time.monotonic()
    try:
        case.measure(settings, samples)
    except CrewFailed as failure:
        samples.fail(name, f"a process of the benchmark failed: {failure}")
    table = report.table(case.rows(samples))
    print(f"{table}\nbenchmarks: {name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return samples


def found_problems(name: str, samples: Samples) -> list[str]:
    """Return what failed in a measurement: a process of it, a launch of tenax, or what tenax should have done."""
    failures = [failure for failure in samples.failures if failure.startswith((report.OURS, f"{name}:"))]
    missed = [f"{what}: {why}" for what, reasons in samples.misses.get(report.OURS, {}).items() for why in reasons]
    return [each if each.startswith(f"{name}:") else f"{name}: {each}" for each in (*failures, *missed)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[*MEASUREMENTS, []], metavar="NAME", help="what to measure (default: everything)"
    )
    parser.add_argument("--quick", action="store_true", help="smoke run with small samples")
    parser.add_argument("--reps", type=int, help="repetitions of each measurement, instead of its default")
    parser.add_argument(
        "--launcher", action="append", choices=[*harness.LAUNCHERS, *peers.NAMES], help="measure only this one"
    )
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS, metavar="FOLDER", help="for samples (default: results/)"
    )
    options = parser.parse_args(arguments)
    usual = [*harness.LAUNCHERS, *(("subprocess",) if options.quick else peers.NAMES)]
    options.launcher = options.launcher or usual
    return options


def keep(name: str, samples: Samples, folder: Path) -> None:
    """Write the raw samples of one measurement."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(vars(samples), indent=1) + "\n")


class Noise:
    """The noise of the machine: the times of a fixed piece of work before, between and after the measurements."""

    def __init__(self) -> None:
        self._spins: list[float] = []
        self._loads: list[float] = []
        self.observe()

    def observe(self) -> None:
        """Take a few samples now."""
        self._spins += [harness.spin_s() for _ in range(9)]
        self._loads.append(os.getloadavg()[0])

    def sentence(self, restless: int | None) -> str:
        """Describe the samples, and how many launches began on a busy machine (None: a smoke run)."""
        spin = spread(summarize(self._spins), seconds)
        loads = f"{min(self._loads):.1f} to {max(self._loads):.1f}"
        quiet = "a smoke run does not wait for a quiet machine"
        if restless is not None:
            quiet = f"launches that started on a busy machine: {restless}"
        return f"Machine noise: a fixed piece of Python work took {spin}; load average {loads}; {quiet}."


def machine() -> str:
    """Describe this machine in one line, without its name."""
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
    """Return the version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
