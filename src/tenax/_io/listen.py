"""Listening sockets, at one address, on all interfaces, or at an endpoint that may be another host's."""

from __future__ import annotations

import _socket
import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from tenax._io.endpoint import Address, Endpoint

_BACKLOG = 4096  # the system caps it


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind and listen. Port 0 picks a free port. Raises OSError.

    An empty host means all interfaces, IPv6 and IPv4. A host name is resolved, which may block.
    """
    import socket

    return socket.socket(fileno=bind_listener(host, port).detach())


def bind_listener(host: str, port: int = 0) -> _socket.socket:
    """Return the socket of ``listen`` for a caller that accepts no connection: it needs no import of ``socket``."""
    if not host:
        return _listen_everywhere(port)
    # As bytes: for text, Python first imports its IDNA tables, even for a numeric address.
    node = host.encode() if host.isascii() else host
    found = _socket.getaddrinfo(node, port, type=_socket.SOCK_STREAM, flags=_socket.AI_PASSIVE)
    for family, _, _, _, address in found[:-1]:
        try:
            return _listen_at(family, address)
        except OSError:  # the name has another address
            continue
    return _listen_at(found[-1][0], found[-1][4])


def open_listeners(endpoint: Endpoint, addresses: list[Address]) -> list[socket.socket]:
    """Listen at those of the addresses that belong to this host.

    Return no sockets if none does, or if another process listens there. A host name that resolves to loopback addresses
    only (Debian maps the host's own name to 127.0.1.1 in /etc/hosts) stands for this host: listen on all interfaces.
    """
    import socket

    from tenax._io.endpoint import is_loopback

    wanted = addresses
    if not endpoint.is_loopback and not endpoint.is_address and all(is_loopback(str(each[1][0])) for each in addresses):
        wanted = [(socket.AF_INET, ("0.0.0.0", endpoint.port)), (socket.AF_INET6, ("::", endpoint.port))]  # noqa: S104
    listeners: list[socket.socket] = []
    for family, address in wanted:
        try:
            listeners.append(socket.socket(fileno=_listen_at(family, address).detach()))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            for other in listeners:
                other.close()
            if error.errno == errno.EADDRINUSE:
                return []  # another process serves this endpoint
            raise
    return listeners


def _listen_everywhere(port: int) -> _socket.socket:
    if _socket.has_ipv6:
        try:
            return _listen_at(_socket.AF_INET6, ("::", port), dual_stack=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listen_at(_socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - requested by the caller


def _listen_at(family: int, address: tuple[object, ...], *, dual_stack: bool = False) -> _socket.socket:
    sock = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        # Reuse the port of an earlier server even while its last connections are in TIME_WAIT.
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            sock.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, not dual_stack)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
