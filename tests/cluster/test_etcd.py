"""A run through a real etcd: whoever dies, the others go on, and nobody is special."""

from __future__ import annotations

import signal
from collections.abc import Callable

from etcd_servers import EtcdCluster, needs_etcd

from .kit import Agent, Cluster

pytestmark = needs_etcd
SERVES = "this node serves the coordinator"
TAKES_OVER = "this node takes over the coordinator"


def leader_of(agents: list[Agent]) -> Agent:
    (leader,) = [agent for agent in agents if agent.text.count("this node serves the coordinator of") == 1]
    return leader


def start(cluster: Cluster, count: int, **told: object) -> tuple[Agent, list[Agent]]:
    """The first leads."""
    first, *others = cluster.start_in_order(count, **told)
    return first, others


def test_a_run_from_beginning_to_end(cluster: Cluster, etcd: EtcdCluster) -> None:
    cluster.use_etcd(etcd)
    cluster.start(2)
    cluster.finish(cluster.desk.generation(2))


def test_the_death_of_the_leader(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Another leads at once, and the rest goes on in a new generation, uncharged."""
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    cluster.desk.generation(3)
    cluster.kill(leader)
    workers = cluster.desk.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    cluster.finish(workers, *others)


def test_a_leader_that_is_a_spare_dies_unnoticed(cluster: Cluster, etcd: EtcdCluster) -> None:
    cluster.use_etcd(etcd)
    (first,) = cluster.start(nodes=(2, 2))
    first.until_said(SERVES)
    spare = first
    others = cluster.start(2, nodes=(2, 2))
    workers = cluster.desk.generation(2)
    members = {cluster.agent_of(worker).name for worker in workers}
    leads_and_works = spare.name in members
    if leads_and_works:
        return cluster.finish(workers, *cluster.agents[:0] or [a for a in cluster.agents if a.name in members])
    cluster.kill(spare)
    return cluster.finish(workers, *others)
