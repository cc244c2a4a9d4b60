"""Fixtures for tests on a network. The output of the hosts' programs is shown when a test fails."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .lab import Lab

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # network namespaces need Linux


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Return a factory of labs, which takes the options of ``Lab``. They are torn down after the test."""
    with contextlib.ExitStack() as labs:

        def make(hosts: int = 3, **options: object) -> Lab:
            folder = tmp_path / f"lab{len(made)}"
            folder.mkdir()
            made.append(labs.enter_context(Lab(hosts, folder=folder, **options)))  # type: ignore[arg-type]
            return made[-1]

        made: list[Lab] = []
        yield make
        for lab in made:
            print(lab.describe())


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """Three hosts on a fast network."""
    return make_lab(3)
