"""Listening: a socket that waits for clients of a store, at one address or at all of this host's."""

from __future__ import annotations

import errno
import socket

_BACKLOG = 4096  # the system takes what it allows


def listen(host: str, port: int = 0) -> socket.socket:
    """Bind and listen; port 0: any that is free. Raises OSError.

    Empty for all interfaces, IPv6 and IPv4. A name instead of an address is asked of the resolver, which may block.
    """
    if not host:
        return _listen_everywhere(port)
    # As bytes: for text Python loads its tables of international names first, also for an address.
    asked = host.encode() if host.isascii() else host
    found = socket.getaddrinfo(asked, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in found[:-1]:
        try:
            return _bound(family, address)
        except OSError:  # the name has another address
            continue
    return _bound(found[-1][0], found[-1][4])


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _bound(socket.AF_INET6, ("::", port), both=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _bound(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - asked for


def _bound(family: int, address: tuple[object, ...], *, both: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that an earlier server had may be taken again while its last connections fade away.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
