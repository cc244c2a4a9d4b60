"""What the scripts of the end-to-end tests share: copied next to each of them, and run inside real workers.

A worker tells the test something with a *note*, a small file that appears whole; the test waits for it. Needs nothing
but the standard library, and knows nothing of tenax.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
NOTES = Path(os.environ["E2E_NOTES"])


def note(name: str, text: object = "", rank: int | None = None) -> None:
    """Leave a note for the test."""
    path = NOTES / f"{name}.{RANK if rank is None else rank}.{ATTEMPT}"
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    half.write_text(str(text))
    half.rename(path)


def noted(name: str, rank: int | None = None) -> bool:
    return (NOTES / f"{name}.{RANK if rank is None else rank}.{ATTEMPT}").exists()


def wait_for(name: str, rank: int | None = None) -> None:
    """Wait for another one's note, or the test's."""
    while not noted(name, rank):
        time.sleep(0.002)


def ready() -> None:
    """I am here, with this pid; returns when all workers of this attempt are."""
    note("ready", os.getpid())
    for rank in range(WORLD):
        wait_for("ready", rank)


def ignore(*names: str) -> None:
    for name in names:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def stay() -> None:
    """Until somebody ends us."""
    while True:
        signal.pause()


def daemon(name: str) -> None:
    """Leave a grandchild of the nastiest kind: own session, orphaned, deaf to everything that can be ignored."""
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
    """Print many lines, in writes that do not respect them."""
    data = "".join(f"{text(number)}\n" for number in range(lines)).encode()
    sys.stdout.flush()
    for start in range(0, len(data), 4093):
        view = memoryview(data)[start : start + 4093]
        while view:
            view = view[os.write(stream, view) :]
