"""More nodes than places: the others wait, say so, and take a place that becomes free. A coordinator may be one too."""

from __future__ import annotations

import signal

from .cluster import LEASE_S, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns


def test_a_spare_waits_and_takes_the_rank_of_a_host_that_died(lab: Lab) -> None:
    cluster = Cluster(lab, 2)
    serving, member = cluster.start(lab[0], lab[1])
    first = cluster.until_at_work(2)
    (spare,) = cluster.start(lab[2])
    cluster.until_said(spare, "generation 1 is running; this node is a spare: all 2 places are taken")
    cluster.until_it_worked_for(first, 0.2)
    rank = first.hosts.index("node1")
    lab[1].power_off()
    second = cluster.until_at_work(2, after=first)
    assert second.hosts[rank] == "node2"
    assert second.hosts[1 - rank] == "node0", "a node that stays keeps its rank"
    lab[1].power_on()
    (back,) = cluster.start(lab[1])
    cluster.until_said(back, "generation 2 is running; this node is a spare: all 2 places are taken")
    cluster.until_it_worked_for(second, 0.2)
    cluster.finish(serving, spare, back)
    assert member.is_over


def test_when_only_the_coordinator_is_lost_its_successor_takes_the_running_workers_over(lab: Lab) -> None:
    """Two agents on the endpoint's host. The one that serves leaves the group, stays for the others, and is killed."""
    cluster = Cluster(lab, 2)
    (serving,) = cluster.start(lab[0])
    cluster.until_said(serving, "this node serves the coordinator")
    (away,) = cluster.start(lab[1])
    first = cluster.until_at_work(2)
    (heir,) = cluster.start(lab[0])
    cluster.until_said(heir, "this node is a spare")
    serving.send(signal.SIGTERM)
    cluster.until_said(serving, "this node has left the run, but it serves the coordinator of the others")
    second = cluster.until_at_work(2, after=first)
    assert second.hosts == ["node0", "node1"]
    serving.send(signal.SIGKILL)
    cluster.until_said(heir, "this node takes over the coordinator of the run 'job'")
    cluster.until_it_worked_for(second, LEASE_S + 1.0)  # longer than it waits for those who may be missing
    (lab.shared / "fail-0").touch()
    third = cluster.until_at_work(2, after=second)
    assert third.restart_count == 1
    cluster.finish(heir, away)
