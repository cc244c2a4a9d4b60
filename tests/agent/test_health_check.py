"""The health check: alive while the agent makes progress, ready while workers run."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.http import kube_probe
from kit.processes import TIMEOUT_S, leaving_nothing, on_linux, until
from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, GiveUp, History
from tenax._io.interfaces import RequestRefused
from tenax._io.listen import listen
from tenax._io.loop import Loop
from tenax._logs.specs import DefaultLogsSpecs
from tenax._observe.health.check import AgentLiveness, HealthCheck, health_check_of
from tenax.agent.server import LocalElasticAgent, WorkerGroup, WorkerSpec
from tenax.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server
from tenax.launcher import LaunchConfig, elastic_launch

pytestmark = on_linux


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


def now() -> int:
    return int(time.time())


@contextmanager
def serving(server: HealthCheckServer) -> Iterator[HealthCheckServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- alone ------------------------------------------------------------------------------------------------------------


def test_the_server_reports_whether_there_was_progress() -> None:
    """200 until the timeout since the last progress, then 503; no listener after stop."""
    last = [time.time()]
    server = create_healthcheck_server(lambda: int(last[0]), 0, 60)
    server.start()
    server.start()
    port = server.port
    assert kube_probe(port).status == 200
    last[0] -= 3600
    assert kube_probe(port).status == 503
    server.stop()
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        kube_probe(port)
    assert server.alive_callback() == int(last[0])
    with serving(server):
        assert kube_probe(server.port).status == 503


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/", "/anything/else?x=1"])
def test_every_path_except_readyz_is_a_liveness_check(path: str) -> None:
    """A plain answer is one line."""
    with serving(HealthCheckServer(now, 0, 60)) as server:
        response = kube_probe(server.port, path)
    assert (response.status, response.body) == (200, b"alive\n")
    assert response.headers["Content-Type"].startswith("text/plain")


def test_head_is_answered_and_other_methods_are_rejected() -> None:
    """HEAD is a GET without the body."""
    with serving(HealthCheckServer(now, 0, 60)) as server:
        response = kube_probe(server.port, method="HEAD")
        assert (response.status, response.body, response.headers["Content-Length"]) == (200, b"", "6")
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            response = kube_probe(server.port, method=method)
            assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_details_are_available_as_json() -> None:
    """By header or by query; without the run id and the environment."""
    with serving(HealthCheckServer(now, 0, 60)) as server:
        server.signs.begin()
        server.signs.note("running", 2, is_ready=True)
        server.signs.beat()
        response = kube_probe(server.port, "/readyz?format=json").json()
        assert response.pop("seconds_since_loop_progress") < TIMEOUT_S
        assert response == {
            "ok": True,
            "why": "ready: running",
            "phase": "running",
            "generation": 2,
            "ready": True,
            "seconds_since_watchdog_progress": None,
            "timeout_s": 60,
        }
        assert kube_probe(server.port, Accept="application/json").json()["why"] == "alive"


def test_a_callback_that_raises_is_not_alive() -> None:
    """The response contains the reason, and the server continues."""

    def fail() -> int:
        raise LookupError("no such clock")

    with serving(HealthCheckServer(fail, 0, 60)) as server:
        for _ in range(2):
            response = kube_probe(server.port)
            assert (response.status, response.body) == (503, b"alive_callback raised LookupError: no such clock\n")


# --- in the hands of an agent -----------------------------------------------------------------------------------------


class Own(HealthCheckServer):
    """A subclass with its own start and stop, as torch documents it."""

    def __init__(self, alive_callback: Callable[[], int] = now, port: int = 0, timeout: int = 60) -> None:
        super().__init__(alive_callback, port, timeout)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


class Foreign:
    """A server that is not a subclass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("make", [Own, Foreign])
def test_an_own_server_is_started_and_stopped_once(make: type[Own], tmp_path: Path) -> None:
    """By the agent and by the launcher, also if the run fails."""
    server = make()
    specs = DefaultLogsSpecs(log_dir=str(tmp_path))
    spec = WorkerSpec(entrypoint="sh", args=("-c", "exit 3"), max_restarts=0)
    assert LocalElasticAgent(spec, specs, health_check_server=server).run().is_failed()
    assert server.calls == ["start", "stop"]
    config = LaunchConfig(1, 1, 1, logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)))
    elastic_launch(config, "true", health_check_server=server)()
    assert server.calls == ["start", "stop"] * 2


class StuckPolicy:
    """Blocks the agent's loop until the test releases it."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_return = threading.Event()

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.is_asked.set()
        self.may_return.wait(TIMEOUT_S)
        return GiveUp("enough")


def test_a_stuck_loop_is_not_alive(tmp_path: Path) -> None:
    """While the loop is blocked it is not alive, until it continues."""
    clock, policy = Clock(), StuckPolicy()
    server = HealthCheckServer(now, 0, 60, signs=AgentLiveness(clock))
    fail = tmp_path / "fail"
    os.mkfifo(fail)
    spec = WorkerSpec(entrypoint="sh", args=("-c", f"read _ < {shlex.quote(str(fail))}; exit 3"), max_restarts=1)
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server, restart_policy=policy
    )
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(agent.run()))
    thread.start()
    try:
        until(lambda: server.port and kube_probe(server.port, "/readyz").status == 200, "the worker to run")
        port = server.port
        clock.now += 61
        until(lambda: kube_probe(port).status == 200, "the next beat")
        fail.write_text("now\n")
        assert policy.is_asked.wait(TIMEOUT_S)
        clock.now += 61
        response = kube_probe(port, "/healthz?format=json")
        assert response.status == 503
        assert "the agent's loop has made no progress for 1 min 1 s" in response.json()["why"]
        assert kube_probe(port, "/readyz").status == 503
    finally:
        policy.may_return.set()
        thread.join(TIMEOUT_S)
    assert result[0].is_failed()


class OldHooks(LocalElasticAgent):
    """Runs in the polling loop, and blocks in a hook on request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hold = threading.Event()
        self.is_held = threading.Event()
        self.go_on = threading.Event()

    def _monitor_workers(self, worker_group: WorkerGroup) -> Any:
        if self.hold.is_set():
            self.is_held.set()
            self.go_on.wait(TIMEOUT_S)
        return super()._monitor_workers(worker_group)


def test_a_blocked_polling_loop_is_not_alive(tmp_path: Path) -> None:
    """A hook that does not return; waiting for the rendezvous is not a fault."""
    clock = Clock()
    server = HealthCheckServer(now, 0, 60, signs=AgentLiveness(clock))
    end = tmp_path / "end"
    os.mkfifo(end)
    spec = WorkerSpec(entrypoint="sh", args=("-c", f"read _ < {shlex.quote(str(end))}"), monitor_interval=0.01)
    agent = OldHooks(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(agent.run()))
    thread.start()
    try:
        until(lambda: server.port and kube_probe(server.port, "/readyz").status == 200, "the worker to run")
        clock.now += 61
        until(lambda: kube_probe(server.port).status == 200, "the next beat")
        agent.hold.set()
        assert agent.is_held.wait(TIMEOUT_S)
        clock.now += 61
        assert kube_probe(server.port).status == 503
    finally:
        agent.hold.clear()
        agent.go_on.set()
        end.write_text("now\n")
        thread.join(TIMEOUT_S)
    assert not result[0].is_failed()


class Unwatched(LocalElasticAgent):
    """An agent with its own loop, which reports no progress."""

    seen = 0

    def _invoke_run(self, role: str = "default") -> Any:
        assert self._health is not None
        signs = self._health.signs
        assert signs is not None
        type(self).seen = signs.read().loop_age_s is None
        return super()._invoke_run(role)


def test_an_own_loop_without_progress_reports_is_alive(tmp_path: Path) -> None:
    """An agent that overrides the whole loop is alive according to its callback."""
    spec = WorkerSpec(entrypoint="true", monitor_interval=0.01)
    server = HealthCheckServer(now, 0, 60)
    assert not Unwatched(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server).run().is_failed()
    assert Unwatched.seen


@pytest.mark.parametrize("kind", [LocalElasticAgent, OldHooks])
def test_a_port_in_use_is_rejected(kind: type[LocalElasticAgent], tmp_path: Path) -> None:
    """Before any worker starts; the message names the port and the variable to change."""
    with listen("", 0) as taken:
        server = HealthCheckServer(now, taken.getsockname()[1], 60)
        spec = WorkerSpec(entrypoint="touch", args=(str(tmp_path / "started"),))
        agent = kind(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server)
        with pytest.raises(RequestRefused, match=f"could not serve health checks on port {server.port}"):
            agent.run()
    assert not (tmp_path / "started").exists()


class Breaks(Foreign):
    """Raises in one of its two methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def start(self) -> None:
        super().start()
        self._break("start")

    def stop(self) -> None:
        super().stop()
        self._break("stop")

    def _break(self, where: str) -> None:
        if self.where == where:
            raise LookupError(f"{where} broke")


@pytest.mark.parametrize("kind", [LocalElasticAgent, OldHooks])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "start",
            "could not start the health check server: start() raised LookupError: start broke; the run continues",
        ),
        ("stop", "could not stop the health check server: stop() raised LookupError: stop broke"),
    ],
)
def test_a_server_that_raises_does_not_affect_the_run(
    kind: type[LocalElasticAgent], where: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is reported."""
    server = Breaks(where)
    agent = kind(WorkerSpec(entrypoint="true"), DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server)
    assert not agent.run().is_failed()
    assert f"tenax: {message}" in capsys.readouterr().err
    assert server.calls == (["start"] if where == "start" else ["start", "stop"])


def test_the_environment_variable_starts_a_server() -> None:
    """Unless one was passed; an invalid port is rejected before the start."""
    environ = {"TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
    assert health_check_of(None, {}) is None
    own = Own()
    given = health_check_of(own, {"TORCHELASTIC_HEALTH_CHECK_PORT": "nonsense"})
    assert given is not None
    assert given.signs is own.signs
    with pytest.raises(ValueError, match="expected a port from 0"):
        health_check_of(None, {"TORCHELASTIC_HEALTH_CHECK_PORT": "nonsense"})
    check = health_check_of(None, environ)
    assert check is not None
    messages: list[str] = []
    check.open(warn=pytest.fail, inform=messages.append)
    try:
        assert messages[0].startswith("serving health checks on port ")
        port = int(messages[0].rpartition(" ")[2])
        response = kube_probe(port, "/readyz?format=json")
        assert (response.status, response.json()["phase"], response.json()["timeout_s"]) == (503, "starting", 60)
    finally:
        check.close(pytest.fail)


def test_a_loop_without_health_checks_has_no_timer() -> None:
    """Without a server the loop does not wake up every second."""
    loop = Loop()
    try:
        with listen("", 0) as taken:
            check = HealthCheck(HealthCheckServer(now, taken.getsockname()[1], 60))
            with pytest.raises(RequestRefused):
                check.open(warn=pytest.fail)
            check.watch(loop)
            assert loop._next_timer() is None
        check = HealthCheck(HealthCheckServer(now, 0, 60))
        check.open(warn=pytest.fail)
        check.watch(loop)
        assert loop._next_timer() is not None
        check.close(pytest.fail)
        assert loop._next_timer() is None
    finally:
        loop.close()


def test_a_fork_keeper_is_created_before_the_servers_thread(tmp_path: Path) -> None:
    """With start method fork, nothing is forked from a process with the server's thread in it."""
    config = LaunchConfig(1, 1, 1, start_method="fork", logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert elastic_launch(config, now, HealthCheckServer(now, 0, 60))()[0] > 0


SCOPED = """
import os, sys
from tenax import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=600, scope="step"):
    sys.stdin = open(sys.argv[1])
    sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", [LocalElasticAgent, OldHooks])
def test_the_progress_of_the_watchdog_is_shown(
    kind: type[LocalElasticAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an agent with hooks: how long ago a worker sent a timer."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    server = HealthCheckServer(now, 0, 60)
    end = tmp_path / "end"
    os.mkfifo(end)
    script = tmp_path / "scoped.py"
    script.write_text(SCOPED)
    spec = WorkerSpec(entrypoint=sys.executable, args=(str(script), str(end)), monitor_interval=0.01)
    agent = kind(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), health_check_server=server)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(agent.run()))
    thread.start()
    try:
        until(lambda: server.port, "the server to listen")
        until(
            lambda: kube_probe(server.port, "/?format=json").json()["seconds_since_watchdog_progress"] is not None,
            "a worker's timer",
        )
    finally:
        end.write_text("now\n")
        thread.join(TIMEOUT_S)
    assert not result[0].is_failed()
