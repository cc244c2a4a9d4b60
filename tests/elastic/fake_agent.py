"""The agent's side of the channel, in a test's hands."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


class FakeAgent:
    """One end of a socket pair; the other one is a worker's, which finds it in TENAX_ELASTIC_FD."""

    def __init__(self) -> None:
        self._socket, self._worker = socket.socketpair()
        self._socket.settimeout(60)
        self._received = b""

    def offer(self, generation: int = 1, rank: int = 0, world_size: int = 1) -> None:
        """Let the next ``generations()`` of this process find the channel."""
        self.descriptor = os.dup(self._worker.fileno())
        self._worker.close()
        os.environ["TENAX_ELASTIC_FD"] = str(self.descriptor)
        os.environ.update(variables(generation, rank, world_size))

    def receive(self) -> dict[str, Any]:
        """Return the worker's next message; empty if it has closed the channel."""
        while b"\n" not in self._received:
            data = self._socket.recv(4096)
            if not data:
                return {}
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def has_message(self) -> bool:
        """Return whether the worker has sent something that was not received yet."""
        self._socket.setblocking(False)
        try:
            return bool(self._received or self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            self._socket.settimeout(60)

    def send(self, line: bytes) -> None:
        self._socket.sendall(line)

    def end(self, generation: int = 1, why: str = "rank 3 was killed by SIGKILL") -> None:
        self.send(_line(type="end", generation=generation, why=why))

    def begin(self, generation: int = 2, rank: int = 0, world_size: int = 1, **more: str) -> None:
        self.send(_line(type="begin", generation=generation, env=variables(generation, rank, world_size) | more))

    def end_and_begin(self, generation: int = 2, rank: int = 0, why: str = "rank 3 was killed by SIGKILL") -> None:
        """In one write: the end may interrupt the caller. The worker reads the second message when it is held."""
        end = _line(type="end", generation=generation - 1, why=why)
        self.send(end + _line(type="begin", generation=generation, env=variables(generation, rank, 1)))

    def close(self) -> None:
        self._socket.close()


def _line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def variables(generation: int, rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TENAX_GENERATION": str(generation),
        "TENAX_GENERATION_REASON": f"reason {generation}",
    }
