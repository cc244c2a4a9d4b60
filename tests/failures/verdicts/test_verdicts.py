"""Every node reports the right worker and the right cause for every failure of the corpus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .corpus import CORPUS, Seed
from .kit import WrongVerdict, run

if not sys.platform.startswith("linux"):
    pytest.skip("needs control groups, signals and /dev/full of Linux", allow_module_level=True)


def test_the_corpus_is_large_and_has_every_variant() -> None:
    assert len(CORPUS) >= 64
    assert len({seed.name for seed in CORPUS}) == len(CORPUS)
    assert {0, 1, "all", None} <= {seed.root for seed in CORPUS}
    assert {1, 2, 3} == {seed.nodes for seed in CORPUS}
    assert {"", "slow", "second"} == {seed.variant for seed in CORPUS}
    assert {True, False} == {seed.record for seed in CORPUS}


@pytest.mark.parametrize("seed", CORPUS, ids=lambda seed: seed.name)
def test_the_verdict_is_right(tmp_path: Path, seed: Seed) -> None:
    run(seed, tmp_path)


def test_a_wrong_verdict_is_detected(tmp_path: Path) -> None:
    seed = next(seed for seed in CORPUS if seed.kind == "disk_full")
    with pytest.raises(WrongVerdict, match="the cause is disk_full, not killed"):
        run(seed._replace(kind="killed"), tmp_path)
