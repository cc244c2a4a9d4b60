"""The model of the leadership: the quick worlds hold, some mistakes are found, and the configurations are whole.

``./dev model`` runs all worlds and all mistakes.
"""

from __future__ import annotations

import re

import pytest
from model.check import CHECKS, HERE, MISTAKES, Check, Result, describe, run, what_is_missing

QUICK = [each for each in CHECKS if each.is_quick]
needs_tlc = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "TLC is here")


@needs_tlc
@pytest.mark.parametrize("check", QUICK, ids=lambda each: f"{each.kind}: {each.name}")
def test_tlc_finds_what_it_should(check: Check) -> None:
    """A world without mistakes holds; a mistake is found by the property that it breaks; a goal is reached."""
    result = run(check)
    assert result.is_right, f"{describe(result)}\n{result.output}"
    assert result.states > 10, "TLC explored next to nothing"


def test_every_mistake_of_the_module_is_checked() -> None:
    """A mistake that the module knows and nobody checks, or the other way round, is a misspelling."""
    known = set(re.findall(r'Wrong\("([^"]+)"\)', (HERE / "Leadership.tla").read_text()))
    assert known == {each.mistake for each in MISTAKES}


def test_names_are_unique() -> None:
    names = [(each.kind, each.name) for each in CHECKS]
    assert len(names) == len(set(names))


def test_a_result_is_judged_by_what_was_expected() -> None:
    """Holding is wrong for a mistake; failing is wrong for a world; another property than the expected is wrong too."""
    mistake, world = MISTAKES[0], QUICK[0]
    assert not Result(mistake, "", 100, 1.0, "").is_right
    assert not Result(mistake, "SomethingElse", 100, 1.0, "").is_right
    assert Result(mistake, mistake.expected[0], 100, 1.0, "").is_right
    assert not Result(world, "OneGenerationAtWork", 100, 1.0, "").is_right
    assert Result(world, "", 100, 1.0, "").is_right
