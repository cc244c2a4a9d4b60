"""The simulator detects mistakes in the link machines, each by a known seed."""

from __future__ import annotations

import msgspec
import pytest

from tenax.testing.simulator import draw, simulate

from .broken_links import MISTAKES, SendsBeforeTheJoin
from .broken_parts import parts_with


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_in_a_link_is_found_by_its_seed(part: type) -> None:
    seed, name = MISTAKES[part]
    assert simulate(draw(seed, survivors=False), parts_with(part)).property == name


@pytest.mark.parametrize("seed", [179, 186, 192])
def test_a_generation_that_crosses_the_join_breaks_s1(seed: int) -> None:
    """With the faults of the seed that found it, and other delays. Drawn faults find it too rarely for the lane."""
    setup = msgspec.structs.replace(draw(233153662446), seed=seed)
    assert simulate(setup, parts_with(SendsBeforeTheJoin)).property == "S1"
    assert not simulate(setup).broken
