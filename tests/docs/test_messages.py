"""Messages that a page explains exist in the source."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from .pages import DOCS, ROOT

PAGE = DOCS / "guides" / "multi-node.md"
_CELL = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)
# What differs from run to run: names, numbers, signals, messages of the system, omitted parts. Messages are assembled
# at colons and semicolons.
_VARYING = re.compile(
    r"…|'[^']*'|--?[\w-]+(?: \S+)?|\b\w*host\d\S*|\d[\d.:]*(?: nodes?)?|\([^)]*\)|SIG\w+|Connection \w+(?: out)?|[:;] ?"
)
_WINDOW = 3  # words


def _messages() -> list[str]:
    text = PAGE.read_text()
    section = text[text.index("## Messages") : text.index("## From Python")]
    quoted = [message for cell in _CELL.findall(section) for message in re.findall(r"`([^`]{24,})`", cell)]
    return [message for message in quoted if _windows(message)]


def _windows(message: str) -> list[str]:
    """Return each sequence of three words that is the same in every run."""
    parts = [part.split() for part in _VARYING.split(message)]
    return [" ".join(words[at : at + _WINDOW]) for words in parts for at in range(len(words) - _WINDOW + 1)]


@functools.cache
def _texts_of_the_source() -> str:
    """Return all string literals of the source."""
    pieces = []
    for path in sorted((ROOT / "src" / "tenax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\0".join(pieces)


@pytest.mark.parametrize("message", _messages())
def test_a_message_exists_in_the_source(message: str) -> None:
    """Most of its constant parts, because messages are assembled from parts."""
    windows = _windows(message)
    unknown = [window for window in windows if window not in _texts_of_the_source()]
    assert len(unknown) <= len(windows) / 3, f"{message!r} is not in the source: {unknown}"


def test_messages_are_found() -> None:
    """So that a change of their format does not disable the tests."""
    assert len(_messages()) >= 30
