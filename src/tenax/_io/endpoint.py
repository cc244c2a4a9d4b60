"""The endpoint of the coordinator as the user gave it, and the addresses that it resolves to.

An IPv4 or IPv6 address is used as given. A host name is resolved in its own thread, so that slow name servers never
block the agent. There are no reverse lookups.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEFAULT_PORT = 29400
_BACKLOG = 4096


class Endpoint:
    """Host and port."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    @classmethod
    def parse(cls, text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
        """Parse ``host``, ``host:port``, ``1.2.3.4:port``, ``::1`` or ``[::1]:port``. Raises ValueError."""
        text = text.strip()
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            port = rest.removeprefix(":") if bracket and rest[:1] in ("", ":") else "none"
        elif text.count(":") > 1:
            host, port = text, "" if "%" in text or literal(text, default_port) else "none"
        else:
            host, _, port = text.partition(":")
        if not host or (port and not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536)):
            raise ValueError(
                f"the rendezvous endpoint is {text!r}; expected HOST or HOST:PORT with a port from 1 to 65535"
            )
        return cls(host, int(port) if port else default_port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_address(self) -> bool:
        return bool(literal(self.host, self.port))

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or (self.is_address and self.host.startswith("127."))


Address = tuple["socket.AddressFamily", "tuple[Any, ...]"]


def literal(host: str, port: int) -> list[Address]:
    """Return the address if the host is a numeric one, else nothing. Does no lookup."""
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]


class Lookup:
    """Resolves an endpoint. Watched by the loop; calls ``found`` or ``failed`` once."""

    def __init__(
        self, endpoint: Endpoint, found: Callable[[list[Address]], None], failed: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._found = found
        self._failed = failed
        self._answer: list[Address] | str = ""
        self._reader = self._writer = -1

    def start(self) -> bool:
        """Return True if a lookup is in progress; False if the host is an address, reported to ``found`` already."""
        addresses = literal(self._endpoint.host, self._endpoint.port)
        if addresses:
            self._found(addresses)
            return False
        import threading

        self._reader, self._writer = os.pipe()
        threading.Thread(target=self._resolve, name="tenax lookup", daemon=True).start()
        return True

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
            self._answer = [(family, address) for family, _, _, _, address in found]
        except (OSError, UnicodeError) as error:
            self._answer = getattr(error, "strerror", None) or str(error)
        writer, self._writer = self._writer, -1
        os.close(writer)  # wakes the loop

    def fileno(self) -> int:
        return self._reader

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """Do nothing: this end only reads."""

    def on_readable(self) -> None:
        reader, self._reader = self._reader, -1
        os.close(reader)
        if isinstance(self._answer, str):
            self._failed(self._answer)
        else:
            self._found(self._answer)

    def close(self) -> None:
        """Abandon the lookup."""
        reader, self._reader = self._reader, -1
        if reader >= 0:
            os.close(reader)


def open_listeners(endpoint: Endpoint, addresses: list[Address]) -> list[socket.socket]:
    """Listen at those of the addresses that belong to this host.

    Return no sockets if none does, or if another process listens there. A host name that resolves to loopback addresses
    only (Debian maps the host's own name to 127.0.1.1 in /etc/hosts) stands for this host: listen on all interfaces.
    """
    wanted = addresses
    if not endpoint.is_loopback and not endpoint.is_address and all(is_loopback(str(each[1][0])) for each in addresses):
        wanted = [(socket.AF_INET, ("0.0.0.0", endpoint.port)), (socket.AF_INET6, ("::", endpoint.port))]  # noqa: S104
    listeners: list[socket.socket] = []
    for family, address in wanted:
        try:
            listeners.append(_listen_at(family, address))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EAFNOSUPPORT):
                for other in listeners:
                    other.close()
                raise
            if error.errno == errno.EADDRINUSE:
                for other in listeners:
                    other.close()
                return []  # another process serves this endpoint
    return listeners


def _listen_at(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)  # fails on a system without that address family
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
