"""Sends requests to an HTTP server over raw sockets, so that the test controls every byte."""

from __future__ import annotations

import json
import re
import socket
from typing import Any, NamedTuple

from kit.processes import TIMEOUT_S


class Received(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def kube_probe(
    port: int, path: str = "/healthz", method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> Received:
    """Send an httpGet probe as the kubelet does."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "User-Agent: kube-probe/1.31",
        *(f"{name}: {value}" for name, value in ({"Accept": "*/*"} | headers).items()),
        "Connection: close",
    ]
    return raw(port, "".join(f"{line}\r\n" for line in [*lines, ""]).encode(), host)


def raw(port: int, data: bytes, host: str = "127.0.0.1") -> Received:
    """Send these bytes, and read until the server closes."""
    with socket.create_connection((host, port), TIMEOUT_S) as sock:
        sock.sendall(data)
        return receive_response(sock)


def receive_response(sock: socket.socket) -> Received:
    return parse_response(until_closed(sock))


def until_closed(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def parse_response(data: bytes) -> Received:
    head, end, body = data.partition(b"\r\n\r\n")
    assert end, f"not an HTTP response: {data!r}"
    first, *rest = head.decode().split("\r\n")
    match = re.fullmatch(r"HTTP/1\.1 (\d{3}) .+", first)
    assert match, first
    return Received(int(match[1]), dict(line.split(": ", 1) for line in rest), body)
