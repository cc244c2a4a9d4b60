"""Clients that run as other users, in separate processes. Requires root."""

from __future__ import annotations

import subprocess
import sys

from store import requests as ask

UNPRIVILEGED_UID = 65534
# Connects, greets, sets a key; prints what it received, or that it was closed.
CLIENT = """
import os, socket, sys
host, port, uid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setuid(uid)
with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
    sock.settimeout(60)
    sock.connect((host, port))
    try:
        sock.sendall(bytes.fromhex(sys.argv[4]))
        print(sock.recv(4).hex())
    except (ConnectionResetError, BrokenPipeError):
        print()
"""


def answer_to(host: str, port: int, uid: int) -> bytes:
    """Return the answer to a greeting, a SET and a PING from a process of this user."""
    asked = ask.GREETING + ask.set_(b"/key", b"%d" % uid) + ask.ping(b"abcd")
    command = [sys.executable, "-S", "-c", CLIENT, host, str(port), str(uid), asked.hex()]
    return bytes.fromhex(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
