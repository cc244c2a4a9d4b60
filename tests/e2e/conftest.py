"""A fixture that runs jobs; afterwards it checks that no process is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they read /proc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that they do not run alone at the end of a parallel run."""
    items.sort(key=lambda item: "e2e/test_torch" not in item.nodeid)


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
