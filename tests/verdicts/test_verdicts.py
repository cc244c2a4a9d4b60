"""Of every failure in the corpus, every node names the right worker and the right cause."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .corpus import CORPUS, Seed
from .kit import Wrong, run

if not sys.platform.startswith("linux"):
    pytest.skip("control groups, signals and /dev/full as Linux has them", allow_module_level=True)

_AT_ONCE = 3  # runs: most of the time of each is the start of interpreters
_MAX_WRONG = 1


def test_the_corpus_is_large_and_has_every_way_to_fail() -> None:
    assert len(CORPUS) >= 64
    assert len({seed.name for seed in CORPUS}) == len(CORPUS)
    assert {0, 1, "all", None} <= {seed.root for seed in CORPUS}
    assert {"", "slow", "second"} == {seed.how for seed in CORPUS}
    assert {True, False} == {seed.record for seed in CORPUS}


@pytest.mark.timeout(400)
def test_every_verdict_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def judged(numbered: tuple[int, Seed]) -> str:
        number, seed = numbered
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            run(seed, folder)
        except Wrong as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        wrong = list(filter(None, pool.map(judged, enumerate(CORPUS))))
    with capsys.disabled():
        print(f"\nverdicts: {len(CORPUS) - len(wrong)} of {len(CORPUS)}", *wrong, sep="\n")
    assert len(wrong) <= _MAX_WRONG, "\n\n".join(wrong)


def test_a_wrong_verdict_is_noticed(tmp_path: Path) -> None:
    seed = next(seed for seed in CORPUS if seed.kind == "disk_full")
    with pytest.raises(Wrong, match="the cause is called disk_full, not killed"):
        run(seed._replace(kind="killed"), tmp_path)
