"""The torch worker: a script that imports torch at its top, as every training script does, and then only waits.

usage: torch_worker.py EVENTS MODE

EVENTS is the harness's FIFO; each event is one line in the format that `worker.c` explains, written in one piece.
"start" is the time at which `main` was reached, after everything before it: the interpreter, torch, the launcher. It is
written only after a small sum with torch was correct: a worker without torch writes nothing.

MODE
  exit  stamp "start" and "end", exit with 0
  idle  stamp "start", wait for a signal

Like the instant worker it exits after LIFE_S, even without harness and launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

LIFE_S = 300


def main() -> int:
    """Write the start event, then act by the mode."""
    arrived_ns = time.monotonic_ns()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_S)
    path, mode = sys.argv[1:]
    events = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if int(torch.arange(4).sum()) != 6:
        return 4
    stamp(events, arrived_ns, "start")
    if mode == "exit":
        stamp(events, time.monotonic_ns(), "end")
        return 0
    while True:
        signal.pause()


def stamp(events: int, at_ns: int, name: str) -> None:
    """Write one event, in one piece."""
    variables = (
        ("RANK", "0"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("WORLD_SIZE", "1"),
        ("TENAX_GENERATION", "0"),
        ("BENCH_NODE", "0"),
    )
    who = " ".join(os.environ.get(variable, otherwise) for variable, otherwise in variables)
    os.write(events, f"{at_ns} {name} {os.getpid()} {started_ticks()} {who}\n".encode())


def started_ticks() -> int:
    """Return when this process was started: a pid can be reused, a pid with its start time cannot."""
    with open("/proc/self/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


if __name__ == "__main__":
    sys.exit(main())
