"""A run with a real etcd of three members: faults of etcd, of the agents, and of the network between them.

The agents are on node0 to node2, and node0 leads; the members of etcd have their own hosts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

import pytest

from kit.etcd import needs_etcd
from kit.processes import is_alive, until

from .cluster import Cluster
from .etcd_members import EtcdMembers
from .lab import Host, Lab, requires_netns
from .running import Running

pytestmark = [requires_netns, needs_etcd]

MakeLab = Callable[..., Lab]
SERVES = "this node serves the coordinator of the run"
TAKES_OVER = "this node takes over the coordinator of the run"
# Where nothing must happen: on a busy machine a pause lasts longer than intended.
LONG_LEASE = {"keep_alive_max_attempt": 10}
DEFAULT_LEASE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 6}  # the defaults with etcd
# Where a node must be lost: the lease is 3 s.
SHORT_LEASE = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 6}


class EtcdRun(Cluster):
    """Agents on the first hosts of a lab, etcd on its last three."""

    def __init__(self, lab: Lab, nnodes: str, conf: Mapping[str, object] | None = None) -> None:
        self.etcd = EtcdMembers(lab.hosts[-3:])
        super().__init__(
            lab,
            nnodes,
            endpoint=self.etcd.endpoints,
            options=("--rdzv-backend", "etcd"),
            conf={"last_call_timeout": 60, **DEFAULT_LEASE, **(conf or {})},
        )

    def start_in_order(self, *hosts: Host) -> list[Running]:
        """Start agents on these hosts. The first one leads."""
        (first,) = self.start(hosts[0])
        self.until_printed(first, SERVES)
        return [first, *self.start(*hosts[1:])]

    def until_one_takes_over(self, agents: list[Running]) -> Running:
        def found() -> Running | None:
            return next((agent for agent in agents if TAKES_OVER in agent.err), None)

        agent = self.until(found, "an agent to take over")
        assert agent is not None
        return agent

    def until_all_joined_the_new_leader(self) -> None:
        """Wait until the record shows that all members have joined the new leader."""
        until(lambda: not self.etcd.records(self.run_id)[-1].before, "all members to join the new leader")


# --- the leader of etcd dies ------------------------------------------------------------------------------------------


def test_the_leader_of_etcd_may_die_before_all_nodes_have_joined(make_lab: MakeLab) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "3", LONG_LEASE)
    run.start_in_order(lab[0], lab[1])
    run.etcd.kill_leader()
    run.start(lab[2])
    generation = run.until_at_work(3)
    run.finish()
    assert run.history.latest() is generation


def test_the_leader_of_etcd_may_die_while_workers_run_and_while_they_restart(make_lab: MakeLab) -> None:
    """The first death causes no restart."""
    lab = make_lab(6)
    run = EtcdRun(lab, "3")
    run.start_in_order(*lab.hosts[:3])
    first = run.until_at_work(3)
    pids = first.pids
    run.etcd.kill_leader()
    run.until_worked_for(first, 4.0)  # longer than the leader's lease in etcd
    run.etcd.start_all()
    leader = run.etcd.leader()
    assert (first.number, first.pids) == (1, pids)
    assert all(is_alive(pid) for pid in pids)
    (lab.shared / "fail-1").touch()
    run.etcd.kill(leader)
    second = run.until_at_work(3, after=first)
    assert (second.number, second.restart_count) == (2, 1)
    run.finish()
    assert run.history.latest() is second


# --- agents and their hosts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1], ids=["the leader", "another"])
def test_the_run_continues_after_an_agent_was_killed(make_lab: MakeLab, victim: int) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", SHORT_LEASE)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    agents[victim].send(signal.SIGKILL)
    fewer = run.until_at_work(2, after=whole)
    assert lab[victim].name not in fewer.hosts
    agents[victim] = run.start(lab[victim])[0]
    again = run.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    run.finish(*agents)


def test_the_leaders_host_may_be_cut_off_and_rejoin(make_lab: MakeLab) -> None:
    """Its workers are gone before the others continue without it."""
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", SHORT_LEASE)
    run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab[0].cut()
    fewer = run.until_at_work(2, after=whole)
    assert set(fewer.hosts) == {"node1", "node2"}
    assert not any(is_alive(pid) for pid in whole.pids)
    lab[0].heal()
    again = run.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    by = [written.by for written in run.etcd.records(run.run_id)]
    assert by[0].host == "node0"
    assert by[-1] != by[0]
    assert by[0] not in by[by.count(by[0]) :], "the first leader wrote after another led"
    run.finish()


def test_a_leader_that_is_cut_off_from_etcd_hands_over_and_keeps_its_node(make_lab: MakeLab) -> None:
    """It learns the new leader from a node that leaves it. No worker is restarted, also when it reaches etcd again."""
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", LONG_LEASE)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab.partition([lab[0]], run.etcd.hosts)
    run.until_one_takes_over(agents[1:])
    run.until_printed(agents[0], "another node is the leader, as a node reports")
    run.until_all_joined_the_new_leader()
    run.until_worked_for(whole, 0.5)
    lab.heal()
    run.until_worked_for(whole, 0.5)
    run.finish()


def test_a_leader_that_reaches_etcd_again_in_time_causes_no_restart(make_lab: MakeLab) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", LONG_LEASE)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab.partition([lab[0]], run.etcd.hosts)
    run.until_one_takes_over(agents[1:])
    lab.heal()
    run.until_printed(agents[0], "this node no longer serves the coordinator")
    run.until_all_joined_the_new_leader()
    run.until_worked_for(whole, 0.5)
    (lab.shared / "fail-0").touch()
    again = run.until_at_work(3, after=whole)
    assert (again.number, again.restart_count) == (2, 1)
    run.finish()


def test_members_that_a_dead_successor_never_met_are_not_lost(make_lab: MakeLab) -> None:
    """A generation is cut off from etcd with its leader and keeps running. One of two spares takes over and dies before
    any member has connected. The other spare must not declare the generation lost."""
    lab = make_lab(7)
    run = EtcdRun(lab, "1:2", SHORT_LEASE)
    members = run.start_in_order(lab[0], lab[1])
    whole = run.until_at_work(2)
    spares = run.start(lab[2], lab[3])
    for agent in spares:
        run.until_printed(agent, "this node is a spare")
    lab.partition(lab.hosts[:2], lab.hosts[2:])
    first = run.until_one_takes_over(spares)
    first.send(signal.SIGKILL)
    (other,) = [agent for agent in spares if agent is not first]
    run.until_printed(other, TAKES_OVER)
    run.until_worked_for(whole, 5.0)  # longer than it waits for the members of a dead leader
    lab.heal()
    run.until_all_joined_the_new_leader()
    run.until_worked_for(whole, 0.5)
    run.finish(*members, other)
