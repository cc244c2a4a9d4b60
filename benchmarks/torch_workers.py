"""Torch workers: workers that import torch (`torch_worker.py`): command → all in `main`; SIGKILL of one → all in
`main` again.

The script is the same for all and is started as a user would start it. torchrun starts an interpreter for each worker,
which imports torch; tenax runs with `--preload torch`. Separate rows have tenax with `--preload none`, next to the same
samples of torchrun. The harness kills a worker of any rank: RESTED_S or a little more after all were in `main`, and at
the end once more as soon as they are, when a launcher that prepares for the next restart has had no time for it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness, procfs
from benchmarks.events import Event, whole_group
from benchmarks.harness import Launch, Launcher, LaunchFailed, Settings
from benchmarks.report import BASELINE, OURS, Row, compared, limited, seconds, spread
from benchmarks.running import HERE
from benchmarks.samples import Samples

SIZES = (2, 8)
SCRIPT = HERE / "torch_worker.py"
PRELOAD = {OURS: ("--preload=torch",)}
NO_PRELOAD = ("--preload=none",)
COLD = ", tenax without preload"
RESTED_S = 1.0
BOUND_S = 120.0
REFERENCE = "reference"
IMPORT = "python -c 'import torch'"


class TorchLaunch(Launch):
    """One launcher with torch workers: the same command, with the script instead of the instant worker."""

    def __init__(self, launcher: Launcher, workers: int, mode: str, *, options: Sequence[str] = ()) -> None:
        super().__init__(launcher, workers, [mode], options=options)
        program = self._command.index("--no-python")
        self._command[program : program + 2] = [str(SCRIPT)]


@dataclass(frozen=True)
class Way:
    """One way to start the workers, how often, and how many of them are killed in each launch."""

    options: tuple[str, ...]
    endings: tuple[str, ...]  # of the names of its measures: a sample may be in two rows
    launches: int
    deaths: int
    at_once: bool  # whether one more is killed as soon as all run again


def ways(who: str, size: int, quick: bool) -> list[Way]:
    """Return how this launcher starts that many workers. Slow cases are repeated less often."""
    if quick:
        return [Way(PRELOAD.get(who, ()), ("",), launches=1, deaths=1, at_once=False)] if size == SIZES[0] else []
    launches, cold = (2, ()) if size == SIZES[0] else (3, (COLD,))
    if who == BASELINE:
        return [Way((), ("", *cold), launches, deaths=1, at_once=True)]
    if who != OURS:
        return [Way((), ("",), launches=1, deaths=1, at_once=False)]
    warm = Way(PRELOAD[OURS], ("",), launches, deaths=4, at_once=True)
    return [warm, *(Way(NO_PRELOAD, (ending,), 2, deaths=1, at_once=False) for ending in cold)]


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    import_torch = [sys.executable, "-c", "import torch"]
    if not settings.quick:
        harness.run_s(import_torch)  # not measured: warms bytecode and page cache for all
    for repetition, launcher in settings.interleaved(3):
        if launcher == settings.launchers[0]:
            settings.settle(samples)
            samples.add(REFERENCE, IMPORT, harness.run_s(import_torch))
        for size in SIZES:
            for way in ways(launcher.name, size, settings.quick):
                if repetition < way.launches:
                    settings.settle(samples)
                    _take(launcher, size, way, samples)


def _take(launcher: Launcher, size: int, way: Way, samples: Samples) -> None:
    restarts = f"--max-restarts={way.deaths + way.at_once}"
    with TorchLaunch(launcher, size, "idle", options=[restarts, *way.options]) as launch:
        try:
            group = _group(launch, size, launch.started_ns, launches=1)
            for ending in way.endings:
                samples.add(launcher.name, _first(size) + ending, (group[0].at_ns - launch.started_ns) / 1e9)
                samples.add(launcher.name, _all(size) + ending, (group[-1].at_ns - launch.started_ns) / 1e9)
            for death in range(way.deaths):
                time.sleep(RESTED_S + random.random() * 0.2)  # spread over torchrun's monitor intervals
                took_s, group = _kill_one(launch, group, launches=death + 2)
                for ending in way.endings:
                    samples.add(launcher.name, _again(size) + ending, took_s)
            if way.at_once:
                took_s, _ = _kill_one(launch, group, launches=way.deaths + 2)
                samples.add(launcher.name, _at_once(size), took_s)
        except LaunchFailed as failure:
            how = " ".join(way.options) or "no options"
            samples.fail(launcher.name, f"{size} torch workers ({how}): {failure}")


def _kill_one(launch: Launch, group: Sequence[Event], launches: int) -> tuple[float, list[Event]]:
    """Kill one worker. Return how long it took until all were in `main` again, and their events."""
    killed_ns = time.monotonic_ns()
    procfs.end([random.choice(group).process])
    again = _group(launch, len(group), killed_ns, launches)
    return (again[-1].at_ns - killed_ns) / 1e9, again


def _group(launch: Launch, size: int, since_ns: int, launches: int) -> list[Event]:
    """Wait for the whole group that started since then, given the number of all starts; earliest first."""
    launch.wait_for({"start": launches * size}, BOUND_S)
    group = whole_group(launch.events(), since_ns, size)
    if not group or len(launch.named("start")) != launches * size:
        raise launch.failure(f"{launches} groups of {size} workers were expected; {_started_ranks(launch)}")
    return group


def _started_ranks(launch: Launch) -> str:
    return "these ranks started: " + ", ".join(str(event.rank) for event in launch.named("start"))


def _first(size: int) -> str:
    return f"{size} workers that import torch: command → first in `main`"


def _all(size: int) -> str:
    return f"{size} workers that import torch: command → all in `main`"


def _again(size: int) -> str:
    return f"{size} workers that import torch: worker SIGKILL → all in `main` again"


def _at_once(size: int) -> str:
    return f"{_again(size)}, killed as soon as all were there"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    small, large = SIZES
    every = [
        (_first(small), compared(samples, _first(small), seconds)),
        (_all(small), compared(samples, _all(small), seconds)),
        (_again(small), compared(samples, _again(small), seconds)),
        (_at_once(small), compared(samples, _at_once(small), seconds)),
        (_first(large), compared(samples, _first(large), seconds)),
        (_all(large), compared(samples, _all(large), seconds, at_least=4)),
        (_again(large), compared(samples, _again(large), seconds, at_least=20)),
        (_again(large), limited(samples, _again(large), seconds, measure="the same, by the clock", below=0.3)),
        (_at_once(large), compared(samples, _at_once(large), seconds)),
        *((what, compared(samples, what, seconds)) for what in (_all(large) + COLD, _again(large) + COLD)),
    ]
    return [row for what, row in every if samples.has(OURS, what) or samples.has(BASELINE, what)]


def notes(samples: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        "Workers that import torch: the same script for both, with `import torch` at its top; all imports share "
        "this machine's cores. tenax ran with `--preload torch`, which torchrun does not have; the rows without "
        f"preload show tenax with `--preload none`, next to the same samples of torchrun. A bare `{IMPORT}`: "
        f"{spread(samples.summary(REFERENCE, IMPORT), seconds)}.",
    ]
