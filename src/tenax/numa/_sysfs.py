"""Reads files of sysfs: one value per file, lists of CPUs as ``0-3,8``.

A missing or unreadable file is not an error: the kernel omits or forbids files that have no value (an offline CPU, a
container without the folder). The result is then ``None`` or an empty list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


def read(*path: str) -> str | None:
    """Return the stripped text of a file, or None if it cannot be read."""
    try:
        with open(os.path.join(*path), "rb", buffering=0) as file:
            return file.read().decode(errors="replace").strip()
    except OSError:
        return None


def read_int(*path: str) -> int | None:
    text = read(*path)
    try:
        return int(text or "")
    except ValueError:
        return None


def names(*path: str) -> list[str]:
    """Return the names in a folder, sorted as text."""
    try:
        return sorted(os.listdir(os.path.join(*path)))
    except OSError:
        return []


def parse_list(text: str) -> frozenset[int]:
    """Parse ``0-3,8`` as {0, 1, 2, 3, 8}."""
    numbers: set[int] = set()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Format {0, 1, 2, 3, 8} as ``0-3,8``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
