"""TorchElastic's ``EtcdServer``: one etcd server for a job on one host, or for a test.

Differences from TorchElastic's: the server never outlives this process; the client uses etcd's v3 API; and the server's
output goes to a file in its data directory unless ``stderr`` is given, because a pipe that is not read would eventually
block the server. Everything here blocks.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess as processes
import tempfile
from contextlib import suppress
from typing import IO, Any

from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Status
from tenax._core.text import format_seconds
from tenax._io.etcd.binary import find_etcd, judge_version, server_environ
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.data_directory import last_messages
from tenax._io.etcd.settings import etcd_settings
from tenax._io.loop import Loop
from tenax._processes.server_process import GRACE_S, ServerProcess
from tenax.utils.api import get_socket_with_port

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

_HOST = "localhost"
_PROBE_TIMEOUT_S = 0.5  # for one request to a starting server


def find_free_port() -> socket.socket:
    """Return a socket that listens on a free port of localhost. Close it just before another program binds the port."""
    return get_socket_with_port()


def stop_etcd(subprocess: Any, data_dir: str | None = None) -> None:
    """Stop a server that was started as a ``subprocess.Popen``, and remove its data."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        try:
            subprocess.wait(GRACE_S)
        except processes.TimeoutExpired:
            subprocess.kill()
            subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """Starts and stops an etcd server on free ports of localhost.

    The program is searched in ``$TORCHELASTIC_ETCD_BINARY_PATH``, ``$TENAX_ETCD``, on ``PATH``, and beside the Python
    interpreter. ``data_dir`` is removed when the server is stopped.

        server = EtcdServer()
        server.start()
        client = server.get_client()
        ...
        server.stop()
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._port = -1
        self._base_data_dir = data_dir or tempfile.mkdtemp(prefix="torchelastic_etcd_data")
        self._running: tuple[Loop, ServerProcess] | None = None
        self._end_reason = ""

    def get_port(self) -> int:
        """Return the client port; -1 before ``start``."""
        return self._port

    def get_host(self) -> str:
        return _HOST

    def get_endpoint(self) -> str:
        """Return ``host:port``."""
        return f"{_HOST}:{self._port}"

    def get_client(self) -> BlockingEtcd:
        """Return a client of this server. The caller closes it."""
        return BlockingEtcd(etcd_settings(self.get_endpoint()))

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Start the server and wait until it is ready, at most ``timeout`` seconds per attempt.

        ``stderr``: a descriptor, an open file or ``subprocess.DEVNULL`` for the server's output; the default is the
        file ``etcd.log`` in the data directory. Raises ``TimeoutError``, ``RuntimeError`` with the last lines of the
        output, or ``EtcdUnusable`` if there is no usable etcd program.
        """
        if self._running is not None:
            raise RuntimeError("this etcd server is already started; stop it first")
        loop = Loop()
        server = ServerProcess(loop, self._on_end)
        self._running = loop, server
        atexit.register(self.stop)
        try:
            program, versions = find_etcd(), list[str]()
            server.query_version(program, server_environ(), versions.append)
            while not versions:
                loop.next_event(lambda: loop.now() if versions else None)
            judge_version(program, versions[0])
            for attempt in range(max(1, num_retries)):
                try:
                    self._wait_until_ready(loop, timeout, self._start(server, program, attempt, stderr))
                    return
                except (RuntimeError, TimeoutError):
                    server.kill()
                    if attempt + 1 >= num_retries:
                        raise
        except BaseException:
            self.stop()
            raise

    def _start(self, server: ServerProcess, program: str, attempt: int, stderr: int | IO[Any] | None) -> str:
        """Start the server and return the path of its log."""
        self._end_reason = ""
        data = os.path.join(self._base_data_dir, str(attempt))
        os.makedirs(data, mode=0o700, exist_ok=True)
        log = os.path.join(data, "etcd.log")
        with find_free_port() as client_port, find_free_port() as peer_port:
            self._port = client_port.getsockname()[1]
            client_url, peer_url = f"http://{self.get_endpoint()}", f"http://{_HOST}:{peer_port.getsockname()[1]}"
        command = [
            program,
            *("--data-dir", data),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"default={peer_url}"),
            *("--logger", "zap", "--log-level", "warn"),
        ]
        output = _descriptor(stderr)
        try:
            server.start(command, server_environ(), log, output=output)
        finally:
            if output is not None:
                os.close(output)
        return log

    def _wait_until_ready(self, loop: Loop, timeout_s: float, log: str) -> None:
        deadline = loop.now() + timeout_s
        client = BlockingEtcd(etcd_settings(self.get_endpoint()), patience_s=_PROBE_TIMEOUT_S)
        try:
            while loop.now() < deadline:
                with suppress(EtcdError):  # not yet
                    client.call(Status())
                    return
                loop.next_event(loop.now)  # processes the events of the server process that have arrived
                if self._end_reason:
                    output = ""
                    with suppress(OSError), open(log, encoding="utf-8", errors="replace") as text:
                        output = last_messages(text.read())
                    raise RuntimeError(f"etcd {self._end_reason}; last log messages: {output or 'none'}")
        finally:
            client.close()
        raise TimeoutError(f"the etcd server at {self.get_endpoint()} was not ready within {format_seconds(timeout_s)}")

    def _on_end(self, how: str, _by_itself: bool) -> None:
        self._end_reason = how

    def stop(self) -> None:
        """Stop the server and remove its data. A second call does nothing."""
        running, self._running = self._running, None
        if running is not None:
            loop, server = running
            if server.is_running:
                server.stop()
                end = loop.now() + 2 * GRACE_S
                loop.next_event(lambda: loop.now() if not server.is_running else end)
            server.kill()
            loop.close()
            atexit.unregister(self.stop)
        shutil.rmtree(self._base_data_dir, ignore_errors=True)


def _descriptor(stderr: int | IO[Any] | None) -> int | None:
    """Return a new descriptor for the server's output; None for the default file."""
    if stderr is None or stderr == processes.PIPE:
        return None
    if stderr == processes.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    return os.dup(stderr if isinstance(stderr, int) else stderr.fileno())
