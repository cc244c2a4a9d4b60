"""Real jobs for tests of hangs: agents, workers that run in lockstep, and the hub that controls them."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import time
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.jobs import Runner, Running

WORKER = str(Path(__file__).parent / "worker_main.py")
_numbers = itertools.count(1)
# On a busy machine the detector learns gaps of a second, and then waits thirty or sixty times as long.
LONG_TIMEOUT_S = 300.0
_STEP_S = 0.003


class Member:
    """The connection to one worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        file = sock.makefile("rb", buffering=0)
        self.rank, self.generation, self.pid = map(int, file.readline().split())

    def send(self, letter: str) -> None:
        self.sock.sendall(letter.encode())


class Hub:
    """Workers connect to it and wait for its answer at every step. The test decides the answers."""

    def __init__(self) -> None:
        self.name = f"tenax-hangs-{os.getpid()}-{next(_numbers)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._listener.settimeout(LONG_TIMEOUT_S)
        self.members: list[Member] = []

    def meet(self, world_size: int, generation: int = 1) -> list[Member]:
        """Wait until all workers of that generation are connected; return them by rank."""
        while sum(member.generation == generation for member in self.members) < world_size:
            sock = self._listener.accept()[0]
            sock.settimeout(LONG_TIMEOUT_S)
            self.members.append(Member(sock))
        found = [member for member in self.members if member.generation == generation]
        return sorted(found, key=lambda member: member.rank)

    @staticmethod
    def gather(members: list[Member]) -> None:
        """Wait until each of them has reached the next step."""
        for member in members:
            assert member.sock.recv(1) == b".", f"rank {member.rank} has exited"

    def step(self, members: list[Member], letters: dict[int, str] | None = None) -> None:
        """Answer a step of all: with these letters by rank, with ``.`` for the others."""
        self.gather(members)
        for member in members:
            member.send((letters or {}).get(member.rank, "."))

    def steps_for(self, seconds: float, members: list[Member]) -> None:
        """Answer all steps for this long, or longer on a busy machine, so that the detector learns the rhythm."""
        until = time.monotonic() + seconds
        steps = seconds / _STEP_S / 2
        while time.monotonic() < until or steps > 0:
            self.step(members)
            steps -= 1
            time.sleep(_STEP_S)

    def finish(self, members: list[Member]) -> None:
        self.step(members, {member.rank: "q" for member in members})

    def is_silent_for(self, seconds: float, member: Member) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(member.sock, selectors.EVENT_READ)
            return not selector.select(seconds)

    def close(self) -> None:
        for member in self.members:
            member.sock.close()
        self._listener.close()


class Job:
    """One run: its agents and its hub."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.hub = Hub()
        self.endpoint = own_endpoint()

    def start(self, *flags: str, nodes: int = 1, workers: int = 2, steps: bool = False) -> list[Running]:
        env = {"HANGS_HUB": self.hub.name, "HANGS_STEPS": "1" if steps else ""}
        rendezvous = (
            [] if nodes == 1 else ["--rdzv-backend", "tcp", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "hangs"]
        )
        common = ["--nnodes", str(nodes), "--nproc-per-node", str(workers), *rendezvous, *flags]
        return [self.runner.start(*common, "--log-dir", f"logs{node}", WORKER, env=env) for node in range(nodes)]

    def close(self) -> None:
        self.hub.close()
        self.runner.close()


def lines_of(agent: Running) -> list[str]:
    return [line[7:] for line in agent.err.splitlines() if line.startswith("tenax: ")]


def hang_report(agent: Running) -> list[str]:
    """Return the lines of the hang report of an agent; there must be exactly one."""
    lines = lines_of(agent)
    begins = [number for number, line in enumerate(lines) if " seems to hang: " in line]
    assert len(begins) == 1, agent.err
    first = begins[0]
    last = next((n for n in range(first, len(lines)) if "--on-hang" in lines[n]), None)
    if last is None:
        pytest.fail(f"the report has no end\n{agent.err}")
    return lines[first : last + 1]
