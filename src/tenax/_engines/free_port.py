"""Picks a free port for the workers' store."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_LOWEST = 20000
_FIRST_WELL_KNOWN = 29400  # the default port of the rendezvous; torch's 29500 is above it
_TRIES = 64


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port below the kernel's ephemeral range and below the well-known rendezvous ports.

    Seconds may pass until a worker binds it, because imports are slow. Meanwhile the kernel could give an ephemeral
    port to any outgoing connection, and the next job on this host may need a well-known port for its endpoint.
    """
    end = min(_first_ephemeral_port(), _FIRST_WELL_KNOWN)
    for _ in range(_TRIES if end > _LOWEST else 0):
        with suppress(OSError):
            return _bind(address, _LOWEST + int.from_bytes(os.urandom(4), "little") % (end - _LOWEST))
    return _bind(address, 0)


def _first_ephemeral_port() -> int:
    try:
        with open(_RANGE_FILE, "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bind(address: str, port: int) -> int:
    """Bind a socket for a moment, and return its port. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        return int(probe.getsockname()[1])
