"""An operator at work: a cluster of real agents whose doors lie in a folder of the test's own, and real commands."""

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
from kit.jobs import TENAX, Bench, Done, Terminal, until
from tenax._core.requests import StatusRequest
from tenax._engines.tcp import wire
from tenax._engines.tcp.operator import OperatorLine, connect_to_agent
from tenax._view.status import RunStatus


class Operator:
    """Somebody with a shell on the host of the cluster."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cluster = Cluster(bench)
        # Short: the path of a socket has at most 107 bytes.
        self.doors = tempfile.mkdtemp(prefix="doors-", dir="/tmp")
        bench.environ["TENAX_PRIVATE_DIR"] = self.doors
        self._terminals: list[Terminal] = []

    def tenax(self, *words: str, env: dict[str, str] | None = None) -> Done:
        """``tenax WORDS``, to its end."""
        return self.bench.start(*words, program=TENAX, env=env).wait()

    def terminal(self, *words: str, **options: Any) -> Terminal:
        self._terminals.append(Terminal([*TENAX, *words], self.bench, **options))
        return self._terminals[-1]

    def door(self, agent: Agent) -> str:
        """The path of its door, once it is open."""
        path = os.path.join(self.doors, f"{agent.process.pid}.sock")
        until(lambda: os.path.exists(path), f"the door of {agent}")
        return path

    def until_found(self, *agents: Agent) -> None:
        for agent in agents or self.cluster.agents:
            self.door(agent)

    def until_status(self, agent: Agent, fact: Callable[[RunStatus], bool]) -> RunStatus:
        """The run's status, asked at the door of this agent, once it is so."""
        line, mark = connect_to_agent(self.door(agent)), ""
        seen: list[RunStatus] = []

        def is_so() -> bool:
            nonlocal mark
            seen.append(msgspec.json.decode(line.ask(StatusRequest(mark, 1.0), 30.0), type=RunStatus))
            mark = seen[-1].mark
            return fact(seen[-1])

        try:
            until(is_so, lambda: f"another status than {seen[-1]}")
        finally:
            line.close()
        return seen[-1]

    @contextmanager
    def line_at(self, agent: Agent) -> Any:
        line: OperatorLine = connect_to_agent(self.door(agent))
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
            shutil.rmtree(self.doors)


def say_and_hear(endpoint: str, data: bytes) -> bytes:
    """Send these bytes to a coordinator and read until it closes, or has answered once."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30.0) as sock:
        sock.sendall(data)
        return sock.recv(4096)


def greeting(run_id: str, node_id: str = "operator") -> wire.Hello:
    return wire.Hello(wire.VERSION, run_id, node_id, os.urandom(wire.NONCE_BYTES), is_operator=True)


def self_signed(folder: Path, address: str) -> tuple[str, str]:
    """A certificate for this address, which is its own authority, and its key."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    words: Sequence[str] = (
        *("openssl", "req", "-x509", *new, "-keyout", "tls.key", "-out", "tls.pem"),
        *("-subj", "/CN=node", "-addext", f"subjectAltName=IP:{address}"),
    )
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return str(folder / "tls.pem"), str(folder / "tls.key")
