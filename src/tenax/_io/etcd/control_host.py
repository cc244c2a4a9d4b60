"""Control hosts: the hosts that the user chose to run the members of a managed etcd.

Which of them is this host, if any (``MemberAddress``), and the command line of a member's server (``member_command``).
"""

from __future__ import annotations

import errno
import hashlib
import socket

import msgspec

from tenax._io.endpoint import Endpoint, Lookup, is_loopback
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from tenax._core.etcd.operations import Member
    from tenax._io.endpoint import Address
    from tenax._io.interfaces import Cancellable, EventLoop
    from tenax._io.tls import TlsFiles

DEFAULT_PORT = 2379
_RESOLVE_PAUSE_S = 1.0
_RESOLVE_PATIENCE_S = 120.0
_MAX_HOSTS = 7  # etcd's own limit: more members make every write slower


class ControlHost(msgspec.Struct, frozen=True):
    """``name`` is as the user wrote it, and also the member's name. The peer port is the client port + 1."""

    name: str
    host: str
    client_port: int
    is_tls: bool = False

    @property
    def peer_port(self) -> int:
        return self.client_port + 1

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.client_port)

    @property
    def client_url(self) -> str:
        return self._url(self.host, self.client_port)

    @property
    def peer_url(self) -> str:
        return self._url(self.host, self.peer_port)

    def _url(self, host: str, port: int) -> str:
        return f"{'https' if self.is_tls else 'http'}://{Endpoint(host, port)}"

    def listen_urls(self, addresses: list[str], port: int) -> str:
        """Return the URLs to listen at: etcd requires addresses there, not host names."""
        return ",".join(self._url(address, port) for address in addresses)


def split_names(endpoint_text: str) -> tuple[str, ...]:
    """Return the unique names in ``n0,n1,n2`` or ``http://n0:2379,http://n1:2379``."""
    texts = (text.strip().removeprefix("http://").removeprefix("https://") for text in endpoint_text.split(","))
    return tuple(dict.fromkeys(filter(None, (text.removesuffix("/") for text in texts))))


def control_hosts(names: tuple[str, ...], default_port: int, *, is_tls: bool) -> tuple[ControlHost, ...]:
    """Parse the names. Raises ValueError."""
    if not 0 < len(names) <= _MAX_HOSTS:
        raise ValueError(
            f"--rdzv-endpoint has {len(names)} control hosts; managed etcd needs 1 to {_MAX_HOSTS}, best 3 or 5"
        )
    hosts = []
    for name in names:
        endpoint = Endpoint.parse(name, default_port)
        if endpoint.port == 65535:
            raise ValueError(f"control host {name!r}: the port must be at most 65534, because the next one is used too")
        hosts.append(ControlHost(name, endpoint.host, endpoint.port, is_tls))
    return tuple(hosts)


def addresses_here(host: ControlHost, addresses: list[Address]) -> list[str]:
    """Return the addresses at which this host can listen for that name; none if the name is another host's.

    A host name that resolves to loopback addresses only (Debian maps the host's own name to 127.0.1.1 in /etc/hosts)
    stands for this host: listen on all interfaces.
    """
    endpoint = host.endpoint
    texts = list(dict.fromkeys(str(address[0]) for _, address in addresses))
    if texts and not endpoint.is_loopback and not endpoint.is_address and all(map(is_loopback, texts)):
        # With "::", Go listens on IPv4 too.
        return ["::"] if _can_bind(socket.AF_INET6, ("::", 0, 0, 0)) else ["0.0.0.0"]  # noqa: S104
    return [str(address[0]) for family, address in addresses if _can_bind(family, address)]


def _can_bind(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    """Return True if the address is this host's. Uses any free port: the wanted one may be taken."""
    return _bind_error(family, (address[0], 0, *address[2:]), errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) is None


def taken_port(addresses: list[str], ports: tuple[int, ...]) -> int:
    """Return the first of these ports at which another program listens, or 0."""
    for address in addresses:
        for port in ports:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            if _bind_error(family, (address, port), errno.EADDRINUSE) is not None:
                return port
    return 0


def _bind_error(family: socket.AddressFamily, address: tuple[object, ...], *expected: int) -> OSError | None:
    """Bind a socket for a moment. Return an error with one of the expected numbers; raise any other."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        if error.errno in expected:
            return error
        raise
    return None


class MemberAddress(msgspec.Struct, eq=False):
    """Finds out which of the control hosts is this host.

    Calls once, from the loop: ``found`` with the host and the addresses to listen at, or ``nowhere``. Names are
    resolved off the loop. A name is this host's if one of its addresses can be bound here; host names are never
    compared. A name that cannot be resolved yet is retried by a timer for a while, because no event announces it.
    """

    _loop: EventLoop
    _hosts: tuple[ControlHost, ...]
    _found: Callable[[ControlHost, list[str]], None]
    _nowhere: Callable[[], None]
    _until: float = 0.0
    _lookups: list[Lookup] = []
    _timer: Cancellable = NO_TIMER
    _answers: dict[str, list[Address] | None] = {}

    def start(self) -> None:
        now = self._loop.now()
        self._until = now + _RESOLVE_PATIENCE_S
        self._timer = self._loop.at(now, self._resolve)

    def _resolve(self) -> None:
        self._answers.clear()
        self._lookups = [
            Lookup(
                self._loop,
                host.endpoint,
                found=lambda addresses, host=host: self._resolved(host, addresses),  # type: ignore[misc]
                failed=lambda _, host=host: self._resolved(host, None),  # type: ignore[misc]
            )
            for host in self._hosts
        ]
        for lookup in self._lookups:
            lookup.start()

    def _resolved(self, host: ControlHost, addresses: list[Address] | None) -> None:
        """Choose the first name, in the user's order, that is this host's. Waits until all are resolved."""
        self._answers[host.name] = addresses
        if len(self._answers) < len(self._hosts):
            return
        for each in self._hosts:
            here = addresses_here(each, self._answers[each.name] or [])
            if here:
                self._found(each, here)
                return
        if None in self._answers.values() and self._loop.now() < self._until:
            self._timer = self._loop.at(self._loop.now() + _RESOLVE_PAUSE_S, self._resolve)
        else:
            self._nowhere()

    def close(self) -> None:
        self._timer.cancel()
        for lookup in self._lookups:
            lookup.close()


# --- the server -------------------------------------------------------------------------------------------------------


def member_command(
    program: str,
    host: ControlHost,
    addresses: list[str],
    data: str,
    run_id: str,
    initial_cluster: dict[str, str],
    state: Literal["new", "existing"],
    tls: TlsFiles | None,
) -> list[str]:
    """Return the command. ``initial_cluster`` maps names to peer URLs. A server with data ignores it and ``state``."""
    return [
        program,
        *("--name", host.name),
        *("--data-dir", data),
        *("--listen-client-urls", host.listen_urls(addresses, host.client_port)),
        *("--advertise-client-urls", host.client_url),
        *("--listen-peer-urls", host.listen_urls(addresses, host.peer_port)),
        *("--initial-advertise-peer-urls", host.peer_url),
        *("--initial-cluster", ",".join(f"{name}={url}" for name, url in initial_cluster.items())),
        *("--initial-cluster-state", state),
        *("--initial-cluster-token", cluster_token(run_id)),
        # An hour of history is plenty: writes are few, and readers can start over. Leave the memory to the workers.
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        *("--snapshot-count", "10000"),
        *("--bcrypt-cost", "4"),  # the password is a digest: a slow hash only delays logins
        *("--logger", "zap", "--log-level", "warn"),
        *(_tls_flags(tls) if tls is not None else ()),
    ]


def cluster_token(run_id: str) -> str:
    """Return a token that is unique to the run, so that two runs on the same hosts never mix their members."""
    return f"tenax-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def first_cluster(hosts: Iterable[ControlHost]) -> dict[str, str]:
    """Return the initial cluster: all control hosts, the same for every member."""
    return {host.name: host.peer_url for host in hosts}


def present_cluster(members: Iterable[Member], hosts: Iterable[ControlHost]) -> dict[str, str]:
    """Return the current members. A member that has not started yet has no name; its URL identifies it."""
    names = {host.peer_url: host.name for host in hosts}
    return {names.get(url) or member.name or f"{member.id:x}": url for member in members for url in member.peer_urls}


def _tls_flags(tls: TlsFiles) -> list[str]:
    flags = []
    for prefix in ("", "peer-"):
        flags += [f"--{prefix}cert-file", tls.cert, f"--{prefix}key-file", tls.key or tls.cert]
        if tls.ca:
            flags += [f"--{prefix}trusted-ca-file", tls.ca, f"--{prefix}client-cert-auth"]
    return flags
