"""A tunnel like that of ``ssh -L``: forwards its port to another address while it is open."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tunnel:
    """Open from the start; can be closed and opened again at the same port."""

    def __init__(self, host: str, to: tuple[str, int]) -> None:
        self.host, self.port = host, 0
        self._to = to
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.open()

    def open(self) -> None:
        listener = socket.create_server((self.host, self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._sockets.append(listener)
        self._start(self._accept, listener)

    def close(self) -> None:
        """Close all connections."""
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

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection(self._to)
                self._sockets += [client, server]
                self._start(self._forward, client, server)
                self._start(self._forward, server, client)

    @staticmethod
    def _forward(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
