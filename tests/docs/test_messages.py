"""Messages: a sentence that a page explains is one that tenax says."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from .pages import DOCS, ROOT

PAGE = DOCS / "guides" / "multi-node.md"
_CELL = re.compile(r"^\| (`.+?`) \|", re.MULTILINE)
# What differs from one run to the next: names, numbers, what a system says, what was left out.
_VARYING = re.compile(r"…|'[^']*'|--?[\w-]+(?: \S+)?|\b\w*host\d\S*|\d[\d.:]*|\([^)]*\)|: ")
_WINDOW = 3  # words


def _messages() -> list[str]:
    text = PAGE.read_text()
    told = text[text.index("## Messages") : text.index("## From Python")]
    quoted = [message for cell in _CELL.findall(told) for message in re.findall(r"`([^`]{24,})`", cell)]
    return [message for message in quoted if _windows(message)]


def _windows(message: str) -> list[str]:
    """Neighbouring words that are the same in every run."""
    parts = [part.split() for part in _VARYING.split(message)]
    return [" ".join(words[at : at + _WINDOW]) for words in parts for at in range(len(words) - _WINDOW + 1)]


@functools.cache
def _said() -> str:
    """Every piece of text in the source, whatever stands between the pieces at run time."""
    pieces = []
    for path in sorted((ROOT / "src" / "tenax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\0".join(pieces)


@pytest.mark.parametrize("message", _messages())
def test_a_message_is_said(message: str) -> None:
    """Most of what is the same in every run stands in the source. (Sentences are put together from parts.)"""
    windows = _windows(message)
    unknown = [window for window in windows if window not in _said()]
    assert len(unknown) <= len(windows) / 3, f"{message!r} is not said: {unknown}"


def test_there_are_messages() -> None:
    """They are found: a changed way of writing them would otherwise pass for success."""
    assert len(_messages()) >= 30
