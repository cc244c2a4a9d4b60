"""The process on each host: it starts the agent, and no agent outlives it or its input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tenax
from kit.processes import TIMEOUT_S, gone, on_linux

pytestmark = on_linux

AGENT = """
import os, signal, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "end" in sys.argv:
    print("no newline", end="", flush=True)
    sys.exit(5)
print(os.getpid(), os.getcwd(), os.environ["NAME"], sys.stdin.read() == "", flush=True)
while True:
    signal.pause()
"""


class Guard:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "tenax._processes.start_guard"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def send(self, request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n" + json.dumps(request).encode() + b"\n\n")  # between heartbeats

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode()

    def check(self, folder: str = "/", endpoint: str = "", silence_s: float = TIMEOUT_S) -> str:
        self.send({"marker": "MARK", "folder": folder, "endpoint": endpoint, "silence_s": silence_s})
        return self.line()

    def start(self, *args: str) -> int:
        """Start the agent. Return its pid."""
        self.check()
        argv = [sys.executable, "-I", "-S", "-c", AGENT, *args]
        self.send({"argv": argv, "folder": "/tmp", "env": {"NAME": "value"}})
        if "end" in args:
            return 0
        pid, *rest = self.line().split()
        assert rest == ["/tmp", "value", "True"]
        return int(pid)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()
    made.process.wait(TIMEOUT_S)
    made.process.stdout.close()


def test_the_check_describes_the_host(guard: Guard) -> None:
    marker, _, text = guard.check("/no/such", "no.such.host.invalid").partition(" ")
    found = json.loads(text)
    assert marker == "MARK"
    assert (found["tenax"], found["has_folder"]) == (tenax.__version__, False)
    assert found["unresolved"] == "no.such.host.invalid"
    guard.close()
    assert guard.process.wait(TIMEOUT_S) == 0


def test_the_exit_code_follows_the_output(guard: Guard) -> None:
    guard.start("end")
    assert guard.line() == "no newlineMARK 5\n"


def test_signals_are_forwarded(guard: Guard) -> None:
    guard.start()
    guard.process.send_signal(signal.SIGTERM)  # ignored: a scheduler sends it to the agent too
    guard.send(int(signal.SIGINT))
    assert guard.line() == "MARK -2\n"


@pytest.mark.parametrize(("argument", "code"), [("", -15), ("deaf", -9)])
def test_the_agent_ends_with_the_input(guard: Guard, argument: str, code: int) -> None:
    agent = guard.start(argument)
    guard.close()
    assert gone([agent], 2.0)
    assert guard.line() == f"MARK {code}\n"


def test_the_agent_ends_after_a_silence(guard: Guard) -> None:
    """As when the network of the starter is gone."""
    guard.check(silence_s=1.0)
    guard.send({"argv": [sys.executable, "-I", "-S", "-c", AGENT], "folder": "/tmp", "env": {"NAME": "value"}})
    lines = [guard.line(), guard.line()]  # the first one is missing if the agent starts slowly
    assert "MARK -15\n" in lines


def test_the_agent_ends_with_the_guard(guard: Guard) -> None:
    agent = guard.start("deaf")
    guard.process.kill()
    assert gone([agent], 1.0)


def test_an_agent_that_cannot_be_started(guard: Guard) -> None:
    guard.check()
    guard.send({"argv": ["/no/such/python"], "folder": os.sep, "env": {}})
    assert guard.line() == "MARK 71\n"
