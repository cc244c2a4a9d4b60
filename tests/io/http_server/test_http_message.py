"""HTTP from bytes: a complete request, an incomplete one, or an error response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.linear import pieces
from tenax._io.http.message import Limits, Request, Response, json, render, text
from tenax._io.http.request_reader import RequestReader

SMALL = Limits(head_bytes=200, body_bytes=10)
HOST = b"Host: h\r\n"


def parse(data: bytes, limits: Limits = SMALL) -> Request | Response | None:
    """Read these bytes, received at once."""
    return RequestReader(limits).feed(data)


def test_a_request_has_method_path_parameters_headers_and_body() -> None:
    """Header names are in lower case, percent escapes are decoded."""
    data = b"POST /handler/a%20b?x=1&y=&x=2 HTTP/1.1\r\nHost: h\r\nX-Odd:  v \r\nContent-Length: 3\r\n\r\nabcdef"
    assert parse(data) == Request(
        "POST", "/handler/a b", {"x": "2", "y": ""}, {"host": "h", "x-odd": "v", "content-length": "3"}, b"abc"
    )


def test_old_forms_of_requests_are_accepted() -> None:
    """HTTP/1.0 without any header, an absolute address, lines that end without a carriage return."""
    assert parse(b"GET / HTTP/1.0\r\n\r\n") == Request("GET")
    assert parse(b"GET http://host:1/livez?a=b HTTP/1.0\r\n\r\n") == Request("GET", "/livez", {"a": "b"})
    assert parse(b"GET / HTTP/1.1\nHost: x\n\n") == Request("GET", headers={"host": "x"})


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
def test_a_request_may_arrive_in_pieces(length: int) -> None:
    """However it is cut, it is complete with its last byte."""
    data = b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\nbody"
    reader = RequestReader(SMALL)
    *before, last = [reader.feed(piece) for piece in pieces(data, length)]
    assert set(before) <= {None}
    assert last == Request("POST", "/x", {}, {"host": "h", "content-length": "4"}, b"body")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),  # TLS
        (b"hello\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: b" + b" \t" * 65 + b"c\r\n\r\n", 400),
        (b"GET //[ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /?" + b"&".join(b"a=1" for _ in range(40)) + b" HTTP/1.1\r\n" + HOST + b"\r\n", None),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1e3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 11\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", 501),
        (b"GET /" + b"a" * 300, 431),
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a:\n" * 150, 431),
    ],
)
def test_invalid_requests_get_an_error_response(data: bytes, status: int | None) -> None:
    """With the matching status code."""
    for length in (1, len(data)):
        reader = RequestReader(SMALL)
        found = next(filter(None, (reader.feed(piece) for piece in pieces(data, length))), None)
        assert (found.status if isinstance(found, Response) else None) == status


def test_a_body_may_contain_blanks_and_lines_that_a_head_may_not() -> None:
    """Whether it arrives together with the head or after it."""
    body = b" " * 5000 + b"\n" * 5000
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
    for received in ([head + body], [head, body], pieces(head + body, 9)):
        reader = RequestReader(Limits(body_bytes=len(body)))
        found = [reader.feed(piece) for piece in received][-1]
        assert isinstance(found, Request)
        assert found.body == body


@pytest.mark.parametrize("more", [b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n"])
def test_upgrade_and_expect_headers_are_ignored(more: bytes) -> None:
    """The request is answered as without them."""
    for method in (b"GET", b"CONNECT"):
        found = parse(method + b" / HTTP/1.1\r\n" + HOST + more + b"\r\n")
        assert isinstance(found, Request)


def test_a_body_is_not_awaited_if_bodies_are_not_accepted() -> None:
    """A GET that announces a body is answered at once."""
    request = parse(b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\n", Limits())
    assert isinstance(request, Request)
    assert request.body == b""


@given(st.binary(min_size=1, max_size=400))
def test_no_input_raises(data: bytes) -> None:
    """Garbage, alone and after a valid beginning."""
    for sent in (data, b"GET /?" + data, b"GET / HTTP/1.1\r\n" + HOST + data + b"\r\n\r\n"):
        found = parse(sent)
        assert found is None or isinstance(found, Request | Response)


def test_json_is_chosen_by_parameter_or_header() -> None:
    """The parameter takes precedence."""
    assert Request("GET", headers={"accept": "application/json, */*"}).wants_json
    assert Request("GET", params={"format": "json"}).wants_json
    assert not Request("GET", params={"format": "text"}, headers={"accept": "application/json"}).wants_json
    assert not Request("GET", headers={"accept": "*/*"}).wants_json


def test_a_response_has_a_length_and_closes_the_connection() -> None:
    """Also without its body, for HEAD."""
    answer = render(text(405, "no", Allow="GET"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 405 Method Not Allowed"
    assert {b"Content-Length: 3", b"Connection: close", b"Allow: GET"} <= set(head.split(b"\r\n"))
    assert body == b"no\n"
    assert render(text(405, "no", Allow="GET"), with_body=False) == head + b"\r\n\r\n"
    assert render(json(200, {"a": 1})).endswith(b'{"a":1}\n')
