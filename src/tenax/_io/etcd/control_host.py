"""A control host: one of the hosts that the user named to run a member of the run's own etcd, and its addresses."""

from __future__ import annotations

import errno
import socket

import msgspec

from tenax._io.endpoint import Endpoint, is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.endpoint import Address

DEFAULT_PORT = 2379
_MOST = 7  # etcd's own advice: more members make every write slower


class ControlHost(msgspec.Struct, frozen=True):
    """``name`` as the user wrote it, which is also the member's. Members talk to each other at the next higher port."""

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
        """Where the server listens: etcd wants addresses there, not names."""
        return ",".join(self._url(address, port) for address in addresses)


def split_names(endpoint_text: str) -> tuple[str, ...]:
    """The names in ``n0,n1,n2`` or ``http://n0:2379,http://n1:2379``, each once."""
    names: dict[str, None] = {}
    for text in endpoint_text.split(","):
        name = text.strip()
        for scheme in ("http://", "https://"):
            name = name.removeprefix(scheme)
        name = name.removesuffix("/")
        if name:
            names[name] = None
    return tuple(names)


def control_hosts(names: tuple[str, ...], default_port: int, *, is_tls: bool) -> tuple[ControlHost, ...]:
    """Raises ValueError with a sentence."""
    if not 0 < len(names) <= _MOST:
        raise ValueError(
            f"managed etcd was given {len(names)} control hosts; "
            f"expected 1 to {_MOST} names in --rdzv-endpoint, best 3 or 5"
        )
    hosts = []
    for name in names:
        endpoint = Endpoint.parse(name, default_port)
        if endpoint.port == 65535:
            raise ValueError(f"the control host {name!r} has port 65535; expected at most 65534, the next is used too")
        hosts.append(ControlHost(name, endpoint.host, endpoint.port, is_tls))
    return tuple(hosts)


def addresses_here(host: ControlHost, addresses: list[Address]) -> list[str]:
    """Where this host can listen for that name; none if the name is another host's.

    A name that this host knows as a loopback address (Debian writes its own name so into /etc/hosts) means this host
    as the others know it: then we listen everywhere.
    """
    endpoint = host.endpoint
    texts = list(dict.fromkeys(str(address[0]) for _, address in addresses))
    if texts and not endpoint.is_loopback and not endpoint.is_address and all(map(is_loopback, texts)):
        # With the first, Go listens at IPv4 too.
        return ["::"] if _is_ours(socket.AF_INET6, ("::", 0, 0, 0)) else ["0.0.0.0"]  # noqa: S104
    return [str(address[0]) for family, address in addresses if _is_ours(family, address)]


def _is_ours(family: socket.AddressFamily, address: tuple[object, ...]) -> bool:
    """Any port will do: whether the one that we want is free is another question."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address[0], 0, *address[2:]))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def taken_port(addresses: list[str], ports: tuple[int, ...]) -> int:
    """The first of these ports at which another program listens; 0 if all are free."""
    for address in addresses:
        for port in ports:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind((address, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    return port
    return 0
