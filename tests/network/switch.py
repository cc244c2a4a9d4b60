"""A switch in user space: forwards frames between TAP devices with delay and loss, reproducibly for one seed.

``python switch.py SEED``, with a stream socket as standard input: one JSON command per line, each answered by a line,
``ok`` on success. It exits when the socket is closed, and its devices are removed.

Loss and delay are drawn per direction between two ports, each from its own random generator, so one connection does not
affect another. With jitter, frames overtake each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_TUNSETIFF, _TUNSETCARRIER = 0x400454CA, 0x400454E2
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAMES_AT_ONCE = 64  # per port, before frames are delivered and other ports are read


class Link:
    """One direction between two ports."""

    def __init__(self, seed: str) -> None:
        self.delay_s = self.jitter_s = self.loss = 0.0
        self._random = random.Random(seed)

    def arrival(self, now: float) -> float | None:
        """Return when a frame sent now arrives; None if it is lost."""
        if self.loss and self._random.random() < self.loss:
            return None
        return now + self.delay_s + (self._random.uniform(0.0, self.jitter_s) if self.jitter_s else 0.0)


class Port:
    """One TAP device. It is created in the namespace of this process and may be moved to another."""

    def __init__(self, name: str, mac: str) -> None:
        self.name = name
        self.mac = bytes.fromhex(mac.replace(":", ""))
        self.is_up = True
        self.handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(self.handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))

    def set_carrier(self, is_up: bool) -> None:
        self.is_up = is_up
        fcntl.ioctl(self.handle, _TUNSETCARRIER, struct.pack("i", is_up))

    def read(self) -> bytes | None:
        try:
            return os.read(self.handle, 1 << 16)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EIO, errno.EBADFD):  # the device is down
                return None
            raise

    def write(self, frame: bytes) -> None:
        """Write a frame. A full or unplugged device drops it."""
        try:
            os.write(self.handle, frame)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EBADFD, errno.ENOBUFS, errno.ENOMEM):
                raise


class Switch:
    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._ports: dict[str, Port] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._in_flight: list[tuple[float, int, str, bytes]] = []
        self._count = 0

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(self, port: str, mac: str) -> None:
        self._ports[port] = Port(port, mac)

    def remove(self, port: str) -> None:
        os.close(self._ports.pop(port).handle)

    def carrier(self, port: str, up: bool) -> None:
        self._ports[port].set_carrier(up)

    def shape(self, source: str, target: str, delay_ms: float, jitter_ms: float, loss: float) -> None:
        link = self._link(source, target)
        link.delay_s, link.jitter_s, link.loss = delay_ms / 1000, jitter_ms / 1000, loss

    def execute(self, line: bytes) -> bytes:
        command: dict[str, Any] = json.loads(line)
        act: Callable[..., None] = getattr(self, command.pop("do"))
        act(**command)
        return b"ok\n"

    # --- frames -------------------------------------------------------------------------------------------------------

    def _link(self, source: str, target: str) -> Link:
        if (source, target) not in self._links:
            self._links[source, target] = Link(f"{self._seed} {source} {target}")
        return self._links[source, target]

    def accept(self, source: Port, frame: bytes, now: float) -> None:
        to = frame[:6]
        for target in self._ports.values():
            is_target = target.mac == to or (to[0] & 1 and target is not source)
            if not (is_target and source.is_up and target.is_up):
                continue
            link = self._link(source.name, target.name)
            # Broadcasts of the kernels must not consume random numbers for the frames of tests.
            arrival = now + link.delay_s if to[0] & 1 else link.arrival(now)
            if arrival is not None:
                self._count += 1
                heapq.heappush(self._in_flight, (arrival, self._count, target.name, frame))

    def deliver(self, now: float) -> float | None:
        """Deliver the frames that are due. Return the seconds until the next one."""
        while self._in_flight:
            arrival, _, name, frame = self._in_flight[0]
            if arrival > now:
                return arrival - now
            heapq.heappop(self._in_flight)
            if (port := self._ports.get(name)) is not None and port.is_up:
                port.write(frame)
        return None

    def collect(self, handles: Iterable[int], at_most: int = sys.maxsize) -> None:
        """Read what the hosts have sent on these ports."""
        by_handle = {port.handle: port for port in self._ports.values()}
        for port in [by_handle[handle] for handle in handles]:
            for _ in range(at_most):
                frame = port.read()
                if frame is None:
                    break
                self.accept(port, frame, time.monotonic())

    def run(self, control: socket.socket) -> None:
        rest = b""
        while True:
            handles = [port.handle for port in self._ports.values()]
            wait_s = self.deliver(time.monotonic())
            ready, _, _ = select.select([control.fileno(), *handles], [], [], wait_s)
            if control.fileno() not in ready:
                self.collect(ready, _FRAMES_AT_ONCE)
                continue
            data = control.recv(1 << 16)
            if not data:
                return
            self.collect(handles)  # a command does not affect frames sent before it
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                control.sendall(self.execute(line))


if __name__ == "__main__":
    with contextlib.closing(socket.socket(fileno=0)) as standard_input:
        Switch(sys.argv[1]).run(standard_input)
