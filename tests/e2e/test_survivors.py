"""Survivors: one of three workers is killed, and the others go on in the same process."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kit.jobs import TIMEOUT_S, Runner
from kit.processes import needs_torch
from lanes.survivor_chain import expected

WORKER = Path(__file__).parents[1] / "lanes" / "survivor_main.py"


class Reports:
    """The reports of the workers, in the order in which they connected."""

    def __init__(self) -> None:
        self.name = f"tenax-elastic-{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(8)
        self._listener.settimeout(2 * TIMEOUT_S)

    def accept(self) -> Connection:
        return Connection(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.close()


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(2 * TIMEOUT_S)
        self.sock = sock
        self._file = sock.makefile("rb")
        self.all: list[dict[str, Any]] = []

    def until(self, key: str, value: int, generation: int = 1) -> dict[str, Any]:
        """Return the first report of a generation in which this is at least the value."""
        while line := self._file.readline():
            self.all.append(json.loads(line))
            if self.all[-1].get(key, -1) >= value and self.all[-1]["generation"] == generation:
                return self.all[-1]
        raise AssertionError(f"the worker ended before {key} {value} of generation {generation}: {self.all[-5:]}")


@pytest.mark.parametrize("framework", ["none", pytest.param("torch", marks=needs_torch)])
def test_a_killed_worker_costs_one_process_and_no_step(runner: Runner, tmp_path: Path, framework: str) -> None:
    """The others keep their pid and their rank, the new one gets their state, and every step is applied once."""
    reports = Reports()
    script = [str(WORKER), framework, str(tmp_path / "checkpoint.json")]
    job = runner.start("--nproc-per-node=3", "--max-restarts=1", *script, env={"LANE_HUB": reports.name})
    workers = [reports.accept() for _ in range(3)]
    for worker in workers:
        worker.until("step", 5)
    killed = workers.pop()
    os.kill(killed.all[-1]["pid"], signal.SIGKILL)
    workers.append(reports.accept())
    begun = [worker.until("begins", 0, generation=2) for worker in workers]
    # The furthest step that anyone completed is where all go on.
    done = max(report["step"] for worker in workers[:2] for report in worker.all if "step" in report)
    assert [report["begins"] for report in begun] == [done, done, done]
    assert [report["restored"] for report in begun] == [False, False, False]
    limit = done + 100
    for worker in workers:
        worker.sock.sendall(b"%d\n" % limit)
    last = [worker.until("step", limit, generation=2) for worker in workers]
    assert job.wait(2 * TIMEOUT_S).code == 0
    for worker in workers:
        for report in worker.all:
            assert report["chain"] == expected(report.get("step", report.get("begins")))[0]
    for worker in workers[:2]:
        assert len({(report["pid"], report["rank"]) for report in worker.all}) == 1
        steps = [report["step"] for report in worker.all if "step" in report]
        assert len(steps) == len(set(steps))
        # A rank that was behind got the last step of generation 1 from another one.
        assert {*steps, done} == set(range(1, limit + 1))
    assert {report["rank"] for report in last} == {0, 1, 2}
    reports.close()
