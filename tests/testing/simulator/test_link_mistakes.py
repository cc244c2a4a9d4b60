"""The simulator detects mistakes in the link machines, each by a known seed."""

from __future__ import annotations

import pytest

from tenax.testing.simulator import draw, simulate

from .broken_links import MISTAKES
from .broken_parts import parts_with


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_in_a_link_is_found_by_its_seed(part: type) -> None:
    seed, name = MISTAKES[part]
    assert simulate(draw(seed, survivors=False), parts_with(part)).property == name
