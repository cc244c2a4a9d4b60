"""The pages under test: every Markdown file for readers, with its samples, links and headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))])

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_RUN = re.compile(r"<!-- run(?:: (?P<line>.+))? -->\n\Z")


class Sample(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    is_to_run: bool
    line_to_run: str = ""  # the command line that runs it; empty: it is a program

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def samples(page: Path) -> list[Sample]:
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        line = before.count("\n") + 1
        mark = _RUN.search(before)
        line_to_run = (mark["line"] or "") if mark else ""
        found.append(Sample(page, line, fence["language"], fence["text"], mark is not None, line_to_run))
    return found


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Return the targets of its links to other pages and headings."""
    return [target for target in _LINK.findall(prose(page)) if not re.match(r"\w+://", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that the site gives the headings of a page."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        base = anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{base}_{number}"
        found.add(anchor)
    return found


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))
