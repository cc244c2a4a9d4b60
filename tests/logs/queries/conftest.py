"""A run whose workers print what the test requests, and ``tenax logs`` beside it."""

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
from kit.jobs import TENAX, TIMEOUT_S, Done, Runner, Running, until
from tenax._core.requests import LogsRequest
from tenax._engines.tcp.operator import connect_to_agent
from tenax.cli.main import main

_WORKER = Path(__file__).parent / "worker_main.py"

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they read /proc


class Run:
    """One run of real agents."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.hub = WorkerHub()
        self.private_dir = os.environ["TENAX_PRIVATE_DIR"]
        self.agents: list[Running] = []
        self._env = {"TENAX_PRIVATE_DIR": self.private_dir, "CLUSTER_HUB": self.hub.name}

    def start(self, *flags: str, run_id: str = "seen") -> Running:
        """Start one more agent. Returns when its control socket exists."""
        env = {**self._env, "CLUSTER_AGENT": f"node{len(self.agents)}"}
        agent = self.runner.start(
            "--rdzv-id", run_id, "--log-dir", str(self.runner.home / "logs"), *flags, str(_WORKER), env=env
        )
        self.agents.append(agent)
        control_socket = self._control_socket(agent)
        until(lambda: control_socket.exists() or agent.process.poll() is not None, f"the control socket of {agent.pid}")
        return agent

    def _control_socket(self, agent: Running) -> Path:
        return Path(self.private_dir, f"{agent.pid}.sock")

    def settle(self) -> None:
        """Wait until the log writers have read all lines so far, so that later ones get later times."""
        line = connect_to_agent(str(self._control_socket(self.agents[0])))
        for node in range(len(self.agents)):
            line.ask(LogsRequest(str(node), last=0), TIMEOUT_S)
        line.close()

    def print_text(self, worker: Worker, text: str, to: int = 1) -> None:
        """Make the worker print this text. Returns when it has."""
        assert worker.ask(json.dumps({"print": text, "to": to})) == "done"

    def print_and_exit(self, worker: Worker, text: str, code: int = 0) -> None:
        """Make the worker print this text and exit at once."""
        worker.send(json.dumps({"print": text, "to": 1}) + "\n" + json.dumps({"exit": code}))

    def exit_worker(self, worker: Worker, code: int = 0) -> None:
        worker.send(json.dumps({"exit": code}))

    def logs(self, *arguments: str) -> Done:
        """Run ``tenax logs`` in this process, which is faster than starting it."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["logs", *arguments])
        return Done(code, out.getvalue(), err.getvalue())

    def follow(self, *arguments: str, **options: int) -> Running:
        """Start ``tenax logs``, which may run until the run ends."""
        return self.runner.start(*arguments, program=[*TENAX, "logs"], env=self._env, **options)

    def finish(self, workers: list[Worker]) -> None:
        for worker in workers:
            self.exit_worker(worker)
        for agent in self.agents:
            done = agent.wait()
            assert done.code == 0, done

    def close(self) -> None:
        self.hub.close()
        self.runner.close()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}"))
    yield made
    made.close()
