"""Each HTTP parser takes linear time for expensive input, at once or in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.linear import assert_linear, pieces
from tenax._io.etcd.http_response import HttpError, Part, ResponseReader
from tenax._io.http.message import Limits, Request, Response
from tenax._io.http.request_reader import RequestReader

SIZES = {1 << 20: 16_384, 3: 8192}  # of the input, by the length of the pieces in which it is received
LARGE = Limits(head_bytes=1 << 20, body_bytes=1 << 20)  # so that the limits do not hide how the work grows
GET = b"GET / HTTP/1.1\r\nHost: h\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

HEADERS: dict[str, Callable[[int], bytes]] = {
    "blanks inside a value": lambda n: b"x:a" + b" " * n + b"b\r\n",
    "blanks before a control character": lambda n: b"x:" + b" " * n + b"\x0b\r\n",
    "blanks before a carriage return": lambda n: b"x:" + b" " * n + b"\rb\r\n",
    "blanks before a zero": lambda n: b"x:a" + b" \t" * (n // 2) + b"\0\r\n",
    "short runs of blanks": lambda n: b"x:" + (b" " * 120 + b"a") * (n // 121) + b"\0\r\n",
    "many headers": lambda n: b"a:\r\n" * (n // 4),
    "folded lines": lambda n: b"a:b\r\n" + b" \r\n" * (n // 3),
    "a long name": lambda n: b"x" * n + b"\r\n",
    "many elements": lambda n: b"Connection:" + b"a," * (n // 2) + b"\r\n",
    "many lengths": lambda n: b"Content-Length:" + b"1," * (n // 2) + b"2\r\n",
    "a long length": lambda n: b"Content-Length: " + b"1" * n + b"\r\n",
    "newlines": lambda n: b"a:b\r\n" + b"\n\r" * (n // 2),
}
REQUESTS: dict[str, Callable[[int], bytes]] = {
    **{name: lambda n, make=make: GET + make(n) + b"\r\n" for name, make in HEADERS.items()},  # type: ignore[misc]
    "an endless line": lambda n: b"G" * n,
    "an endless target": lambda n: b"GET /" + b"%41" * (n // 3),
    "a long target": lambda n: b"GET /" + b"%41" * (n // 3) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "a target of brackets": lambda n: b"GET //" + b"[:" * (n // 2) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "parameters": lambda n: b"GET /?" + b"a=%" * (n // 3) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "many parameters": lambda n: b"GET /?" + b"a&" * (n // 2) + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "a body": lambda n: b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % n + b" " * n,
}
RESPONSES: dict[str, Callable[[int], bytes]] = {
    **{name: lambda n, make=make: OK + make(n) + b"\r\n" for name, make in HEADERS.items()},  # type: ignore[misc]
    "a long reason": lambda n: b"HTTP/1.1 200 " + b" a" * (n // 2) + b"\0\r\n\r\n",
    "blanks in a chunk's line": lambda n: CHUNKED + b"5;" + b" " * n + b"\n\r\n",
    "short runs in a chunk's line": lambda n: CHUNKED + b"5;" + (b" " * 120 + b"a") * (n // 121) + b"\n\r\n",
    "a chunk's line": lambda n: CHUNKED + b"5;" + b"a" * n,
    "many chunks": lambda n: CHUNKED + b"1\r\na\r\n" * (n // 6),
    "many trailers": lambda n: CHUNKED + b"0\r\n" + b"a:b\r\n" * (n // 5) + b"\r\n",
    "many interim responses": lambda n: b"HTTP/1.1 100 Continue\r\n\r\n" * (n // 25),
    "a body until the end": lambda n: OK + b"\r\n" + b"a" * n,
}


def read_request(received: list[bytes]) -> Request | Response | None:
    """Feed a reader until it returns a request or an error response."""
    reader = RequestReader(LARGE)
    return next(filter(None, map(reader.feed, received)), None)


def read_response(received: list[bytes]) -> list[Part] | HttpError:
    """Feed a reader until the end or an error."""
    reader = ResponseReader()
    try:
        return [part for piece in received for part in reader.feed(piece)]
    except HttpError as error:
        return error


@pytest.mark.parametrize("length", SIZES, ids=["at once", "in pieces"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_is_read_in_linear_time(kind: str, length: int) -> None:
    assert_linear(read_request, lambda n: pieces(REQUESTS[kind](n), length), size=SIZES[length])


@pytest.mark.parametrize("length", SIZES, ids=["at once", "in pieces"])
@pytest.mark.parametrize("kind", RESPONSES)
def test_a_response_is_read_in_linear_time(kind: str, length: int) -> None:
    assert_linear(read_response, lambda n: pieces(RESPONSES[kind](n), length), size=SIZES[length])
