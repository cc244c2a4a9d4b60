"""RequestReader: parses one request from bytes in arbitrary pieces. h11 parses; this module enforces the limits.

Pure: no sockets and no clock. An unacceptable request becomes an error response; no input raises. Importing this module
imports h11, so only servers import it.
"""

from __future__ import annotations

import re
from contextlib import suppress

import h11

from tenax._io.http import message as http

MAX_BLANKS = 128
_RUN = b" " * (MAX_BLANKS + 1)
_MAX_HEADER_LINES = 100
_MAX_PARAMETERS = 64
_MAX_MESSAGE = 100  # characters; h11 quotes what it rejects
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_OVERLAP = 2  # bytes of the head's end that the previous piece may contain


class H11Guard:
    """Checks the bytes of one message before h11 parses them.

    h11's regular expressions take quadratic time for a long run of blanks (h11 0.16: 16 KB of spaces and a vertical tab
    cost 1.4 s as a header, 0.2 s as the first line of a chunk). The guard rejects such runs, also across pieces, so
    that h11's work is linear; the tests measure this. No legitimate header, chunk line or etcd response contains one.
    """

    def __init__(self) -> None:
        self._tail = b""

    def admits(self, data: bytes) -> bool:
        """Return False if ``data`` contains or completes a run of blanks that is too long."""
        seen = (self._tail + data).replace(b"\t", b" ")
        self._tail = seen[-MAX_BLANKS:]
        return _RUN not in seen


class RequestReader:
    def __init__(self, limits: http.Limits) -> None:
        self._limits = limits
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        self._guard = H11Guard()
        self._head_bytes = 0
        self._lines = 0
        self._last = b""  # the last bytes of the previous piece
        self._head: h11.Request | None = None
        self._body = bytearray()

    def feed(self, data: bytes) -> http.Request | http.Response | None:
        """Return the request if it is complete, an error response if it is unacceptable, None if it is incomplete.

        ``data`` is not empty. After a request or a response the reader is not used again.
        """
        if self._head is None and (error_response := self._check_head(data)) is not None:
            return error_response
        try:
            self._parser.receive_data(data)
            while True:
                event = self._parser.next_event()
                if event is h11.NEED_DATA:
                    return None
                if isinstance(event, h11.Request):
                    self._head = event
                    if (error_response := self._check_body()) is not None:
                        return error_response
                    if not self._limits.body_bytes:
                        return self._request()
                elif isinstance(event, h11.Data):
                    self._body += event.data
                else:  # the end of the request, or PAUSED: a request to switch protocols, which is ignored
                    return self._request()
        except h11.RemoteProtocolError as error:
            return http.text(error.error_status_hint, f"invalid HTTP request: {str(error)[:_MAX_MESSAGE]}")

    def _check_head(self, data: bytes) -> http.Response | None:
        """Check the part of ``data`` that belongs to the head. Takes linear time, before h11 parses it."""
        seen = self._last + data
        self._last = seen[-_OVERLAP:]
        end = _END_OF_HEAD.search(seen)
        head = data if end is None else data[: end.end() - len(seen) + len(data)]
        self._head_bytes += len(head)
        self._lines += head.count(b"\n")
        if self._head_bytes > self._limits.head_bytes:
            return http.text(http.HEADERS_TOO_LARGE, f"the request head is larger than {self._limits.head_bytes} bytes")
        if self._lines > _MAX_HEADER_LINES:
            return http.text(http.HEADERS_TOO_LARGE, f"the request has more than {_MAX_HEADER_LINES} header lines")
        if not self._guard.admits(head):
            return http.text(http.BAD_REQUEST, "the request head has too many blanks in a row")
        return None

    def _check_body(self) -> http.Response | None:
        assert self._head is not None
        if self._head.http_version not in (b"1.0", b"1.1"):
            return http.text(http.BAD_REQUEST, "the request is not HTTP/1.1 or HTTP/1.0")
        headers = dict(self._head.headers)
        if b"transfer-encoding" in headers:
            return http.text(http.NOT_IMPLEMENTED, "Transfer-Encoding is not supported; send a Content-Length")
        length = int(headers.get(b"content-length", b"0"))
        if length > self._limits.body_bytes > 0:
            return http.text(http.TOO_LARGE, f"the body has {length} bytes; the maximum is {self._limits.body_bytes}")
        return None

    def _request(self) -> http.Request | http.Response:
        assert self._head is not None
        target = _target(self._head.target.decode("ascii"))
        if target is None:
            return http.text(http.BAD_REQUEST, "the path is invalid")
        path, params = target
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in self._head.headers}
        return http.Request(self._head.method.decode("ascii"), path, params, headers, bytes(self._body))


def _target(written: str) -> tuple[str, dict[str, str]] | None:
    from urllib.parse import parse_qsl, unquote, urlsplit

    with suppress(ValueError):
        parts = urlsplit(written)
        params = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS))
        return unquote(parts.path) or "/", params
    return None
