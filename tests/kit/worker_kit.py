"""Helpers for the scripts of end-to-end tests: copied next to each of them, and run inside real workers.

A worker reports something to the test with a *note*, a small file that is created atomically; the test waits for it.
Does not use tenax, and imports as little as possible, because thousands of workers import it.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
NOTES = os.environ["E2E_NOTES"]


def _path(name: str, rank: int | None) -> str:
    return f"{NOTES}/{name}.{RANK if rank is None else rank}.{ATTEMPT}"


def note(name: str, text: object = "", rank: int | None = None) -> None:
    """Leave a note for the test."""
    path = _path(name, rank)
    partial = f"{path}.{os.getpid()}.partial"
    with open(partial, "w") as file:
        file.write(str(text))
    os.rename(partial, path)


def noted(name: str, rank: int | None = None) -> bool:
    return os.path.exists(_path(name, rank))


def wait_for(name: str, rank: int | None = None) -> None:
    """Wait for a note of another worker or of the test."""
    while not noted(name, rank):
        time.sleep(0.002)


def ready() -> None:
    """Report this pid; return when all workers of this attempt have."""
    note("ready", os.getpid())
    for rank in range(WORLD):
        wait_for("ready", rank)


def ignore(*names: str) -> None:
    import signal

    for name in names:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def stay() -> None:
    """Wait until a signal ends this process."""
    while True:
        select.select([], [], [])


def daemon(name: str) -> None:
    """Start a grandchild that is hard to end: own session, orphaned, ignoring all signals that can be ignored."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ignore("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
            note(name, os.getpid())
            stay()
        os._exit(0)
    os.wait()
    wait_for(name)


def flood(stream: int, lines: int, text: Callable[[int], str]) -> None:
    """Print many lines, in writes that do not end at line ends."""
    data = "".join(f"{text(number)}\n" for number in range(lines)).encode()
    sys.stdout.flush()
    for start in range(0, len(data), 4093):
        view = memoryview(data)[start : start + 4093]
        while view:
            view = view[os.write(stream, view) :]
