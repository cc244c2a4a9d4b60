"""The functions that processes of ``test_pcontext.py`` run.

Not in the module of tests, because a spawned worker would import pytest with it, for 0.2 s.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

RAISE_AND_EXIT_SLOWLY = """
import atexit, os, signal, sys
from pathlib import Path
from tenax.multiprocessing.errors import record

@record
def main(rank, folder):
    if rank == 0:
        atexit.register(signal.pause)  # it is still exiting when the signal arrives
        atexit.register(Path(folder, "raised").touch)
        raise RuntimeError("the first")
    while not Path(folder, "raised").exists():
        signal.sigtimedwait([], 0.005)
    raise RuntimeError("the second")

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


def double(number: int) -> int:
    print(f"doubling {number} in {os.environ['LABEL']}")
    return 2 * number


def raise_if_odd(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    signal.pause()
    return number


def return_or_watch(rank: int, end: str, folder: str) -> object:
    """Rank 0 publishes its pid and returns; rank 1 checks that the process stays, then ends as ``end`` describes."""
    published, watched = Path(folder, "pid"), Path(folder, "watched")
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: None)
        Path(folder, "half").write_text(str(os.getpid()))
        Path(folder, "half").rename(published)
        return "first"
    while not published.exists():
        time.sleep(0.002)
    peer = os.pidfd_open(int(published.read_text()))
    is_alive_still = not select.select([peer], [], [], 0.2)[0]
    match end:
        case "exit":
            os._exit(0)
        case "raise":
            raise ValueError("the last one")
        case "hang":
            watched.touch()
            signal.pause()
    return is_alive_still


def raise_and_exit_slowly(rank: int, folder: str) -> None:
    """Rank 0 raises and takes long to exit; rank 1 then raises and exits."""
    scope: dict[str, Any] = {"__name__": "worker"}
    exec(RAISE_AND_EXIT_SLOWLY, scope)
    scope["main"](rank, folder)
