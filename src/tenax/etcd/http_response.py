"""An HTTP/1.1 response: from bytes, cut anywhere, to parts. Pure: no sockets and no clock.

One reader reads one response: a head, any number of pieces of its body as they come, and the end. Laws:

1. How the bytes were cut does not change the head, the joined body or the end.
2. Nothing is read beyond the end; a connection with bytes beyond it is not used again.
3. What is held back is bounded: the head and the lines of chunks have limits; bodies are passed on at once.
"""

from __future__ import annotations

import re

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_HEAD_BYTES = 64 << 10
_MOST_LINE_BYTES = 4096  # of the line before a chunk
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [^\r\n]*)?")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")


class HttpError(Exception):
    """What came is no HTTP response."""


class Head(msgspec.Struct, frozen=True):
    """The status, and the headers by their names in lower case."""

    status: int
    headers: dict[str, str] = {}


class End(msgspec.Struct, frozen=True):
    """The response is complete; ``keeps_open``: the connection can carry another one."""

    keeps_open: bool


Part = Head | bytes | End


class ResponseReader:
    """Fed with what was received; gives parts."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._state: Callable[[list[Part]], bool] = self._head
        self._left = 0  # bytes of the body, or of the chunk
        self._keeps_open = True
        self._is_over = False
        self.has_begun = False  # anything at all has come

    def feed(self, data: bytes) -> list[Part]:
        """The parts that are complete now. Raises HttpError."""
        if self._is_over:
            raise HttpError("more than was asked for")
        if data:
            self.has_begun = True
            self._held += data
        parts: list[Part] = []
        while not self._is_over and self._state(parts):
            pass
        return parts

    def feed_end(self) -> list[Part]:
        """The other side has closed. The end, where that is how the body ends. Raises HttpError."""
        if self._is_over:
            return []
        if self._state != self._until_closed:
            raise HttpError("an answer that ends in its middle" if self.has_begun else "no answer")
        self._is_over = True
        return [End(keeps_open=False)]

    # --- states: each takes what it can from what is held; False: more must come --------------------------------------

    def _head(self, parts: list[Part]) -> bool:
        head = self._take_until(b"\r\n\r\n", _MOST_HEAD_BYTES, "a head that is too long")
        if head is None:
            if not b"HTTP/1.".startswith(self._held[:7]):
                raise HttpError("something else than HTTP")
            return False
        first, *rest = head.split(b"\r\n")
        line = _STATUS_LINE.fullmatch(first)
        if line is None:
            raise HttpError("something else than HTTP")
        headers: dict[str, str] = {}
        for each in rest:
            name, colon, value = each.partition(b":")
            if not colon or not name.strip():
                raise HttpError("a header that is none")
            headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip(" \t")
        status = int(line[2])
        if status < 200:  # "100 Continue": the answer follows
            return True
        connection = headers.get("connection", "").lower()
        self._keeps_open = "keep-alive" in connection if line[1] == b"0" else "close" not in connection
        parts.append(Head(status, headers))
        self._expect_body(status, headers, parts)
        return True

    def _expect_body(self, status: int, headers: dict[str, str], parts: list[Part]) -> None:
        length = headers.get("content-length")
        if status in (204, 304):
            self._end(parts)
        elif "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked":
                raise HttpError("a transfer encoding that was not asked for")
            self._state = self._chunk_line
        elif length is None:
            self._state = self._until_closed
        elif not (length.isascii() and length.isdecimal() and len(length) <= 18):
            raise HttpError("a length that is no number")
        else:
            self._left = int(length)
            self._state = self._counted
            if not self._left:
                self._end(parts)

    def _counted(self, parts: list[Part]) -> bool:
        if not self._pass_on(parts):
            return False
        if not self._left:
            self._end(parts)
        return True

    def _until_closed(self, parts: list[Part]) -> bool:
        self._left = len(self._held)
        return self._pass_on(parts)

    def _chunk_line(self, _: list[Part]) -> bool:
        text = self._take_until(b"\r\n", _MOST_LINE_BYTES, "a chunk whose first line is too long")
        if text is None:
            return False
        line = _CHUNK_LINE.fullmatch(text)
        if line is None:
            raise HttpError("a chunk without a length")
        self._left = int(line[1], 16)
        self._state = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, parts: list[Part]) -> bool:
        if not self._pass_on(parts):
            return False
        if not self._left:
            self._state = self._chunk_end
        return True

    def _chunk_end(self, _: list[Part]) -> bool:
        if len(self._held) < 2:
            return False
        if self._held[:2] != b"\r\n":
            raise HttpError("a chunk that is longer than it said")
        del self._held[:2]
        self._state = self._chunk_line
        return True

    def _trailer(self, parts: list[Part]) -> bool:
        line = self._take_until(b"\r\n", _MOST_HEAD_BYTES, "a trailer that is too long")
        if line is None:
            return False
        if not line:
            self._end(parts)
        return True

    def _end(self, parts: list[Part]) -> None:
        self._is_over = True
        parts.append(End(self._keeps_open and not self._held))

    # --- what is held -------------------------------------------------------------------------------------------------

    def _take_until(self, mark: bytes, most: int, complaint: str) -> bytes | None:
        at = self._held.find(mark)
        if at > most or (at < 0 and len(self._held) > most):
            raise HttpError(complaint)
        if at < 0:
            return None
        taken = bytes(self._held[:at])
        del self._held[: at + len(mark)]
        return taken

    def _pass_on(self, parts: list[Part]) -> bool:
        """What is there of the body, at most what is left of it. Whether there was any."""
        data = bytes(self._held[: self._left])
        if not data:
            return False
        del self._held[: len(data)]
        self._left -= len(data)
        parts.append(data)
        return True
