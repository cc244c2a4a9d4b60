"""A fixture with an operator and a cluster; afterwards it checks that no process or file is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.jobs import Runner

from .kit import Operator

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]  # they look at processes through /proc


@pytest.fixture
def operator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Operator]:
    made = Operator(Runner(tmp_path, f"{abs(hash(request.node.nodeid)):x}"))
    yield made
    made.close()
