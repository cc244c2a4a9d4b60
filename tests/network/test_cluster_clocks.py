"""The wall clock has no influence: hosts may differ, and it may jump."""

from __future__ import annotations

from .cluster import LEASE_S, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns


def test_wrong_and_jumping_wall_clocks_have_no_effect(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    (ahead,) = cluster.start(lab[0], skew_s=60)
    (behind,) = cluster.start(lab[1], skew_s=-60)
    cluster.start(lab[2])
    generation = cluster.until_at_work(3)
    ahead.set_skew(-60)
    behind.set_skew(60)
    cluster.until_worked_for(generation, LEASE_S + 1.0)
    (lab.shared / "fail-2").touch()
    again = cluster.until_at_work(3, after=generation)
    assert again.restart_count == 1
    behind.set_skew(3600)
    cluster.until_worked_for(again, 1.0)
    cluster.finish()
