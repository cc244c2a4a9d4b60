"""The fuzz lane: a short part with fixed seeds; a failure prints the seed that repeats it."""

from __future__ import annotations

import random

import pytest

from .fuzz import main
from .targets import TARGETS
from .values import Draw

pytestmark = pytest.mark.unit

CASES = {"http": 10, "links": 10, "frames": 200}


@pytest.mark.parametrize("name", TARGETS)
def test_no_target_breaks_with_fixed_seeds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--target", name, "--seed", "1", "--cases", str(CASES.get(name, 60))])
    assert code == 0, capsys.readouterr().out


def test_the_same_seed_draws_the_same_values() -> None:
    """Otherwise a failure could not be repeated."""
    from tenax._core.link import wire

    one, other = (Draw(random.Random("seed"), 0.1).json(wire.FromAgent) for _ in range(2))
    assert one == other


def test_a_failure_prints_the_seed_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With the traceback above it."""

    class Broken:
        def case(self, draw: Draw) -> None:
            raise AssertionError("broken")

        def close(self) -> None:
            """Nothing was opened."""

    TARGETS["broken"] = (Broken, 0.0)
    try:
        assert main(["--target", "broken", "--seed", "17", "--cases", "1"]) == 1
    finally:
        del TARGETS["broken"]
    printed = capsys.readouterr().out
    assert "first seed: 17" in printed
    assert "to repeat: ./dev fuzz --target broken --seed 17 --cases 1" in printed
