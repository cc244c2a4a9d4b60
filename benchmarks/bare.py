"""The minimal launcher: starts the workers with `subprocess`, and waits for them.

It is the floor for comparison: no supervision, no restarts, no logs. It reads two of torchrun's flags
(`--nproc-per-node=N`, `--no-python`), ignores the others, and imports nothing of tenax.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Return 1 if a worker failed, else 0."""
    flags = []
    while arguments and arguments[0].startswith("--"):
        flags.append(arguments.pop(0))
    (workers,) = (int(flag.partition("=")[2]) for flag in flags if flag.startswith("--nproc-per-node="))
    command = arguments if "--no-python" in flags else [sys.executable, *arguments]
    started = []
    for rank in range(workers):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
        started.append(subprocess.Popen(command, env=os.environ | variables))
    return int(any([worker.wait() for worker in started]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
