from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.etcd import find_etcd
from kit.processes import program

from .kit import ManagedCluster

__all__ = ["program"]


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., ManagedCluster]]:
    """Return a factory of clusters, which are closed after the test."""
    clusters: list[ManagedCluster] = []

    def make(count: int = 3, **options: Any) -> ManagedCluster:
        if "program" not in options and find_etcd() is None:
            pytest.skip("needs etcd, beside python or on PATH")
        clusters.append(ManagedCluster(tmp_path / "data", count, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()
