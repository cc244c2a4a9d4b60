"""The browser, a page in it, and stages, for every test of this folder that asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.jobs import Bench

from .browser import chromium, page
from .stage import Stage

__all__ = ["bench", "chromium", "page", "set_up"]

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they look at processes through /proc


@pytest.fixture
def set_up() -> Iterator[Callable[..., Stage]]:
    """Set up stages; they are taken down after the test."""
    stages: list[Stage] = []

    def start(*arguments: Any, **options: Any) -> Stage:
        stages.append(Stage(*arguments, **options))
        return stages[-1]

    yield start
    for stage in stages:
        stage.close()


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
