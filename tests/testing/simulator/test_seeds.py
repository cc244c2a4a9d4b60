"""Simulations of small clusters with faults: every property holds in each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenax.testing.simulator import draw, simulate

SHARDS = 10
SEEDS_PER_SHARD = 5
KNOWN = Path(__file__).with_name("seeds.txt")


def known_seeds() -> list[tuple[int, str]]:
    """Return seeds and the engines that they were found with."""
    found = [line.split()[:2] for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return [(int(seed), "etcd" if mark == "etcd" else "tcp") for seed, mark in found]


def simulate_seed(seed: int, engine: str, survivors: bool | None = None) -> str:
    outcome = simulate(draw(seed, engine=engine, survivors=survivors))
    how = "" if survivors is None else f"--survivors {'yes' if survivors else 'no'} "
    how += f"--engine {engine} " if engine else ""
    command = f"python -m tenax.testing.simulator {how}--seed {seed} --shrink"
    return f"{outcome.broken} ({command})" if outcome.broken else ""


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("engine", ["tcp", "etcd"])
def test_every_property_holds_for_every_seed(engine: str, shard: int) -> None:
    """Seeds 1 to 50; ``./dev sim`` draws fresh ones. The message of a failure has the command that shrinks it."""
    seeds = range(1 + shard * SEEDS_PER_SHARD, 1 + (shard + 1) * SEEDS_PER_SHARD)
    assert [message for seed in seeds if (message := simulate_seed(seed, engine))] == []


@pytest.mark.parametrize(("seed", "engine"), known_seeds())
def test_a_bug_that_was_found_stays_fixed(seed: int, engine: str) -> None:
    """Most were found before workers could be held: those histories have no survivors."""
    for survivors in (None, False, True):
        assert simulate_seed(seed, engine, survivors) == ""
        if engine == "etcd" and survivors is not False:  # the faults of etcd are others if the engine is drawn
            assert simulate_seed(seed, "", survivors) == ""
