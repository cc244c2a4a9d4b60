"""Hosts are silently cut off from each other. There are never two groups of workers, and in the end there is one.

A host without messages stops its workers before the others may start without it. Both sides use their own clock.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .cluster import LEASE_S, PORT, Cluster
from .lab import Direction, Lab, requires_netns, requires_slow_network

pytestmark = requires_netns

MakeLab = Callable[..., Lab]


@pytest.mark.parametrize("direction", ["in", "out"])
def test_the_others_continue_without_a_cut_off_host_and_accept_it_again(lab: Lab, direction: Direction) -> None:
    """Even if its workers do not exit on SIGTERM."""
    cluster = Cluster(lab, "2:3", nproc=2)
    cluster.start(lab[0], lab[1])
    cluster.start(lab[2], env={"STOP_DELAY_S": "20"})
    whole = cluster.until_at_work(6)
    lab[2].cut(direction)
    fewer = cluster.until_at_work(4, after=whole)
    assert set(fewer.hosts) == {"node0", "node1"}
    lab[2].heal(direction)
    again = cluster.until_at_work(6, after=fewer)
    assert again.restart_count == 0, "a cut is not the program's fault"
    cluster.finish()


def test_without_the_coordinators_host_no_node_continues(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    serving, *others = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab.partition([lab[0]], lab.hosts[1:])
    for agent in others:
        cluster.until_printed(agent, "killing all remaining processes: ")
    cluster.until_printed(serving, "1 of 2 to 3 nodes ready (node0); waiting up to ")
    assert cluster.history.latest() is whole
    lab.heal()
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish()


def test_the_coordinators_host_continues_alone_if_one_node_is_enough(lab: Lab) -> None:
    cluster = Cluster(lab, "1:3")
    cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab.partition([lab[0]], lab.hosts[1:])
    alone = cluster.until_at_work(1, after=whole)
    assert alone.hosts == ["node0"]
    lab.heal()
    cluster.until_at_work(3, after=alone)
    cluster.finish()


def test_a_cut_shorter_than_the_lease_has_no_effect(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", conf={"keep_alive_max_attempt": 30})  # on a busy machine 1 s may take longer
    cluster.start(*lab)
    generation = cluster.until_at_work(3)
    lab[1].cut()
    cluster.until_worked_for(generation, 1.0)
    lab[1].heal()
    cluster.until_worked_for(generation, 2.0)
    cluster.finish()


@requires_slow_network
def test_a_slow_and_lossy_network_causes_no_false_failures(make_lab: MakeLab) -> None:
    lab = make_lab(3, delay_ms=30, jitter_ms=15, loss=0.01, seed=7)
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    first = cluster.until_at_work(3)
    (lab.shared / "fail-1").touch()
    second = cluster.until_at_work(3, after=first)
    assert second.restart_count == 1
    cluster.until_worked_for(second, 2 * LEASE_S)
    lab[2].power_off()
    third = cluster.until_at_work(2, after=second)
    lab[2].power_on()
    agents[2] = cluster.start(lab[2])[0]
    cluster.until_at_work(3, after=third)
    cluster.finish(*agents)


def test_a_reset_link_between_live_nodes_has_no_effect(lab: Lab) -> None:
    """As by a firewall that lost its state. The node reconnects before its lease ends."""
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    generation = cluster.until_at_work(3)
    lab[2].reset(PORT)
    cluster.until_printed(agents[2], "workers keep running while this node reconnects")
    cluster.until_worked_for(generation, LEASE_S + 1.0)
    (lab.shared / "fail-0").touch()
    cluster.until_at_work(3, after=generation)
    cluster.finish()
