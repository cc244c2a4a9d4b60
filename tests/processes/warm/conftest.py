"""A runner for real runs with and without preloading; it checks that no process or file is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # workers are forked warm only there


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield runner
    runner.close()
