"""How long after ``tenax run`` the first training step is done, warm and cold, for each framework.

    python -m benchmarks.first_step [--rounds 5] [NAME ...]

Runs the scripts of ``examples/frameworks`` on one node, in turns. Warm is the default of ``tenax run``; cold is ``--preload
none``. The time of the first step is the one that the worker reports (``tenax.progress``). Results are minima, because
other processes only add to them. Workers stop after their first steps.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "frameworks"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "task")
LAYOUT = struct.Struct("<8sqqddQ32s")  # as in tenax.progress


def first_step(script: Path, workers: int, *flags: str) -> float:
    """Return the seconds until the slowest worker has made its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tenax", "run", "--nproc-per-node", str(workers), "--max-restarts", "3"]
        logs = Path(folder) / "logs"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--log-dir", logs, *flags, script, folder], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return max(LAYOUT.unpack(path.read_bytes())[3] for path in logs.rglob("progress")) - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("names", nargs="*", default=NAMES)
    args = parser.parse_args()
    print(f"{'':20} {'workers':>7} {'cold':>8} {'warm':>8} {'warm/cold':>9}")
    for name in args.names:
        for workers in (1, 2):
            cold, warm = [], []
            for _ in range(args.rounds):
                cold.append(first_step(SCRIPTS / f"{name}.py", workers, "--preload", "none"))
                warm.append(first_step(SCRIPTS / f"{name}.py", workers))
            ratio = min(warm) / min(cold)
            print(f"{name:20} {workers:7} {min(cold):6.2f} s {min(warm):6.2f} s {ratio:9.2f}", flush=True)


if __name__ == "__main__":
    main()
