"""The functions that workers of ``test_local_agent.py`` run.

Not in the module of tests, because a spawned worker would import pytest with it, for 0.2 s.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def identify(text: str) -> tuple[str, str, str]:
    return text, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def fail_first(folder: str) -> str:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < 2 and os.environ["RANK"] == "1":
        raise ValueError(f"attempt {attempt}")
    return f"attempt {attempt}"


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    signal.pause()


def environment(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


def kill_my_parent(notes: str, leaves_a_daemon: bool) -> None:
    """A worker, optionally with a child in another session, which the death of the keeper does not reach."""
    keeper = os.getppid()

    def note() -> None:
        with open(notes, "a") as file:
            print(os.getpid(), file=file, flush=True)

    note()
    if leaves_a_daemon and os.fork() == 0:
        os.setsid()
        note()
        leaves_a_daemon = False
    if not leaves_a_daemon:
        os.kill(keeper, signal.SIGKILL)
    while True:
        signal.pause()


def wait_for_a_line(fifo: str) -> None:
    Path(fifo).write_text("here\n")
    Path(fifo).read_text()
