"""The model of leadership: the properties hold in the quick worlds, and TLC finds some mistakes.

``./dev model`` checks all worlds and all mistakes.
"""

from __future__ import annotations

import re

import pytest
from model.check import CHECKS, MISTAKES, Check, Result, describe, run
from model.tlc import HERE, what_is_missing

QUICK = [each for each in CHECKS if each.is_quick]
needs_tlc = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "TLC is installed")


@needs_tlc
@pytest.mark.parametrize("check", QUICK, ids=lambda each: f"{each.kind}: {each.name}")
def test_tlc_gives_the_expected_result(check: Check) -> None:
    """All properties hold in a world; a mistake breaks its property; a goal is reached."""
    result = run(check)
    assert result.is_right, f"{describe(result)}\n{result.output}"
    assert result.states > 10, "TLC explored hardly any state"


def test_every_mistake_of_the_module_is_checked() -> None:
    """A mistake that is only in the module or only in the checks is a misspelling."""
    known = set(re.findall(r'Wrong\("([^"]+)"\)', (HERE / "Leadership.tla").read_text()))
    assert known == {each.mistake for each in MISTAKES}


def test_the_names_of_checks_are_unique() -> None:
    names = [(each.kind, each.name) for each in CHECKS]
    assert len(names) == len(set(names))


def test_a_result_is_right_only_if_it_is_the_expected_one() -> None:
    """A mistake must break its expected property, and a world must break none."""
    mistake, world = MISTAKES[0], QUICK[0]
    assert not Result(mistake, "", 100, 1.0, "").is_right
    assert not Result(mistake, "SomethingElse", 100, 1.0, "").is_right
    assert Result(mistake, mistake.expected[0], 100, 1.0, "").is_right
    assert not Result(world, "OneGenerationAtWork", 100, 1.0, "").is_right
    assert Result(world, "", 100, 1.0, "").is_right
