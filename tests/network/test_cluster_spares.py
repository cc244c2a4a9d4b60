"""Spares: more nodes than members. A spare replaces a lost member, and may take over the coordinator."""

from __future__ import annotations

import signal

from .cluster import LEASE_S, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns


def test_a_spare_replaces_a_lost_host_with_its_rank(lab: Lab) -> None:
    cluster = Cluster(lab, 2)
    serving, member = cluster.start(lab[0], lab[1])
    first = cluster.until_at_work(2)
    (spare,) = cluster.start(lab[2])
    cluster.until_printed(spare, "generation 1 is running; this node is a spare: the run has its maximum of 2 nodes")
    cluster.until_worked_for(first, 0.2)
    rank = first.hosts.index("node1")
    lab[1].power_off()
    second = cluster.until_at_work(2, after=first)
    assert second.hosts[rank] == "node2"
    assert second.hosts[1 - rank] == "node0", "a node that stays keeps its rank"
    lab[1].power_on()
    (back,) = cluster.start(lab[1])
    cluster.until_printed(back, "generation 2 is running; this node is a spare: the run has its maximum of 2 nodes")
    cluster.until_worked_for(second, 0.2)
    cluster.finish(serving, spare, back)
    assert member.is_over


def test_the_successor_of_a_lost_coordinator_keeps_the_running_workers(lab: Lab) -> None:
    """Two agents on the endpoint's host. The serving one is drained, keeps serving, and is then killed."""
    cluster = Cluster(lab, 2)
    (serving,) = cluster.start(lab[0])
    cluster.until_printed(serving, "this node serves the coordinator")
    (other,) = cluster.start(lab[1])
    first = cluster.until_at_work(2)
    (successor,) = cluster.start(lab[0])
    cluster.until_printed(successor, "this node is a spare")
    serving.send(signal.SIGTERM)
    cluster.until_printed(serving, "this node has left the run, but it serves the coordinator: it stays")
    second = cluster.until_at_work(2, after=first)
    assert second.hosts == ["node0", "node1"]
    serving.send(signal.SIGKILL)
    cluster.until_printed(successor, "this node takes over the coordinator of the run 'job'")
    cluster.until_worked_for(second, LEASE_S + 1.0)  # longer than it waits for missing members
    (lab.shared / "fail-0").touch()
    third = cluster.until_at_work(2, after=second)
    assert third.restart_count == 1
    cluster.finish(successor, other)
