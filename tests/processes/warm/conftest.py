"""A bench for real runs with and without preloading; it checks that no process or file is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Bench

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # workers are forked warm only there


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield bench
    bench.close()
