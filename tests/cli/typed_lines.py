"""Command lines as they would be typed, each with what is expected for it, and how to read them."""

from __future__ import annotations

import pytest

from tenax.cli.arguments import parse
from tenax.cli.options import Options


def cases(text: str) -> list:
    """A line as it would be typed, then what is expected for it."""
    found = []
    for block in text.strip().split("$")[1:]:
        line, _, expected = block.partition("\n")
        found.append(pytest.param(line.split(), expected.strip().splitlines(), id=line.strip() or "nothing"))
    return found


def ask(words: list[str]) -> Options:
    """Leading NAME=value words are the environment, as in a shell."""
    environ = {}
    while words and words[0].split("=")[0].isupper() and "=" in words[0]:
        name, _, value = words[0].partition("=")
        environ[name] = value
        words = words[1:]
    return parse(words, environ)
