"""The coordinator with many nodes and generations: the properties hold, and its memory does not grow."""

from __future__ import annotations

from tenax.testing.simulator.crowd import Crowd, CrowdSetup, simulate_crowd


def test_every_dead_node_is_replaced() -> None:
    outcome = simulate_crowd(CrowdSetup(nodes=100, hours=1.0, deaths_per_minute=2.0))
    assert outcome.broken == ""
    assert outcome.deaths >= 119
    assert outcome.generations >= 2 * 119  # one without the dead node, one with the new one


def test_a_spare_replaces_a_dead_node_at_once() -> None:
    outcome = simulate_crowd(CrowdSetup(nodes=100, spares=3, hours=1.0, deaths_per_minute=1.0))
    assert outcome.broken == ""
    assert outcome.generations == 1 + 59  # the first, and one for every minute


def test_the_coordinator_remembers_no_more_after_a_day_than_after_an_hour() -> None:
    hour, day = (simulate_crowd(CrowdSetup(nodes=8, hours=hours, named_share=1.0)) for hours in (1.0, 24.0))
    assert (hour.broken, day.broken) == ("", "")
    assert day.state_bytes < 1.2 * hour.state_bytes


def test_the_number_of_messages_is_linear_in_the_number_of_nodes() -> None:
    """One message to each node when a generation ends, one when the next is formed, and few others."""
    outcome = simulate_crowd(CrowdSetup(nodes=200, spares=1, hours=0.5))
    assert outcome.broken == ""
    assert outcome.sent < 2.5 * outcome.generations * 201


def test_the_same_seed_gives_the_same_outcome() -> None:
    first, second = (simulate_crowd(CrowdSetup(nodes=50, hours=1.0, seed=7)) for _ in range(2))
    assert first == second


def test_a_rank_that_is_assigned_twice_is_detected() -> None:
    from .broken_parts import AssignsARankTwice

    class Broken(Crowd):
        def __init__(self, setup: CrowdSetup) -> None:
            super().__init__(setup)
            self.machine = AssignsARankTwice(self.machine.state.settings)

    outcome = simulate_crowd(CrowdSetup(nodes=10, hours=0.1), Broken)
    assert outcome.broken.startswith("S3")
