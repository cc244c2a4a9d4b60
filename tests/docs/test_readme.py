"""The README: short, installed within its first lines, and readable on a package index."""

from __future__ import annotations

import re

from .pages import ROOT, prose

README = ROOT / "README.md"
REPOSITORY = "https://github.com/tenax-project/tenax/blob/main/"
_TARGETS = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE)


def targets() -> list[str]:
    """Where its links and pictures lead, written inline, as a reference or in HTML."""
    return ["".join(groups) for groups in _TARGETS.findall(prose(README))]


def test_it_is_short() -> None:
    """A newcomer reads all of it: under 120 lines, and the installation is within the first 20."""
    lines = README.read_text().splitlines()
    assert len(lines) < 120
    assert any(line.startswith("$ pip install tenax") for line in lines[:20])


def test_it_names_the_two_commands_of_a_checkout() -> None:
    """One shows tenax at work, one runs every check."""
    commands = re.findall(r"^\$ (\./dev \w+)", README.read_text(), re.MULTILINE)
    assert commands == ["./dev demo", "./dev test"]


def test_its_links_are_absolute() -> None:
    """A package index shows the README alone: a relative link would be dead there."""
    assert targets()
    assert [target for target in targets() if not target.startswith("https://")] == []


def test_its_links_into_the_repository_name_files() -> None:
    """A page that was moved takes its links along."""
    paths = [target.removeprefix(REPOSITORY).partition("#")[0] for target in targets() if REPOSITORY in target]
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_reference_is_defined() -> None:
    """``[text][name]`` has its ``[name]: address``, and each address is used."""
    text = prose(README)
    used = set(re.findall(r"\[[^\]]+\]\[([^\]]+)\]", text))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
