"""The fixture ``cluster``: a run of real agents. At the end it checks that no process is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.cluster import Cluster
from kit.jobs import Runner

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they inspect processes in /proc


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}"))
    yield made
    made.close()
