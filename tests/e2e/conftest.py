"""Every end-to-end test gets a bench, and its bench proves afterwards that nothing was left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Bench

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they look at processes through /proc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker of a parallel run is left alone with it at the end."""
    items.sort(key=lambda item: "e2e/test_torch" not in item.nodeid)


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
