"""What connects the hosts of a lab: a kernel bridge, or a switch in user space that can be slow and lossy.

Each has its own network namespace: no interface of a lab is visible outside it, and the machine's firewall does not
affect it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .namespaces import Namespace

_ANSWER_TIMEOUT_S = 30.0


class Bridge:
    """Connects every host to a bridge by a veth pair."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._namespace.ip("link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 up")

    def attach(self, number: int, mac: str, host: Namespace) -> None:
        """Give the host an ``eth0`` with this address."""
        self._namespace.ip(
            f"link add p{number} type veth peer name eth0 address {mac} netns {host.path}",
            f"link set p{number} master br0 up",
        )

    def until_carrying(self, number: int) -> AbstractContextManager[None]:
        """On exit, wait until the bridge's end of the link is up."""
        return self._namespace.until_running(f"p{number}")

    def plug(self, number: int, is_in: bool) -> None:
        self._namespace.ip(f"link set p{number} {'up' if is_in else 'down'}")

    def detach(self, number: int) -> None:
        """Remove the link and the host's ``eth0``."""
        self._namespace.ip(f"link del p{number}")

    def shape(self, source: int, target: int, delay_ms: float, jitter_ms: float, loss: float) -> None:
        raise RuntimeError("a kernel bridge cannot be slow; create the lab with a delay, a loss or a seed")

    def close(self) -> None:
        """Do nothing: the bridge is removed with its namespace."""


class SlowSwitch:
    """Connects every host by a TAP device to a switch process; see ``switch.py``."""

    def __init__(self, namespace: Namespace, seed: int, folder: Path) -> None:
        self._namespace = namespace
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_TIMEOUT_S)
        self._errors = folder / "switch.err"
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("switch.py")), str(seed)]
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*self._namespace.enter, *program], stdin=theirs.fileno(), stdout=errors, stderr=errors, cwd="/"
            )

    def _do(self, do: str, **details: object) -> None:
        self._control.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
        answer = self._control.recv(64)
        if answer != b"ok\n":
            raise RuntimeError(f"the switch could not {do} {details}: {self._errors.read_text()}")

    def attach(self, number: int, mac: str, host: Namespace) -> None:
        self._do("add", port=f"p{number}", mac=mac)
        self._namespace.ip(f"link set p{number} netns {host.path} name eth0 address {mac}")

    def until_carrying(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()  # the switch always forwards

    def plug(self, number: int, is_in: bool) -> None:
        self._do("carrier", port=f"p{number}", up=is_in)

    def detach(self, number: int) -> None:
        self._do("remove", port=f"p{number}")

    def shape(self, source: int, target: int, delay_ms: float, jitter_ms: float, loss: float) -> None:
        self._do("shape", source=f"p{source}", target=f"p{target}", delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss)

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(_ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
