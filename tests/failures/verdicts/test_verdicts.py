"""Of every failure in the corpus, every node names the right worker and the right cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .corpus import CORPUS, Seed
from .kit import Wrong, run

if not sys.platform.startswith("linux"):
    pytest.skip("control groups, signals and /dev/full as Linux has them", allow_module_level=True)


def test_the_corpus_is_large_and_has_every_way_to_fail() -> None:
    assert len(CORPUS) >= 64
    assert len({seed.name for seed in CORPUS}) == len(CORPUS)
    assert {0, 1, "all", None} <= {seed.root for seed in CORPUS}
    assert {"", "slow", "second"} == {seed.how for seed in CORPUS}
    assert {True, False} == {seed.record for seed in CORPUS}


@pytest.mark.parametrize("seed", CORPUS, ids=lambda seed: seed.name)
def test_every_verdict_is_right(tmp_path: Path, seed: Seed) -> None:
    run(seed, tmp_path)


def test_a_wrong_verdict_is_noticed(tmp_path: Path) -> None:
    seed = next(seed for seed in CORPUS if seed.kind == "disk_full")
    with pytest.raises(Wrong, match="the cause is called disk_full, not killed"):
        run(seed._replace(kind="killed"), tmp_path)
