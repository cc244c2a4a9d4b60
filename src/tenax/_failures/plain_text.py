"""Makes text from files and workers safe to show and store. Pure: text in, text out.

``_core/text.py`` decides what a terminal may show (``harmless``).
"""

from __future__ import annotations

from tenax._core.text import harmless, one_line

__all__ = ["decoded", "harmless", "one_line", "shortened", "storable", "without_middle"]


def storable(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates become escapes, everything else stays."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def decoded(data: bytes) -> str:
    """Decode UTF-8. Invalid bytes become escapes."""
    return data.decode("utf-8", "backslashreplace")


def shortened(line: str, max_length: int) -> str:
    """Cut off the end of a line longer than ``max_length`` characters, and mark the cut."""
    return line if len(line) <= max_length else f"{line[: max(max_length - 3, 0)]}..."


def without_middle(text: str, max_length: int) -> str:
    """Leave out the middle of a text longer than ``max_length`` characters, and mark the gap."""
    if len(text) <= max_length:
        return text
    head = max_length // 4
    tail = max_length - head
    return f"{text[:head]}\n[... {len(text) - max_length} characters omitted ...]\n{text[-tail:]}"
