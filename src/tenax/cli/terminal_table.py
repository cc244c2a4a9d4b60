"""Cells of a terminal: text that fits them, and tables that fit a width. Pure.

Names, hosts and reasons are written by others: ``plain`` makes one harmless line of them first. A character may be two
cells wide or none, so that lengths are never those of strings.
"""

from __future__ import annotations

import unicodedata

import msgspec

from tenax._failures.plain_text import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = "  "


class Column(msgspec.Struct, frozen=True):
    """One column of a table. Of those that do not fit, the least wanted go first; of the rest one may shrink."""

    title: str
    wanted: int  # more: rather kept
    is_right: bool = False  # numbers
    least: int = 0  # may be cut down to so many cells; 0: never


def plain(text: str) -> str:
    """What somebody else wrote, on one line that does nothing to a terminal."""
    return " ".join(harmless(text).split())


def cells(text: str) -> int:
    """How wide it is."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def cut(text: str, most: int) -> str:
    """The text, with its end left out (and that said) if it is wider than that."""
    if cells(text) <= most:
        return text
    room, kept = max(0, most - 3), []
    for character in text:
        room -= _width(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + "..."[: max(0, most)]


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    space = " " * (width - cells(text))
    return space + text if is_right else text + space


def wrapped(text: str, width: int, most_lines: int) -> list[str]:
    """At spaces where there are any. What does not fit on so many lines is left out, and that is said."""
    lines: list[str] = []
    left = text
    while left and len(lines) < most_lines - 1 and cells(left) > width:
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
    """A line for the titles and one per row, none wider than ``width``. Columns without any text are left out."""
    shown = [place for place, _ in enumerate(columns) if any(row[place] for row in rows)]
    widths = {place: max(cells(columns[place].title), *(cells(row[place]) for row in rows)) for place in shown}

    def excess() -> int:
        return sum(widths[place] for place in shown) + len(_GAP) * (len(shown) - 1) - (width or 0)

    def shrink() -> None:
        for place in shown:
            if columns[place].least and excess() > 0:
                widths[place] = max(min(columns[place].least, widths[place]), widths[place] - excess())

    if width is not None:
        natural = dict(widths)
        shrink()
        while excess() > 0 and len(shown) > 1:
            shown.remove(min(shown, key=lambda place: columns[place].wanted))
            widths.update(natural)
            shrink()
    lines = []
    for row in [[column.title for column in columns], *rows]:
        line = _GAP.join(
            padded(cut(row[place], widths[place]), widths[place], is_right=columns[place].is_right) for place in shown
        ).rstrip()
        lines.append(line if width is None else cut(line, width))
    return lines
