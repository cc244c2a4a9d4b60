"""Text and tables that fit a terminal's width. Pure.

Widths are counted in cells: a character may take two cells or none. Names, hosts and reasons are untrusted; ``plain``
turns them into one line without control characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import msgspec

from tenax._core.text import harmless

_GAP = "  "


class Column(msgspec.Struct, frozen=True):
    """One column of a table. If the table is too wide, columns are shrunk, then dropped by lowest priority."""

    title: str
    priority: int
    is_right: bool = False  # align right, for numbers
    min_width: int = 0  # minimum width when shrunk; 0: never shrunk


def plain(text: str) -> str:
    """Return untrusted text as one line without control characters."""
    return " ".join(harmless(text).split())


def cells(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def cut(text: str, width: int) -> str:
    """Return the text, ending in ``...`` if it was cut to fit the width."""
    if cells(text) <= width:
        return text
    room, kept = max(0, width - 3), []
    for character in text:
        room -= _width(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + "..."[: max(0, width)]


def wrapped(text: str, width: int, max_lines: int) -> list[str]:
    """Wrap the text, at spaces if possible. The last line ends in ``...`` if the text does not fit."""
    lines: list[str] = []
    left = text
    while left and len(lines) < max_lines - 1 and cells(left) > width:
        line = ""
        for character in left:
            if cells(line) + _width(character) > width:
                break
            line += character
        if not left.startswith(" ", len(line)) and " " in line.strip():
            line = line[: line.rindex(" ")]
        line = line or left[:1]  # not even one character fits
        lines.append(line.rstrip())
        left = left[len(line) :].lstrip()
    return [*lines, cut(left, width)] if left else lines


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return a line of titles and one line per row, none wider than ``width``. Empty columns are omitted."""
    shown = [index for index, _ in enumerate(columns) if any(row[index] for row in rows)]
    widths = {index: max(cells(columns[index].title), *(cells(row[index]) for row in rows)) for index in shown}

    def excess() -> int:
        return sum(widths[index] for index in shown) + len(_GAP) * (len(shown) - 1) - (width or 0)

    def shrink() -> None:
        for index in shown:
            if columns[index].min_width and excess() > 0:
                widths[index] = max(min(columns[index].min_width, widths[index]), widths[index] - excess())

    if width is not None:
        natural = dict(widths)
        shrink()
        while excess() > 0 and len(shown) > 1:
            shown.remove(min(shown, key=lambda index: columns[index].priority))
            widths.update(natural)
            shrink()
    lines = []
    for row in [[column.title for column in columns], *rows]:
        line = []
        for index in shown:
            text = cut(row[index], widths[index])
            space = " " * (widths[index] - cells(text))
            line.append(space + text if columns[index].is_right else text + space)
        joined = _GAP.join(line).rstrip()
        lines.append(joined if width is None else cut(joined, width))
    return lines
