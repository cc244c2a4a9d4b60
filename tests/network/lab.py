"""The lab: a few hosts on their own network, with faults on command.

Each host has its own network, host name and /etc/hosts, and shares processes and files with the machine. Invariants:

1. A cut is silent: packets are dropped without a reset or "unreachable", and the link stays up.
2. Directions are independent: packets from ``a`` to ``b`` can be dropped while ``b`` still reaches ``a``.
3. A power failure ends all programs of a host at once; none can send anything more. After a boot nothing runs, and the
   host has its old name and address.
4. Labs are isolated from each other, and nothing of a lab is visible outside: no interface, named namespace or mount.
5. A lab leaves nothing behind: every process in one of its networks is killed.

How a cut works: hosts have static neighbour entries for each other, and a direction is cut by a wrong hardware address
at the sender. That needs only ``ip`` and works for existing and new connections. Broadcasts are not cut.

Needs Linux, root and ``ip`` (iproute2); a slow network needs /dev/net/tun too, a shifted clock a C compiler.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import pytest

from .fabric import Bridge, SlowSwitch
from .file_watch import TIMEOUT_S, until
from .name_service import SERVER, Dns, SlowNameServer, write_files
from .namespaces import Namespace
from .running import Running

T = TypeVar("T")
Family = Literal["v4", "v6", "both"]
Direction = Literal["both", "in", "out"]

SLOW_NAME_S = 0.3
_UNUSED_MAC = "02:00:00:00:00:00"  # no host has this hardware address
_SILENT_HOST = 254  # the number of an address without a host
# Variables of a launcher or of the test run, which hosts do not inherit.
_NOT_INHERITED = re.compile(
    "PET_|TORCH|TENAX|OMP_|CUDA_|PYTHON(?!PATH)|NO_COLOR|COLUMNS|LINES|RES_OPTIONS"
    "|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_"
)
# Set the host's name and its name service files, then execute the program.
_ENTER_HOST = """
echo "$1" > /proc/sys/kernel/hostname || exit 126
for name in hosts resolv.conf nsswitch.conf; do
  if [ -e "/etc/$name" ]; then mount --bind "$2/$name" "/etc/$name" || exit 126; fi
done
shift 2
exec "$@"
"""


def why_not(*, slow: bool = False, v6: bool = False) -> str:
    """Return why labs are not possible here; empty if they are."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.getuid() != 0:
        return "creating network namespaces needs root"
    missing = [name for name in ("ip", "nsenter", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"the program {missing[0]} is missing (Debian: apt-get install iproute2 util-linux mount)"
    if slow and not os.path.exists("/dev/net/tun"):
        return "a slow network needs /dev/net/tun"
    if v6 and not os.path.exists("/proc/net/if_inet6"):
        return "the kernel has no IPv6"
    try:
        Namespace().close()
    except OSError as error:
        return f"the kernel refuses a network namespace: {error}"
    return ""


def _skip_if(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(reason), reason=reason)


requires_netns = _skip_if(why_not())
requires_slow_network = _skip_if(why_not(slow=True))
requires_ipv6 = _skip_if(why_not(v6=True))


class Host:
    """One host of a lab. Its name is ``node0``, ``node1`` …; its interface is ``eth0``."""

    def __init__(self, lab: Lab, number: int) -> None:
        self._lab = lab
        self.number = number
        self.name = f"node{number}"
        self.addresses = lab._addresses(number + 1)
        self.address = self.addresses[0]
        self.mac = f"02:{secrets.token_hex(1)}:00:00:00:{number + 1:02x}"
        self.home = lab.home / self.name  # working directory and TMPDIR of its programs
        self.home.mkdir()
        self._started: list[Running] = []
        self._is_plugged = False
        self._names: SlowNameServer | None = None
        self._network: Namespace | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}{'' if self.is_on else ' (off)'}>"

    def endpoint(self, port: int) -> str:
        """Return ``address:port``; IPv6 addresses in brackets."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"

    @property
    def is_on(self) -> bool:
        return self._network is not None

    @property
    def network(self) -> Namespace:
        if self._network is None:
            raise RuntimeError(f"{self.name} is off; power it on first")
        return self._network

    # --- programs and sockets -----------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        hostname: str | None = None,
        dns: Dns = "hosts",
        skew_s: float | None = None,
    ) -> Running:
        """Start a program on this host, in its own session.

        ``env`` is added to a clean environment. ``hostname`` replaces the host's name (two hosts may have the same
        one). ``dns`` selects the name service. ``skew_s`` shifts its wall clock; 0 allows ``set_skew`` later.
        """
        network = self.network
        title = f"{self.name}.{len(self._started)}"
        variables = {key: value for key, value in os.environ.items() if not _NOT_INHERITED.match(key)}
        variables |= {"TMPDIR": str(self.home), **(env or {})}
        clock = None
        if skew_s is not None:
            clock = self._lab.home / f"{title}.clock"
            clock.write_bytes(struct.pack("=q", round(skew_s * 1e9)))
            library = self._lab.skew_library()
            variables["TENAX_LAB_CLOCK"] = str(clock)
            # LD_PRELOAD is split at spaces, which a path may have; LD_LIBRARY_PATH is not.
            for key, first in (("LD_PRELOAD", library.name), ("LD_LIBRARY_PATH", str(library.parent))):
                variables[key] = ":".join(filter(None, [first, variables.get(key, "")]))
        name = self.name if hostname is None else hostname
        etc = self._lab.home / f"{title}.etc"
        names = {name: self.address} | {other.name: other.address for other in self._lab.hosts if other.name != name}
        write_files(etc, dns, names, self._lab._addresses(_SILENT_HOST)[0])
        if dns == "slow":
            self._start_slow_name_server(names)
        out, err = self._lab.home / f"{title}.out", self._lab.home / f"{title}.err"
        become = ["unshare", "--uts", "--mount", "--", "sh", "-c", _ENTER_HOST, "sh", name, str(etc)]
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [*network.enter, *become, *argv],
                env=variables,
                cwd=self.home if cwd is None else cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        running = Running(process, f"{title} {argv[0]}", out, err, clock)
        self._started.append(running)
        self._lab.started.append(running)
        return running

    def _start_slow_name_server(self, names: Mapping[str, str]) -> None:
        if self._names is None:

            def make() -> socket.socket:
                server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                server.bind((SERVER, 53))
                return server

            self._names = SlowNameServer(self.inside(make), names, SLOW_NAME_S)
        for name, address in names.items():
            self._names.add(name, address)

    @property
    def names_queried(self) -> list[str]:
        """The names that programs with ``dns="slow"`` have looked up."""
        return [] if self._names is None else list(self._names.queried)

    def inside(self, act: Callable[[], T]) -> T:
        """Call ``act`` on this host's network, in a thread of this process. Its sockets belong to the host."""
        return self.network.inside(act)

    def listen(self, port: int = 0) -> socket.socket:
        """Return a socket that listens at this host's address."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        return self.inside(lambda: socket.create_server((self.address, port), family=family))

    def connect(self, address: str, port: int, timeout_s: float = TIMEOUT_S) -> socket.socket:
        """Return a connection from this host. Raises TimeoutError."""
        return self.inside(lambda: socket.create_connection((address, port), timeout_s))

    def processes(self) -> dict[int, str]:
        """Return all processes on this host: pid and command."""
        return self._network.processes() if self._network else {}

    # --- faults -------------------------------------------------------------------------------------------------------

    def cut(self, direction: Direction = "both") -> None:
        """Drop all packets to this host (``in``), from it (``out``), or both."""
        self._lab._change(close=self._edges(direction))

    def heal(self, direction: Direction = "both") -> None:
        """Undo all cuts of this host in that direction."""
        self._lab._change(open_=self._edges(direction))

    def _edges(self, direction: Direction) -> set[tuple[int, int]]:
        others = [other.number for other in self._lab.hosts if other is not self]
        incoming = {(other, self.number) for other in others}
        outgoing = {(self.number, other) for other in others}
        return {"both": incoming | outgoing, "in": incoming, "out": outgoing}[direction]

    def reset(self, port: int) -> None:
        """Reset all connections of this host to that port on both sides, as a firewall that lost its state does."""
        command = ["ss", "--tcp", "--kill", "dport", "=", f":{port}"]
        done = subprocess.run([*self.network.enter, *command], capture_output=True, text=True)
        if f":{port}" not in done.stdout:  # ss prints the connections that it has reset
            pytest.skip(f"the kernel does not support ss --kill: {done.stderr.strip()}")

    def unplug(self) -> None:
        """Unplug the network cable. The host keeps running and sees its link down."""
        if self._is_plugged:
            self._lab._fabric.plug(self.number, is_in=False)
            self._is_plugged = False

    def plug(self) -> None:
        """Plug the cable in again."""
        if not self._is_plugged:
            with self._until_connected(self.network):
                self._lab._fabric.plug(self.number, is_in=True)

    @contextlib.contextmanager
    def _until_connected(self, network: Namespace) -> Iterator[None]:
        """On exit, wait until both ends of the host's link are up."""
        with self._lab._fabric.until_carrying(self.number), network.until_running("eth0"):
            yield
        self._is_plugged = True

    def power_off(self, *, kill: bool = True) -> None:
        """Unplug the cable first, so that nothing more is sent, then kill everything on the host at once.

        With ``kill=False`` only the cable is unplugged; kill the host's processes yourself, or call ``power_on``.
        """
        self.unplug()
        if kill:
            self._end_programs()
            if self.is_on:
                self._lab._fabric.detach(self.number)
            self._close_network()

    def _end_programs(self) -> None:
        ours = [running.process for running in self._started if not running.is_over]
        for process in ours:
            process.send_signal(signal.SIGSTOP)  # a new one may not have entered the namespace yet
        if self._network is not None:
            self._network.end_all()
        for process in ours:
            process.kill()
            process.wait()

    def _close_network(self) -> None:
        if self._names is not None:
            self._names.close()
            self._names = None
        if self._network is not None:
            self._network.close()
            self._network = None

    def power_on(self) -> None:
        """Boot: nothing runs and there are no connections; name and address are the same."""
        if self.is_on:
            self.plug()
            return
        self._network = network = Namespace()
        self._lab._fabric.attach(self.number, self.mac, network)
        routes = {address: f"{address}/{64 if ':' in address else 24}" for address in self.addresses}
        settings = [f"addr add {route} dev eth0{' nodad' if ':' in route else ''}" for route in routes.values()]
        neighbours = self._lab._neighbours(self.number)
        with self._until_connected(network), network.until_reachable_at(a for a in self.addresses if ":" in a):
            network.ip("link set lo up", "link set eth0 up", *settings, *neighbours)


class Lab:
    """``with Lab(hosts=3) as lab: a, b, c = lab`` …

    ``family``: v4, v6 (IPv4 on loopback only) or both. With ``delay_ms`` (one way), ``jitter_ms``, ``loss`` (0 to 1,
    each way) or a ``seed`` the network can be slow; the same seed loses the same frames.
    ``folder`` is for its files; by default a temporary folder, which is removed at the end.
    """

    def __init__(
        self,
        hosts: int = 3,
        *,
        family: Family = "v4",
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
        seed: int | None = None,
        folder: Path | None = None,
    ) -> None:
        if not 1 <= hosts < _SILENT_HOST - 1:
            raise ValueError(f"a lab has 1 to {_SILENT_HOST - 2} hosts, not {hosts}")
        self.family = family
        self.hosts: list[Host] = []
        self.started: list[Running] = []
        self._count = hosts
        self._shape = (delay_ms, jitter_ms, loss)
        self._seed = (seed or 0) if seed is not None or any(self._shape) else None
        self._folder = folder
        self._block_v4 = f"10.{secrets.randbelow(255)}.{secrets.randbelow(255)}."
        self._block_v6 = f"fd{secrets.token_hex(1)}:{secrets.randbelow(1 << 16):x}:{secrets.randbelow(1 << 16):x}::"
        self._closed: set[tuple[int, int]] = set()
        self._fabric: Bridge | SlowSwitch
        self._teardown = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as stack:
            if self._folder is None:
                self.home = Path(tempfile.mkdtemp(prefix="tenax-lab-"))
                stack.callback(shutil.rmtree, self.home)
            else:
                self.home = self._folder
            self.shared = self.home / "shared"  # a file system shared by all hosts
            self.shared.mkdir()
            namespace = Namespace()
            stack.callback(namespace.close)
            self._fabric = Bridge(namespace) if self._seed is None else SlowSwitch(namespace, self._seed, self.home)
            stack.callback(self._fabric.close)
            self.hosts += [Host(self, number) for number in range(self._count)]
            for host in self.hosts:
                stack.callback(host._close_network)
                stack.callback(host._end_programs)
                host.power_on()
            if any(self._shape):
                self.shape(*self._shape)
            self._teardown = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._teardown.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    # --- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Return all processes of all hosts: pid, and host and command."""
        return {pid: f"{host.name}: {command}" for host in self.hosts for pid, command in host.processes().items()}

    def until(self, condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = TIMEOUT_S) -> T:
        """Wait until the condition is true. Checked when a program prints or exits, or ``shared`` changes."""
        living = [running.pid for running in self.started if not running.is_over]
        return until(condition, what, [self.home, self.shared], living, timeout_s)

    def describe(self) -> str:
        """Return every program and its output, for the output of a failed test."""
        return "\n\n".join(map(repr, self.started))

    # --- faults -------------------------------------------------------------------------------------------------------

    def partition(self, *groups: Iterable[Host]) -> None:
        """Cut these groups off from each other. Other hosts are not affected."""
        members = [[host.number for host in group] for group in groups]
        pairs = [(one, other) for one in members for other in members if one is not other]
        self._change(close={(source, target) for one, other in pairs for source in one for target in other})

    def heal(self) -> None:
        """Undo all cuts."""
        self._change(open_=set(self._closed))

    def shape(
        self,
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
        *,
        sources: Iterable[Host] | None = None,
        targets: Iterable[Host] | None = None,
    ) -> None:
        """Set delay, jitter and loss from these hosts to those (by default all)."""
        for source in self.hosts if sources is None else sources:
            for target in self.hosts if targets is None else targets:
                if source is not target:
                    self._fabric.shape(source.number, target.number, delay_ms, jitter_ms, loss)

    def _change(self, close: Iterable[tuple[int, int]] = (), open_: Iterable[tuple[int, int]] = ()) -> None:
        before = set(self._closed)
        self._closed = (before | set(close)) - set(open_)
        changed = before ^ self._closed
        for source in {source for source, _ in changed}:
            if self.hosts[source].is_on:
                targets = [target for from_, target in changed if from_ == source]
                self.hosts[source].network.ip(*self._neighbours(source, targets))

    def _neighbours(self, source: int, targets: Iterable[int] | None = None) -> list[str]:
        """Return the neighbour entries of a host as ``ip`` commands: hardware addresses, wrong ones where it is cut."""
        lines = []
        for target in range(self._count) if targets is None else targets:
            if target != source:
                mac = _UNUSED_MAC if (source, target) in self._closed else self.hosts[target].mac
                lines += [(address, mac) for address in self.hosts[target].addresses]
        if targets is None:
            lines += [(address, _UNUSED_MAC) for address in self._addresses(_SILENT_HOST)]
        return [f"neigh replace {address} lladdr {mac} nud permanent dev eth0" for address, mac in lines]

    # --- parts --------------------------------------------------------------------------------------------------------

    def _addresses(self, number: int) -> list[str]:
        v4, v6 = f"{self._block_v4}{number}", str(ip_address(f"{self._block_v6}{number:x}"))  # as the kernel writes it
        return {"v4": [v4], "v6": [v6], "both": [v4, v6]}[self.family]

    def skew_library(self) -> Path:
        """Return the library that shifts a program's wall clock. Skips the test if it cannot be built."""
        library = self.home / "skew.so"
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                pytest.skip("shifting a program's wall clock needs a C compiler")
            source = Path(__file__).with_name("skew.c")
            command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return library
