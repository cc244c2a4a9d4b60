"""EtcdServer: one etcd server for a job on one host, or for a test; TorchElastic's name.

What differs from TorchElastic's: the server never outlives this process, however it ends; the client that it gives
speaks etcd's third API; and what the server prints goes to a file in its data directory unless ``stderr`` says where,
because a pipe that nobody reads would stop the server one day. Everything here blocks.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess as processes
import tempfile
from contextlib import suppress

from tenax._io.etcd.binary import find_etcd, judge_version, server_environ
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.data_directory import last_messages
from tenax._io.etcd.errors import EtcdError
from tenax._io.etcd.operations import Status
from tenax._io.etcd.server import ServerProcess
from tenax._io.etcd.server_guard import GRACE_S
from tenax._io.etcd.settings import etcd_settings
from tenax._io.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]

_HOST = "localhost"
_LOOK_S = 0.5  # how long one question to a server that is coming up may take


def find_free_port() -> socket.socket:
    """A socket that listens at a free port of localhost. Close it just before the port is used by another program."""
    troubles = []
    for family, kind, protocol, _, address in socket.getaddrinfo(_HOST, 0, type=socket.SOCK_STREAM):
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.bind(address)
            sock.listen(0)
            return sock
        except OSError as error:
            troubles.append(str(error))
            if sock is not None:
                sock.close()
    raise RuntimeError(f"there is no free port at {_HOST}: {'; '.join(troubles)}")


def stop_etcd(subprocess: Any, data_dir: str | None = None) -> None:
    """End a server that was started as a ``subprocess.Popen``, and remove its data."""
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
    """Starts and stops an etcd server at free ports of localhost.

    The program is looked for in ``$TORCHELASTIC_ETCD_BINARY_PATH``, ``$TENAX_ETCD``, on ``PATH``, and beside the Python
    that runs this. ``data_dir`` is removed when the server is stopped.

        server = EtcdServer()
        server.start()
        client = server.get_client()
        ...
        server.stop()
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._port = -1
        self._base_data_dir = data_dir or tempfile.mkdtemp(prefix="torchelastic_etcd_data")
        self._loop: Loop | None = None
        self._server: ServerProcess | None = None
        self._told = ""
        self._how_it_ended = ""

    def get_port(self) -> int:
        """Where clients are served; -1 before ``start``."""
        return self._port

    def get_host(self) -> str:
        return _HOST

    def get_endpoint(self) -> str:
        """``host:port``."""
        return f"{_HOST}:{self._port}"

    def get_client(self) -> BlockingEtcd:
        """A client of this server. The caller closes it."""
        return BlockingEtcd(etcd_settings(self.get_endpoint()))

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Start the server, and wait until it serves, each time so many seconds at most.

        ``stderr``: a descriptor, an open file or ``subprocess.DEVNULL`` for what the server prints; else it goes to the
        file ``etcd.log`` in the data directory. Raises ``TimeoutError``, ``RuntimeError`` with the server's last words,
        or ``EtcdUnusable`` if there is no etcd program that can be used.
        """
        if self._server is not None:
            raise RuntimeError("this etcd server was started already; stop it first")
        self._loop = Loop()
        self._server = ServerProcess(self._loop, self._note_end)
        atexit.register(self.stop)
        try:
            program, environ = self._find_program()
            for attempt in range(max(1, num_retries)):
                try:
                    self._start(program, environ, attempt, timeout, stderr)
                    return
                except (RuntimeError, TimeoutError):
                    self._server.kill()  # for the next attempt there is another
                    if attempt + 1 >= num_retries:
                        raise
        except BaseException:
            self.stop()
            raise

    def _find_program(self) -> tuple[str, dict[str, str]]:
        assert self._loop is not None
        assert self._server is not None
        program, environ = find_etcd(), server_environ()
        heard: list[str] = []
        self._server.ask_version(program, environ, heard.append)
        while not heard:
            self._loop.next_event(lambda: self._now() if heard else None)
        judge_version(program, heard[0])
        return program, environ

    def _start(
        self, program: str, environ: dict[str, str], attempt: int, timeout_s: float, stderr: int | IO[Any] | None
    ) -> None:
        assert self._server is not None
        self._how_it_ended = ""
        data = os.path.join(self._base_data_dir, str(attempt))
        os.makedirs(data, mode=0o700, exist_ok=True)
        log = os.path.join(data, "etcd.log")
        with find_free_port() as client_port, find_free_port() as peer_port:
            self._port = client_port.getsockname()[1]
            client_url, peer_url = self._url(self._port), self._url(peer_port.getsockname()[1])
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
            self._server.start(command, environ, log, lock=None, output=output)
        finally:
            if output is not None:
                os.close(output)
        self._wait_until_it_serves(timeout_s, log)

    def _url(self, port: int) -> str:
        return f"http://{_HOST}:{port}"

    def _wait_until_it_serves(self, timeout_s: float, log: str) -> None:
        assert self._loop is not None
        deadline = self._now() + timeout_s
        client = BlockingEtcd(etcd_settings(self.get_endpoint()), patience_s=_LOOK_S)
        try:
            while self._now() < deadline:
                with suppress(EtcdError):  # not yet
                    client.call(Status())
                    return
                self._hear()
                if self._how_it_ended:
                    words = ""
                    with suppress(OSError), open(log, encoding="utf-8", errors="replace") as text:
                        words = last_messages(text.read())
                    raise RuntimeError(
                        f"the etcd server has ended: {self._how_it_ended}; its last words: {words or 'none'}"
                    )
        finally:
            client.close()
        raise TimeoutError(f"the etcd server at {self.get_endpoint()} did not serve within {timeout_s:g} s")

    def _hear(self) -> None:
        """Whatever the guard has said by now."""
        assert self._loop is not None
        rounds: list[bool] = []
        self._loop.at(self._now(), lambda: rounds.append(True))
        self._loop.next_event(lambda: self._now() if rounds else None)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.now()

    def _note_end(self, how: str, _by_itself: bool) -> None:
        self._how_it_ended = how

    def stop(self) -> None:
        """Stop the server and remove its data. To stop it again does nothing."""
        server, self._server = self._server, None
        loop, self._loop = self._loop, None
        if server is not None and loop is not None:
            if server.is_running:
                server.stop()
                end = loop.now() + 2 * GRACE_S
                loop.next_event(lambda: loop.now() if not server.is_running else end)
            server.kill()
            loop.close()
            atexit.unregister(self.stop)
        shutil.rmtree(self._base_data_dir, ignore_errors=True)


def _descriptor(stderr: int | IO[Any] | None) -> int | None:
    """A descriptor of ours for what the server prints; None: its own file."""
    if stderr is None or stderr == processes.PIPE:
        return None
    if stderr == processes.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    return os.dup(stderr if isinstance(stderr, int) else stderr.fileno())
