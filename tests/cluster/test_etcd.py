"""A run through a real etcd: whoever dies, the others go on, and nobody is special."""

from __future__ import annotations

import os
import signal
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Running
from etcd_servers import EtcdCluster, needs_etcd
from net.etcd_members import records_of
from tenax.rendezvous.etcd.keys import Keys, Written
from watching import is_alive, until

from .kit import Agent, Cluster, Worker

pytestmark = needs_etcd

MakeEtcd = Callable[..., EtcdCluster]
SERVES = "this node serves the coordinator"
TAKES_OVER = "this node takes over the coordinator"
REFUSED = 71  # the exit code of an agent that was not let in
# Where nothing must happen: on a busy machine a pause lasts longer than the test meant.
PATIENT = {"keep_alive_max_attempt": 20}


def start(cluster: Cluster, count: int, **told: Any) -> tuple[Agent, list[Agent]]:
    """The first leads."""
    first, *others = cluster.start_in_order(count, **told)
    return first, others


def all_still(workers: Sequence[Worker], seconds: float) -> bool:
    """For so long nobody says anything, or ends."""
    return not workers[0].is_heard_within(seconds) and not any(worker.is_heard_within(0.0) for worker in workers)


def records(cluster: Cluster, etcd: EtcdCluster) -> list[Written]:
    """Every record that was ever written for this run."""
    return records_of(lambda path, body: etcd.ask(0, path, body, etcd.token()), cluster.told["run_id"])


def node_id_of(agent: Agent, cluster: Cluster, etcd: EtcdCluster) -> str:
    raise NotImplementedError


def remove_leader(cluster: Cluster, etcd: EtcdCluster) -> None:
    key = b64encode(Keys(cluster.told["run_id"]).leader).decode()
    assert etcd.ask(0, "/v3/kv/deleterange", {"key": key})["deleted"] == "1"


def stop(*agents: Agent) -> None:
    """SIGSTOP: they stand still when this returns."""
    for agent in agents:
        agent.send(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED | os.WNOWAIT)


def let_lead(cluster: Cluster, etcd: EtcdCluster, heir: Agent, others: Sequence[Agent]) -> None:
    """The others stand still for a moment, in which the leader's key is lost: so the next to lead is this one."""
    stop(*others)
    remove_leader(cluster, etcd)
    heir.until_said(TAKES_OVER)
    for agent in others:
        agent.send(signal.SIGCONT)


# --- agents die, or stand still ---------------------------------------------------------------------------------------


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
    """The generation goes on: nothing is restarted because the coordinator is another one, twice."""
    cluster.use_etcd(etcd, **PATIENT)
    members = cluster.start(2)
    workers = cluster.desk.generation(2)
    (spare,) = cluster.start()
    spare.until_said("this node is a spare")
    let_lead(cluster, etcd, spare, members)
    for agent in members:
        agent.until_said("workers go on, and this node looks for it")
    until(lambda: records(cluster, etcd)[-1].before == (), "the spare to have heard of all members")
    cluster.kill(spare)
    until(lambda: any(TAKES_OVER in agent.text for agent in members), "one of the members to take over")
    until(lambda: records(cluster, etcd)[-1].before == (), "that one to have heard of all members")
    assert all_still(workers, 0.0)
    workers[0].tell("exit 3")
    second = cluster.desk.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *members)


def test_a_leader_that_is_stopped(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Its own workers are dead before the others go on; when it continues, it can change nothing, and joins again."""
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    workers = cluster.desk.generation(3)
    led_by = records(cluster, etcd)[-1].by
    leader.send(signal.SIGSTOP)
    (stopped,) = cluster.workers_of(leader, workers)
    stopped.until_gone()
    second = cluster.desk.generation(2, number=2)
    assert leader.name not in {worker.agent for worker in second}
    leader.send(signal.SIGCONT)
    third = cluster.desk.generation(3, number=3)
    by = [written.by for written in records(cluster, etcd)]
    assert by[0] == led_by
    assert set(by[by.count(led_by) :]) == {by[-1]}, "once another led, nothing was written by the first"
    cluster.finish(third, leader, *others)


# --- etcd is away -----------------------------------------------------------------------------------------------------


def test_all_of_etcd_away_and_back(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """Workers never stop; who came meanwhile is let in afterwards, and a failure is restarted as ever."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd)
    agents = cluster.start(2, nodes=(2, 3), conf={"last_call_timeout": 0.1})
    workers = cluster.desk.generation(2)
    etcd.kill_all()
    (late,) = cluster.start(nodes=(2, 3))
    late.until_said("connection refused; still trying")
    assert all_still(workers, 30.0), "longer than any lease"
    etcd.start_all()
    second = cluster.desk.generation(3, number=2)
    second[0].tell("exit 3")
    third = cluster.desk.generation(3, number=3)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in third} == {"1"}
    cluster.finish(third, *agents, late)


def test_etcd_forgets_everything(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """Workers go on, and a later failure is restarted."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **PATIENT)
    agents = cluster.start(3, nodes=(3, 3))
    workers = cluster.desk.generation(3)
    etcd.wipe()
    etcd.start_all()
    until(lambda: records(cluster, etcd), "somebody to lead again")
    assert all_still(workers, 5.0)
    workers[0].tell("exit 3")
    second = cluster.desk.generation(3, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *agents)


def test_etcd_forgets_everything_and_a_spare_leads(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """It knows of no generation, but that there may be one."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **PATIENT)
    members = cluster.start(2)
    workers = cluster.desk.generation(2)
    (spare,) = cluster.start()
    spare.until_said("this node is a spare")
    stop(*members)
    etcd.wipe()
    etcd.start_all()
    spare.until_said(SERVES)
    for agent in members:
        agent.send(signal.SIGCONT)
    assert all_still(workers, 5.0)
    workers[0].tell("exit 3")
    second = cluster.desk.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *members, spare)
