"""Agents that are stopped for longer than a lease: never two generations at once, and the run goes on."""

from __future__ import annotations

import pytest

from kit.cluster import Cluster

from .freezes import Freezes


@pytest.mark.parametrize("kind", Freezes.KINDS)
def test_a_freeze_of_the_agent_that_serves_never_leads_to_two_generations(cluster: Cluster, kind: str) -> None:
    """A lease of 1 s and a freeze of three. The lane (``./dev freezes``) does the same with real ones, 30 s each."""
    freezes = Freezes(cluster, lease_s=1.0, pause_s=3.0)
    freezes.freeze(kind)
    freezes.finish()


def test_a_worker_that_starts_beside_another_generation_writes_that_down(cluster: Cluster) -> None:
    """The proof means something: a worker of a later generation that is started by hand is caught."""
    freezes = Freezes(cluster, lease_s=5.0, pause_s=0.0)
    freezes.start_intruder()
    assert f"{freezes.generation}-0-" in freezes.overlaps
    freezes.clear_overlaps()
    freezes.finish()
