"""Text: what JSON can hold, whatever a worker or a file system wrote; short lists; addresses without passwords."""

from __future__ import annotations

from typing import Any

NAMES_SAID = 8
_SECRET_NAMES = ("secret", "password", "token", "conf")  # of fields and settings


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


def hide_passwords(text: str) -> str:
    """The same text without what stands before an ``@``: the user and the password of an address."""
    *before, last = text.split("@")
    shown = [part[: max(map(part.rfind, "/, \t\n'\"=")) + 1] + "***@" for part in before]
    return "".join([*shown, last])


def conceal(name: str, value: Any) -> Any:
    """The value of a field or setting for people: without secrets."""
    if name in _SECRET_NAMES and value:
        return "***"
    if isinstance(value, dict):
        return {key: conceal(key, member) for key, member in value.items()}
    return hide_passwords(value) if isinstance(value, str) else value


def concealed_repr(struct: Any) -> str:
    """``repr()`` of a struct, without secrets."""
    shown = (f"{name}={conceal(name, getattr(struct, name))!r}" for name in struct.__struct_fields__)
    return f"{type(struct).__name__}({', '.join(shown)})"


def some_of(names: list[str], count: int = 0) -> str:
    """A few names, however many there are."""
    count = count or len(names)
    shown = ", ".join(names[:NAMES_SAID])
    return shown if count <= NAMES_SAID else f"{shown} and {count - NAMES_SAID} more"
