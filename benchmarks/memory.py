"""Memory: what a job with torch workers that only wait takes of the machine, all of its processes together.

PSS: a page that several processes share is divided among them, so the sum over a job counts each of its pages once.
A process outside the job that has torch too takes its share of torch's pages, and makes the job look smaller: the
notes say so if there was one. Taken when the job has been steady for STEADY_S, by the number of its processes and
their RSS, which no outsider changes: whatever a launcher prepares for later (templates, standby workers) is there
and counts. Restarts are allowed, since without any tenax keeps no standbys; a job of tenax that has fewer standbys
than workers gives no sample.

Who is who: the agent is the process that the command started, a worker is who said so. Of the others, those that
have torch's library mapped are templates and standbys, and the rest are helpers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks import procfs
from benchmarks.harness import Launch, LaunchFailed, Settings
from benchmarks.report import BASELINE, OURS, Row, compared, megabytes, spread
from benchmarks.samples import Samples
from benchmarks.torch_workers import BOUND_S, PRELOAD, TorchLaunch

SIZES = (2, 8)  # of a smoke run, and of a full one
RESTARTS = "--max-restarts=3"
STEADY_S = 2.0
LOOK_S = 0.2
SETTLES_WITHIN_S = 30.0
NEAR = 0.005  # of the sum: so much may come and go without anybody having done anything

AGENT, WARM, WORKERS = KINDS = ("agent and helpers", "template and standbys", "workers")
OUTSIDERS = "processes outside the job that have torch"


@dataclass(frozen=True)
class Census:
    """The processes of a job at one moment: how many of each kind, their PSS, and the RSS of all."""

    numbers: dict[str, int]
    pss_mb: dict[str, float]
    rss_mb: float

    @property
    def total_mb(self) -> float:
        """Of all."""
        return sum(self.pss_mb.values())

    def like(self, other: Census) -> bool:
        """Whether nothing has happened between the two."""
        return self.numbers == other.numbers and abs(self.rss_mb - other.rss_mb) <= NEAR * other.rss_mb


def measure(settings: Settings, samples: Samples) -> None:
    """Take every sample."""
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
    """The census when it has not changed for a while. Looks again and again: nothing is timed here."""
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
    """Everybody of the job now, also who only carries its name; a process that goes meanwhile is in none."""
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
    """How many processes that are not of the job have torch mapped."""
    ours = {launch.pid, *(process.pid for process in launch.processes())}
    found = 0
    for pid in procfs.pids():
        try:
            found += pid not in ours and _has_torch(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or somebody else's
    return found


def has_standbys(census: Census) -> bool:
    """Whether beside the template there is a standby for each worker: otherwise something was not counted."""
    return census.numbers[WARM] > census.numbers[WORKERS]


def _has_torch(pid: int) -> bool:
    return "libtorch" in (procfs.PROC / str(pid) / "maps").read_text()


def _total(size: int) -> str:
    return f"memory of a job with {size} idle workers that import torch (PSS of all its processes)"


def _number(kind: str) -> str:
    return f"{kind}, number"


def rows(samples: Samples) -> list[Row]:
    """The measure beside each other, for whichever size was taken."""
    sizes = [size for size in SIZES if any(samples.has(who, _total(size)) for who in (BASELINE, OURS))]
    return [compared(samples, _total(size), megabytes, at_least=2 if size == SIZES[1] else None) for size in sizes]


def notes(samples: Samples) -> list[str]:
    """What the sums are made of."""
    told = [split(samples, who) for who in (BASELINE, OURS) if samples.all(who, AGENT)]
    if not told:
        return []
    others = max(number for who in (BASELINE, OURS) for number in (0.0, *samples.all(who, OUTSIDERS)))
    doubt = f" Up to {others:g} {OUTSIDERS} were there too: these figures are too small." if others else ""
    return [
        f"Memory of idle torch workers, taken when the job had been steady for {STEADY_S:g} s; in brackets, how many "
        f"processes. {' '.join(told)} Pages that several share are divided among them. The workers have imported "
        f"torch and done one sum; what training allocates comes on top, for both.{doubt}"
    ]


def split(samples: Samples, who: str) -> str:
    """One sentence: who holds how much."""
    parts = []
    for kind in KINDS:
        number = samples.summary(who, _number(kind))
        if number and number.max:
            parts.append(f"{kind} ({number.median:g}) {spread(samples.summary(who, kind), megabytes)}")
    return f"{who}: {'; '.join(parts)}."
