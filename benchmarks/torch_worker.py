"""The torch worker: a Python script that imports torch at its top, as every training script does, and then only
waits.

usage: torch_worker.py EVENTS MODE

EVENTS is the harness's FIFO; each event is one line of the form that `worker.c` explains, written whole. "start"
is the moment at which `main` was reached, so that it holds everything in front of it: the interpreter, torch,
whatever the launcher does. It is said only after a small sum with torch came out right: a worker without torch
says nothing.

MODE
  exit  stamp "start" and "end", leave with 0
  idle  stamp "start", wait for a signal

Like the instant worker it does not live longer than LIFE_S, even when harness and launcher are gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

LIFE_S = 300


def main() -> int:
    """Say that we are here, then do as the mode says."""
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
    """When this process was started: a pid can be given away again, a pid with its start time cannot."""
    with open("/proc/self/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


if __name__ == "__main__":
    sys.exit(main())
