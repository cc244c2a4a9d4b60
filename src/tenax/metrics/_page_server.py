"""Serves one page of text over HTTP (``tenax._io.http.server``)."""

from __future__ import annotations

from tenax._io.http.message import METHOD_NOT_ALLOWED, NOT_FOUND, OK, Request, Response, text
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class PageServer:
    """Serves ``page()`` at ``http://host:port/path``. Raises OSError if it cannot listen there."""

    def __init__(
        self, page: Callable[[], str], *, path: str, content_type: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._page = page
        self._path = path
        self._content_type = content_type
        listener = listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._server = HttpServer(listener, self._answer, name=f"tenax: page at {self.port}")
        self._server.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._path}"

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._server.stop()

    def _answer(self, request: Request) -> Response:
        if request.path != self._path:
            return text(NOT_FOUND, f"not found; the only page is {self._path}")
        if request.method not in ("GET", "HEAD"):
            return text(METHOD_NOT_ALLOWED, "only GET and HEAD are supported", Allow="GET, HEAD")
        return Response(OK, self._page().encode(), self._content_type)
