"""The marks of buffers in an encoded state."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def sizes(value: Any) -> list[dict[str, Any]]:
    """Return the marks of all buffers of an encoded value, in order."""
    found: list[dict[str, Any]] = []
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict) and "buffer" in each:
            found.append(each)
        elif isinstance(each, dict):
            pending += each.values()
    return sorted(found, key=lambda mark: int(mark["buffer"]))
