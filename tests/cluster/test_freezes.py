"""Agents that are stopped for longer than a lease: never two generations at once, and the run continues."""

from __future__ import annotations

import pytest

from kit.cluster import Cluster

from .freezes import Freezes


@pytest.mark.parametrize("kind", Freezes.KINDS)
def test_a_freeze_of_the_serving_agent_never_leads_to_two_generations_at_once(cluster: Cluster, kind: str) -> None:
    """A lease of 1 s and a freeze of 3 s. ``./dev freezes`` uses the default lease and 30 s each."""
    freezes = Freezes(cluster, lease_s=1.0, pause_s=3.0)
    freezes.freeze(kind)
    freezes.finish()


def test_a_worker_reports_live_workers_of_another_generation(cluster: Cluster) -> None:
    """Checks the checker: a worker of a later generation, started by hand, is detected."""
    freezes = Freezes(cluster, lease_s=5.0, pause_s=0.0)
    freezes.start_intruder()
    assert f"{freezes.generation}-0-" in freezes.overlaps
    freezes.clear_overlaps()
    freezes.finish()
