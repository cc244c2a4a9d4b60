"""Listening sockets, at one address, on all interfaces, or at an endpoint that may be another host's."""

from __future__ import annotations

import errno
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.endpoint import Address, Endpoint

_BACKLOG = 4096  # the system caps it


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind and listen. Port 0 picks a free port. Raises OSError.

    An empty host means all interfaces, IPv6 and IPv4. A host name is resolved, which may block.
    """
    if not host:
        return _listen_everywhere(port)
    # As bytes: for text, Python first imports its IDNA tables, even for a numeric address.
    node = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(node, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
    from tenax._io.endpoint import is_loopback

    wanted = addresses
    if not endpoint.is_loopback and not endpoint.is_address and all(is_loopback(str(each[1][0])) for each in addresses):
        wanted = [(socket.AF_INET, ("0.0.0.0", endpoint.port)), (socket.AF_INET6, ("::", endpoint.port))]  # noqa: S104
    listeners: list[socket.socket] = []
    for family, address in wanted:
        try:
            listeners.append(_listen_at(family, address))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            for other in listeners:
                other.close()
            if error.errno == errno.EADDRINUSE:
                return []  # another process serves this endpoint
            raise
    return listeners


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _listen_at(socket.AF_INET6, ("::", port), dual_stack=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listen_at(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - requested by the caller


def _listen_at(family: int, address: tuple[object, ...], *, dual_stack: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Reuse the port of an earlier server even while its last connections are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
