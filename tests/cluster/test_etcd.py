"""A run through a real etcd: whoever dies, the others go on, and nobody is special."""

from __future__ import annotations

import contextlib
import os
import signal
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.addresses import own_endpoint
from kit.cluster import Agent, Cluster, Worker
from kit.etcd import EtcdCluster, needs_etcd
from kit.jobs import Running
from kit.processes import is_alive, until
from network.etcd_members import records_of
from tenax._engines.etcd.keys import Keys, Written

pytestmark = needs_etcd

MakeEtcd = Callable[..., EtcdCluster]
SERVES = "this node serves the coordinator"
TAKES_OVER = "this node takes over the coordinator"
REFUSED = 71  # the exit code of an agent that was not let in
# Where nothing must happen: on a busy machine a pause lasts longer than the test meant.
PATIENT = {"keep_alive_max_attempt": 20}
# Where somebody must be missed.
SHORT = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 6}


def start(cluster: Cluster, count: int, **told: Any) -> tuple[Agent, list[Agent]]:
    """The first leads."""
    first, *others = cluster.start_in_order(count, **told)
    return first, others


def in_one_line(text: str) -> str:
    """What was said, whatever the width of the page."""
    return " ".join(text.split())


def all_still(workers: Sequence[Worker], seconds: float) -> bool:
    """For so long nobody says anything, or ends."""
    return not workers[0].is_heard_within(seconds) and not any(worker.is_heard_within(0.0) for worker in workers)


def records(cluster: Cluster, etcd: EtcdCluster) -> list[Written]:
    """Every record that was ever written for this run."""
    return records_of(lambda path, body: etcd.ask(0, path, body, etcd.token()), cluster.told["run_id"])


def leases(etcd: EtcdCluster) -> set[str]:
    return {lease["ID"] for lease in etcd.ask(0, "/v3/lease/leases", {}).get("leases", [])}


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
        agent.until_said("workers keep running while this node reconnects")
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
    cluster.use_etcd(etcd, **SHORT)
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
    assert by[-1] != led_by
    assert led_by not in by[by.count(led_by) :], "once another led, nothing was written by the first"
    cluster.finish(third, leader, *others)


# --- etcd is away -----------------------------------------------------------------------------------------------------


def test_all_of_etcd_away_and_back(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """Workers never stop; who came meanwhile is let in afterwards, and a failure is restarted as ever."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **SHORT)
    agents = cluster.start(2, nodes=(2, 3), conf={"last_call_timeout": 0.1})
    workers = cluster.desk.generation(2)
    etcd.kill_all()
    (late,) = cluster.start(nodes=(2, 3))
    late.until_said("connection refused; retrying for")
    assert all_still(workers, 5.0), "longer than any lease"
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
    for agent in agents:
        agent.until_said("it is no longer the leader; workers keep running while this node reconnects")
    assert all_still(workers, 2.0)
    workers[0].tell("exit 3")
    cluster.finish(cluster.desk.generation(3, number=2), *agents)


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
    for agent in members:
        agent.until_said("it is no longer the leader; workers keep running while this node reconnects")
    assert all_still(workers, 2.0)
    workers[0].tell("exit 3")
    second = cluster.desk.generation(2, number=2)
    cluster.finish(second, *members, spare)


# --- who may use it ---------------------------------------------------------------------------------------------------


def test_the_death_of_the_leader_where_etcd_wants_certificates_and_passwords(
    cluster: Cluster, make_etcd: MakeEtcd
) -> None:
    etcd = make_etcd(3, tls="mutual", users=True)
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    cluster.desk.generation(3)
    cluster.kill(leader)
    cluster.finish(cluster.desk.generation(2, number=2), *others)


def test_who_is_not_let_in_is_told_why(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    etcd = make_etcd(1, tls="mutual", users=True)
    cluster.use_etcd(etcd)
    assert etcd.certificates is not None
    cert, key = etcd.certificates.strange_client
    place = etcd.endpoint(0)
    tries: dict[str, dict[str, Any]] = {
        f"etcd at {place} refused this client: authentication failed, invalid user ID or password": {
            "password": "not the root password"
        },
        f"etcd at {place}: it rejected this client's certificate": {
            "ssl_cert": cert,
            "ssl_cert_key": key,
            "link_tls": "false",  # it would be refused before etcd is asked
        },
        f"etcd at {place}: untrusted certificate": {
            "ca_cert": etcd.certificates.strange_ca,
            "link_tls": "false",
        },
    }
    agents = {why: cluster.start(conf=conf)[0] for why, conf in tries.items()}
    for why, agent in agents.items():
        assert agent.wait() == REFUSED, agent
        assert why in in_one_line(agent.printed_report), agent
        assert "Traceback" not in agent.text
        assert "password: " not in agent.text
        assert "not the root password" not in agent.text


def test_there_is_no_etcd(cluster: Cluster) -> None:
    nobody = cluster.endpoint
    (agent,) = cluster.start(backend="etcd", conf={"join_timeout": 1})
    assert agent.wait() == REFUSED, agent
    report = in_one_line(agent.printed_report)
    assert f"{nobody}: connection refused" in report
    assert "check that etcd is running and reachable, or allow more time with --rdzv-conf join_timeout" in report
    assert "Traceback" not in agent.text


# --- a name is used again ---------------------------------------------------------------------------------------------


def test_the_name_of_a_run_that_ended_is_soon_free_again(cluster: Cluster, etcd: EtcdCluster) -> None:
    cluster.use_etcd(etcd)
    before = leases(etcd)
    cluster.start(2)
    cluster.finish(cluster.desk.generation(2))
    (early,) = cluster.start()
    assert early.wait() == REFUSED, early
    assert "is over: all 2 workers succeeded; to use its --rdzv-id again, wait 10 s" in in_one_line(early.text)
    (lease,) = leases(etcd) - before
    left = etcd.ask(0, "/v3/lease/timetolive", {"ID": lease, "keys": True})
    assert int(left["TTL"]) <= int(left["grantedTTL"]) == 10, "it ends by itself; the test does not wait for that"
    assert len(left["keys"]) == 1
    etcd.ask(0, "/v3/lease/revoke", {"ID": lease})
    assert not records(cluster, etcd), "nothing is left of it in etcd"
    agents = cluster.start(2)
    workers = [worker for worker in cluster.desk.all(4) if cluster.agent_of(worker) in agents]
    assert [worker.generation for worker in workers] == [1, 1]
    cluster.finish(workers, *agents)


def test_the_name_of_a_run_whose_agents_were_all_killed(cluster: Cluster, etcd: EtcdCluster) -> None:
    """The next ones go on where it was: what it had used up is used up."""
    cluster.use_etcd(etcd, **SHORT)
    dead = cluster.start(2)
    cluster.desk.generation(2)[0].tell("exit 3")
    cluster.desk.generation(2, number=2)
    for agent in dead:
        cluster.kill(agent)
    agents = cluster.start(2)
    third = cluster.desk.generation(2, number=3)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in third} == {"1"}
    cluster.finish(third, *agents)


# --- etcd that the run brings along -----------------------------------------------------------------------------------


class Managed:
    """Agents on this host, started on the command line, with a member of etcd each."""

    def __init__(self, cluster: Cluster, nnodes: str, secret: str = "") -> None:
        self._cluster = cluster
        self._nnodes = nnodes
        self._secret = secret
        self.names = [own_endpoint() for _ in range(3)]

    def start(self, number: int) -> Running:
        script = str(Path(__file__).parents[1] / "kit" / "worker_main.py")
        endpoint, name = ",".join(self.names), self.names[number]
        words = ["--nnodes", self._nnodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "managed"]
        words += ["--rdzv-conf", f"managed=true,managed_only={name},last_call_timeout=60", script]
        env = {"CLUSTER_DESK": self._cluster.desk.name, "CLUSTER_AGENT": str(number)}
        env |= {"TENAX_RDZV_TOKEN": self._secret} if self._secret else {}
        return self._cluster.bench.start(*words, env=env)

    def servers(self) -> list[int]:
        """Every living etcd of this run."""
        ours = [f"{name.partition(':')[0]}:".encode() for name in self.names]
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # gone meanwhile
                command = Path(f"/proc/{entry}/cmdline").read_bytes() if entry.isdigit() else b""
                words = command.split(b"\0")
                if Path(os.fsdecode(words[0])).name == "etcd" and any(each in command for each in ours):
                    found.append(int(entry))
        return [pid for pid in found if is_alive(pid)]


def test_a_run_that_brings_its_etcd_along(cluster: Cluster) -> None:
    managed = Managed(cluster, "3")
    agents = [managed.start(number) for number in range(3)]
    workers = cluster.desk.generation(3)
    assert len(managed.servers()) == 3
    for worker in workers:
        worker.tell("exit 0")
    for agent in agents:
        done = agent.wait()
        assert done.code == 0, done
    assert managed.servers() == []


@pytest.mark.parametrize("secret", ["", "the secret of the run"], ids=["open", "with users"])
def test_a_run_that_brings_its_etcd_along_and_loses_an_agent(cluster: Cluster, secret: str) -> None:
    """The one that leads, with its member of etcd."""
    managed = Managed(cluster, "2:3", secret)
    agents = [managed.start(number) for number in range(3)]
    cluster.desk.generation(3)
    (leader,) = [agent for agent in agents if SERVES in agent.err]
    cluster.bench.leaves_within_s = 1.0
    leader.send(signal.SIGKILL)
    second = cluster.desk.generation(2, number=2)
    assert str(agents.index(leader)) not in {worker.agent for worker in second}
    second[0].tell("exit 3")
    third = cluster.desk.generation(2, number=3)
    for worker in third:
        worker.tell("exit 0")
    for agent in agents:
        done = agent.wait()
        assert done.code == (-signal.SIGKILL if agent is leader else 0), done
    assert managed.servers() == []


@pytest.mark.parametrize("which", [0, 1], ids=["of the one that led", "of another"])
def test_a_failure_while_nobody_leads_is_charged(cluster: Cluster, etcd: EtcdCluster, which: int) -> None:
    cluster.use_etcd(etcd, **PATIENT)
    leader, (other,) = start(cluster, 2)
    members = [leader, other]
    workers = cluster.desk.generation(2)
    (spare,) = cluster.start()
    spare.until_said("this node is a spare")
    stop(*members)
    (worker,) = cluster.workers_of(members[which], workers)
    worker.tell("exit 3")
    worker.until_gone()
    remove_leader(cluster, etcd)
    spare.until_said(TAKES_OVER)
    for agent in members:
        agent.send(signal.SIGCONT)
    second = cluster.desk.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *members, spare)


def test_a_node_that_was_away_does_not_begin_a_finished_run_again(cluster: Cluster, etcd: EtcdCluster) -> None:
    """It stood still until nothing was known of the run any more. Alone it would be enough for a generation."""
    cluster.use_etcd(etcd, **SHORT)
    leader, (away,) = start(cluster, 2, nodes=(1, 2))
    workers = cluster.desk.generation(2)
    stop(away)
    (worker,) = cluster.workers_of(away, workers)
    worker.until_gone()
    cluster.finish(cluster.desk.generation(1, number=2), leader)
    key = b64encode(Keys(cluster.told["run_id"]).record).decode()
    etcd.ask(0, "/v3/kv/deleterange", {"key": key})
    away.send(signal.SIGCONT)
    assert away.wait() == REFUSED
    assert "etcd has no record of the run" in in_one_line(away.text)
    assert len(cluster.desk.workers) == 3


def test_a_run_that_was_stopped_leaves_nothing_to_the_next_of_its_name(cluster: Cluster, etcd: EtcdCluster) -> None:
    """SIGTERM to all: the next one begins with generation 1, and all its restarts."""
    cluster.use_etcd(etcd)
    agents = cluster.start(2)
    (worker, *_) = cluster.desk.generation(2)
    worker.tell("exit 3")
    cluster.desk.generation(2, number=2)
    for agent in agents:
        agent.send(signal.SIGTERM)
    assert {agent.wait() for agent in agents} == {128 + signal.SIGTERM}
    next_ones = cluster.start(2)
    *_, one, other = cluster.desk.all(6)
    assert {one.generation, other.generation} == {1}
    assert {one.env["TORCHELASTIC_RESTART_COUNT"], other.env["TORCHELASTIC_RESTART_COUNT"]} == {"0"}
    cluster.finish([one, other], *next_ones)
