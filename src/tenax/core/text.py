"""Text that can travel: what a worker or a file system wrote may hold what JSON cannot."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """The same plain value, with every text in a form that can be encoded."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {name: encodable(member) for name, member in value.items()}
        case list() | tuple():
            return [encodable(member) for member in value]
    return value
