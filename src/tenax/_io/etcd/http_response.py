"""Parses an HTTP/1.1 response from bytes in arbitrary pieces. h11 parses. Pure: no sockets and no clock.

One reader reads one response: the head, pieces of the body as they arrive, and the end. Invariants:

1. The head, the joined body and the end do not depend on how the bytes were cut into pieces.
2. Nothing is parsed beyond the end; a connection with further bytes is not reused.
3. Buffers are bounded: the head and chunk lines have limits, and the body is passed on at once.
"""

from __future__ import annotations

import h11
import msgspec

from tenax._io.http.request_reader import H11Guard

_MAX_HEAD_BYTES = 16 << 10
_PIECE_BYTES = 16 << 10  # h11 checks its limits between pieces
_BEGINNING = b"HTTP/1."
_MAX_MESSAGE = 100  # characters; h11 quotes what it rejects
# h11 parses a response according to the request; all requests of the client look alike.
_REQUEST = h11.Request(method="POST", target="/", headers=[("Host", "etcd"), ("Content-Length", "0")])
_REQUEST_END = h11.EndOfMessage()


class HttpError(Exception):
    """The peer sent an invalid HTTP response."""


class Head(msgspec.Struct, frozen=True):
    """The status line. Only the parser needs the headers."""

    status: int


class End(msgspec.Struct, frozen=True):
    """The response is complete. ``keeps_open``: the connection can be reused."""

    keeps_open: bool


Part = Head | bytes | End


class ResponseReader:
    def __init__(self) -> None:
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._parser.send(_REQUEST)
        self._parser.send(_REQUEST_END)
        self._guard = H11Guard()
        self._beginning = b""
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """True once a byte was received."""
        return bool(self._beginning)

    def feed(self, data: bytes) -> list[Part]:
        """Return the parts that ``data`` completes. Raises HttpError."""
        if self._is_over:
            raise HttpError("data after its end")
        if len(self._beginning) < len(_BEGINNING):
            self._beginning += data[: len(_BEGINNING) - len(self._beginning)]
            if not _BEGINNING.startswith(self._beginning):
                raise HttpError("not HTTP")
        parts: list[Part] = []
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            if self._is_over:
                parts[-1] = End(keeps_open=False)
                break
            if not self._guard.admits(piece):
                raise HttpError("too many blanks in a row")
            self._parse(piece, parts)
        return parts

    def feed_end(self) -> list[Part]:
        """Handle the end of the connection. Return the end if it ends the body. Raises HttpError."""
        parts: list[Part] = []
        if not self._is_over:
            self._parse(b"", parts)
        return parts

    def _parse(self, data: bytes, parts: list[Part]) -> None:
        try:
            self._parser.receive_data(data)
            while not self._is_over and (event := self._parser.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                elif isinstance(event, h11.Response):
                    parts.append(Head(event.status_code))
                elif isinstance(event, h11.EndOfMessage):
                    self._is_over = True
                elif not isinstance(event, h11.InformationalResponse):  # the connection was closed or switched
                    raise HttpError("no response")
        except h11.RemoteProtocolError as error:
            raise HttpError(str(error)[:_MAX_MESSAGE]) from error
        if self._is_over:
            parts.append(End(self._parser.their_state is h11.DONE and not self._parser.trailing_data[0]))
