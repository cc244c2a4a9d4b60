"""Splits a stream of bytes into whole lines and prefixes them. Pure functions of bytes.

1. Every byte comes out once, in order, however the input is divided.
2. Output ends with a newline, with three exceptions: a line longer than ``max_bytes``, the end of the stream, and, if
   requested, a carriage return, so that progress bars stay alive.
3. Large pieces are processed as a whole, without a loop over lines.
"""

from __future__ import annotations

MAX_LINE_BYTES = 1 << 20


class LineCutter:
    """Buffers the unfinished last line of one stream."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def cut(self, data: bytes, *, at_returns: bool = False) -> bytes:
        """Return what is finished: whole lines; with ``at_returns``, also text up to a lone carriage return."""
        end = data.rfind(b"\n") + 1
        if not end:
            searched = len(self._rest)
            self._rest += data
            return self._cut_unfinished(searched, at_returns)
        finished = data if end == len(data) else data[:end]
        if self._rest:
            finished = bytes(self._rest) + finished
            self._rest.clear()
        if end < len(data):
            self._rest += data[end:]
            finished += self._cut_unfinished(0, at_returns)
        return finished

    def _cut_unfinished(self, searched: int, at_returns: bool) -> bytes:
        end = 0
        if len(self._rest) > self._max_bytes:
            end = len(self._rest)
        elif at_returns:
            # A return at the very end waits for the next byte: it may be part of "\r\n".
            end = self._rest.rfind(b"\r", max(0, searched - 1), len(self._rest) - 1) + 1
        finished = bytes(self._rest[:end])
        del self._rest[:end]
        return finished

    def end(self) -> bytes:
        """Return the unfinished last line of an ended stream."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


def with_prefix(text: bytes, prefix: bytes, *, continues: bool = False, at_returns: bool = False) -> bytes:
    """Put the prefix before every line; with ``continues``, the text begins inside a line.

    With ``at_returns``, a carriage return begins a line too, because what follows overwrites the prefix.
    """
    if not prefix or not text:
        return text
    body = text.replace(b"\n", b"\n" + prefix)
    if at_returns and b"\r" in text:
        body = body.replace(b"\r", b"\r" + prefix).replace(b"\r" + prefix + b"\n", b"\r\n")
    if text.endswith((b"\n", b"\r") if at_returns else b"\n"):
        body = body[: -len(prefix)]  # that line has not begun yet
    return body if continues else prefix + body


def lines_with(text: bytes, needles: list[bytes]) -> bytes:
    """Return the lines that contain any of the needles. The common case, none, needs no loop over lines."""
    if not any(needle in text for needle in needles):
        return b""
    lines = text.removesuffix(b"\n").split(b"\n")
    return b"".join(line + b"\n" for line in lines if any(needle in line for needle in needles))
