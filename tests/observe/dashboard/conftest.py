"""Fixtures: the browser, a page in it, and fake clusters with a dashboard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.jobs import Runner

from .browser import chromium, page
from .fake_cluster import FakeCluster

__all__ = ["chromium", "page", "runner", "start_cluster"]

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they read /proc


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., FakeCluster]]:
    """Start fake clusters; they are closed after the test."""
    clusters: list[FakeCluster] = []

    def start(*arguments: Any, **options: Any) -> FakeCluster:
        clusters.append(FakeCluster(*arguments, **options))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
