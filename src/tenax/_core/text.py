"""Text from files and peers: escaped before it is printed, and made encodable before it is sent. Durations for people.

A worker, a journal or a peer may contain anything: escape sequences that repaint a terminal, characters that reverse
the reading order or cannot be seen, halves of characters that JSON cannot hold. ``harmless`` is the one place that
decides what is printed as it is. Settings in seconds are shown exactly (``format_seconds``), measured times rounded
(``format_duration``). Pure: text in, text out.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_NAMES = 8  # listed by ``some_of``
_SECRET_NAMES = ("secret", "password", "token", "conf")  # of fields and settings
# Colours are removed: a coloured traceback should read like a plain one. Compiled on first use.
_COLOUR = r"\x1b\[[0-9;:]*m"
_ESCAPED = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # controls, formats, surrogates, line and paragraph separators
_INFINITE = float("inf")


class _Escapes(dict[int, str | int]):
    """A table for ``str.translate`` that is filled as characters are met."""

    def __missing__(self, number: int) -> str | int:
        self[number] = _escape(number) if _is_escaped(number) else number
        return self[number]


def _is_escaped(number: int) -> bool:
    character = chr(number)
    if character.isprintable():
        return False
    import unicodedata

    category = unicodedata.category(character)
    if category != "Cn":
        return category in _ESCAPED
    # Not assigned in this Python's version of Unicode: a letter of a newer one, unless it is reserved for format
    # characters or can never be a character.
    is_reserved = number == 0x2065 or 0xFFF0 <= number <= 0xFFF8 or 0xE0000 <= number <= 0xE0FFF
    return is_reserved or number & 0xFFFE == 0xFFFE or 0xFDD0 <= number <= 0xFDEF


def _escape(number: int) -> str:
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_ESCAPES = _Escapes({ord("\t"): "\t", ord("\n"): "\n"})


def harmless(text: str) -> str:
    """Return the text as any terminal may show it: control and format characters become escapes.

    Tabs and line breaks stay, colours are removed. Joiners of emoji and of Persian become visible: they also hide text.
    """
    if text.isprintable():
        return text
    if "\x1b" in text:
        import re

        text = re.sub(_COLOUR, "", text)
    return text.replace("\r\n", "\n").translate(_ESCAPES)


def one_line(text: str) -> str:
    """Return the text escaped and on one line, so that it cannot look like a line of its own."""
    return text if text.isprintable() else harmless(text).replace("\n", "\\n")


def without_passwords(text: str) -> str:
    """Return the text with the user and the password of every address in it replaced: ``http://***@host``."""
    if "://" not in text:
        return text
    import re

    return re.sub(r"://[^\s/'\"]*@", "://***@", text)


def hide_passwords(addresses: str) -> str:
    """Return one or several addresses without what stands before an ``@``, whether or not they have a scheme."""
    *before, last = addresses.split("@")
    shown = [part[: max(map(part.rfind, "/, \t\n'\"=")) + 1] + "***@" for part in before]
    return "".join([*shown, last])


def storable(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates become escapes, everything else stays."""
    return text.encode("utf-8", "backslashreplace").decode()


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


def encodable(value: Any) -> Any:
    """Return a plain value with every text made encodable as UTF-8."""
    return _with_texts(value, storable)


def shortened_texts(value: Any, limit: int) -> Any:
    """Return a plain value with every text truncated to ``limit`` characters, the most that readers accept."""
    return _with_texts(value, lambda text: shortened(text, limit))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            return {name: _with_texts(member, change) for name, member in value.items()}
        case list() | tuple():
            return [_with_texts(member, change) for member in value]
    return value


def conceal(name: str, value: Any) -> Any:
    """Return the value of a field or setting for display, without secrets."""
    if name in _SECRET_NAMES and value:
        return "***"
    if isinstance(value, dict):
        return {key: conceal(key, member) for key, member in value.items()}
    return hide_passwords(value) if isinstance(value, str) else value


def concealed_repr(struct: Any) -> str:
    """Return ``repr()`` of a struct, without secrets."""
    shown = (f"{name}={conceal(name, getattr(struct, name))!r}" for name in struct.__struct_fields__)
    return f"{type(struct).__name__}({', '.join(shown)})"


def some_of(names: list[str], count: int = 0) -> str:
    """Return the first ``MAX_NAMES`` names as one text, and how many more there are."""
    count = count or len(names)
    shown = ", ".join(names[:MAX_NAMES])
    return shown if count <= MAX_NAMES else f"{shown} and {count - MAX_NAMES} more"


def counted(count: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_seconds(seconds: float) -> str:
    """Return a setting exactly: ``0.5 s``, ``30 s``, ``2 min 30 s``, ``1 h``."""
    if seconds < 60 or seconds % 1:
        return f"{seconds:g} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return " ".join(f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min"), (seconds, "s")) if count)


def format_duration(seconds: float) -> str:
    """Return a measured time in at most two units: ``140 ms``, ``2.5 s``, ``2 min 3 s``, ``2 h 3 min``, ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds == _INFINITE:  # possible in a damaged journal
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{round(seconds, 1):g} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    # Round before choosing the unit: 59 min 59.5 s is 1 h, not 60 min.
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if round(seconds) < 3600:
        return _two_units(round(seconds), 60, "min", "s")
    return _two_units(minutes, 60, "h", "min") if minutes < 1440 else _two_units(hours, 24, "d", "h")


def _two_units(count: int, per: int, unit: str, smaller: str) -> str:
    many, rest = divmod(count, per)
    return f"{many} {unit} {rest} {smaller}" if rest else f"{many} {unit}"
