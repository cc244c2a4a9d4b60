"""Reads command lines written as in a shell, each with its expected result."""

from __future__ import annotations

import pytest

from tenax.cli.arguments import parse
from tenax.cli.options import Options


def cases(text: str) -> list:
    """Return the cases of a text: ``$`` and a command line, then the expected lines."""
    found = []
    for block in text.strip().split("$")[1:]:
        line, _, expected = block.partition("\n")
        found.append(pytest.param(line.split(), expected.strip().splitlines(), id=line.strip() or "nothing"))
    return found


def parse_line(args: list[str]) -> Options:
    """Parse arguments. Leading NAME=value arguments are the environment, as in a shell."""
    environ = {}
    while args and args[0].split("=")[0].isupper() and "=" in args[0]:
        name, _, value = args[0].partition("=")
        environ[name] = value
        args = args[1:]
    return parse(args, environ)
