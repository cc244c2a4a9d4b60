"""The schedulers that tenax knows. ``tenax.scheduler`` chooses one."""

from __future__ import annotations

import zlib

FIRST_PORT, PORTS = 16384, 16381  # below the ports that Linux gives to outgoing connections


def port_for(name: str) -> int:
    """Return a port that runs with other names probably do not use."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def read_text(path: str) -> str:
    """Return the content of a file. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
