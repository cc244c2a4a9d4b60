"""Tests on a network get their hosts here; what the hosts' programs said is shown when a test fails."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .lab import Lab

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # namespaces are Linux's


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Make labs with ``Lab``'s options; they are torn down after the test, whatever happened in it."""
    with contextlib.ExitStack() as labs:

        def make(hosts: int = 3, **options: object) -> Lab:
            folder = tmp_path / f"lab{len(made)}"
            folder.mkdir()
            made.append(labs.enter_context(Lab(hosts, folder=folder, **options)))  # type: ignore[arg-type]
            return made[-1]

        made: list[Lab] = []
        yield make
        for lab in made:
            print(lab.tell())


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """Three hosts on a fast network."""
    return make_lab(3)
