"""WorkerServer: answers for a worker at a Unix socket that only its user may open, as torch's worker server does.

A thread of the worker's own process: it can speak whatever the other threads wait for, unless one of them is in native
code that holds Python's interpreter lock.
"""

from __future__ import annotations

import os
import socket

from tenax._io.http.message import HTML, METHOD_NOT_ALLOWED, NOT_FOUND, Limits, Request, Response, text
from tenax._io.http.message import json as as_json
from tenax.control_plane._handlers import call_handler, handler_names, is_registered
from tenax.control_plane._sockets import check_length, is_served, is_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.http.server import HttpServer

_PREFIX = "/handler/"
_BACKLOG = 64
_LIMITS = Limits(body_bytes=1 << 20)
_WELCOME = b'<h1>tenax worker</h1>\n<a href="/handler/">what it can be asked</a>\n'


class WorkerServer:
    """Serves between ``start`` and ``stop`` at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._server: HttpServer | None = None
        self._identity: tuple[int, int] | None = None  # of the socket's file, to remove no other one's
        self._pid = 0  # of the process that serves; one that was forked from it only has a copy of this

    def start(self) -> None:
        """Listen. Raises OSError or ValueError when the path cannot be had."""
        from tenax._io.http.server import HttpServer

        check_length(self.path)
        listener = self._listen()
        self._server = HttpServer(
            listener, _answer, name="tenax worker server", limits=_LIMITS, in_thread=_is_of_the_script
        )
        self._server.start()
        self._pid = os.getpid()

    def stop(self) -> None:
        if self._server is None:
            return
        if os.getpid() != self._pid:
            self._server = None
            return
        self._server.stop()
        self._server = None
        if self._identity is not None and _identity(self.path) == self._identity:
            os.unlink(self.path)

    def _listen(self) -> socket.socket:
        _make_way(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.path)
            # Before anybody can connect: who may not write to the file may not either.
            os.chmod(self.path, 0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._identity = _identity(self.path)
        return listener


def _make_way(path: str) -> None:
    """Remove the socket that an earlier worker has left. Raises ValueError when something else is there."""
    if not os.path.lexists(path):
        return
    if not is_socket(path):
        raise ValueError(f"{path!r} is there and is not a socket; name another path")
    if is_served(path):
        raise ValueError(f"another process answers at {path!r}; every worker needs a path of its own")
    os.unlink(path)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _answer(request: Request) -> Response:
    if request.path.startswith(_PREFIX) and request.path != _PREFIX:
        if request.method != "POST":
            return text(METHOD_NOT_ALLOWED, "a handler is asked with POST", Allow="POST")
        return call_handler(request.path.removeprefix(_PREFIX), request)
    if request.path not in ("/", _PREFIX):
        return text(NOT_FOUND, f"there is nothing at {request.path}; ask for {_PREFIX}")
    if request.method not in ("GET", "HEAD"):
        return text(METHOD_NOT_ALLOWED, "this page is read with GET", Allow="GET, HEAD")
    return Response(body=_WELCOME, content_type=HTML) if request.path == "/" else as_json(200, handler_names())


def _is_of_the_script(request: Request) -> bool:
    return request.method == "POST" and is_registered(request.path.removeprefix(_PREFIX))
