"""A real etcd on hosts of a lab, one member each, and the record that a run has written to it.

Members are programs of their hosts: a power failure or a cut affects them, too. Requests are sent from a member's own
host, so no cut affects them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import time
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kit.etcd import find_etcd
from tenax._core.leadership.keys import Keys, Written

from .file_watch import TIMEOUT_S
from .lab import Host
from .running import Running

Call = Callable[[str, dict[str, Any]], dict[str, Any]]
_PORT, _PEERS_PORT = 2379, 2380


class EtcdMembers:
    """One member on each of these hosts. They serve when the constructor returns."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        binary = find_etcd()
        if binary is None:
            pytest.skip("needs etcd, next to python or on PATH")
        self._binary = binary
        self.hosts = list(hosts)
        self.running: list[Running | None] = [None] * len(self.hosts)
        self.start_all()

    @property
    def endpoints(self) -> str:
        return ",".join(host.endpoint(_PORT) for host in self.hosts)

    # --- starting and killing -----------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start the members that do not run, with their old data."""
        started = [self._start(index) for index, running in enumerate(self.running) if running is None]
        for index, ready in started:
            with ready:
                self._until_ready(index, ready)

    def kill(self, index: int) -> None:
        """Kill a member and wait until it is gone."""
        running = self.running[index]
        assert running is not None, f"member {index} is not running"
        running.process.kill()
        running.process.wait()
        self.running[index] = None

    def kill_leader(self) -> int:
        """Kill the leader. Return its index."""
        index = self.leader()
        self.kill(index)
        return index

    def _start(self, index: int) -> tuple[int, socket.socket]:
        host = self.hosts[index]
        clients, peers = (f"http://{host.endpoint(port)}" for port in (_PORT, _PEERS_PORT))
        all_peers = (f"{each.name}=http://{each.endpoint(_PEERS_PORT)}" for each in self.hosts)
        command = [
            self._binary,
            f"--name={host.name}",
            f"--data-dir={host.home / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            "--initial-cluster=" + ",".join(all_peers),
            "--unsafe-no-fsync",
            "--log-level=error",
        ]
        path = host.home / "ready"  # not abstract: those belong to one network namespace
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ready.bind(os.path.relpath(path))
        self.running[index] = host.run(command, env={"NOTIFY_SOCKET": str(path), "ETCD_UNSUPPORTED_ARCH": "arm64"})
        return index, ready

    def _until_ready(self, index: int, ready: socket.socket) -> None:
        running = self.running[index]
        assert running is not None
        pidfd = os.pidfd_open(running.pid)
        try:
            readable, _, _ = select.select([ready, pidfd], [], [], TIMEOUT_S)
        finally:
            os.close(pidfd)
        if ready not in readable or b"READY=1" not in ready.recv(4096):
            pytest.fail(f"the etcd member on {self.hosts[index].name} did not start\n{running!r}")

    # --- requests -----------------------------------------------------------------------------------------------------

    def call(self, index: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer of a member. Raises urllib's errors."""
        host = self.hosts[index]
        request = urllib.request.Request(f"http://{host.endpoint(_PORT)}{path}", json.dumps(body).encode())

        def send() -> dict[str, Any]:
            with urllib.request.urlopen(request, timeout=10.0) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer

        return host.inside(send)

    def leader(self) -> int:
        """Return the index of the leader, once there is one: a linearizable read waits for it."""
        alive = [index for index, running in enumerate(self.running) if running is not None]
        until = time.monotonic() + TIMEOUT_S
        for index in itertools.cycle(alive):
            assert time.monotonic() < until, "etcd has no leader"
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.call(index, "/v3/kv/range", {"key": "AA=="})
                leader = self.call(index, "/v3/maintenance/status", {}).get("leader", "0")
                for other in alive:
                    if self.call(other, "/v3/maintenance/status", {})["header"]["member_id"] == leader:
                        return other
        raise AssertionError("no member is running")

    def records(self, run_id: str) -> list[Written]:
        index = self.leader()
        return records_of(lambda path, body: self.call(index, path, body), run_id)


def records_of(call: Call, run_id: str) -> list[Written]:
    """Return every value that the record of a run has had, oldest first."""
    key = b64encode(Keys(run_id).record).decode()
    found: list[Written] = []
    revision = 0
    while kvs := call("/v3/kv/range", {"key": key, "revision": str(revision)}).get("kvs"):
        found.append(msgspec.json.decode(b64decode(kvs[0]["value"]), type=Written))
        revision = int(kvs[0]["mod_revision"]) - 1
        if revision <= 0:
            break
    return found[::-1]
