"""Logs: four workers print a million lines, teed to one stream; how many arrive, whole and in order, and how fast.

Delivered lines are distinct whole lines in the sink. Their rate is measured from the first worker's first instruction
until the launcher has exited, when a user can rely on them. A second row has the rate until the last write into the
sink, since a launcher may be fast with its lines and slow to exit.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from benchmarks import harness
from benchmarks.harness import Launch, Launcher, LaunchFailed, Settings
from benchmarks.report import BASELINE, NOTHING, OURS, Row, compared, lines_per_second, spread
from benchmarks.samples import Samples

SIZE = 4
SINKS = ("file", "pipe")
REFERENCE = "reference"
FAULTS = ("missing", "duplicated", "broken", "out_of_order")
UNTOUCHED = "workers that write straight to a file"
LINE = re.compile(
    rb"(?:\[[^\]]*\]: ?)?(\d+) (\d{9}) a training step has a loss, a rate and a few more words to print\n"
)


@dataclass(frozen=True)
class Check:
    """Which of the workers' lines arrived."""

    delivered: int
    missing: int
    duplicated: int
    broken: int
    out_of_order: int


def check(lines: Iterable[bytes], ranks: int, per_rank: int) -> Check:
    """Check every line of every rank, with or without a prefix such as `[default0]:`."""
    seen = [bytearray(per_rank) for _ in range(ranks)]
    expected = [0] * ranks
    duplicated = broken = out_of_order = 0
    for line in lines:
        found = LINE.fullmatch(line)
        rank, number = (int(found[1]), int(found[2])) if found else (ranks, 0)
        if rank >= ranks or number >= per_rank:
            broken += 1
        elif seen[rank][number]:
            duplicated += 1
        else:
            seen[rank][number] = 1
            out_of_order += number < expected[rank]
            expected[rank] = max(expected[rank], number + 1)
    delivered = sum(sum(marks) for marks in seen)
    return Check(delivered, ranks * per_rank - delivered, duplicated, broken, out_of_order)


class Sink:
    """The target of a launcher's stdout: a file, or a pipe that another process copies to a file at full speed."""

    def __init__(self, kind: str) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115, closed when the sink is left
        self.stdout = self.file.fileno()
        self._drain: threading.Thread | None = None
        if kind == "pipe":
            outlet, self.stdout = os.pipe()
            self._drain = threading.Thread(target=self._empty, args=(outlet,), daemon=True)
            self._drain.start()

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hand_over()
        self.file.close()

    def _empty(self, outlet: int) -> None:
        while os.splice(outlet, self.file.fileno(), 1 << 20):
            pass
        os.close(outlet)

    def hand_over(self) -> None:
        """Close this copy of the pipe, so that it ends with its last writer."""
        if self.stdout != self.file.fileno():
            os.close(self.stdout)
            self.stdout = self.file.fileno()

    def last_write_s(self) -> float:
        """Return when the last byte arrived, on the monotonic clock (within a few milliseconds, the kernel's tick)."""
        if self._drain:
            self._drain.join(30)
        return os.fstat(self.file.fileno()).st_mtime - time.time() + time.monotonic()


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    per_rank = 20_000 if settings.quick else 250_000
    for _, launcher in settings.interleaved(3):
        samples.add(REFERENCE, UNTOUCHED, _untouched(per_rank))
        for kind in SINKS:
            settings.settle(samples)
            with Sink(kind) as sink:
                _tee(launcher, kind, sink, per_rank, samples)


def _tee(launcher: Launcher, kind: str, sink: Sink, per_rank: int, samples: Samples) -> None:
    who = launcher.name
    with Launch(launcher, SIZE, ["lines", str(per_rank)], options=["--tee=3"], stdout=sink.stdout) as launch:
        sink.hand_over()
        try:
            launch.wait(240)
        except LaunchFailed as failure:
            samples.fail(who, f"tee to a {kind}: {failure}")
            return
        started_s = launch.named("start")[0].at_ns / 1e9
        gone_s, written_s = launch.gone_ns / 1e9 - started_s, sink.last_write_s() - started_s
        kept = 0
        for path in launch.folder.rglob("stdout.log"):
            with path.open("rb") as file:
                kept += check(file, SIZE, per_rank).delivered
    sink.file.seek(0)
    result = check(sink.file, SIZE, per_rank)
    samples.add(who, _rate(kind), result.delivered / max(gone_s, written_s))
    samples.add(who, _until_written(kind), result.delivered / written_s)
    for fault in FAULTS:
        samples.add(who, f"{fault} in the {kind}", getattr(result, fault))
    samples.add(who, f"missing in the log files, {kind}", SIZE * per_rank - kept)


def _untouched(per_rank: int) -> float:
    """Return lines per second of the same workers that write directly to files."""
    started_ns = time.monotonic_ns()
    with tempfile.TemporaryFile() as file:
        command = [str(harness.WORKER), os.devnull, "lines", str(per_rank)]
        workers = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file) for _ in range(SIZE)]
        for worker in workers:
            worker.wait(60)
    return SIZE * per_rank / ((time.monotonic_ns() - started_ns) / 1e9)


def _rate(kind: str) -> str:
    return f"tee from {SIZE} workers to a {kind}, delivered lines"


def _until_written(kind: str) -> str:
    return f"the same, until the last write into the {kind}"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    return [
        row
        for kind in SINKS
        for row in (
            compared(samples, _rate(kind), lines_per_second, at_least=5, more_is_better=True),
            compared(samples, _until_written(kind), lines_per_second, more_is_better=True),
            _every_line(samples, kind),
        )
    ]


def _every_line(samples: Samples, kind: str) -> Row:
    shown, clean = {}, {}
    for who in (BASELINE, OURS):
        sums = {fault: int(sum(samples.all(who, f"{fault} in the {kind}"))) for fault in FAULTS}
        sums["missing in files"] = int(sum(samples.all(who, f"missing in the log files, {kind}")))
        launches = len(samples.all(who, f"missing in the {kind}"))
        if launches:
            clean[who] = not any(sums.values())
            faults = ", ".join(f"{number:,} {fault.replace('_', ' ')}" for fault, number in sums.items() if number)
            shown[who] = f"{faults or 'every line, in order'} ({launches} launches)"
    what = f"tee to a {kind}: lines that did not arrive once, whole and in order"
    return Row(what, shown.get(BASELINE, NOTHING), shown.get(OURS, NOTHING), bar="none", passed=clean.get(OURS))


def notes(samples: Samples) -> list[str]:
    """Return the note with the reference."""
    return [f"{UNTOUCHED}: {spread(samples.summary(REFERENCE, UNTOUCHED), lines_per_second)}."]
