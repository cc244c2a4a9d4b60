"""The agents of a lane: real processes, each with its own address, and their output with times."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kit.addresses import own_address
from kit.jobs import TIMEOUT_S, Runner

_HERE = Path(__file__).parent


class Node:
    """One agent."""

    def __init__(self, name: str, runner: Runner, hub: str, options: dict[str, Any], since: float) -> None:
        self.name = name
        self.addr = own_address()  # it also identifies the leader
        self.is_stopped = False
        self.was_killed = False
        self._lines: list[tuple[float, str]] = []
        self._since = since
        self.process = subprocess.Popen(
            [sys.executable, str(_HERE / "agent_main.py"), json.dumps({**options, "local_addr": self.addr})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=runner.home,
            env={**runner.environ, "LANE_HUB": hub, "LANE_AGENT": name},
        )
        self._reader = threading.Thread(target=self._read, name=f"console of {name}")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append((time.monotonic() - self._since, line.decode(errors="replace").rstrip()))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def console(self) -> str:
        head = f"--- {self.name} at {self.addr}, pid {self.process.pid}, exit code {self.process.poll()}"
        return "\n".join([head, *(f"{at:7.2f}  {line}" for at, line in self._lines)])

    @property
    def output(self) -> str:
        """Everything that it has printed, independent of line breaks."""
        return " ".join(" ".join(line for _, line in self._lines).split())

    def kill(self) -> None:
        self.was_killed = True
        self.is_stopped = False
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.is_stopped = True
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        if self.is_stopped:
            self.is_stopped = False
            self.process.send_signal(signal.SIGCONT)

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        if self.is_running:
            self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
