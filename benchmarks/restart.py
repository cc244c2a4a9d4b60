"""Restart: a worker kills itself → the agent's decision → the next generation's first and last first instruction.

The decision is observed from outside, by the SIGTERM that reaches a peer: the same for both launchers, and an upper
bound. Each launch has a dozen deaths, at times spread evenly over torchrun's polling interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.events import Event
from benchmarks.harness import Launch, LaunchFailed, Settings
from benchmarks.report import Row, compared, limited, seconds
from benchmarks.samples import Samples

SIZES = (2, 8)


@dataclass(frozen=True)
class Restart:
    """One death and what followed, in seconds after it."""

    decided_s: float
    first_s: float
    last_s: float


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    deaths = 2 if settings.quick else 12
    for _, launcher in settings.interleaved(3):
        for size in SIZES[:1] if settings.quick else SIZES:
            settings.settle(samples)
            with Launch(launcher, size, ["die", str(deaths)], options=[f"--max-restarts={deaths}"]) as launch:
                try:
                    launch.wait(60 + 3 * deaths)
                except LaunchFailed as failure:
                    samples.fail(launcher.name, f"restarts of {size} workers: {failure}")
                seen = list(restarts(launch.events(), size))
            if len(seen) != deaths:
                samples.fail(
                    launcher.name, f"restarts of {size} workers: {deaths} deaths, {len(seen)} whole restarts seen"
                )
            for one in seen:
                samples.add(launcher.name, _decided(size), one.decided_s)
                samples.add(launcher.name, _first(size), one.first_s)
                samples.add(launcher.name, _last(size), one.last_s)


def restarts(events: Sequence[Event], size: int) -> Iterator[Restart]:
    """Return each death after which a peer got SIGTERM and the whole next generation started."""
    for death in (event for event in events if event.name == "die"):
        signalled = [event.at_ns for event in events if event.name == "term" and event.restarts == death.restarts]
        starts = [event.at_ns for event in events if event.name == "start" and event.restarts == death.restarts + 1]
        if signalled and len(starts) == size:
            yield Restart(*((at_ns - death.at_ns) / 1e9 for at_ns in (min(signalled), min(starts), max(starts))))


def _decided(size: int) -> str:
    return f"worker SIGKILL → agent's decision (a peer has its SIGTERM), {size} workers"


def _first(size: int) -> str:
    return f"worker SIGKILL → next generation's first instruction, {size} workers"


def _last(size: int) -> str:
    return f"worker SIGKILL → every worker's first instruction, {size} workers"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    return [
        row
        for size in SIZES
        for row in (
            limited(samples, _decided(size), seconds, below=0.005),
            compared(samples, _first(size), seconds, at_least=5),
            compared(samples, _last(size), seconds),
        )
    ]


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return ["torchrun restarts with its default monitor interval of 0.1 s; tenax has no interval."]
