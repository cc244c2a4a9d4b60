"""On a machine with a GPU: launch → first step, and SIGKILL of a worker → first step of the next generation.

    python -m benchmarks.gpu OUT.md [REPETITIONS]

The same data-parallel script (``gpu_worker.py``) runs under torchrun, under tenax with cold workers and under tenax
with warm ones, in turns, each started by the interpreter that runs this. Writes a Markdown page with the table and the
raw stamps. Needs torch with CUDA; it is not part of ``./dev bench``, whose machine has no GPU.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
WHO = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "tenax, cold": [sys.executable, "-m", "tenax", "run", "--preload=none"],
    "tenax, warm": [sys.executable, "-m", "tenax", "run", "--preload=auto"],
}
CASES = {"1 worker, NCCL": (1, "nccl")}  # NCCL does not allow two workers on one GPU
DEATHS = 2
TIMEOUT_S = 75
RELEVANT = ("warm", "cold", "preload", "Error: ", "the launcher ")
Stamps = list[tuple[str, int, int, int]]


def launch(command: list[str], workers: int, backend: str) -> tuple[int, Stamps, str]:
    """Return the time of the command, all stamps, and the launcher's output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stamps"
        flags = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={DEATHS}"]
        began = time.monotonic_ns()
        arguments = [*command, *flags, str(HERE / "gpu_worker.py"), str(path), str(DEATHS), backend]
        with open(Path(folder) / "output", "w+") as output_file:
            running = subprocess.Popen(arguments, stdout=output_file, stderr=output_file)
            try:
                how = f"exited with {running.wait(TIMEOUT_S)}"
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGTERM)
                running.wait(60)
                how = f"still ran after {TIMEOUT_S} s and was stopped"
            output_file.seek(0)
            output = output_file.read()
        lines = [line.split() for line in path.read_text().splitlines()]
        stamps = [(event, int(restarts), int(rank), int(ns)) for event, restarts, rank, ns in lines]
        return began, stamps, f"{output}\nthe launcher {how}"


def figures(began: int, stamps: Stamps) -> dict[str, list[float]]:
    """Return seconds by measure, always until the last worker."""

    def last(event: str, restarts: int) -> int | None:
        return max((ns for name, count, _, ns in stamps if (name, count) == (event, restarts)), default=None)

    spans = [("command → all in main", began, last("main", 0)), ("command → first step of all", began, last("step", 0))]
    for death in range(DEATHS):
        for event, name in (("main", "all in main again"), ("step", "first step of all")):
            spans.append((f"worker SIGKILL → {name}", last("die", death), last(event, death + 1)))
    found: dict[str, list[float]] = {}
    for measure, start, end in spans:
        found.setdefault(measure, [])
        if start is not None and end is not None:  # else it did not happen
            found[measure].append((end - start) / 1e9)
    return found


def page(taken: dict[tuple[str, str, str], list[float]], raw: list[str]) -> str:
    """The report."""
    import torch

    measures = dict.fromkeys((case, measure) for case, _, measure in taken)
    rows = [
        "| measure | warm vs torchrun | cold vs torchrun | torchrun | tenax, cold | tenax, warm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, measure in measures:
        samples = {who: taken[case, who, measure] for who in WHO}
        middle = {who: statistics.median(found) for who, found in samples.items() if found}
        ratios = [
            f"{middle['torchrun'] / middle[who]:.1f}×" if who in middle and "torchrun" in middle else ""
            for who in ("tenax, warm", "tenax, cold")
        ]
        cells = [
            f"{middle[who]:.2f} s [{min(found):.2f}, {max(found):.2f}] n={len(found)}" if found else "did not happen"
            for who, found in samples.items()
        ]
        rows.append(f"| {measure}, {case} | {' | '.join([*ratios, *cells])} |")
    machine = (
        f"{torch.cuda.get_device_name()}, Python {sys.version.split()[0]}, torch {torch.__version__}, one GPU. "
        "`python -m benchmarks.gpu`; medians [smallest, largest]; launchers in turns."
    )
    folded = ["<details><summary>raw output</summary>", "", "```", *raw, "```", "", "</details>", ""]
    return "\n".join([machine, "", *rows, "", *folded])


def main() -> None:
    out = Path(sys.argv[1])
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    taken: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    raw = []
    for case, (workers, backend) in CASES.items():
        for repetition in range(repetitions):
            for who, command in WHO.items():
                began, stamps, output = launch(command, workers, backend)
                for measure, seconds in figures(began, stamps).items():
                    taken[case, who, measure] += seconds
                raw.append(f"# {case}, {who}, repetition {repetition}; seconds after the command")
                raw += [f"{event} {count} {rank} {(ns - began) / 1e9:.3f}" for event, count, rank, ns in stamps]
                raw += [f"  {line}" for line in output.splitlines() if any(word in line for word in RELEVANT)]
                print(case, who, repetition, figures(began, stamps), flush=True)
    out.write_text(page(taken, raw))


main()
