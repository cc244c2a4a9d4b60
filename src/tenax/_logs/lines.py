"""Lines: cut a stream of bytes into whole lines, and put a prefix before each. Pure functions of bytes.

1. Every byte comes out once, in order, whatever the pieces it came in.
2. What comes out ends with a newline, with three exceptions: the end of a line longer than ``longest``, the end of
   the stream, and, where the caller asks for it, a carriage return, so that progress bars stay alive.
3. Big pieces are treated as a whole; no loop over lines.
"""

from __future__ import annotations

LONGEST_LINE = 1 << 20


class LineCutter:
    """Holds back the unfinished end of one stream."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()

    def cut(self, data: bytes, *, at_returns: bool = False) -> bytes:
        """What is finished now. With ``at_returns``, text before a carriage return that starts no newline is, too."""
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
        if len(self._rest) > self._longest:
            end = len(self._rest)
        elif at_returns:
            # A return at the very end waits for the next byte: it may be half of a "\r\n".
            end = self._rest.rfind(b"\r", max(0, searched - 1), len(self._rest) - 1) + 1
        finished = bytes(self._rest[:end])
        del self._rest[:end]
        return finished

    def end(self) -> bytes:
        """The unfinished last line, when the stream has ended."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def with_prefix(text: bytes, prefix: bytes, *, continues: bool = False, at_returns: bool = False) -> bytes:
    """The text with the prefix before every line; ``continues`` says that it begins inside a line.

    With ``at_returns``, a carriage return begins a line as well, because what follows overwrites the prefix.
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
    """The lines that contain any of the needles. The common case, none at all, costs no loop over lines."""
    if not any(needle in text for needle in needles):
        return b""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return b"".join(line + b"\n" for line in lines if any(needle in line for needle in needles))
