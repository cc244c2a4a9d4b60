"""Runs with a real etcd: any agent may die, and the others continue."""

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
from tenax._core.authority import AuthorityTerms
from tenax._core.leadership.keys import Keys, Written

pytestmark = needs_etcd

MakeEtcd = Callable[..., EtcdCluster]
SERVES = "this node serves the coordinator"
TAKES_OVER = "this node takes over the coordinator"
REFUSED = 71  # the exit code of a rejected agent
# For tests in which no lease may expire, also on a busy machine.
PATIENT = {"keep_alive_max_attempt": 20}
# For tests in which a lease must expire.
SHORT = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 6}


def start(cluster: Cluster, count: int, **options: Any) -> tuple[Agent, list[Agent]]:
    """Start agents, of which the first leads."""
    first, *others = cluster.start_in_order(count, **options)
    return first, others


def in_one_line(text: str) -> str:
    """Undo the line wrapping."""
    return " ".join(text.split())


def all_run_on(workers: Sequence[Worker], seconds: float) -> bool:
    """Return whether no worker prints anything or exits for so long."""
    return not workers[0].is_active_within(seconds) and not any(worker.is_active_within(0.0) for worker in workers)


def records(cluster: Cluster, etcd: EtcdCluster) -> list[Written]:
    """Return every record that was written for this run."""
    return records_of(lambda path, body: etcd.ask(0, path, body, etcd.token()), cluster.options["run_id"])


def leases(etcd: EtcdCluster) -> set[str]:
    return {lease["ID"] for lease in etcd.ask(0, "/v3/lease/leases", {}).get("leases", [])}


def remove_leader(cluster: Cluster, etcd: EtcdCluster) -> None:
    key = b64encode(Keys(cluster.options["run_id"]).leader).decode()
    assert etcd.ask(0, "/v3/kv/deleterange", {"key": key})["deleted"] == "1"


def stop(*agents: Agent) -> None:
    """Stop agents with SIGSTOP; they are stopped when this returns."""
    for agent in agents:
        agent.send(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED | os.WNOWAIT)


def let_lead(cluster: Cluster, etcd: EtcdCluster, heir: Agent, others: Sequence[Agent]) -> None:
    """Make ``heir`` the leader: the others are stopped while the leader key is deleted."""
    stop(*others)
    remove_leader(cluster, etcd)
    heir.until_printed(TAKES_OVER)
    for agent in others:
        agent.send(signal.SIGCONT)


# --- agents die or are stopped ----------------------------------------------------------------------------------------


def test_a_run_succeeds(cluster: Cluster, etcd: EtcdCluster) -> None:
    cluster.use_etcd(etcd)
    cluster.start(2)
    cluster.finish(cluster.hub.generation(2))


def test_after_the_death_of_the_leader_the_others_continue_uncharged(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Another node leads at once, and the rest continue in a new generation."""
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    cluster.hub.generation(3)
    cluster.kill(leader)
    workers = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    cluster.finish(workers, *others)


def test_the_death_of_a_leading_spare_does_not_end_the_generation(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Two changes of the leader restart nothing."""
    cluster.use_etcd(etcd, **PATIENT)
    members = cluster.start(2)
    workers = cluster.hub.generation(2)
    (spare,) = cluster.start()
    spare.until_printed("this node is a spare")
    let_lead(cluster, etcd, spare, members)
    for agent in members:
        agent.until_printed("workers keep running while this node reconnects")
    until(lambda: records(cluster, etcd)[-1].before == (), "all members to be linked to the spare")
    cluster.kill(spare)
    until(lambda: any(TAKES_OVER in agent.text for agent in members), "one of the members to take over")
    until(lambda: records(cluster, etcd)[-1].before == (), "all members to be linked to that one")
    assert all_run_on(workers, 0.0)
    workers[0].send("exit 3")
    second = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *members)


def test_a_stopped_leader_is_deposed_and_rejoins(cluster: Cluster, etcd: EtcdCluster) -> None:
    """Its workers are dead before the others continue. When it continues, it cannot write, and joins again."""
    cluster.use_etcd(etcd, **SHORT)
    leader, others = start(cluster, 3, nodes=(2, 3))
    workers = cluster.hub.generation(3)
    led_by = records(cluster, etcd)[-1].by
    leader.send(signal.SIGSTOP)
    (stopped,) = cluster.workers_of(leader, workers)
    stopped.until_gone()
    second = cluster.hub.generation(2, number=2)
    assert leader.name not in {worker.agent for worker in second}
    leader.send(signal.SIGCONT)
    third = cluster.hub.generation(3, number=3)
    by = [written.by for written in records(cluster, etcd)]
    assert by[0] == led_by
    assert by[-1] != led_by
    assert led_by not in by[by.count(led_by) :], "the first leader wrote nothing after its successor did"
    cluster.finish(third, leader, *others)


# --- etcd is down -----------------------------------------------------------------------------------------------------


def test_workers_keep_running_while_all_of_etcd_is_down(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """A node that started meanwhile joins afterwards, and a failure is restarted."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **SHORT)
    agents = cluster.start(2, nodes=(2, 3), conf={"last_call_timeout": 0.1})
    workers = cluster.hub.generation(2)
    etcd.kill_all()
    (late,) = cluster.start(nodes=(2, 3))
    late.until_printed("connection refused; retrying for")
    assert all_run_on(workers, 5.0), "longer than any lease"
    etcd.start_all()
    second = cluster.hub.generation(3, number=2)
    second[0].send("exit 3")
    third = cluster.hub.generation(3, number=3)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in third} == {"1"}
    cluster.finish(third, *agents, late)


def test_workers_keep_running_when_etcd_loses_its_data(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """A later failure is restarted."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **PATIENT)
    agents = cluster.start(3, nodes=(3, 3))
    workers = cluster.hub.generation(3)
    etcd.wipe()
    etcd.start_all()
    for agent in agents:
        agent.until_printed("it is no longer the leader; workers keep running while this node reconnects")
    assert all_run_on(workers, 2.0)
    workers[0].send("exit 3")
    cluster.finish(cluster.hub.generation(3, number=2), *agents)


def test_a_spare_leads_after_etcd_lost_its_data(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """It knows no generation, and waits for members of one that may exist."""
    etcd = make_etcd(3)
    cluster.use_etcd(etcd, **PATIENT)
    members = cluster.start(2)
    workers = cluster.hub.generation(2)
    (spare,) = cluster.start()
    spare.until_printed("this node is a spare")
    stop(*members)
    etcd.wipe()
    etcd.start_all()
    spare.until_printed(SERVES)
    for agent in members:
        agent.send(signal.SIGCONT)
    for agent in members:
        agent.until_printed("it is no longer the leader; workers keep running while this node reconnects")
    assert all_run_on(workers, 2.0)
    workers[0].send("exit 3")
    second = cluster.hub.generation(2, number=2)
    cluster.finish(second, *members, spare)


# --- access to etcd ---------------------------------------------------------------------------------------------------


def test_the_leader_can_die_if_etcd_requires_certificates_and_passwords(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    etcd = make_etcd(3, tls="mutual", users=True)
    cluster.use_etcd(etcd)
    leader, others = start(cluster, 3, nodes=(2, 3))
    cluster.hub.generation(3)
    cluster.kill(leader)
    cluster.finish(cluster.hub.generation(2, number=2), *others)


def test_rejected_agents_print_the_reason(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    etcd = make_etcd(1, tls="mutual", users=True)
    cluster.use_etcd(etcd)
    assert etcd.certificates is not None
    cert, key = etcd.certificates.other_client
    endpoint = etcd.endpoint(0)
    cases: dict[str, dict[str, Any]] = {
        f"etcd at {endpoint} refused this client: authentication failed, invalid user ID or password": {
            "password": "not the root password"
        },
        f"etcd at {endpoint}: it rejected this client's certificate": {
            "ssl_cert": cert,
            "ssl_cert_key": key,
            "link_tls": "false",  # otherwise it is rejected before the connection to etcd
        },
        f"etcd at {endpoint}: untrusted certificate": {
            "ca_cert": etcd.certificates.other_ca,
            "link_tls": "false",
        },
    }
    agents = {why: cluster.start(conf=conf)[0] for why, conf in cases.items()}
    for why, agent in agents.items():
        assert agent.wait() == REFUSED, agent
        assert why in in_one_line(agent.printed_report), agent
        assert "Traceback" not in agent.text
        assert "password: " not in agent.text
        assert "not the root password" not in agent.text


def test_an_agent_without_a_reachable_etcd_gives_up_with_a_message(cluster: Cluster) -> None:
    endpoint = cluster.endpoint
    (agent,) = cluster.start(backend="etcd", conf={"join_timeout": 1})
    assert agent.wait() == REFUSED, agent
    report = in_one_line(agent.printed_report)
    assert f"{endpoint}: connection refused" in report
    assert "check that etcd is running and reachable, or allow more time with --rdzv-conf join_timeout" in report
    assert "Traceback" not in agent.text


# --- a run id is used again -------------------------------------------------------------------------------------------


def test_the_id_of_a_finished_run_can_soon_be_used_again(cluster: Cluster, etcd: EtcdCluster) -> None:
    cluster.use_etcd(etcd)
    before = leases(etcd)
    cluster.start(2)
    cluster.finish(cluster.hub.generation(2))
    (early,) = cluster.start()
    assert early.wait() == REFUSED, early
    assert "is over: all 2 workers succeeded; to use its --rdzv-id again, wait 10 s" in in_one_line(early.text)
    left = [etcd.ask(0, "/v3/lease/timetolive", {"ID": lease, "keys": True}) for lease in leases(etcd) - before]
    assert all(int(each["TTL"]) <= int(each["grantedTTL"]) and len(each["keys"]) == 1 for each in left)
    short, long = sorted(left, key=lambda each: int(each["grantedTTL"]))
    assert int(short["grantedTTL"]) == 10, "it expires by itself; the test does not wait for that"
    assert int(long["grantedTTL"]) == AuthorityTerms().record_s, (
        "of the verdict, for nodes of the run that come back later"
    )
    etcd.ask(0, "/v3/lease/revoke", {"ID": short["ID"]})
    agents = cluster.start(2)
    workers = [worker for worker in cluster.hub.all(4) if cluster.agent_of(worker) in agents]
    assert [worker.generation for worker in workers] == [1, 1]
    cluster.finish(workers, *agents)


def test_new_agents_continue_a_run_whose_agents_were_all_killed(cluster: Cluster, etcd: EtcdCluster) -> None:
    """The restarts it has used stay used."""
    cluster.use_etcd(etcd, **SHORT)
    dead = cluster.start(2)
    cluster.hub.generation(2)[0].send("exit 3")
    cluster.hub.generation(2, number=2)
    for agent in dead:
        cluster.kill(agent)
    agents = cluster.start(2)
    third = cluster.hub.generation(2, number=3)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in third} == {"1"}
    cluster.finish(third, *agents)


# --- managed etcd -----------------------------------------------------------------------------------------------------


class Managed:
    """Agents on this host, started on the command line, each with a managed etcd member."""

    def __init__(self, cluster: Cluster, nnodes: str, secret: str = "") -> None:
        self._cluster = cluster
        self._nnodes = nnodes
        self._secret = secret
        self.names = [own_endpoint() for _ in range(3)]

    def start(self, number: int) -> Running:
        script = str(Path(__file__).parents[1] / "kit" / "worker_main.py")
        endpoint, name = ",".join(self.names), self.names[number]
        arguments = ["--nnodes", self._nnodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        arguments += ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", "managed"]
        arguments += ["--rdzv-conf", f"managed=true,managed_only={name},last_call_timeout=60", script]
        env = {"CLUSTER_HUB": self._cluster.hub.name, "CLUSTER_AGENT": str(number)}
        env |= {"TENAX_RDZV_TOKEN": self._secret} if self._secret else {}
        return self._cluster.runner.start(*arguments, env=env)

    def servers(self) -> list[int]:
        """Return the pids of the etcd processes of this run."""
        ours = [f"{name.partition(':')[0]}:".encode() for name in self.names]
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # gone meanwhile
                command = Path(f"/proc/{entry}/cmdline").read_bytes() if entry.isdigit() else b""
                program = os.fsdecode(command.split(b"\0")[0])
                if Path(program).name == "etcd" and any(each in command for each in ours):
                    found.append(int(entry))
        return [pid for pid in found if is_alive(pid)]


def test_a_run_with_managed_etcd_succeeds(cluster: Cluster) -> None:
    managed = Managed(cluster, "3")
    agents = [managed.start(number) for number in range(3)]
    workers = cluster.hub.generation(3)
    assert len(managed.servers()) == 3
    for worker in workers:
        worker.send("exit 0")
    for agent in agents:
        done = agent.wait()
        assert done.code == 0, done
    assert managed.servers() == []


def test_a_run_with_managed_etcd_survives_the_death_of_its_leader(cluster: Cluster) -> None:
    """The leader dies together with its etcd member, which has users."""
    managed = Managed(cluster, "2:3", "the secret of the run")
    agents = [managed.start(number) for number in range(3)]
    cluster.hub.generation(3)
    (leader,) = [agent for agent in agents if SERVES in agent.err]
    cluster.runner.leaves_within_s = 1.0
    leader.send(signal.SIGKILL)
    second = cluster.hub.generation(2, number=2)
    assert str(agents.index(leader)) not in {worker.agent for worker in second}
    second[0].send("exit 3")
    third = cluster.hub.generation(2, number=3)
    for worker in third:
        worker.send("exit 0")
    for agent in agents:
        done = agent.wait()
        assert done.code == (-signal.SIGKILL if agent is leader else 0), done
    assert managed.servers() == []


@pytest.mark.parametrize("which", [0, 1], ids=["on the leader", "on another node"])
def test_a_failure_while_there_is_no_leader_is_charged(cluster: Cluster, etcd: EtcdCluster, which: int) -> None:
    cluster.use_etcd(etcd, **PATIENT)
    leader, (other,) = start(cluster, 2)
    members = [leader, other]
    workers = cluster.hub.generation(2)
    (spare,) = cluster.start()
    spare.until_printed("this node is a spare")
    stop(*members)
    (worker,) = cluster.workers_of(members[which], workers)
    worker.send("exit 3")
    worker.until_gone()
    remove_leader(cluster, etcd)
    spare.until_printed(TAKES_OVER)
    for agent in members:
        agent.send(signal.SIGCONT)
    second = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *members, spare)


@pytest.mark.parametrize("is_verdict_known", [True, False])
def test_a_node_that_was_stopped_does_not_start_a_finished_run_again(
    cluster: Cluster, etcd: EtcdCluster, *, is_verdict_known: bool
) -> None:
    """It was stopped until etcd had no record of the run. It leaves with the verdict, if etcd has that."""
    cluster.use_etcd(etcd, **SHORT)
    leader, (stopped,) = start(cluster, 2, nodes=(1, 2))
    workers = cluster.hub.generation(2)
    stop(stopped)
    (worker,) = cluster.workers_of(stopped, workers)
    worker.until_gone()
    cluster.finish(cluster.hub.generation(1, number=2), leader)
    keys = Keys(cluster.options["run_id"])
    first = keys.record if is_verdict_known else keys.ended(0)
    key, end = (b64encode(each).decode() for each in (first, keys.record + b"\0"))
    etcd.ask(0, "/v3/kv/deleterange", {"key": key, "range_end": end})
    stopped.send(signal.SIGCONT)
    if is_verdict_known:
        assert stopped.wait() == 0
        assert "the run succeeded: the worker succeeded" in in_one_line(stopped.text)
    else:
        assert stopped.wait() == REFUSED
        assert "etcd has no record of the run" in in_one_line(stopped.text)
    assert len(cluster.hub.workers) == 3


def test_a_run_after_a_stopped_one_with_the_same_id_starts_anew(cluster: Cluster, etcd: EtcdCluster) -> None:
    """After SIGTERM to all agents the next run starts with generation 1 and all its restarts."""
    cluster.use_etcd(etcd)
    agents = cluster.start(2)
    (worker, *_) = cluster.hub.generation(2)
    worker.send("exit 3")
    cluster.hub.generation(2, number=2)
    for agent in agents:
        agent.send(signal.SIGTERM)
    assert {agent.wait() for agent in agents} == {128 + signal.SIGTERM}
    next_agents = cluster.start(2)
    *_, one, other = cluster.hub.all(6)
    assert {one.generation, other.generation} == {1}
    assert {one.env["TORCHELASTIC_RESTART_COUNT"], other.env["TORCHELASTIC_RESTART_COUNT"]} == {"0"}
    cluster.finish([one, other], *next_agents)
