"""Agents as a reader would start them: ``tenax run`` in processes of their own, and what they say, line by line."""

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
    """``tenax run`` in a process of its own, and what it says, line by line."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tenax", "run", *words],
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
        self._lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"--- exit code {self.process.poll()}\n" + "\n".join(self.said)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def until(self, pattern: str) -> re.Match[str]:
        """The next line that matches."""
        while True:
            try:
                self.said.append(self._lines.get(timeout=LONGEST_S))
            except queue.Empty:
                raise AssertionError(f"waited in vain for {pattern!r} after\n" + "\n".join(self.said)) from None
            if found := re.search(pattern, self.said[-1]):
                return found

    def ended(self) -> int:
        code = self.process.wait(LONGEST_S)
        self._reader.join(LONGEST_S)
        while not self._lines.empty():
            self.said.append(self._lines.get())
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
    """Starts an agent; all of them are gone after the test."""
    started: list[Agent] = []

    def start_one(words: list[str], **env: str) -> Agent:
        started.append(Agent(words, tmp_path, env))
        return started[-1]

    yield start_one
    for agent in started:
        agent.close()
