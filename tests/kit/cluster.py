"""A cluster on loopback: real agents with real workers, which the test controls.

Nothing here sleeps or polls. Every worker connects to the hub, a socket, when it starts: the test waits there for a
generation, sends commands to single workers, and sees them exit. The output of agents is read as it comes.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit.addresses import own_endpoint
from kit.etcd import EtcdCluster
from kit.jobs import TIMEOUT_S, Runner
from tenax._core.link import wire
from tenax._engines.secret import user_secret
from tenax._node.link_journal import read_link_journal
from tenax.testing.link_replay import replay_links

_HERE = Path(__file__).parent
# Fields of a report about the node that wrote it; and times, since clocks differ.
_FIELDS_OF_THE_NODE = {"log_dir", "journal", "host", "began_at", "failed_at"}
_MAX_DIFFERENCE_S = 10.0  # maximum time that a message takes on a busy machine
_numbers = itertools.count(1)


class Worker:
    """The test's connection to one worker."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(TIMEOUT_S)
        self._file = sock.makefile("rb")
        self.env: dict[str, Any] = self.receive()
        self.pid = int(self.env["pid"])
        self.agent: str = self.env["agent"]
        self.rank, self.generation = int(self.env["RANK"]), int(self.env["TENAX_GENERATION"])

    def __repr__(self) -> str:
        return f"<rank {self.rank} of generation {self.generation} on {self.agent}, pid {self.pid}>"

    def receive(self) -> Any:
        """Return its next message."""
        line = self._file.readline()
        if not line:
            raise EOFError("the worker exited without a message")
        return ast.literal_eval(line.decode())

    def send(self, line: str) -> None:
        self._sock.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> Any:
        self.send(line)
        return self.receive()

    def is_active_within(self, seconds: float) -> bool:
        """Return whether it sends something or exits. Only to check that something does not happen."""
        return bool(select.select([self._sock], [], [], seconds)[0])

    def until_gone(self) -> None:
        """Wait until it has exited: no other process holds its end of the connection."""
        with contextlib.suppress(ConnectionResetError):
            assert self._file.readline() == b"", "the worker sent a message instead of exiting"

    def close(self) -> None:
        self._file.close()
        self._sock.close()


class WorkerHub:
    """Accepts the connections of workers."""

    def __init__(self) -> None:
        self.name = f"tenax-cluster-{os.getpid()}-{next(_numbers)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.name)
        self._listener.listen(128)
        self._listener.settimeout(TIMEOUT_S)
        self.workers: list[Worker] = []

    def generation(self, world_size: int, number: int = 1) -> list[Worker]:
        """Return the workers of the generation with this number, by rank, when all of them are connected."""
        while True:
            group = [worker for worker in self.workers if worker.generation == number]
            if len(group) == world_size:
                assert {worker.env["WORLD_SIZE"] for worker in group} == {str(world_size)}
                return sorted(group, key=lambda worker: worker.rank)
            try:
                self._accept()
            except TimeoutError:
                pytest.fail(f"no generation {number} of {world_size} workers; there were {self.workers}")

    def next(self) -> Worker:
        """Return the next worker that connects."""
        return self.all(len(self.workers) + 1)[-1]

    def all(self, count: int) -> list[Worker]:
        """Return this number of workers, of whatever generation or run, in order of connection."""
        while len(self.workers) < count:
            self._accept()
        return self.workers

    def _accept(self) -> None:
        """Accept a connection. A worker that is stopped before it sends its first message is not counted."""
        sock, _ = self._listener.accept()
        with contextlib.suppress(EOFError, ConnectionResetError):
            self.workers.append(Worker(sock))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._listener.close()


class Agent:
    """The agent of one node, and its output."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], report: Path) -> None:
        self.name = name
        self.process = process
        self.report_path = report
        self.text = ""
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"console of {name}")
        self._reader.start()

    def __repr__(self) -> str:
        return f"--- {self.name}, exit code {self.process.poll()}\n{self.text}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            with self._printed:
                self.text += data.decode(errors="replace")
                self._printed.notify_all()

    def until_printed(self, text: str) -> None:
        with self._printed:
            assert self._printed.wait_for(lambda: text in self.text, TIMEOUT_S), f"{text!r} was not printed\n{self}"

    def wait_for_output(self, seconds: float) -> None:
        """Wait until it prints something, or for this time."""
        with self._printed:
            self._printed.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return its exit code, when all its output was read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:g} s\n{self}")
        self._reader.join(TIMEOUT_S)
        assert not self._reader.is_alive(), f"another process still holds the console of {self.name}"
        return code

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = msgspec.json.decode(self.report_path.read_bytes())
        return report

    @property
    def printed_report(self) -> str:
        """The block at the end; empty if there is none."""
        _, ruler, rest = self.text.partition("=" * 80)
        return ruler + rest

    def close(self) -> None:
        if self.is_running:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def etcd_conf(etcd: EtcdCluster) -> dict[str, str]:
    """Return the settings that give an agent access to this etcd."""
    settings, files = etcd.settings(), etcd.tls_files
    conf = {"user": settings.user, "password": settings.password}
    if files is not None:
        conf |= {"ssl_cert": files.cert, "ssl_cert_key": files.key, "ca_cert": files.ca}
    return {key: value for key, value in conf.items() if value}


def same_report(agents: Sequence[Agent], code: int) -> dict[str, Any]:
    """Check that every agent exits with this code and the same report; return the report."""
    codes = {agent.name: agent.wait() for agent in agents}
    assert set(codes.values()) == {code}, f"{codes}\n{agents}"
    first, *others = (
        {key: value for key, value in agent.report.items() if key not in _FIELDS_OF_THE_NODE} for agent in agents
    )
    for other in others:
        assert other == first
    times = [agent.report["failed_at"] for agent in agents]
    assert len({time is None for time in times}) == 1, times
    assert None in times or max(times) - min(times) < _MAX_DIFFERENCE_S, times
    return first


class Cluster:
    """One run. ``start`` adds agents with the same options, unless it gets others."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.hub = WorkerHub()
        self.agents: list[Agent] = []
        self.endpoint = own_endpoint()
        self.options: dict[str, Any] = {
            "nodes": (2, 2),
            "workers": 1,
            "run_id": "run",
            "role": "default",
            "conf": {"last_call_timeout": 60},  # longer than any test: all started agents become members
            "max_restarts": 3,
            "grace_s": 30,
            "fatal_exit_codes": [],
            "script": "",
            "backend": "tcp",
        }

    def use_etcd(self, etcd: EtcdCluster, **conf: Any) -> None:
        """Use etcd for the rendezvous, with a unique run id, because other tests may use the same etcd."""
        self.endpoint = etcd.endpoints
        self.options["backend"] = "etcd"
        self.options["run_id"] = f"run-{os.getpid()}-{next(_numbers)}"
        self.options["conf"] = {**self.options["conf"], **etcd_conf(etcd), **conf}

    def start(self, count: int = 1, env: dict[str, str] | None = None, **options: Any) -> list[Agent]:
        """Start agents with these options. ``conf`` is added to the existing one."""
        conf = {**self.options["conf"], **options.pop("conf", {})}
        return [self._start({**self.options, **options, "conf": conf}, env or {}) for _ in range(count)]

    def _start(self, options: dict[str, Any], env: dict[str, str]) -> Agent:
        name = f"node{len(self.agents)}"
        report = self.runner.home / f"{name}.json"
        argument = json.dumps({**options, "endpoint": options.get("endpoint", self.endpoint), "report": str(report)})
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "agent_main.py"), argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.runner.home,
            env={**self.runner.environ, "CLUSTER_HUB": self.hub.name, "CLUSTER_AGENT": name, **env},
        )
        agent = Agent(name, process, report)
        self.agents.append(agent)
        return agent

    def start_in_order(self, count: int, **options: Any) -> list[Agent]:
        """Start agents so that the first one serves the endpoint: the others follow when it does."""
        (first,) = self.start(**options)
        first.until_printed("this node serves the coordinator")
        return [first, *self.start(count - 1, **options)]

    def agent_of(self, worker: Worker) -> Agent:
        return next(agent for agent in self.agents if agent.name == worker.agent)

    def workers_of(self, agent: Agent, workers: Sequence[Worker]) -> list[Worker]:
        return [worker for worker in workers if worker.agent == agent.name]

    def finish(self, workers: Sequence[Worker], *agents: Agent) -> None:
        """Let these workers succeed; their agents must succeed too."""
        for worker in workers:
            worker.send("exit 0")
        for agent in agents or {self.agent_of(worker).name: self.agent_of(worker) for worker in workers}.values():
            assert agent.wait() == 0, agent

    def kill(self, agent: Agent) -> None:
        """Send SIGKILL: its helpers exit by themselves within a second."""
        self.runner.leaves_within_s = 1.0
        agent.send(signal.SIGKILL)

    def operate(self, frame: wire.FromAgent) -> None:
        """Send a frame to the coordinator as a node of the run, with this user's secret."""
        host, _, port = self.endpoint.rpartition(":")
        hello = wire.Hello(wire.VERSION, self.options["run_id"], "operator", os.urandom(wire.NONCE_BYTES))
        with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
            reader = wire.FrameReader(wire.MAX_BYTES)

            def answer() -> Any:
                bodies: list[bytes] = []
                while not bodies:
                    bodies = reader.feed(sock.recv(4096))
                return wire.decode_from_server(bodies[0])

            sock.sendall(wire.encode(hello))
            proof = wire.prove(user_secret(), "agent", hello, answer().nonce)
            sock.sendall(wire.encode(wire.Proof(proof)))
            assert isinstance(answer(), wire.Accepted)
            sock.sendall(wire.encode(frame))

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.agents))

    def close(self) -> None:
        left = [agent.name for agent in self.agents if agent.is_running]
        for agent in self.agents:
            agent.close()
        self.hub.close()
        if left:
            self.runner.leaves_within_s = 1.0
        self.runner.close()
        assert not left, f"the test left {left} running\n{self}"
        self._check_link_journals()

    def _check_link_journals(self) -> None:
        """What the links of every agent decided follows from their journals."""
        for path in self.runner.home.glob("tmp/tenax_*/*/links*.jsonl"):
            header, lines, _ = read_link_journal(str(path))
            assert replay_links(header, lines).differences == [], path
