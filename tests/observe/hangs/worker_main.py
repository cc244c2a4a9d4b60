"""A worker of a job that runs in lockstep: at every step it reports to the hub and waits for the answer.

The hub (``kit.Hub``), which is the test, answers each step with one letter:

    .   continue
    p   wait for the hub in ``park``
    e   wait for an event that never comes
    q   exit with 0
"""

from __future__ import annotations

import os
import socket
import sys
import threading

from tenax import progress

hub = socket.socket(socket.AF_UNIX)
hub.connect("\0" + os.environ["HANGS_HUB"])
hub.sendall(f"{os.environ['RANK']} {os.environ['TENAX_GENERATION']} {os.getpid()}\n".encode())
reports_steps = os.environ.get("HANGS_STEPS", "")


def exchange(data: bytes) -> bytes:
    hub.sendall(data)
    return hub.recv(1)


def park() -> None:
    hub.recv(1)


def wait_for_nothing() -> None:
    threading.Event().wait()


step = 0
while True:
    match exchange(b"."):
        case b"p":
            park()
        case b"e":
            wait_for_nothing()
        case b"q" | b"":
            sys.exit(0)
    step += 1
    if reports_steps:
        progress.step(step)
