"""Picks a free port for the workers' store."""

from __future__ import annotations

import os
import socket

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
    if end > _LOWEST:
        for _ in range(_TRIES):
            port = _LOWEST + int.from_bytes(os.urandom(4), "little") % (end - _LOWEST)
            if _is_free(address, port):
                return port
    with _socket(address) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _first_ephemeral_port() -> int:
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
