from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import program

from .kit import Party

__all__ = ["program"]


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Party]]:
    """Makes parties; whatever is left of them is ended after the test."""
    made: list[Party] = []

    def make(count: int = 3, **told: Any) -> Party:
        made.append(Party(tmp_path / "data", count, **told))
        return made[-1]

    yield make
    for each in made:
        each.close()
