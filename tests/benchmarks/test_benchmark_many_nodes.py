"""Pure helpers of the measurements with many nodes."""

from __future__ import annotations

import pytest
from benchmarks.agents import Scenario, joined_at_s
from benchmarks.crew import shares
from benchmarks.growth import exponent
from benchmarks.rendezvous import ranges
from benchmarks.store import geometric_mean


def test_a_join_is_the_first_message_of_a_node_in_the_coordinators_journal() -> None:
    """A node that comes back sends it again, which is no other join; other lines do not matter."""
    journal = [
        '{"line":"run header","at":1.0}',
        '{"line":"run step","at":2.0,"event":{"event":"Received","node_id":"a","message":{"message":"NodeJoined"}}}',
        '{"line":"run step","at":3.0,"event":{"event":"Received","node_id":"a","message":{"message":"NodeReady"}}}',
        '{"line":"run step","at":4.0,"event":{"event":"Received","node_id":"b","message":{"message":"NodeJoined"}}}',
        '{"line":"run step","at":5.0,"event":{"event":"Received","node_id":"a","message":{"message":"NodeJoined"}}}',
        '{"line":"run step","at":6.0,"event":{"event":"Tick"}}',
    ]
    assert joined_at_s(journal) == [2.0, 4.0]


def test_torchrun_has_fewer_repetitions_and_no_timeouts_in_a_smoke_run() -> None:
    """Waiting for something that does not happen is only for a full run."""
    scenario = Scenario(lambda *_: None, ours=6, theirs=2)
    assert [scenario.is_due("torchrun", number, False) for number in (0, 1, 2)] == [True, True, False]
    assert [scenario.is_due("tenax", number, False) for number in (0, 5, 6)] == [True, True, False]
    assert not scenario.is_due("torchrun", 0, True)
    assert Scenario(lambda *_: None, ours=1, theirs=1, quick=True).is_due("torchrun", 0, True)


def test_growth_is_the_exponent_that_fits_best() -> None:
    """Linear is 1 and quadratic 2, whatever the constant; one size gives none."""
    assert exponent({8: 0.8, 64: 6.4, 1000: 100.0}) == pytest.approx(1.0)
    assert exponent({8: 64.0, 16: 256.0}) == pytest.approx(2.0)
    assert exponent({8: 1.0}) is None


def test_work_is_divided_evenly_and_completely() -> None:
    """Shares differ by one at most."""
    assert shares(10, 4) == [3, 3, 2, 2]
    assert ranges(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_the_mean_of_ratios_is_geometric() -> None:
    """Twice as fast and half as fast are even."""
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
