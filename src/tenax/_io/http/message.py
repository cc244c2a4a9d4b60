"""HTTP requests and responses as values, and a response's bytes. Pure: no sockets and no clock."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, METHOD_NOT_ALLOWED = 200, 400, 403, 404, 405
TIMED_OUT, CONFLICT, TOO_LARGE = 408, 409, 413
HEADERS_TOO_LARGE, INTERNAL_ERROR, NOT_IMPLEMENTED, UNAVAILABLE = 431, 500, 501, 503
PLAIN, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"

_PHRASES = {
    OK: "OK",
    BAD_REQUEST: "Bad Request",
    FORBIDDEN: "Forbidden",
    NOT_FOUND: "Not Found",
    METHOD_NOT_ALLOWED: "Method Not Allowed",
    TIMED_OUT: "Request Timeout",
    CONFLICT: "Conflict",
    TOO_LARGE: "Content Too Large",
    HEADERS_TOO_LARGE: "Request Header Fields Too Large",
    INTERNAL_ERROR: "Internal Server Error",
    NOT_IMPLEMENTED: "Not Implemented",
    UNAVAILABLE: "Service Unavailable",
}


class Limits(msgspec.Struct, frozen=True):
    """How much of a request is taken."""

    head_bytes: int = 8192
    body_bytes: int = 0


class Request(msgspec.Struct, frozen=True):
    """What was asked. Names of headers are in lower case; of a parameter that was given twice, the last counts."""

    method: str
    path: str = "/"
    params: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes = b""

    @property
    def wants_json(self) -> bool:
        """``?format=json``, or a client that says so."""
        if "format" in self.params:
            return self.params["format"] == "json"
        return JSON in self.headers.get("accept", "")


class Response(msgspec.Struct, frozen=True):
    """What is answered."""

    status: int = OK
    body: bytes = b""
    content_type: str = PLAIN
    headers: dict[str, str] = {}


def text(status: int, sentence: str, **headers: str) -> Response:
    """One line for a person."""
    return Response(status, f"{sentence}\n".encode(errors="backslashreplace"), PLAIN, headers)


def json(status: int, value: Any) -> Response:
    """The same for a program."""
    return Response(status, as_json(value) + b"\n", JSON)


def as_json(value: Any) -> bytes:
    """Whatever text is in it: a run may be called by bytes that are no characters."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        from tenax._core.text import encodable

        return msgspec.json.encode(encodable(msgspec.to_builtins(value)))


def render(response: Response, *, with_body: bool = True) -> bytes:
    """The bytes of an answer, after which the connection is closed. ``with_body``: False for a HEAD."""
    length = {"Content-Length": str(len(response.body))}
    head = _head(response.status, response.content_type, {**length, **response.headers})
    return head + response.body if with_body else head


def render_head(content_type: str, headers: Mapping[str, str]) -> bytes:
    """The bytes in front of an answer that ends when the connection does."""
    return _head(OK, content_type, headers)


def _head(status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_PHRASES.get(status, 'Status')}",
        f"Content-Type: {content_type}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1", "replace")
