"""The name service of a host: its files in /etc, and a slow name server."""

from __future__ import annotations

import heapq
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

Dns = Literal["hosts", "dead", "silent", "slow"]
"""``hosts``: every host of the lab is in /etc/hosts. Otherwise only localhost is there, and a name server is queried:
``dead`` refuses at once, ``silent`` never answers (the resolver times out after 10 s), ``slow`` answers correctly but
late."""

SERVER = "127.0.0.53"  # where the slow one listens, on each host
_TYPE_A, _TYPE_AAAA, _NO_SUCH_NAME = 1, 28, 3


def write_files(folder: Path, dns: Dns, names: Mapping[str, str], silent_address: str) -> None:
    """Write the ``hosts``, ``resolv.conf`` and ``nsswitch.conf`` of a host."""
    servers = {"hosts": "127.0.0.1", "dead": "127.0.0.1", "silent": silent_address, "slow": SERVER}
    known = [f"{address} {name}" for name, address in names.items()] if dns == "hosts" else []
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *known, ""]))
    (folder / "resolv.conf").write_text(f"nameserver {servers[dns]}\n")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def name_in(query: bytes) -> tuple[str, int]:
    """Return the queried name, and where in the query it ends."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels), at


def answer(query: bytes, names: Mapping[str, str]) -> bytes:
    """Return the answer of a name server that knows only these names."""
    name, at = name_in(query)
    (kind,) = struct.unpack_from("!H", query, at + 1)
    question = query[12 : at + 5]
    address = names.get(name)
    packed = ip_address(address).packed if address else b""
    record = b""
    if len(packed) == {_TYPE_A: 4, _TYPE_AAAA: 16}.get(kind):
        record = struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
    flags = 0x8580 | (0 if address else _NO_SUCH_NAME)
    return query[:2] + struct.pack("!HHHHH", flags, 1, 1 if record else 0, 0, 0) + question + record


class SlowNameServer:
    """Answers on the given socket, each query after a delay."""

    def __init__(self, server: socket.socket, names: Mapping[str, str], delay_s: float) -> None:
        self._socket = server
        self._names = dict(names)
        self._delay_s = delay_s
        self.queried: list[str] = []  # the queried names, in order
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="slow name server")
        self._thread.start()

    def add(self, name: str, address: str) -> None:
        self._names[name] = address

    def _serve(self) -> None:
        due: list[tuple[float, bytes, tuple[str, int]]] = []
        while True:
            wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
            ready, _, _ = select.select([self._socket.fileno(), self._stop_reader], [], [], wait_s)
            if self._stop_reader in ready:
                return
            if self._socket.fileno() in ready:
                query, client = self._socket.recvfrom(512)
                self.queried.append(name_in(query)[0])
                heapq.heappush(due, (time.monotonic() + self._delay_s, answer(query, self._names), client))
            while due and due[0][0] <= time.monotonic():
                _, reply, client = heapq.heappop(due)
                self._socket.sendto(reply, client)

    def close(self) -> None:
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)
        self._socket.close()
