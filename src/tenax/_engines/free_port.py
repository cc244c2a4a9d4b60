"""A port for the workers' store that nobody else is about to take."""

from __future__ import annotations

import os
import socket

_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_LOWEST = 20000
_ASKED_FOR = 29400  # and above: what people write down, ours for a rendezvous and torch's 29500 among them
_TRIES = 64


def free_port(address: str = "127.0.0.1") -> int:
    """A free port outside the range from which the kernel serves everybody who does not care.

    Seconds may pass until a worker binds it (imports are slow). A port from the kernel's own range could be given to
    any outgoing connection meanwhile; one below it can only be taken by somebody who asks for exactly that number.
    And who will ask for a well-known one should find it free: the next job on this host, for its endpoint.
    """
    end = min(_lowest_port_the_kernel_gives(), _ASKED_FOR)
    if end > _LOWEST:
        for _ in range(_TRIES):
            port = _LOWEST + int.from_bytes(os.urandom(4), "little") % (end - _LOWEST)
            if _is_free(address, port):
                return port
    with _socket(address) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _lowest_port_the_kernel_gives() -> int:
    try:
        with open(_RANGE_FILE, "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _is_free(address: str, port: int) -> bool:
    with _socket(address) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
