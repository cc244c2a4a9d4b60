"""Text that a stranger wrote, made fit to be shown and stored.

A worker may print anything: escape sequences that repaint a terminal, characters that reverse the reading order, halves
of characters that cannot be encoded. Here such text becomes harmless without losing what a person needs to read.
Pure: text in, text out.
"""

from __future__ import annotations

import re

# Patterns are compiled when they are needed (``re`` keeps them): most starts never do, and it takes a millisecond.
# Colours are dropped without a trace: a coloured traceback should read like a plain one.
_COLOUR = r"\x1b\[[0-9;:]*m"
# Everything else that acts on a terminal, or on the eye, is shown as its code: C0 and C1 controls except tab and
# newline, line and paragraph separators, the marks that change the direction of text, and lone surrogates.
_ACTING = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"


def _as_code(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def harmless(text: str) -> str:
    """The text as any terminal may show it. Keeps tabs and newlines; drops colours; shows the rest as codes."""
    if text.isascii() and text.isprintable():
        return text
    return re.sub(_ACTING, _as_code, re.sub(_COLOUR, "", text.replace("\r\n", "\n")))


def storable(text: str) -> str:
    """The text as it may be encoded as UTF-8: lone surrogates become their codes, everything else stays."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def decoded(data: bytes) -> str:
    """Bytes that should be UTF-8 as text. What is not is shown as codes, never refused."""
    return data.decode("utf-8", "backslashreplace")


def shortened(line: str, most: int) -> str:
    """The line, with its end cut off (and that said) if it is longer than ``most`` characters."""
    return line if len(line) <= most else f"{line[: max(most - 3, 0)]}..."


def without_middle(text: str, most: int) -> str:
    """The text, with its middle left out (and that said) if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    head = most // 4
    tail = most - head
    return f"{text[:head]}\n[... {len(text) - most} characters left out ...]\n{text[-tail:]}"
