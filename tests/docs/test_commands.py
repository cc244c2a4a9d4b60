"""Command lines on the pages: their flags exist and fit together."""

from __future__ import annotations

import re
import shlex

import pytest

from tenax.cli.arguments import parse

from .pages import PAGES, Sample, samples

_LINE = re.compile(r"^(?:\$ )?(tenax run .+(?:(?<=\\)\n.+)*)$", re.MULTILINE)
LINES = [
    (sample, line)
    for page in PAGES
    for sample in samples(page)
    if sample.language in ("console", "bash")
    for line in _LINE.findall(sample.text)
    if "..." not in line and "…" not in line
]


def test_there_are_lines() -> None:
    """They are found: a changed way of writing them would otherwise pass for success."""
    assert len(LINES) >= 20


@pytest.mark.parametrize(("sample", "line"), LINES, ids=[f"{sample.name}-{line[:50]}" for sample, line in LINES])
def test_a_command_line_would_be_accepted(sample: Sample, line: str) -> None:
    """What depends on the machine (how many GPUs) is put in its place; files are not looked at."""
    words = shlex.split(line.replace("\\\n", " "), comments=True)[2:]
    assert parse(["2" if word == "gpu" else word for word in words], {}).script, sample.name
