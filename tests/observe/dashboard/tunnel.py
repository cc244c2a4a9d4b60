"""A tunnel, as ``ssh -L`` makes one: what comes to its port goes to another place, as long as it is open."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tunnel:
    """Open from the start; closed and opened again at the same port."""

    def __init__(self, host: str, to: tuple[str, int]) -> None:
        self.host, self.port = host, 0
        self._to = to
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.open()

    def open(self) -> None:
        door = socket.create_server((self.host, self.port), backlog=64)
        self.port = door.getsockname()[1]
        self._sockets.append(door)
        self._start(self._accept, door)

    def close(self) -> None:
        """Nothing goes through any more, and whoever is connected notices."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def _start(self, call: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=call, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = door.accept()[0]
                there = socket.create_connection(self._to)
                self._sockets += [here, there]
                self._start(self._carry, here, there)
                self._start(self._carry, there, here)

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
