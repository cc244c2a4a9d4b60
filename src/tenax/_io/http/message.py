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
EVENTS = "text/event-stream"


class Limits(msgspec.Struct, frozen=True):
    head_bytes: int = 8192
    body_bytes: int = 0


class Request(msgspec.Struct, frozen=True):
    """A request. Header names are in lower case; the last value of a repeated parameter counts."""

    method: str
    path: str = "/"
    params: dict[str, str] = {}
    headers: dict[str, str] = {}
    body: bytes = b""

    @property
    def wants_json(self) -> bool:
        """True with ``?format=json``, or an Accept header for JSON."""
        if "format" in self.params:
            return self.params["format"] == "json"
        return JSON in self.headers.get("accept", "")


class Response(msgspec.Struct, frozen=True):
    status: int = OK
    body: bytes = b""
    content_type: str = PLAIN
    headers: dict[str, str] = {}


def text(status: int, message: str, **headers: str) -> Response:
    return Response(status, f"{message}\n".encode(errors="backslashreplace"), PLAIN, headers)


def json(status: int, value: Any) -> Response:
    return Response(status, as_json(value) + b"\n", JSON)


def as_json(value: Any) -> bytes:
    """Encode ``value``, also with text that is not valid Unicode: a run id may contain arbitrary bytes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        from tenax._core.text import encodable

        return msgspec.json.encode(encodable(msgspec.to_builtins(value)))


def render(response: Response, *, with_body: bool = True) -> bytes:
    """Return the bytes of a response that closes the connection. ``with_body`` is False for HEAD."""
    length = {"Content-Length": str(len(response.body))}
    head = _head(response.status, response.content_type, {**length, **response.headers})
    return head + response.body if with_body else head


def render_head(headers: Mapping[str, str]) -> bytes:
    """Return the head of a stream of events, whose end is the end of the connection."""
    return _head(OK, EVENTS, headers)


def _head(status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
    from http import HTTPStatus

    phrase = next((each.phrase for each in HTTPStatus if each == status), "Status")
    lines = [
        f"HTTP/1.1 {status} {phrase}",
        f"Content-Type: {content_type}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1", "replace")
