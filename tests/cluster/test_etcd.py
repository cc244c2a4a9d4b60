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


def test_a_spare_that_leads_dies_and_nobody_notices(cluster: Cluster, etcd: EtcdCluster) -> None:
    """The generation goes on: nothing is restarted because the coordinator is another one."""
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 2), conf={"node_order": "0"})
    # Not said by the order of arrival: whoever has the last name in the order is the spare.
    workers = cluster.desk.generation(2)
    members = [cluster.agent_of(worker) for worker in workers]
    (spare,) = [agent for agent in cluster.agents if agent not in members]
    cluster.kill(leader)
    if leader is spare:
        assert not any(worker.is_heard_within(0.5) for worker in workers)
        cluster.finish(workers, *members)
    else:
        cluster.finish(cluster.desk.generation(2, number=2), *others)


def test_all_of_etcd_away_and_back(cluster: Cluster, make_etcd: Callable[..., EtcdCluster]) -> None:
    """Workers never stop; afterwards a failure is restarted as ever."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd)
    cluster.start(2)
    workers = cluster.desk.generation(2)
    etcd.kill_all()
    assert not any(worker.is_heard_within(6.0) for worker in workers), "longer than any lease"
    etcd.start_all()
    workers[0].tell("exit 3")
    cluster.finish(cluster.desk.generation(2, number=2))


def test_a_leader_that_is_stopped(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Its own workers are dead before the others go on; when it continues, it can change nothing, and joins again."""
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    workers = cluster.desk.generation(3)
    leader.send(signal.SIGSTOP)
    (stopped,) = cluster.workers_of(leader, workers)
    stopped.until_gone()
    second = cluster.desk.generation(2, number=2)
    assert leader.name not in {worker.agent for worker in second}
    leader.send(signal.SIGCONT)
    cluster.finish(cluster.desk.generation(3, number=3), leader, *others)
