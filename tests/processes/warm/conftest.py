"""Real runs with and without what was preloaded, on a bench of their own that proves that nothing was left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Bench

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # only there are workers forked warm


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
