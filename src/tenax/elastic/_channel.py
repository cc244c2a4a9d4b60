"""The socket that a worker shares with its agent: one JSON object per line, in both directions.

Strict: a line that is too long, is not an object, or is none of the known messages closes the channel.
"""

from __future__ import annotations

import json
import socket
from typing import Any

VARIABLE = "TENAX_ELASTIC_FD"
_MAX_LINE = 64 << 10


class Channel:
    """Lines are received by one thread, and sent by any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""

    @classmethod
    def inherited(cls, descriptor: int) -> Channel | None:
        """Take over the descriptor that the agent has passed to this process. Child processes do not inherit it.

        None: the descriptor is not a channel. A program that a worker starts inherits the variable without it.
        """
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return None  # closed, or not a socket
        if not _is_channel(connection):
            connection.detach()
            return None
        connection.set_inheritable(False)
        connection.setblocking(True)
        return cls(connection)

    def send(self, **message: str | float) -> None:
        """Send one message. A closed channel is detected by ``receive``, not here."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.shut_down()

    def receive(self) -> dict[str, Any] | None:
        """Wait for a message. None: the channel is closed."""
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE:
                return None
            try:
                data = self._socket.recv(_MAX_LINE)
            except OSError:
                data = b""
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return _message(line)

    def shut_down(self) -> None:
        """End the channel for both sides. A thread that waits in ``receive`` returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is not connected any more

    def close(self) -> None:
        """Close the descriptor only: in a forked child, the parent's channel stays open."""
        self._socket.close()


def _is_channel(connection: socket.socket) -> bool:
    """Return whether the socket is one of a connected pair."""
    if connection.family != socket.AF_UNIX or connection.type != socket.SOCK_STREAM:
        return False
    try:
        return not connection.getsockname() and not connection.getpeername()
    except OSError:
        return False  # not connected


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or type(message.get("generation")) is not int:
        return None
    match message.get("type"):
        case "end":
            return message if isinstance(message.get("why"), str) else None
        case "begin":
            env = message.get("env")
            is_valid = isinstance(env, dict) and all(isinstance(value, str) for value in env.values())
            return message if is_valid else None
    return None
