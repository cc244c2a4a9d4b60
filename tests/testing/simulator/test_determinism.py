"""The same seed gives the same history."""

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
for seed in range(1, 41):
    sys.stdout.write(simulate(draw(seed, engine=""), record_history=True).history)
"""


def histories(hash_seed: str) -> bytes:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize("seed", [3, 5, 8, 20])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    first, second = (simulate(draw(seed), record_history=True) for _ in range(2))
    assert first.history == second.history
    assert first == second


def test_recording_a_history_does_not_change_it() -> None:
    recorded, unrecorded = simulate(draw(20), record_history=True), simulate(draw(20))
    assert unrecorded.history == ""
    assert (recorded.counts, recorded.seconds) == (unrecorded.counts, unrecorded.seconds)


@pytest.mark.process
def test_a_history_does_not_depend_on_hash_order() -> None:
    """The order of a set of strings differs between processes; it must not affect a decision or a message."""
    first, second = histories("1"), histories("2")
    assert first == second
    assert len(first.splitlines()) > 5_000


def test_another_seed_gives_another_history() -> None:
    assert simulate(draw(3), record_history=True).history != simulate(draw(4), record_history=True).history
