"""When a worker of each framework takes its first batch after ``tenax run``: warm and cold, in turns.

    python -m benchmarks.first_step [--rounds 5] [--workers 1,2] [NAME ...]

Runs the scripts of ``examples/frameworks`` on one node. Warm is the default of ``tenax run``, cold ``--preload none``.
The CPU time is that of the whole run without the other workers: what one worker waits for, on a machine with a core for
each. It hardly depends on other load. Both results are minima.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "frameworks"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "task")
HOOK = """
import os, time

class Samples(Samples):
    def __getitem__(self, index):
        path = os.environ["FIRST_BATCH"]
        if os.environ["RANK"] == "0" and not os.path.exists(path):
            now = time.monotonic()
            with open(path, "w") as file:
                file.write(f"{now} {cpu_s(int(os.environ['ROOT']))}")
        return super().__getitem__(index)

def cpu_s(root):
    parents, ticks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    others = {pid for pid in below if pid != os.getpid() and os.getsid(pid) == pid and parents[pid] == os.getppid()}
    return sum(ticks[pid] for pid in below - others - {root}) / os.sysconf("SC_CLK_TCK")
"""


def first_batch(script: Path, workers: int, *flags: str) -> tuple[float, float]:
    """Return the seconds until the first batch, and the CPU time."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "first"
        command = [sys.executable, "-m", "tenax", "run", "--nproc-per-node", str(workers), "--max-restarts", "3"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ROOT": str(os.getpid()), "FIRST_BATCH": str(result)}
        began = time.monotonic()
        done = subprocess.run([*command, *flags, script, folder], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        at, cpu_s = map(float, result.read_text().split())
        return at - began, cpu_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("names", nargs="*", default=NAMES)
    args = parser.parse_args()
    print(f"{'':16} workers {'time: cold':>11} {'warm':>8} {'ratio':>6} {'CPU: cold':>11} {'warm':>8} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(SCRIPTS, Path(folder) / "scripts"))
        with (copy / "task.py").open("a") as file:
            file.write(HOOK)
        for name in args.names:
            for workers in map(int, args.workers.split(",")):
                rounds = []
                for _ in range(args.rounds):
                    cold = first_batch(copy / f"{name}.py", workers, "--preload", "none")
                    rounds.append((*cold, *first_batch(copy / f"{name}.py", workers)))
                cold_s, cold_cpu_s, warm_s, warm_cpu_s = map(min, zip(*rounds, strict=True))
                print(f"{name:16} {workers:7} {cold_s:9.2f} s {warm_s:6.2f} s {warm_s / cold_s:6.2f}", end=" ")
                print(f"{cold_cpu_s:9.2f} s {warm_cpu_s:6.2f} s {warm_cpu_s / cold_cpu_s:6.2f}", flush=True)


if __name__ == "__main__":
    main()
