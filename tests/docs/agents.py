"""``tenax run`` in real processes, as a reader would start it, and its output line by line."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LONGEST_S = 120


class Agent:
    """``tenax run`` in its own process, and its output line by line."""

    def __init__(self, args: list[str], folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tenax", "run", *args],
            cwd=folder,
            env={
                **os.environ,
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "TENAX_RDZV_TOKEN": "a secret for this test",
                **env,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._queue: queue.Queue[str] = queue.Queue()
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"--- exit code {self.process.poll()}\n" + "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for the next line that matches, and return the match."""
        while True:
            try:
                self.lines.append(self._queue.get(timeout=LONGEST_S))
            except queue.Empty:
                raise AssertionError(f"no line matches {pattern!r}; the lines are\n" + "\n".join(self.lines)) from None
            if found := re.search(pattern, self.lines[-1]):
                return found

    def ended(self) -> int:
        code = self.process.wait(LONGEST_S)
        self._reader.join(LONGEST_S)
        while not self._queue.empty():
            self.lines.append(self._queue.get())
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(LONGEST_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts agents, which are killed after the test."""
    started: list[Agent] = []

    def start_one(args: list[str], **env: str) -> Agent:
        started.append(Agent(args, tmp_path, env))
        return started[-1]

    yield start_one
    for agent in started:
        agent.close()
