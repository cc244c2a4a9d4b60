"""A fixture for tests with the real program, which checks that no process is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner


@pytest.fixture
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    made = Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}")
    yield made
    made.close()
