"""A real ``tenax run`` under the probes of a scheduler: startup, liveness, readiness; httpGet and tcpSocket."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.http import TIMEOUT_S, kube_probe
from kit.jobs import Runner, Running, until
from kit.processes import on_linux
from tenax._observe.health.server import READY_PATH

pytestmark = [on_linux, pytest.mark.process]

STAY = "from worker_kit import ready, stay; ready(); stay()"
ON = {"TORCHELASTIC_HEALTH_CHECK_PORT": "0"}


def port_of(run: Running) -> int:
    """Return the port that it printed."""
    run.until_printed("serving health checks on port ")
    match = re.search(r"health checks on port (\d+)", run.err)
    assert match
    return int(match[1])


def is_stopped(pid: int) -> bool:
    states = [task.joinpath("stat").read_text().rpartition(")")[2].split()[0] for task in _tasks(pid)]
    return set(states) == {"T"}


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def test_the_manifest_of_the_guide_uses_the_right_paths() -> None:
    """Probes that restart a container check liveness, never readiness."""
    guide = Path(__file__).parents[3] / "docs" / "guides" / "health-checks.md"
    probes = re.findall(r"(\w+)Probe: .*\n +httpGet: \{path: (\S+), port: health\}", guide.read_text())
    assert probes == [("startup", "/livez"), ("liveness", "/livez"), ("readiness", READY_PATH)]


def test_waiting_for_nodes_is_alive_and_not_ready(runner: Runner) -> None:
    """Alive and not ready before the second node joins; then both are ready."""
    arguments = ["--nnodes", "2", "--rdzv-endpoint", own_endpoint(), "--rdzv-id", "probes", runner.script(STAY)]
    first = runner.start(*arguments, env=ON)
    port = port_of(first)
    first.until_printed("waiting up to")
    assert kube_probe(port, "/livez").status == 200
    answer = kube_probe(port, "/readyz?format=json")
    assert (answer.status, answer.json()["phase"]) == (503, "joining")
    assert b"probes" not in answer.body, "any peer can read it, and a node without a secret joins by the run id"
    second = runner.start(*arguments, env=ON)
    for run in (first, second):
        until(lambda run=run: kube_probe(port_of(run), "/readyz").status == 200, "both to be ready")
    assert runner.pids(2)
    assert kube_probe(port, "/readyz?format=json").json()["generation"] == 1
    for run in (first, second):
        run.send(signal.SIGTERM)
    assert {first.wait().code, second.wait().code} == {143}


def test_the_agent_is_alive_and_not_ready_during_a_restart(runner: Runner) -> None:
    """Until the next generation runs."""
    script = runner.script("""
        import os, signal
        from worker_kit import ATTEMPT, RANK, note, ready, stay, wait_for
        if ATTEMPT == 0 and RANK == 1:
            signal.signal(signal.SIGTERM, lambda *_: (note("asked"), wait_for("may_end"), os._exit(0)))
        ready()
        if ATTEMPT == 0 and RANK == 0:
            wait_for("may_fail")
            os._exit(3)
        stay()
    """)
    run = runner.start("--nproc-per-node", "2", "--max-restarts", "1", script, env=ON)
    port = port_of(run)
    runner.pids(2)
    until(lambda: kube_probe(port, "/readyz").status == 200, "generation 1 to be ready")
    runner.leave_note("may_fail", 0)
    runner.note("asked", 1)
    until(lambda: kube_probe(port, "/readyz").status == 503, "generation 1 to be over")
    assert kube_probe(port, "/readyz?format=json").json()["phase"] == "stopping"
    assert kube_probe(port, "/livez").status == 200
    runner.leave_note("may_end", 1)
    runner.pids(2, attempt=1)
    until(lambda: kube_probe(port, "/readyz").status == 200, "generation 2 to be ready")
    assert kube_probe(port, "/readyz?format=json").json()["generation"] == 2
    run.send(signal.SIGTERM)
    assert run.wait().code == 143


def test_a_stopped_agent_does_not_answer_and_a_tcp_probe_still_connects(runner: Runner) -> None:
    """SIGSTOP: the kernel accepts the connection, and the probe times out. SIGCONT: it is answered again."""
    run = runner.start(runner.script(STAY), env=ON)
    port = port_of(run)
    runner.pids(1)
    run.send(signal.SIGSTOP)
    until(lambda: is_stopped(run.pid), "every thread of it to stop")
    try:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: h\r\n\r\n")
            sock.settimeout(0.2)
            try:
                answer = sock.recv(1)
            except TimeoutError:
                answer = b""
            assert not answer
    finally:
        run.send(signal.SIGCONT)
    assert kube_probe(port, "/livez").status == 200
    run.send(signal.SIGTERM)
    assert run.wait().code == 143


def test_an_invalid_port_is_rejected(runner: Runner) -> None:
    """Before anything starts."""
    done = runner.run(runner.script("print('done')"), env={"TORCHELASTIC_HEALTH_CHECK_PORT": "http"})
    assert (done.code, done.out) == (2, "")
    assert "TORCHELASTIC_HEALTH_CHECK_PORT is 'http'; expected a port from 0 to 65535" in done.err


def test_without_the_variable_there_is_no_server_and_no_import(runner: Runner) -> None:
    """Health checks do not slow down the cold start."""
    program = [sys.executable, "-X", "importtime", "-m", "tenax", "run"]
    done = runner.run(runner.script("pass"), program=program)
    assert done.code == 0, done
    assert "tenax._observe.health" not in done.err
    assert "health check" not in "".join(done.messages)
