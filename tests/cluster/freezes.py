"""Stops agents with SIGSTOP for longer than a lease while something else happens, then continues them.

After each freeze the run must have settled with all nodes, and no worker may have seen one of another generation alive
(``exclusive_worker_main.py``). Only agents are stopped: the keeper and the workers of a stopped agent keep running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kit.cluster import Agent, Cluster, Worker

NODES = 3
_TAKES_OVER = "this node takes over"
# The variables that a worker reports.
_SHOWN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
_SHOWN += " MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
_SHOWN += " TENAX_GENERATION TENAX_GENERATION_REASON"


class Freezes:
    """A run of 2 to 3 nodes. ``KINDS`` are the events that can happen during a freeze."""

    def __init__(self, cluster: Cluster, lease_s: float, pause_s: float) -> None:
        self.cluster = cluster
        self.pause_s = pause_s
        conf = {"keep_alive_interval": lease_s / 5, "keep_alive_max_attempt": 5, "last_call_timeout": 0.2}
        script = str(Path(__file__).with_name("exclusive_worker_main.py"))
        cluster.options |= {"nodes": (2, NODES), "script": script, "grace_s": 2, "max_restarts": 1000}
        cluster.options["conf"] = {**cluster.options["conf"], **conf}
        self.server, *self.others = cluster.start_in_order(NODES)
        self.workers = self.settle()

    def settle(self, after: int = 0) -> list[Worker]:
        """Wait for a complete generation after ``after`` with all nodes, and return its workers."""
        hub = self.cluster.hub
        while True:
            groups: dict[int, list[Worker]] = {}
            for worker in hub.workers:
                groups.setdefault(worker.generation, []).append(worker)
            latest = max(groups, default=0)
            if latest > after and len(groups[latest]) == NODES:
                return sorted(groups[latest], key=lambda worker: worker.rank)
            hub.next()

    @property
    def generation(self) -> int:
        return self.workers[0].generation

    @property
    def overlaps(self) -> str:
        """What workers wrote about live workers of other generations; empty: there were never two generations."""
        path = self.cluster.runner.notes / "overlaps"
        return path.read_text() if path.exists() else ""

    def freeze(self, kind: str) -> None:
        """Do one freeze, and wait until the run has settled."""
        happens: Callable[[], bool] = getattr(self, f"_{kind}")
        if happens():
            self.workers = self.settle(after=self.generation)
        assert not self.overlaps, f"{kind}: {self.overlaps}\n{self.cluster}"

    # --- what happens -------------------------------------------------------------------------------------------------

    KINDS = ("quiet", "failure", "death", "host", "recovery")

    def _quiet(self) -> bool:
        """Nothing else happens: the workers continue."""
        self._stop(self.server)
        assert not self.workers[0].is_active_within(self.pause_s), self.cluster
        self._continue(self.server)
        return False

    def _failure(self) -> bool:
        """A worker of another node fails."""
        self._stop(self.server)
        self._worker_of(self.others[0]).send("exit 3")
        self._wait()
        self._continue(self.server)
        return True

    def _death(self) -> bool:
        """Another agent dies, and is started again."""
        self._stop(self.server)
        dead = self.others.pop()
        self.cluster.kill(dead)
        dead.wait()
        self.others += self.cluster.start()
        self._wait()
        self._continue(self.server)
        return True

    def _host(self) -> bool:
        """All agents of a host are stopped: the serving one and another. A worker of the third node fails."""
        self._stop(self.server, self.others[0])
        self._worker_of(self.others[1]).send("exit 3")
        self._wait()
        self._continue(self.server, self.others[0])
        return True

    def _recovery(self) -> bool:
        """The serving agent dies, and its successor is stopped as soon as it serves, before all nodes are back."""
        earlier = [agent.text.count(_TAKES_OVER) for agent in self.others]
        self.cluster.kill(self.server)
        self.server = self._successor(earlier)
        self.others.remove(self.server)
        self._stop(self.server)
        self._wait()
        self._continue(self.server)
        self.others += self.cluster.start()
        return True

    def _successor(self, earlier: list[int]) -> Agent:
        """Return the agent that takes over; ``earlier`` is how often each has done so before."""
        while True:
            for agent, count in zip(self.others, earlier, strict=True):
                if agent.text.count(_TAKES_OVER) > count:
                    return agent
            self.others[0].wait_for_output(0.01)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _worker_of(self, agent: Agent) -> Worker:
        (worker,) = self.cluster.workers_of(agent, self.workers)
        return worker

    def _wait(self) -> None:
        time.sleep(self.pause_s)  # the pause is part of the test

    def _stop(self, *agents: Agent) -> None:
        for agent in agents:
            agent.send(signal.SIGSTOP)
            os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED | os.WNOWAIT)

    def _continue(self, *agents: Agent) -> None:
        for agent in agents:
            agent.send(signal.SIGCONT)

    def start_intruder(self) -> None:
        """Start a worker of a generation that was never formed, next to those of the current one."""
        hub = self.cluster.hub
        numbers = {"RANK": "9", "TENAX_GENERATION": "999", "CLUSTER_HUB": hub.name, "CLUSTER_AGENT": "none"}
        variables = {name: "0" for name in _SHOWN.split()}
        script = self.cluster.options["script"]
        intruder = subprocess.Popen(
            [sys.executable, script], env={**self.cluster.runner.environ, **variables, **numbers}
        )
        worker = hub.next()
        worker.send("exit 0")
        assert intruder.wait() == 0

    def clear_overlaps(self) -> None:
        (self.cluster.runner.notes / "overlaps").unlink()

    def finish(self) -> None:
        self.cluster.finish(self.workers, self.server, *self.others)
        assert not self.overlaps
