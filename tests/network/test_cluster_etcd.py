"""A run through a real etcd of three members, on a network with faults: etcd's, the agents', and of the way between.

Hosts node0 to node2 have the agents, the first of which leads; the members of etcd are on hosts of their own.
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
# Where nothing must happen: on a busy machine a pause lasts longer than the test meant.
PATIENT = {"keep_alive_max_attempt": 10}
USUAL = {"keep_alive_interval": 1, "keep_alive_max_attempt": 6}  # the defaults with etcd
# Where somebody must be missed: the lease is 3 s.
SHORT = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 6}


class EtcdRun(Cluster):
    """Agents on the first hosts of a lab, etcd on its last three."""

    def __init__(self, lab: Lab, nnodes: str, conf: Mapping[str, object] | None = None) -> None:
        self.etcd = EtcdMembers(lab.hosts[-3:])
        super().__init__(
            lab,
            nnodes,
            endpoint=self.etcd.endpoints,
            options=("--rdzv-backend", "etcd"),
            conf={"last_call_timeout": 60, **USUAL, **(conf or {})},
        )

    def start_in_order(self, *hosts: Host) -> list[Running]:
        """The first one leads, for sure."""
        (first,) = self.start(hosts[0])
        self.until_said(first, SERVES)
        return [first, *self.start(*hosts[1:])]

    def until_one_takes_over(self, agents: list[Running]) -> Running:
        def found() -> Running | None:
            return next((agent for agent in agents if TAKES_OVER in agent.err), None)

        agent = self.until(found, "one of them takes over")
        assert agent is not None
        return agent

    def until_all_are_with_the_new_one(self) -> None:
        """Only then it says in the record that nobody else can have an answer for anybody."""
        until(lambda: not self.etcd.records(self.run_id)[-1].before, "all members to be with the one that leads")


# --- etcd's own leader dies -------------------------------------------------------------------------------------------


def test_the_leader_of_etcd_dies_before_all_nodes_are_here(make_lab: MakeLab) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "3", PATIENT)
    run.start_in_order(lab[0], lab[1])
    run.etcd.kill_leader()
    run.start(lab[2])
    generation = run.until_at_work(3)
    run.finish()
    assert run.history.latest() is generation


def test_the_leader_of_etcd_dies_while_workers_are_at_work_and_then_while_they_are_restarted(make_lab: MakeLab) -> None:
    """First nothing is restarted; then the failure is."""
    lab = make_lab(6)
    run = EtcdRun(lab, "3")
    run.start_in_order(*lab.hosts[:3])
    first = run.until_at_work(3)
    pids = first.pids
    run.etcd.kill_leader()
    run.until_it_worked_for(first, 4.0)  # longer than the lease in etcd of the one that leads the run
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


@pytest.mark.parametrize("victim", [0, 1], ids=["the one that leads", "another"])
def test_an_agent_is_killed(make_lab: MakeLab, victim: int) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", SHORT)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    agents[victim].send(signal.SIGKILL)
    fewer = run.until_at_work(2, after=whole)
    assert lab[victim].name not in fewer.hosts
    agents[victim] = run.start(lab[victim])[0]
    again = run.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    run.finish(*agents)


def test_the_host_of_the_one_that_leads_is_cut_off_and_comes_back(make_lab: MakeLab) -> None:
    """Its workers are gone before the others go on without it: the history says so at the end."""
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", SHORT)
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
    assert by[0] not in by[by.count(by[0]) :], "once another led, nothing was written by the first"
    run.finish()


def test_the_one_that_leads_is_cut_off_from_etcd_only(make_lab: MakeLab) -> None:
    """It cannot learn who leads now, and so its node is lost to the others, who go on without it."""
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", SHORT)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab.partition([lab[0]], run.etcd.hosts)
    run.until_one_takes_over(agents[1:])
    fewer = run.until_at_work(2, after=whole)
    assert set(fewer.hosts) == {"node1", "node2"}
    lab.heal()
    again = run.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    run.finish()


def test_when_it_reaches_etcd_again_in_time_nothing_is_restarted(make_lab: MakeLab) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3", PATIENT)
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab.partition([lab[0]], run.etcd.hosts)
    run.until_one_takes_over(agents[1:])
    lab.heal()
    run.until_said(agents[0], "this node no longer serves the coordinator")
    run.until_all_are_with_the_new_one()
    run.until_it_worked_for(whole, 0.5)
    (lab.shared / "fail-0").touch()
    again = run.until_at_work(3, after=whole)
    assert (again.number, again.restart_count) == (2, 1)
    run.finish()


def test_the_death_of_a_successor_says_nothing_about_those_it_never_heard_of(make_lab: MakeLab) -> None:
    """A generation is cut off from etcd, its leader with it: it goes on. Of two that wait elsewhere one takes over,
    and dies before it has heard of anybody. The other must not believe that the generation is dead as well."""
    lab = make_lab(7)
    run = EtcdRun(lab, "1:2", SHORT)
    members = run.start_in_order(lab[0], lab[1])
    whole = run.until_at_work(2)
    spares = run.start(lab[2], lab[3])
    for agent in spares:
        run.until_said(agent, "this node is a spare")
    lab.partition(lab.hosts[:2], lab.hosts[2:])
    first = run.until_one_takes_over(spares)
    first.send(signal.SIGKILL)
    (other,) = [agent for agent in spares if agent is not first]
    run.until_said(other, TAKES_OVER)
    run.until_it_worked_for(whole, 5.0)  # longer than it would wait for those of a dead leader
    lab.heal()
    run.until_all_are_with_the_new_one()
    run.until_it_worked_for(whole, 0.5)
    run.finish(*members, other)
