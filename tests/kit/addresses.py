"""Addresses that no other test uses: on Linux all of 127.0.0.0/8 is this host."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess

# A process that listens at every address of this host, as torch's store does, occupies the port at all of these too. So
# ports are below those that the kernel and ``free_port`` assign, and each process of a test run has its own.
_LOWEST_PORT, _PORTS = 10_000, 6_000
_PROCESSES, _ADDRESSES = 1 << 11, 1 << 12
_numbers = itertools.count()


def own_address() -> str:
    """Return an address that no other test uses, in this or a parallel process: its ports stay free."""
    number = os.getpid() % _PROCESSES * _ADDRESSES + next(_numbers) % _ADDRESSES
    return f"127.{64 + number // 65536}.{number // 256 % 256}.{number % 256}"


def own_endpoint() -> str:
    host, port = own_address(), _LOWEST_PORT + os.getpid() % _PORTS
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=False).stdout
        raise AssertionError(f"{host}:{port} is in use ({error}):\n{listening}") from error
    return f"{host}:{port}"
