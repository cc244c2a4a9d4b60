"""A fixture for tests with real jobs, which checks that no process is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner

from .kit import Job

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they read /proc


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}"))
    yield made
    made.close()
