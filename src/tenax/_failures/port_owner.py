"""Finds the process that listens on a port of this host, from /proc. Reads only; never raises."""

from __future__ import annotations

import os
import re

_LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_PORT = re.compile(r"(?:port: |port |:|, )(\d{2,5})\b(?!\])")


def owner_in(message: str) -> str:
    """Return the process that listens on the port that the message names: ``pid 4711 (python3)``; empty if unknown."""
    match = _PORT.search(message)
    sockets = _listening_on(int(match[1])) if match is not None else set()
    if not sockets:
        return ""
    for pid in _entries("/proc"):
        if pid.isdecimal() and sockets & set(_sockets_of(pid)):
            return f"pid {pid} ({_read(f'/proc/{pid}/comm').strip() or 'unknown'})"
    return "a process of another user"


def _listening_on(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on this port."""
    rows = (line.split() for name in ("tcp", "tcp6") for line in _read(f"/proc/net/{name}").splitlines()[1:])
    return {row[9] for row in rows if len(row) > 9 and row[3] == _LISTENING and row[1].endswith(f":{port:04X}")}


def _sockets_of(pid: str) -> list[str]:
    found = []
    for name in _entries(f"/proc/{pid}/fd"):
        try:
            match = _SOCKET.match(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
        if match is not None:
            found.append(match[1])
    return found


def _entries(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # the process has exited or belongs to another user
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
