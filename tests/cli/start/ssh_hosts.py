"""Four hosts for ssh: servers of sshd on the loopback address, each at its own port, for the user of the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S, until

NAMES = ("h0", "h1", "h2", "h3")
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
_VARIABLE = "TENAX_SSH_TEST"  # the processes that ssh starts on these hosts have it


def why_not() -> str:
    """Return why there can be no sshd here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "reads /proc"
    if SSHD is None or shutil.which("ssh") is None:
        return "sshd is missing (Debian: apt-get install openssh-server)"
    return ""


class SshHosts:
    """The hosts. ``config`` is the configuration of ssh with their ports; in it, ``bad`` is a host that is down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config"
        self._mark = f"{_VARIABLE}={os.urandom(8).hex()}"
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # sshd of root refuses to run without this empty folder
        for key in ("user_key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        hosts = [self._start_server(name) for name in NAMES]
        common = (
            f'IdentityFile "{self.folder}/user_key"',
            "IdentitiesOnly yes",
            "StrictHostKeyChecking no",
            "UserKnownHostsFile /dev/null",
            "LogLevel ERROR",
            f"SetEnv {self._mark}",
        )
        hosts += [_address_of("bad", own_endpoint()), "Host *", *common]
        self.config.write_text("\n".join(hosts) + "\n")

    def _start_server(self, name: str) -> str:
        """Start one server. Return its part of the configuration of ssh."""
        endpoint, path = own_endpoint(), self.folder / f"{name}.conf"
        path.write_text(
            f'ListenAddress {endpoint}\nHostKey "{self.folder}/host_key"\nPidFile none\nUsePAM no\n'
            f'AuthorizedKeysFile "{self.folder}/user_key.pub"\nStrictModes no\nAcceptEnv {_VARIABLE}\n'
        )
        assert SSHD is not None
        log = self.folder / f"{name}.log"
        self._servers.append(subprocess.Popen([SSHD, "-D", "-f", path, "-E", log], stdin=subprocess.DEVNULL))
        until(lambda: log.exists() and "Server listening" in log.read_text(), f"the sshd of {name}")
        return _address_of(name, endpoint)

    def stop(self) -> None:
        for server in self._servers:
            server.terminate()
            server.wait(TIMEOUT_S)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, *words: str) -> list[int]:
        """Return the pids of the processes on the hosts whose command line has all of these words."""
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
                environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if self._mark.encode() in environ and all(word in command for word in words):
                    found.append(int(entry))
        return found


def _address_of(name: str, endpoint: str) -> str:
    host, _, port = endpoint.partition(":")
    return f"Host {name}\nHostName {host}\nPort {port}"
