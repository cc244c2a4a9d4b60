"""A history is a function of its seed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenax.testing.simulator import draw, simulate

# Prints the histories of some seeds.
SCRIPT = """
import sys
from tenax.testing.simulator import draw, simulate
for seed in range(1, 81):
    sys.stdout.write(simulate(draw(seed), tell=True).history)
"""


def histories(hash_seed: str) -> bytes:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize("seed", [3, 5, 8, 20])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    first, second = (simulate(draw(seed), tell=True) for _ in range(2))
    assert first.history == second.history
    assert first == second


def test_telling_a_history_does_not_change_it() -> None:
    told, untold = simulate(draw(20), tell=True), simulate(draw(20))
    assert untold.history == ""
    assert (told.counts, told.seconds) == (untold.counts, untold.seconds)


@pytest.mark.process
def test_no_order_comes_from_the_interpreter() -> None:
    """Sets of texts have another order in every process: nothing that is decided or said may show it."""
    first, second = histories("1"), histories("2")
    assert first == second
    assert len(first.splitlines()) > 10_000


def test_another_seed_gives_another_history() -> None:
    assert simulate(draw(3), tell=True).history != simulate(draw(4), tell=True).history
