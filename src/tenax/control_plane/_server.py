"""WorkerServer: serves a worker's handlers at a Unix socket that only its user can open, like torch's worker server.

It is a thread of the worker's own process: it answers while other threads are blocked, unless one of them is in native
code that holds Python's interpreter lock.
"""

from __future__ import annotations

import os
import socket

from tenax._io.http.message import HTML, METHOD_NOT_ALLOWED, NOT_FOUND, Limits, Request, Response, text
from tenax._io.http.message import json as as_json
from tenax.control_plane._handlers import _registered, call_handler, handler_names
from tenax.control_plane._sockets import check_length, is_served, is_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.http.server import HttpServer

_PREFIX = "/handler/"
_BACKLOG = 64
_LIMITS = Limits(body_bytes=1 << 20)
_WELCOME = b'<h1>tenax worker</h1>\n<a href="/handler/">handlers</a>\n'


class WorkerServer:
    """Serves between ``start`` and ``stop`` at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._server: HttpServer | None = None
        self._identity: tuple[int, int] | None = None  # of the socket file, so that only this one is removed
        self._pid = 0  # of the serving process; a forked child only has a copy of this object

    def start(self) -> None:
        """Start serving. Raises OSError or ValueError if the path cannot be used."""
        from tenax._io.http.server import HttpServer

        check_length(self.path)
        listener = self._listen()
        self._server = HttpServer(
            listener, _answer, name="tenax worker server", limits=_LIMITS, in_thread=_is_user_handler
        )
        self._server.start()
        self._pid = os.getpid()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None and os.getpid() == self._pid:
            server.stop()
            if self._identity is not None and _identity(self.path) == self._identity:
                os.unlink(self.path)

    def _listen(self) -> socket.socket:
        if os.path.lexists(self.path):
            if not is_socket(self.path):
                raise ValueError(f"{self.path!r} exists and is not a socket; choose another path")
            if is_served(self.path):
                raise ValueError(f"another process listens at {self.path!r}; every worker needs its own path")
            os.unlink(self.path)  # of an earlier worker
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            # Before listening: only users that may write to the file can connect.
            os.chmod(self.path, 0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._identity = _identity(self.path)
        return listener


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _answer(request: Request) -> Response:
    if request.path.startswith(_PREFIX) and request.path != _PREFIX:
        if request.method != "POST":
            return text(METHOD_NOT_ALLOWED, "method not allowed; use POST for handlers", Allow="POST")
        return call_handler(request.path.removeprefix(_PREFIX), request)
    if request.path not in ("/", _PREFIX):
        return text(NOT_FOUND, f"{request.path} not found; GET {_PREFIX} lists the handlers")
    if request.method not in ("GET", "HEAD"):
        return text(METHOD_NOT_ALLOWED, "method not allowed; use GET", Allow="GET, HEAD")
    return Response(body=_WELCOME, content_type=HTML) if request.path == "/" else as_json(200, handler_names())


def _is_user_handler(request: Request) -> bool:
    return request.method == "POST" and request.path.removeprefix(_PREFIX) in _registered
