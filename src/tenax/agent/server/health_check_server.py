"""HealthCheckServer: answers whether the agent is alive, over HTTP.

``alive_callback`` returns when the agent last made progress, in seconds since the epoch. Any GET is answered with 200
while that is at most ``timeout`` seconds ago, and with 503 after that. Runs in a thread of its own, so that it can
still say so when the agent is stuck.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HealthCheckServer", "create_healthcheck_server"]


class HealthCheckServer:
    """Serves between ``start`` and ``stop``. Subclass it to answer in another way."""

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback

    @property
    def port(self) -> int:
        """Where it listens; with port 0, the one that was given to it."""
        return int(self._server.server_address[1]) if self._server is not None else self._port

    def is_alive(self) -> bool:
        return time.time() - self._alive_callback() <= self._timeout

    def start(self) -> None:
        """Listen. Raises OSError if the port cannot be had."""
        if self._server is not None:
            return
        self._server = ThreadingHTTPServer(("", self._port), _answer_for(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="tenax health check", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """What TorchElastic's users call."""
    return HealthCheckServer(alive_callback, port, timeout)


def _answer_for(owner: HealthCheckServer) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        timeout = 5  # seconds that a client may take to ask

        def do_GET(self) -> None:
            alive = owner.is_alive()
            body = b"alive\n" if alive else b"no progress\n"
            self.send_response(200 if alive else 503)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: nobody wants to read that."""

    return Answer
