"""Job: several agents of one launcher with one endpoint, on this machine or on hosts made of namespaces.

As in the harness, a launcher is only a command, and all get the same flags. The agent that is started first serves the
endpoint: the others follow when it listens, unless all are started at once. A group is whole when all its workers have
stamped their first instruction, however a launcher numbers its generations.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks import procfs
from benchmarks.events import Event, EventPipe, whole_group
from benchmarks.harness import WORKER, Launcher, LaunchFailed
from benchmarks.running import NO_NAME_SERVER, Running, end_all

PER_AGENT = 2
FORMS_WITHIN_S = 45.0


class Missing(Exception):
    """The awaited event did not happen; the message describes what was seen instead."""


class Job:
    """Agents with `PER_AGENT` workers each, and all their processes."""

    def __init__(self, launcher: Launcher, nnodes: str, *, host: str = "127.0.0.1", conf: Sequence[str] = ()) -> None:
        self.name = launcher.name
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self.agents: list[Running] = []
        self.events = EventPipe(self.folder)
        self._launcher = launcher
        self._port = free_port()
        self._conf = ("last_call_timeout=1", *conf)
        self._flags = [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={PER_AGENT}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{self._port}",
            f"--rdzv-id={self.folder.name}",
            "--max-restarts=100",
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_all(self.agents, {event.process for event in self.events.all()})
        procfs.end(event.process for event in self.events.all())  # also those that started meanwhile
        self.events.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *, before: Sequence[str] = (), options: Sequence[str] = (), conf: Sequence[str] = ()) -> Running:
        """Start the next agent; `before` is a command prefix, for example to enter a namespace."""
        number = len(self.agents)
        command = [
            *before,
            *self._launcher.command,
            *self._flags,
            f"--rdzv-conf={','.join((*self._conf, *conf))}",
            f"--log-dir={self.logs(number)}",
            *options,
            "--no-python",
            str(WORKER),
            str(self.events.path),
            "steady",
        ]
        variables = {"BENCH_NODE": str(number), **NO_NAME_SERVER}
        agent = Running(command, self.folder, name=f"agent{number}", variables=variables)
        self.agents.append(agent)
        return agent

    def logs(self, number: int) -> Path:
        """Return the log folder of the agent of this number."""
        return self.folder / f"logs{number}"

    def wait_until_served(self) -> None:
        """Wait until the first agent listens at the endpoint. Polling is fine here: nothing is measured."""
        deadline = time.monotonic() + FORMS_WITHIN_S
        while not procfs.listens(self.agents[0].pid, self._port):
            if self.agents[0].wait_until_gone(0.01) or time.monotonic() > deadline:
                raise self.failure("its first agent did not serve the endpoint", self.agents[0])

    def form(self, agents: int) -> list[Event]:
        """Start that many agents, and wait for their first whole group."""
        while len(self.agents) < agents:
            self.start()
            if len(self.agents) == 1:
                self.wait_until_served()
        return self.formed()

    def form_at_once(self, agents: int) -> list[Event]:
        """Start that many agents at once, as a scheduler does, and wait for their first whole group."""
        while len(self.agents) < agents:
            self.start()
        return self.formed()

    def formed(self) -> list[Event]:
        """Wait for the first group of all started agents."""
        try:
            return self.group_after(0, len(self.agents), FORMS_WITHIN_S)
        except Missing as missing:
            raise self.failure(f"{len(self.agents)} agents did not form a group: {missing}", self.agents[-1]) from None

    def group_after(self, after_ns: int, agents: int, timeout_s: float) -> list[Event]:
        """Return the starts of the next whole group of that many agents, earliest first."""
        began, deadline = time.monotonic(), time.monotonic() + timeout_s
        while not (group := whole_group(self.events.all(), after_ns, agents * PER_AGENT)):
            living = [agent for agent in self.agents if not agent.gone_ns]
            if not living:
                statuses = ", ".join(str(agent.status) for agent in self.agents)
                raise Missing(f"every agent was gone after {time.monotonic() - began:.1f} s, statuses {statuses}")
            descriptors = [self.events.fileno(), *(agent.fileno() for agent in living)]
            if not select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Missing(f"not within {timeout_s:g} s")
            for agent in living:
                agent.wait_until_gone(0)
        return group

    def failure(self, what: str, whose: Running) -> LaunchFailed:
        """Return an error with an agent's last output."""
        return LaunchFailed(f"{what}; last output: {whose.last_output()}")


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
