"""HTTP: from bytes to a request, and from a response to bytes. The small part of it that a probe or a person uses.

Pure: no sockets and no clock. One request per connection, of a bounded size, whole or not at all; whatever is not such
a request becomes the response that says so. Never raises for what a stranger sent.
"""

from __future__ import annotations

import re

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
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.[01]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_MOST_PARAMETERS = 64


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
        from tenax.core.text import encodable

        return msgspec.json.encode(encodable(msgspec.to_builtins(value)))


def parse(data: bytes, limits: Limits) -> Request | Response | None:
    """The request in what has come so far; None: more must come; a response: this is none, and what to say about it."""
    head, end, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
    if not end:
        if len(data) > limits.head_bytes:
            return text(HEADERS_TOO_LARGE, f"the request has more than {limits.head_bytes} bytes before its body")
        return None if _may_become_a_request(head) else _bad("this is not an HTTP request")
    if len(head) > limits.head_bytes:
        return text(HEADERS_TOO_LARGE, f"the request has more than {limits.head_bytes} bytes before its body")
    first, *rest = head.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        return _bad("the first line is not 'METHOD /path HTTP/1.1'")
    headers = {}
    for each in rest:
        header = _HEADER.fullmatch(each)
        if header is None:
            return _bad("a header is not 'Name: value'")
        headers[header[1].decode().lower()] = header[2].decode("latin-1")
    if "transfer-encoding" in headers:
        return text(NOT_IMPLEMENTED, "only bodies with a Content-Length are read")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) <= 18):
        return _bad("Content-Length is not a number")
    if int(length) > limits.body_bytes and limits.body_bytes:
        return text(TOO_LARGE, f"the body has {length} bytes, and at most {limits.body_bytes} are taken")
    if len(body) < int(length) and limits.body_bytes:
        return None
    target = _target(line[2].decode())
    if target is None:
        return _bad("the path cannot be read")
    path, params = target
    return Request(line[1].decode(), path, params, headers, body[: int(length)] if limits.body_bytes else b"")


def _may_become_a_request(head: bytes) -> bool:
    """Whether waiting for more makes sense: a first line that is there must be one already."""
    first, end, _ = head.partition(b"\r\n")
    if end:
        return _REQUEST_LINE.fullmatch(first) is not None
    return first == b"" or (b"A" <= first[:1] <= b"Z" and b"\0" not in first and b"\n" not in first)


def _target(written: str) -> tuple[str, dict[str, str]] | None:
    from urllib.parse import parse_qsl, unquote, urlsplit

    try:
        parts = urlsplit(written)
        params = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS))
    except ValueError:
        return None
    return unquote(parts.path) or "/", params


def _bad(sentence: str) -> Response:
    return text(BAD_REQUEST, sentence)


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
