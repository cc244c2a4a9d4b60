"""Launch: command → first and last worker's first instruction, and last worker done → launcher gone.

Workers exit at once. A bare `python -c pass` and a bare spawn of the worker are measured in the same turns.
"""

from __future__ import annotations

import os
import sys

from benchmarks import harness
from benchmarks.harness import Launch, LaunchFailed, Settings
from benchmarks.report import BASELINE, OURS, Row, compared, seconds, spread, times
from benchmarks.samples import Samples

SIZES = (2, 8)
REFERENCE = "reference"
PYTHON = "python -c pass"
SPAWN = "spawn of the worker"


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    for launcher in () if settings.quick else settings.launchers:  # not measured: warms bytecode and page cache
        _launch(launcher, SIZES[0], Samples())
    for _, launcher in settings.interleaved(15):
        settings.settle(samples)
        samples.add(REFERENCE, PYTHON, harness.run_s([sys.executable, "-c", "pass"]))
        samples.add(REFERENCE, SPAWN, harness.run_s([str(harness.WORKER), os.devnull, "exit"]))
        for size in SIZES[:1] if settings.quick else SIZES:
            settings.settle(samples)
            _launch(launcher, size, samples)


def _launch(launcher: harness.Launcher, size: int, samples: Samples) -> None:
    with Launch(launcher, size, ["exit"]) as launch:
        try:
            launch.wait(60)
        except LaunchFailed as failure:
            samples.fail(launcher.name, f"launch of {size} workers: {failure}")
            return
        starts, ends = launch.named("start"), launch.named("end")
        if len(starts) != size or len(ends) != size:
            samples.fail(launcher.name, f"launch of {size} workers: {len(starts)} started and {len(ends)} ended")
            return
        samples.add(launcher.name, _first(size), (starts[0].at_ns - launch.started_ns) / 1e9)
        samples.add(launcher.name, _last(size), (starts[-1].at_ns - launch.started_ns) / 1e9)
        samples.add(launcher.name, _gone(size), (launch.gone_ns - ends[-1].at_ns) / 1e9)


def _first(size: int) -> str:
    return f"command → first worker instruction, {size} workers"


def _last(size: int) -> str:
    return f"command → last worker's first instruction, {size} workers"


def _gone(size: int) -> str:
    return f"last worker done → launcher gone, {size} workers"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    return [
        row
        for size in SIZES
        for row in (
            compared(samples, _first(size), seconds, at_least=15),
            _beside_python(samples, size),
            compared(samples, _last(size), seconds),
            compared(samples, _gone(size), seconds, at_least=15),
        )
    ]


def _beside_python(samples: Samples, size: int, at_most: float = 8) -> Row:
    python = samples.summary(REFERENCE, PYTHON)
    multiples = {}
    for who in (BASELINE, OURS):
        first = samples.summary(who, _first(size))
        if first and python:
            multiples[who] = first.median / python.median
    passed = multiples[OURS] <= at_most if OURS in multiples else None
    shown = {who: times(multiple) for who, multiple in multiples.items()}
    what = f"the same, as a multiple of a bare `{PYTHON}`, {size} workers"
    return Row(what, shown.get(BASELINE, "–"), shown.get(OURS, "–"), bar=f"≤ {at_most:g}×", passed=passed)


def notes(samples: Samples) -> list[str]:
    """Return the notes with the references."""
    return [
        f"`{PYTHON}` with the same interpreter: {spread(samples.summary(REFERENCE, PYTHON), seconds)}; "
        f"{SPAWN}: {spread(samples.summary(REFERENCE, SPAWN), seconds)}."
    ]
