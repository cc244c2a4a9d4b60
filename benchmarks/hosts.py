"""Hosts on this machine, each with its own network, of which one can be cut off silently.

A host is a network namespace, held by a process that exits when this end of its pipe closes: nothing is left behind,
however the benchmarks end. The hosts have static hardware addresses of each other, so connections to a host that is cut
off are neither reset nor unreachable: packets to it and from it are dropped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from types import TracebackType


def why_not() -> str:
    """Return why hosts cannot be created here; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"the program {missing[0]} is missing (iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"the kernel refuses a network namespace: {made.stderr.strip()}" if made.returncode else ""


class Namespace:
    """One network, held by a process that reads a pipe until it closes."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.read(1)  # it has entered its namespace
        self.path = f"/proc/{self._holder.pid}/ns/net"

    @property
    def enter(self) -> list[str]:
        """Return the command prefix that starts a program here. The program keeps the pid of the caller."""
        return ["nsenter", f"--net={self.path}", "--"]

    def ip(self, *lines: str) -> None:
        """Run these commands of `ip`."""
        subprocess.run([*self.enter, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)

    def close(self) -> None:
        """Release it; the kernel removes the network when no process is in it."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(10)


class Hosts:
    """Hosts on one bridge."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._stack = contextlib.ExitStack()
        self.hosts: list[Namespace] = []

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            self._bridge = Namespace()
            stack.callback(self._bridge.close)
            self._bridge.ip("link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 up")
            for number in range(self._number):
                host = Namespace()
                stack.callback(host.close)
                self.hosts.append(host)
                self._bridge.ip(
                    f"link add p{number} type veth peer name eth0 address {_mac(number)} netns {host.path}",
                    f"link set p{number} master br0 up",
                )
                others = (other for other in range(self._number) if other != number)
                host.ip(
                    "link set lo up",
                    f"addr add {address(number)}/24 dev eth0",
                    "link set eth0 up",
                    *(f"neigh add {address(other)} lladdr {_mac(other)} dev eth0 nud permanent" for other in others),
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def cut_off(self, number: int) -> None:
        """Drop all packets from and to this host. Its link stays up."""
        self._bridge.ip(f"link set p{number} nomaster")


def address(number: int) -> str:
    """Return the address of the host of this number."""
    return f"10.77.0.{number + 1}"


def _mac(number: int) -> str:
    return f"02:00:00:00:77:{number + 1:02x}"
