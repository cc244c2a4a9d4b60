"""Launch: command → first and last worker's first instruction, and last worker done → launcher gone.

Workers exit at once. A bare spawn of the worker is measured in the same turns, and tenax next to a bare
`python -c pass` in an environment with tenax alone: other packages may have code that runs at every start of Python.
"""

from __future__ import annotations

import os
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import tenax
from benchmarks import harness
from benchmarks.harness import Launch, Launcher, LaunchFailed, Settings
from benchmarks.report import OURS, Row, compared, seconds, spread, times
from benchmarks.samples import Samples

SIZES = (2, 8)
REFERENCE = "reference"
ALONE = "tenax alone"
PYTHON = "python -c pass"
SPAWN = "spawn of the worker"


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    with _environment_of_its_own() as python:
        alone = Launcher(ALONE, (python, "-m", "tenax", "run"))
        # Not measured: warms bytecode and page cache.
        for launcher in () if settings.quick else (*settings.launchers, alone):
            _launch(launcher, SIZES[0], Samples())
        for _, launcher in settings.interleaved(15):
            settings.settle(samples)
            samples.add(REFERENCE, SPAWN, harness.run_s([str(harness.WORKER), os.devnull, "exit"]))
            for each in (launcher, alone) if launcher.name == OURS else (launcher,):
                for size in SIZES[:1] if settings.quick else SIZES:
                    settings.settle(samples)
                    if each is alone:
                        samples.add(REFERENCE, PYTHON, harness.run_s([python, "-c", "pass"]))
                    _launch(each, size, samples)


@contextmanager
def _environment_of_its_own() -> Iterator[str]:
    """Create an environment with tenax and the package that it imports; return its interpreter."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        venv.create(folder, symlinks=True)
        packages = next(Path(folder).glob("lib/python*/site-packages"))
        for package in (tenax, msgspec):
            assert package.__file__ is not None
            (packages / package.__name__).symlink_to(Path(package.__file__).parent)
        yield str(Path(folder) / "bin" / "python")


def _launch(launcher: Launcher, size: int, samples: Samples) -> None:
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
            compared(samples, _first(size), seconds, at_least=20),
            _beside_python(samples, size),
            compared(samples, _last(size), seconds),
            compared(samples, _gone(size), seconds, at_least=15),
        )
    ]


def _beside_python(samples: Samples, size: int, at_most: float = 6) -> Row:
    first, python = samples.summary(ALONE, _first(size)), samples.summary(REFERENCE, PYTHON)
    multiple = first.median / python.median if first and python else None
    return Row(
        f"the same in an environment with tenax alone, as a multiple of a bare `{PYTHON}` there, {size} workers",
        "–",
        times(multiple) if multiple is not None else "–",
        bar=f"≤ {at_most:g}×",
        passed=multiple <= at_most if multiple is not None else None,
    )


def notes(samples: Samples) -> list[str]:
    """Return the notes with the references."""
    return [
        f"In an environment with tenax alone: `{PYTHON}` {spread(samples.summary(REFERENCE, PYTHON), seconds)}, first "
        f"worker instruction {spread(samples.summary(ALONE, _first(SIZES[0])), seconds)}; "
        f"{SPAWN}: {spread(samples.summary(REFERENCE, SPAWN), seconds)}."
    ]
