"""A run whose workers print what the test tells them, and ``tenax logs`` beside it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kit.cluster import Worker, WorkerHub
from kit.jobs import PATIENCE_S, TENAX, Bench, Done, Running, until
from tenax._core.requests import LogsRequest
from tenax._engines.tcp.operator import connect_to_agent
from tenax.cli.main import main

_WORKER = Path(__file__).parent / "worker_main.py"

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they look at processes through /proc


class Run:
    """One run of real agents, and people who look at it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.desk = WorkerHub()
        self.doors = os.environ["TENAX_PRIVATE_DIR"]
        self.agents: list[Running] = []
        self._env = {"TENAX_PRIVATE_DIR": self.doors, "CLUSTER_DESK": self.desk.name}

    def start(self, *flags: str, run_id: str = "seen") -> Running:
        """One more agent. Returns when it can be asked."""
        env = {**self._env, "CLUSTER_AGENT": f"node{len(self.agents)}"}
        agent = self.bench.start(
            "--rdzv-id", run_id, "--log-dir", str(self.bench.home / "logs"), *flags, str(_WORKER), env=env
        )
        self.agents.append(agent)
        door = self._door(agent)
        until(lambda: door.exists() or agent.process.poll() is not None, f"the door of {agent.pid}")
        return agent

    def _door(self, agent: Running) -> Path:
        return Path(self.doors, f"{agent.pid}.sock")

    def settle(self) -> None:
        """What was printed until now was read, and so has another time than what comes."""
        line = connect_to_agent(str(self._door(self.agents[0])))
        for node in range(len(self.agents)):
            line.ask(LogsRequest(str(node), last=0), PATIENCE_S)
        line.close()

    def say(self, worker: Worker, text: str, to: int = 1) -> None:
        """Make it print this. When this returns, it has."""
        assert worker.ask(json.dumps({"print": text, "to": to})) == "done"

    def say_and_end(self, worker: Worker, text: str, code: int = 0) -> None:
        """Make it print this and end in the same moment."""
        worker.tell(json.dumps({"print": text, "to": 1}) + "\n" + json.dumps({"exit": code}))

    def end(self, worker: Worker, code: int = 0) -> None:
        worker.tell(json.dumps({"exit": code}))

    def logs(self, *words: str) -> Done:
        """``tenax logs``, which ends. In this process: it is asked often."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["logs", *words])
        return Done(code, out.getvalue(), err.getvalue())

    def follow(self, *words: str, **options: int) -> Running:
        """``tenax logs``, which may go on."""
        return self.bench.start(*words, program=[*TENAX, "logs"], env=self._env, **options)

    def finish(self, workers: list[Worker]) -> None:
        for worker in workers:
            self.end(worker)
        for agent in self.agents:
            done = agent.wait()
            assert done.code == 0, done

    def close(self) -> None:
        self.desk.close()
        self.bench.close()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}"))
    yield made
    made.close()
