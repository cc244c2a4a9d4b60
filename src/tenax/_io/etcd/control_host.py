"""Control hosts: the hosts that the user chose to run the members of a managed etcd, and their addresses."""

from __future__ import annotations

import errno
import socket

import msgspec

from tenax._io.endpoint import Endpoint, is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.endpoint import Address

DEFAULT_PORT = 2379
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
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address[0], 0, *address[2:]))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def taken_port(addresses: list[str], ports: tuple[int, ...]) -> int:
    """Return the first of these ports at which another program listens, or 0."""
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
