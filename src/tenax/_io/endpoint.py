"""The endpoint of the coordinator as the user gave it, and the addresses that it resolves to.

An IPv4 or IPv6 address is used as given. A host name is resolved in its own thread, so that slow name servers never
block the agent. There are no reverse lookups.
"""

from __future__ import annotations

import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._io.interfaces import EventLoop

DEFAULT_PORT = 29400


class Endpoint:
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
    """Resolves an endpoint. Calls ``found`` or ``failed`` once, in the loop, unless it is closed before."""

    def __init__(
        self, loop: EventLoop, endpoint: Endpoint, found: Callable[[list[Address]], None], failed: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._found = found
        self._failed = failed
        self._is_closed = False

    def start(self) -> None:
        """Start the lookup in its own thread. An address needs none and is reported at once."""
        addresses = literal(self._endpoint.host, self._endpoint.port)
        if addresses:
            self._found(addresses)
            return
        import threading

        threading.Thread(target=self._resolve, name="tenax lookup", daemon=True).start()

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._loop.soon(lambda: None if self._is_closed else self._failed(reason))
        else:
            addresses: list[Address] = [(family, address) for family, _, _, _, address in found]
            self._loop.soon(lambda: None if self._is_closed else self._found(addresses))

    def close(self) -> None:
        self._is_closed = True


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
