"""An operator: real commands against a cluster of real agents, with control sockets in a folder of the test."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kit.cluster import Agent, Cluster
from kit.jobs import TENAX, Done, Runner, Terminal, until
from tenax._core.link import wire
from tenax._core.requests import StatusRequest
from tenax._engines.tcp.operator import OperatorConnection, connect_to_agent
from tenax._view.status import RunStatus


class Operator:
    """Runs operator commands on the host of the cluster."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cluster = Cluster(runner)
        # Short: the path of a socket has at most 107 bytes.
        self.sockets = tempfile.mkdtemp(prefix="sockets-", dir="/tmp")
        runner.environ["TENAX_PRIVATE_DIR"] = self.sockets
        self._terminals: list[Terminal] = []

    def tenax(self, *words: str, env: dict[str, str] | None = None) -> Done:
        """Run ``tenax WORDS`` to its end."""
        return self.runner.start(*words, program=TENAX, env=env).wait()

    def terminal(self, *words: str, **options: Any) -> Terminal:
        self._terminals.append(Terminal([*TENAX, *words], self.runner, **options))
        return self._terminals[-1]

    def control_socket(self, agent: Agent) -> str:
        """Return the path of the agent's control socket, once it is open."""
        path = os.path.join(self.sockets, f"{agent.process.pid}.sock")
        until(lambda: os.path.exists(path), f"the control_socket of {agent}")
        return path

    def until_found(self, *agents: Agent) -> None:
        for agent in agents or self.cluster.agents:
            self.control_socket(agent)

    def until_status(self, agent: Agent, predicate: Callable[[RunStatus], bool]) -> RunStatus:
        """Return the run's status from this agent, once it satisfies the predicate."""
        line, mark = connect_to_agent(self.control_socket(agent)), ""
        seen: list[RunStatus] = []

        def is_satisfied() -> bool:
            nonlocal mark
            seen.append(msgspec.json.decode(line.ask(StatusRequest(mark, 1.0), 30.0), type=RunStatus))
            mark = seen[-1].mark
            return predicate(seen[-1])

        try:
            until(is_satisfied, lambda: f"another status than {seen[-1]}")
        finally:
            line.close()
        return seen[-1]

    @contextmanager
    def line_at(self, agent: Agent) -> Any:
        line: OperatorConnection = connect_to_agent(self.control_socket(agent))
        try:
            yield line
        finally:
            line.close()

    def json(self, *words: str, env: dict[str, str] | None = None) -> Any:
        done = self.tenax(*words, "--json", env=env)
        assert done.code == 0, done
        return json.loads(done.out)

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()
        try:
            self.cluster.close()
        finally:
            shutil.rmtree(self.sockets)


def exchange(endpoint: str, data: bytes) -> bytes:
    """Send bytes to a coordinator and return the first bytes of its answer; empty if it closed the connection."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30.0) as sock:
        sock.sendall(data)
        return sock.recv(4096)


def greeting(run_id: str, node_id: str = "operator") -> wire.Hello:
    return wire.Hello(wire.VERSION, run_id, node_id, os.urandom(wire.NONCE_BYTES), is_operator=True)


def self_signed(folder: Path, address: str) -> tuple[str, str]:
    """Create a self-signed certificate for this address and its key."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    words: Sequence[str] = (
        *("openssl", "req", "-x509", *new, "-keyout", "tls.key", "-out", "tls.pem"),
        *("-subj", "/CN=node", "-addext", f"subjectAltName=IP:{address}"),
    )
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return str(folder / "tls.pem"), str(folder / "tls.key")
