"""A bench for real runs; it checks that no process or file is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Bench


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield bench
    bench.close()
