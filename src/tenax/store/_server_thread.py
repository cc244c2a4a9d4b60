"""A store server in a daemon thread of this process: ``ServerThread`` for launchers and tests, ``OwnServer`` for a
``TCPStore`` that is master.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
import weakref

from tenax._io.listen import listen
from tenax.store import _wire as wire
from tenax.store._api import StoreError
from tenax.store._key_values import KeyValues, Waiter
from tenax.store._server import StoreServer
from tenax.store._table import NotANumber, as_number


class ServerThread:
    """Serves from its creation until ``close``."""

    def __init__(self, server: StoreServer, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.counters = server.counters
        self._server = server
        self._thread = threading.Thread(target=server.serve, name="tenax-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join()
            self._server.close()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _WorkerCount(Waiter):
    """Waits, in the server's thread, until the expected number of clients has registered."""

    __slots__ = ("_expected", "_table", "is_complete")

    def __init__(self, table: KeyValues, expected: int) -> None:
        self._table = table
        self._expected = expected
        self.is_complete = threading.Event()
        table.register(wire.WORKER_COUNT_KEY, self)

    def seen(self, key: bytes) -> bool:
        try:
            count = as_number(self._table.values.get(key, b"0"))
        except NotANumber:  # a client may use this key as any other
            count = 0
        if count >= self._expected:
            self.is_complete.set()
        else:
            self._table.register(key, self)
        return True


class OwnServer:
    """A server thread that is closed when this object is collected."""

    def __init__(self, listener: socket.socket, host: str, expected: int) -> None:
        server = StoreServer(listener)
        self._worker_count = _WorkerCount(server.table, expected)
        self.port: int = listener.getsockname()[1]
        weakref.finalize(self, ServerThread(server, host, self.port).close)

    @classmethod
    def start(
        cls, host: str, port: int, expected: int, multi_tenant: bool, listener_descriptor: int | None
    ) -> OwnServer | None:
        """Start a server. Return None if the port is in use and ``multi_tenant`` is set."""
        if listener_descriptor is not None:
            return cls(socket.socket(fileno=listener_descriptor), host, expected)
        try:
            return cls(_listen(host, port), host, expected)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and multi_tenant:
                return None
            reason = error.strerror or str(error)
            raise StoreError(f"could not serve a store at port {port} of {host}: {reason}.") from error

    def wait_for_workers(self, deadline: float) -> bool:
        return self._worker_count.is_complete.wait(max(0.0, deadline - time.monotonic()))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return listen("", port)  # the name belongs to a gateway in front of this host
