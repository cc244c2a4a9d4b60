"""Text from files and workers, made fit to be shown and stored. Pure: text in, text out.

What a terminal may show is decided in ``_core/text.py`` (``harmless``).
"""

from __future__ import annotations

from tenax._core.text import harmless, one_line

__all__ = ["decoded", "harmless", "one_line", "shortened", "storable", "without_middle"]


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
