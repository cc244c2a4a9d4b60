"""A job that survives the death of its workers: count, checkpoint, resume.

    tenax run --nproc-per-node 4 --max-restarts 3 examples/elastic_counter.py --folder /tmp/counter

It stands in for a training script and needs no framework. The numbers below ``--numbers`` are distributed to the
workers by rank; each worker adds up its own, one per step, and saves (step, sum) every few steps. After a restart a
worker loads its last checkpoint and continues from there. At the end the saved sums add up to the sum of all numbers:
no step was lost and none was counted twice.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


class Checkpoint:
    """One worker's progress, in one file. It is replaced atomically: a reader sees the old one or the new one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank_{rank}.json"
        self.step = 0
        self.total = 0
        if self._path.exists():
            saved = json.loads(self._path.read_text())
            self.step, self.total = saved["step"], saved["total"]

    def save(self) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"step": self.step, "total": self.total}))
        unfinished.replace(self._path)


def main() -> None:
    args = parse()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = range(rank, args.numbers, world_size)
    args.folder.mkdir(parents=True, exist_ok=True)

    progress = Checkpoint(args.folder, rank)
    begin = f"resumes at step {progress.step}" if progress.step else "begins"
    print(f"rank {rank} (pid {os.getpid()}) {begin}", flush=True)

    while progress.step < len(mine):
        if rank == args.fail_rank and progress.step >= args.fail_step:
            raise RuntimeError(f"the loss is not a number at step {progress.step}")
        progress.total += mine[progress.step]
        progress.step += 1
        time.sleep(args.seconds_per_step)  # the training
        if progress.step % args.save_every == 0 or progress.step == len(mine):
            progress.save()
            print(f"rank {rank} saved step {progress.step} of {len(mine)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count together, and resume after a restart.")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--numbers", type=int, default=80)
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--seconds-per-step", type=float, default=0.05)
    parser.add_argument("--fail-rank", type=int, default=-1, help="this rank raises an exception in every generation")
    parser.add_argument("--fail-step", type=int, default=0, help="... when it reaches this step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
