"""Requests as bytes, for tests that use the wire protocol directly."""

from __future__ import annotations

import socket
import struct

from tenax.store import _wire as wire

GREETING = wire.GREETING


def number(value: int) -> bytes:
    return struct.pack("<q", value)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def texts(*values: bytes) -> bytes:
    return struct.pack("<Q", len(values)) + b"".join(map(text, values))


def set_(key: bytes, value: bytes) -> bytes:
    return b"\x01" + text(key) + text(value)


def compare_set(key: bytes, expected: bytes, desired: bytes) -> bytes:
    return b"\x02" + text(key) + text(expected) + text(desired)


def get(key: bytes) -> bytes:
    return b"\x03" + text(key)


def add(key: bytes, amount: int) -> bytes:
    return b"\x04" + text(key) + number(amount)


def check(*keys: bytes) -> bytes:
    return b"\x05" + texts(*keys)


def wait(*keys: bytes) -> bytes:
    return b"\x06" + texts(*keys)


COUNT_KEYS = b"\x07"


def delete(key: bytes) -> bytes:
    return b"\x08" + text(key)


def append(key: bytes, value: bytes) -> bytes:
    return b"\x09" + text(key) + text(value)


def multi_get(*keys: bytes) -> bytes:
    return b"\x0a" + texts(*keys)


def multi_set(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"\x0b" + number(len(pairs)) + b"".join(text(key) + text(value) for key, value in pairs)


CANCEL_WAIT = b"\x0c"


def ping(nonce: bytes) -> bytes:
    return b"\x0d" + nonce


def push(key: bytes, value: bytes) -> bytes:
    return b"\x0e" + text(key) + text(value)


def pop(key: bytes) -> bytes:
    return b"\x0f" + text(key)


def queue_length(key: bytes) -> bytes:
    return b"\x10" + text(key)


LIST_KEYS = b"\x11"


def barrier(key: bytes, world_size: int) -> bytes:
    return b"\x12" + text(key) + number(world_size)


class Peer:
    """A raw connection to a server. It sends the greeting by default; no call blocks longer than its timeout."""

    def __init__(self, port: int, *, greets: bool = True, patience_s: float = 60.0, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_connection((host, port), timeout=patience_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._nonce = 0
        if greets:
            self.send(GREETING)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            data = self.sock.recv(size - len(received))
            assert data, f"closed after {received!r}"
            received += data
        return received

    def answers(self) -> bytes | None:
        """Return what the server has sent until it answers a ping. None: it closed the connection."""
        self._nonce += 1
        nonce = struct.pack("<I", 0xA5000000 + self._nonce)
        received = b""
        try:
            self.send(ping(nonce))
            while not received.endswith(nonce):
                data = self.sock.recv(1 << 16)
                if not data:
                    return None
                received += data
        except (ConnectionResetError, BrokenPipeError):
            return None
        return received[: -len(nonce)]

    def is_closed_by_the_server(self) -> bool:
        """Wait until it is; fail at the timeout."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            return True
        return True

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
