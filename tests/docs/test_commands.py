"""The command lines on the pages are valid."""

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


def test_command_lines_are_found() -> None:
    """So that a change of their format does not disable the tests."""
    assert len(LINES) >= 20


@pytest.mark.parametrize(("sample", "line"), LINES, ids=[f"{sample.name}-{line[:50]}" for sample, line in LINES])
def test_a_command_line_is_accepted_by_the_parser(sample: Sample, line: str) -> None:
    """The number of GPUs is replaced; files are not checked."""
    args = shlex.split(line.replace("\\\n", " "), comments=True)[2:]
    assert parse(["2" if arg == "gpu" else arg for arg in args], {}).script, sample.name
