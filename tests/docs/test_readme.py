"""The README is short, shows the installation first, and is readable on a package index."""

from __future__ import annotations

import re

from .pages import ROOT, prose

README = ROOT / "README.md"
REPOSITORY = "https://github.com/tenax-project/tenax/blob/main/"
_TARGETS = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE)


def targets() -> list[str]:
    """Return the targets of its links and pictures: inline, references and HTML."""
    return ["".join(groups) for groups in _TARGETS.findall(prose(README))]


def test_the_readme_is_short() -> None:
    """Under 120 lines, with the installation within the first 20."""
    lines = README.read_text().splitlines()
    assert len(lines) < 120
    assert any(line.startswith("$ pip install tenax") for line in lines[:20])


def test_the_readme_names_the_two_commands_of_a_checkout() -> None:
    commands = re.findall(r"^\$ (\./dev \w+)", README.read_text(), re.MULTILINE)
    assert commands == ["./dev demo", "./dev test"]


def test_its_links_are_absolute() -> None:
    """A relative link would be broken on a package index."""
    assert targets()
    assert [target for target in targets() if not target.startswith("https://")] == []


def test_its_links_to_the_repository_are_existing_files() -> None:
    paths = [target.removeprefix(REPOSITORY).partition("#")[0] for target in targets() if REPOSITORY in target]
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_reference_is_defined() -> None:
    """``[text][name]`` has its ``[name]: address``, and each address is used."""
    text = prose(README)
    used = set(re.findall(r"\[[^\]]+\]\[([^\]]+)\]", text))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
