"""HTTP responses: the result does not depend on how the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenax._io.etcd.http_response import End, Head, HttpError, Part, ResponseReader

pytestmark = pytest.mark.unit

CALM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
bodies = st.lists(st.binary(min_size=1, max_size=60), max_size=5)


def cut(data: bytes, positions: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(position % (len(data) + 1) for position in positions)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(pieces: list[bytes], *, closes: bool = False) -> tuple[Head, bytes, End | None]:
    reader = ResponseReader()
    parts: list[Part] = [part for piece in pieces for part in reader.feed(piece)]
    if closes:
        parts += reader.feed_end()
    head = parts[0]
    assert isinstance(head, Head)
    end = parts[-1] if isinstance(parts[-1], End) else None
    middle = parts[1:-1] if end is not None else parts[1:]
    assert all(isinstance(part, bytes) and part for part in middle)
    return head, b"".join(part for part in middle if isinstance(part, bytes)), end


def chunked(chunks: list[bytes], trailer: bytes = b"") -> bytes:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n" + trailer + b"\r\n"


@CALM
@given(bodies, st.lists(st.integers(0, 10_000), max_size=12))
def test_bodies_with_a_content_length_are_read(chunks: list[bytes], positions: list[int]) -> None:
    body = b"".join(chunks)
    data = b"HTTP/1.1 503 Service Unavailable\r\nX-A:  b \r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    head, found, end = read(cut(data, positions))
    assert head == Head(503)
    assert found == body
    assert end == End(keeps_open=True)


@CALM
@given(bodies, st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from([b"", b"Grpc-Trailer: x\r\n"]))
def test_chunked_bodies_are_read(chunks: list[bytes], positions: list[int], trailer: bytes) -> None:
    head, found, end = read(cut(chunked(chunks, trailer), positions))
    assert head.status == 200
    assert found == b"".join(chunks)
    assert end == End(keeps_open=True)


@CALM
@given(bodies, st.lists(st.integers(0, 10_000), max_size=12))
def test_bodies_that_end_with_the_connection_are_read(chunks: list[bytes], positions: list[int]) -> None:
    body = b"".join(chunks)
    pieces = cut(b"HTTP/1.0 200 OK\r\n\r\n" + body, positions)
    assert read(pieces)[1:] == (body, None)
    assert read(pieces, closes=True)[1:] == (body, End(keeps_open=False))


@CALM
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_any_input_is_read_or_rejected(data: bytes, positions: list[int]) -> None:
    reader = ResponseReader()
    try:
        for piece in cut(data, positions):
            reader.feed(piece)
        reader.feed_end()
    except HttpError:
        pass


@CALM
@given(bodies, st.integers(0, 10_000))
def test_a_truncated_response_is_rejected(chunks: list[bytes], position: int) -> None:
    data = chunked(chunks)
    reader = ResponseReader()
    parts = reader.feed(data[: position % len(data)])
    assert not any(isinstance(part, End) for part in parts)
    with pytest.raises(HttpError):
        reader.feed_end()


def test_parts_of_the_body_are_returned_as_they_arrive() -> None:
    reader = ResponseReader()
    assert len(reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")) == 1
    assert reader.feed(b"5\r\nhel") == [b"hel"]
    assert reader.feed(b"lo\r\n3\r\nyou\r\n") == [b"lo", b"you"]
    assert reader.feed(b"0\r\n\r\n") == [End(keeps_open=True)]
    with pytest.raises(HttpError, match="data after its end"):
        reader.feed(b"x")


def test_interim_responses_are_ignored() -> None:
    parts = ResponseReader().feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
    assert parts == [Head(204), End(keeps_open=True)]


@pytest.mark.parametrize(
    ("head", "keeps_open"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n", False),
        (b"HTTP/1.1 200\r\n", True),
    ],
)
def test_the_end_shows_whether_the_connection_can_be_reused(head: bytes, keeps_open: bool) -> None:
    assert ResponseReader().feed(head + b"Content-Length: 0\r\n\r\n")[-1] == End(keeps_open)


def test_a_connection_with_data_after_the_response_is_not_reused() -> None:
    """One byte or many."""
    for more in (b"b", b"b" * 100_000):
        parts = ResponseReader().feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na" + more)
        assert parts[1:] == [b"a", End(keeps_open=False)]


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 20_000,
    ],
)
def test_invalid_responses_are_rejected(data: bytes) -> None:
    with pytest.raises(HttpError):
        ResponseReader().feed(data)
