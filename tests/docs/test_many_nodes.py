"""Several nodes as the guides show them: agents on loopback, started as a reader would start them."""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from watching import on_linux

from .pages import DOCS, ROOT, samples

pytestmark = on_linux

LONGEST_S = 120


class Agent:
    """``tenax run`` in a process of its own, and what it says, line by line."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tenax", "run", *words],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "TENAX_RDZV_TOKEN": "for this test"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Agent]]:
    """Starts an agent; all of them are gone after the test."""
    started: list[Agent] = []

    def start_one(words: list[str]) -> Agent:
        started.append(Agent(words, tmp_path))
        return started[-1]

    yield start_one
    for agent in started:
        agent.process.kill()
        agent.process.wait()


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_two_terminals_on_one_machine(start: Callable[[list[str]], Agent], tmp_path: Path) -> None:
    """The first steps of the guide: its line in two terminals, with the script of the first page, and what it says."""
    script = next(each.text for each in samples(DOCS / "getting-started.md") if each.text.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    guide = (DOCS / "guides" / "many-nodes.md").read_text()
    page = guide.partition("## Try it on one machine")[2].partition("\n## ")[0]
    line = re.search(r"^\$ tenax run (.+)$", page, re.MULTILINE)
    assert line is not None
    words = shlex.split(line[1].replace("--rdzv-endpoint 127.0.0.1", f"--rdzv-endpoint {free_endpoint()}"))
    one, other = start(words), start(words)
    assert [one.ended(), other.ended()] == [0, 0], one.said + other.said
    said = one.said + other.said
    assert sorted(each[len("[default0]:") :] for each in said if each.startswith("[default")) == [
        f"rank {rank} of 4, step {step}" for rank in range(4) for step in range(3)
    ]
    for sentence in re.findall(r"^tenax: ((?:generation|all workers|the run) .+)$", page, re.MULTILINE):
        assert f"tenax: {sentence}" in said


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_training_example_loses_no_step_when_a_node_leaves(
    start: Callable[[list[str]], Agent], tmp_path: Path
) -> None:
    """One of two nodes is asked to leave: all save after the same step, and the other goes on after that one."""
    words = ["--nnodes", "1:2", "--rdzv-endpoint", free_endpoint(), "--rdzv-id", "leaving", "--max-restarts", "0"]
    words += ["--rdzv-conf", "last_call_timeout=100", "--shutdown-timeout", "60"]
    words += [str(ROOT / "examples" / "train_elastic.py"), "--folder", str(tmp_path / "checkpoints")]
    words += ["--steps", "1000000", "--save-every", "1000000", "--seconds-per-step", "0.01"]
    stays = start(words)
    stays.until("this node serves the coordinator")  # else the one that leaves might, and would stay for the others
    leaves = start(words)
    for agent in (stays, leaves):
        agent.until("generation 1 goes on after step 0")
    leaves.process.send_signal(signal.SIGTERM)
    last = stays.until(r"rank \d leaves after step (\d+)")[1]
    assert stays.until(r"rank 0 of 1: generation 2 goes on after step (\d+)")[1] == last
    assert leaves.ended() == 128 + signal.SIGTERM
    stays.process.send_signal(signal.SIGTERM)
    assert stays.ended() == 128 + signal.SIGTERM
