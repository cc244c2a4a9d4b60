"""Every view of a failure shows the same first cause, rank, host, next step and counts."""

from __future__ import annotations

import pytest
from tests.kit.causes import known_cause

from tenax._core.model import Verdict

from .corpus import CORPUS
from .frameworks import PRELOAD
from .played import SLOTS, WALL, Case, cases, play
from .views import first_of, views_of

CASES = cases()


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_view_shows_the_expected_cause(case: Case) -> None:
    played = play(case)
    status, views, texts = views_of(played.header, played.steps, played.state, WALL)
    verdict = played.state.verdict
    assert (verdict is None) == bool(case.change)
    failed, consequences = case.counts
    for name, seen in views.items():
        assert (seen.failed, seen.consequences) == case.counts, name
        if name != "metrics" and case.is_known:
            assert seen.rank == case.rank, name
        if seen.cause is not None:
            assert seen.cause == case.kind, name
    first = first_of(status.failures)
    for name, text in texts.items():
        if first is not None:
            host = f"host{first.rank // SLOTS}"
            assert f"rank {first.rank} on {host} {squeezed(first.what)[:40]}" in squeezed(text), name
            assert squeezed(known_cause(first.cause, first.proof).next_step) in squeezed(text), name
        if consequences and name == "report of runs":
            assert f"{consequences} failed as a consequence" in text
    if case.change:
        how, number = case.change.split()
        for name in ("status screen", "timeline", "report of runs"):
            assert f"host{number}" in texts[name]
            assert how in texts[name], name
        assert [(each.name, each.state) for each in status.left] == [(f"host{number}", how)]
        assert first is None
    assert len(status.stopped) + failed + consequences + _done(case) == _reported(case)


def _done(case: Case) -> int:
    """Workers that exited with code 0 and are not the first cause."""
    done = sum(len(each.ranks) for each in case.left if each.how == "done")
    return 0 if case.kind == "exited_early" else done


def _reported(case: Case) -> int:
    return SLOTS if case.change.startswith("lost") else 2 * SLOTS - (SLOTS if case.change else 0)


def test_the_verdict_survives_json() -> None:
    import msgspec

    verdict = play(CASES[0]).state.verdict
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_the_played_corpus_is_large_and_its_names_are_unique() -> None:
    captured = [case for case in CASES if case.name.partition(":")[0] in PRELOAD]
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(captured) >= 40
    assert len(CASES) + len(CORPUS) >= 150
