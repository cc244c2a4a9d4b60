"""Trace validation: simulated histories of the real leadership machine are behaviours of the TLA+ model.

``./dev model --histories 1000`` checks a thousand. TLC starts once here, because starting it takes most of the time.
"""

from __future__ import annotations

import pytest
from model.histories import histories, history_of, rejected
from model.tlc import what_is_missing

from tenax.testing.simulator import draw
from testing.simulator import broken_leadership as broken
from testing.simulator.broken_parts import parts_with

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "TLC is installed")

SEEDS = (1, 3, 7, 11)
BROKEN = (
    broken.SendsBeforeItIsWritten,
    broken.SkipsTheLeaseCheck,
    broken.CountsOnlyLinkedMembers,
    broken.ContinuesAlone,
    broken.RecoversAtOnce,
    broken.TakesSilenceForDeath,
    broken.ForgetsEarlierLeaders,
)


@pytest.fixture(scope="module")
def names_of_rejected() -> set[str]:
    found = list(histories(SEEDS))
    for part in BROKEN:
        if part in broken.MISTAKES:
            setup = draw(broken.MISTAKES[part][0], engine="etcd", survivors=False)
        else:
            setup, _ = broken.PLANNED[part]
        found.append(history_of(part.__name__, setup, parts_with(part)))
    return {each.name for batch in rejected(found) for each in batch}


def test_every_transition_of_the_real_machine_is_a_step_of_the_model(names_of_rejected: set[str]) -> None:
    assert not {name for name in names_of_rejected if name.startswith("seed")}


@pytest.mark.parametrize("part", BROKEN, ids=lambda part: part.__name__)
def test_a_history_of_a_broken_machine_is_rejected(part: type, names_of_rejected: set[str]) -> None:
    assert part.__name__ in names_of_rejected
