"""A run through a real etcd of three members, on a network with faults: etcd's, the agents', and of the way between.

Hosts node0 to node2 have the agents, the first of which leads; the members of etcd are on hosts of their own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

import pytest

from etcd_servers import needs_etcd
from watching import is_alive

from .cluster import Cluster
from .etcd_members import EtcdMembers
from .lab import Host, Lab, requires_netns
from .running import Running

pytestmark = [requires_netns, needs_etcd]

MakeLab = Callable[..., Lab]
SERVES = "this node serves the coordinator of the run"
TAKES_OVER = "this node takes over the coordinator of the run"
# Where nothing must happen: on a busy machine a pause lasts longer than the test meant.
PATIENT = {"keep_alive_max_attempt": 12}


class EtcdRun(Cluster):
    """Agents on the first hosts of a lab, etcd on its last three."""

    def __init__(self, lab: Lab, nnodes: str, conf: Mapping[str, object] | None = None) -> None:
        self.etcd = EtcdMembers(lab.hosts[-3:])
        super().__init__(
            lab,
            nnodes,
            endpoint=self.etcd.endpoints,
            options=("--rdzv-backend", "etcd"),
            conf={"last_call_timeout": 60, **(conf or {})},
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
    run = EtcdRun(lab, "3", PATIENT)
    run.start_in_order(*lab.hosts[:3])
    first = run.until_at_work(3)
    pids = first.pids
    dead = run.etcd.kill_leader()
    run.until_it_worked_for(first, 8.0)  # longer than the lease of the one that leads the run
    assert first.number == 1
    assert first.pids == pids
    assert all(is_alive(pid) for pid in pids)
    run.etcd.start_all()
    (lab.shared / "fail-1").touch()
    assert run.etcd.kill_leader() != dead or dead >= 0
    second = run.until_at_work(3, after=first)
    assert second.restart_count == 1
    run.finish()
    assert run.history.latest() is second


# --- agents and their hosts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1], ids=["the one that leads", "another"])
def test_an_agent_is_killed(make_lab: MakeLab, victim: int) -> None:
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3")
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
    run = EtcdRun(lab, "2:3")
    agents = run.start_in_order(*lab.hosts[:3])
    whole = run.until_at_work(3)
    lab[0].cut()
    fewer = run.until_at_work(2, after=whole)
    assert set(fewer.hosts) == {"node1", "node2"}
    assert not any(is_alive(pid) for pid in whole.pids)
    lab[0].heal()
    again = run.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    leaders = [written.by.host for written in run.etcd.records(run.run_id)]
    assert "node0" not in leaders[leaders.index(run.until_one_takes_over(agents[1:]).name.partition(".")[0]) :]
    run.finish()


def test_the_one_that_leads_is_cut_off_from_etcd_only(make_lab: MakeLab) -> None:
    """It cannot learn who leads now, and so its node is lost to the others, who go on without it."""
    lab = make_lab(6)
    run = EtcdRun(lab, "2:3")
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
    run.until_said(agents[0], "this node serves the coordinator no longer")
    run.until_it_worked_for(whole, 10.0)
    (lab.shared / "fail-0").touch()
    again = run.until_at_work(3, after=whole)
    assert again.restart_count == 1
    run.finish()


def test_the_death_of_a_successor_says_nothing_about_those_it_never_heard_of(make_lab: MakeLab) -> None:
    """A generation is cut off from etcd, its leader with it: it goes on. Of two that wait elsewhere one takes over,
    and dies before it has heard of anybody. The other must not believe that the generation is dead as well."""
    lab = make_lab(7)
    run = EtcdRun(lab, "1:2", {"last_call_timeout": 60})
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
    run.until_it_worked_for(whole, 10.0)
    lab.heal()
    run.until_it_worked_for(whole, 5.0)
    run.finish(*members, other)
