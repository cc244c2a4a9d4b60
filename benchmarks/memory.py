"""Memory of a whole job with idle torch workers, all of its processes together.

PSS: a page that several processes share is divided among them, so the sum over a job counts each of its pages once. A
process outside the job that has torch mapped too takes a share of torch's pages, and makes the job look smaller: the
notes mention it. The sample is taken when the job has been steady for STEADY_S, by the number of its processes and
their RSS, which other processes do not change: what a launcher prepares for later (templates, standbys) counts.
Restarts are allowed, since without them tenax keeps no standbys; a job of tenax that has fewer standbys than workers
gives no sample.

The agent is the process that the command started; a worker is a process that sent an event. Of the others, those with
torch's library mapped are templates and standbys, and the rest are helpers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks import procfs
from benchmarks.harness import Launch, LaunchFailed, Settings
from benchmarks.report import BASELINE, OURS, Row, compared, megabytes, spread
from benchmarks.samples import Samples
from benchmarks.torch_workers import BOUND_S, PRELOAD, TorchLaunch

SIZES = (2, 8)  # in a smoke run, and in a full one
RESTARTS = "--max-restarts=3"
STEADY_S = 2.0
LOOK_S = 0.2
SETTLES_WITHIN_S = 30.0
NEAR = 0.005  # of the sum: normal fluctuation

AGENT, WARM, WORKERS = KINDS = ("agent and helpers", "template and standbys", "workers")
OUTSIDERS = "processes outside the job that have torch"


@dataclass(frozen=True)
class Census:
    """The processes of a job at one time: how many of each kind, their PSS, and the RSS of all."""

    numbers: dict[str, int]
    pss_mb: dict[str, float]
    rss_mb: float

    @property
    def total_mb(self) -> float:
        """The sum over all kinds."""
        return sum(self.pss_mb.values())

    def like(self, other: Census) -> bool:
        """Return whether the job did not change between the two."""
        return self.numbers == other.numbers and abs(self.rss_mb - other.rss_mb) <= NEAR * other.rss_mb


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    size = SIZES[0] if settings.quick else SIZES[1]
    for _, launcher in settings.interleaved(2):
        settings.settle(samples)
        options = [RESTARTS, *PRELOAD.get(launcher.name, ())]
        with TorchLaunch(launcher, size, "idle", options=options) as launch:
            try:
                launch.wait_for({"start": size}, BOUND_S)
                census = steady(launch)
                if launcher.name == OURS and not has_standbys(census):
                    raise launch.failure(f"{census.numbers} is a job without standbys")
                samples.add(launcher.name, OUTSIDERS, outsiders(launch))
            except LaunchFailed as failure:
                samples.fail(launcher.name, f"memory of {size} torch workers: {failure}")
                continue
        samples.add(launcher.name, _total(size), census.total_mb)
        for kind, number in census.numbers.items():
            samples.add(launcher.name, _number(kind), number)
            samples.add(launcher.name, kind, census.pss_mb[kind])


def steady(launch: Launch) -> Census:
    """Return the census when it has not changed for a while. Polling is fine here: nothing is timed."""
    deadline = time.monotonic() + SETTLES_WITHIN_S
    first, since = take_census(launch), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        census = take_census(launch)
        if not census.like(first):
            first, since = census, time.monotonic()
        elif time.monotonic() - since >= STEADY_S:
            return census
    raise launch.failure(f"its memory was not steady for {STEADY_S:g} s within {SETTLES_WITHIN_S:g} s")


def take_census(launch: Launch) -> Census:
    """Return the processes of the job, also those found only by its name; one that exits meanwhile is left out."""
    workers = {event.process.pid for event in launch.events()}
    others = {process.pid for process in launch.processes() | procfs.mentioning(str(launch.folder))}
    numbers, pss_mb, rss_mb = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0), 0.0
    for pid in {launch.pid, *others}:
        try:
            kind = WORKERS if pid in workers else WARM if pid != launch.pid and _has_torch(pid) else AGENT
            taken = procfs.memory(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        numbers[kind] += 1
        pss_mb[kind] += taken.pss_mb
        rss_mb += taken.rss_mb
    return Census(numbers, pss_mb, rss_mb)


def outsiders(launch: Launch) -> int:
    """Return how many processes outside the job have torch mapped."""
    ours = {launch.pid, *(process.pid for process in launch.processes())}
    found = 0
    for pid in procfs.pids():
        try:
            found += pid not in ours and _has_torch(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # exited meanwhile, or another user's
    return found


def has_standbys(census: Census) -> bool:
    """Return whether there is a standby for each worker besides the template: else the count is incomplete."""
    return census.numbers[WARM] > census.numbers[WORKERS]


def _has_torch(pid: int) -> bool:
    return "libtorch" in (procfs.PROC / str(pid) / "maps").read_text()


def _total(size: int) -> str:
    return f"memory of a job with {size} idle workers that import torch (PSS of all its processes)"


def _number(kind: str) -> str:
    return f"{kind}, number"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers, for the measured size."""
    sizes = [size for size in SIZES if any(samples.has(who, _total(size)) for who in (BASELINE, OURS))]
    return [compared(samples, _total(size), megabytes, at_least=2 if size == SIZES[1] else None) for size in sizes]


def notes(samples: Samples) -> list[str]:
    """Return the notes on what the sums consist of."""
    splits = [split(samples, who) for who in (BASELINE, OURS) if samples.all(who, AGENT)]
    if not splits:
        return []
    others = max(number for who in (BASELINE, OURS) for number in (0.0, *samples.all(who, OUTSIDERS)))
    doubt = f" Up to {others:g} {OUTSIDERS} were there too: these figures are too small." if others else ""
    return [
        f"Memory of idle torch workers, taken when the job had been steady for {STEADY_S:g} s; the number of "
        f"processes in parentheses. {' '.join(splits)} Shared pages are divided among their users. The workers have "
        f"imported torch and computed one sum; training allocates more, in both.{doubt}"
    ]


def split(samples: Samples, who: str) -> str:
    """Return one sentence: the memory of each kind of process."""
    parts = []
    for kind in KINDS:
        number = samples.summary(who, _number(kind))
        if number and number.max:
            parts.append(f"{kind} ({number.median:g}) {spread(samples.summary(who, kind), megabytes)}")
    return f"{who}: {'; '.join(parts)}."
