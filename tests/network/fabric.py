"""What joins the hosts of a lab: a bridge of the kernel, or a switch in user space that can be slow and lossy.

Each works in a namespace apart from those of the hosts and from the machine's: no interface of a lab is ever visible
outside of it, and no firewall of the machine has a say in it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .namespaces import Namespace

_ANSWERS_WITHIN_S = 30.0


class Bridge:
    """Every host has a virtual cable (veth) to a bridge."""

    def __init__(self, place: Namespace) -> None:
        self._place = place
        self._place.ip("link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 up")

    def attach(self, number: int, mac: str, host: Namespace) -> None:
        """Give the host an ``eth0`` with this address."""
        self._place.ip(
            f"link add p{number} type veth peer name eth0 address {mac} netns {host.path}",
            f"link set p{number} master br0 up",
        )

    def until_carrying(self, number: int) -> AbstractContextManager[None]:
        """What happens inside brings the host's cable up; returns when our end of it has noticed."""
        return self._place.until_running(f"p{number}")

    def plug(self, number: int, is_in: bool) -> None:
        self._place.ip(f"link set p{number} {'up' if is_in else 'down'}")

    def detach(self, number: int) -> None:
        """The cable is gone, with the host's ``eth0``."""
        self._place.ip(f"link del p{number}")

    def shape(self, source: int, target: int, delay_ms: float, jitter_ms: float, loss: float) -> None:
        raise RuntimeError("A bridge of the kernel cannot be slow: make the lab with a delay, a loss or a seed.")

    def close(self) -> None:
        """It goes with its namespace."""


class SlowSwitch:
    """Every host has a TAP device whose other end is a process of ours; see ``switch.py``."""

    def __init__(self, place: Namespace, seed: int, folder: Path) -> None:
        self._place = place
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWERS_WITHIN_S)
        self._errors = folder / "switch.err"
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("switch.py")), str(seed)]
        with theirs, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*self._place.enter, *program], stdin=theirs.fileno(), stdout=errors, stderr=errors, cwd="/"
            )

    def _do(self, do: str, **details: object) -> None:
        self._control.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
        answer = self._control.recv(64)
        if answer != b"ok\n":
            raise RuntimeError(f"the switch could not {do} {details}: {self._errors.read_text()}")

    def attach(self, number: int, mac: str, host: Namespace) -> None:
        self._do("add", port=f"p{number}", mac=mac)
        self._place.ip(f"link set p{number} netns {host.path} name eth0 address {mac}")

    def until_carrying(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()  # our end carries whatever comes

    def plug(self, number: int, is_in: bool) -> None:
        self._do("carrier", port=f"p{number}", up=is_in)

    def detach(self, number: int) -> None:
        self._do("remove", port=f"p{number}")

    def shape(self, source: int, target: int, delay_ms: float, jitter_ms: float, loss: float) -> None:
        self._do("shape", source=f"p{source}", target=f"p{target}", delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss)

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(_ANSWERS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
