"""A runner for real runs; it checks that no process or file is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield runner
    runner.close()
