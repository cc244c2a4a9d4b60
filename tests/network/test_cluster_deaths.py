"""Hosts lose their power, agents are killed or stopped: the run goes on, with one group at a time."""

from __future__ import annotations

import signal

from kit.processes import is_alive

from .cluster import LEASE_S, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns

# A longer lease than usual, where nothing must happen: on a busy machine a pause lasts longer than the test meant.
PATIENT = {"keep_alive_max_attempt": 30}


def test_a_host_that_lost_its_power_is_missed_and_taken_back(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[1].power_off()
    fewer = cluster.until_at_work(2, after=whole)
    assert fewer.hosts == ["node0", "node2"]
    lab[1].power_on()
    agents[1] = cluster.start(lab[1])[0]
    again = cluster.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_the_job_resumes_by_itself_when_the_endpoints_host_is_back(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[0].power_off()
    for agent in agents[1:]:
        cluster.until_said(agent, "killing all remaining processes: ")
    lab[0].power_on()
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_the_endpoints_host_may_be_back_before_anybody_missed_it(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[0].power_off()
    lab[0].power_on()
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_workers_of_other_nodes_live_on_while_the_serving_agent_is_away(lab: Lab) -> None:
    """Nobody can form a generation meanwhile, so there is no reason to end them before there is a coordinator again."""
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGKILL)
    agents[0].wait()
    for agent in agents[1:]:
        cluster.until_said(agent, "was lost: its connection was closed; workers go on, and this node looks for it")
    others = whole.pids - whole.pids_on("node0")
    cluster.until_it_worked_for(whole, 1.0, pids=others)
    assert all(is_alive(pid) for pid in others)
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_an_agent_that_is_killed_takes_its_workers_along_before_the_others_start_again(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", nproc=2)
    agents = cluster.start(lab[0], lab[1])
    agents += cluster.start(lab[2], env={"GOODBYE_S": "20"})
    whole = cluster.until_at_work(6)
    agents[2].send(signal.SIGKILL)
    fewer = cluster.until_at_work(4, after=whole)
    assert set(fewer.hosts) == {"node0", "node1"}
    agents[2] = cluster.start(lab[2])[0]
    cluster.until_at_work(6, after=fewer)
    cluster.finish(*agents)


def test_a_pause_of_an_agent_that_is_shorter_than_the_lease_alarms_nobody(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", conf=PATIENT)
    agents = cluster.start(*lab)
    generation = cluster.until_at_work(3)
    for agent in agents[:2]:  # the one that serves, and another
        agent.send(signal.SIGSTOP)
        cluster.until_it_worked_for(generation, 1.0)
        agent.send(signal.SIGCONT)
    cluster.until_it_worked_for(generation, 1.0)
    cluster.finish()


def test_the_workers_of_an_agent_that_is_stopped_for_long_end_before_the_others_start_without_it(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", nproc=2)
    agents = [cluster.start(host, env=env)[0] for host, env in zip(lab, ({}, {"GOODBYE_S": "20"}, {}), strict=True)]
    whole = cluster.until_at_work(6)
    agents[1].send(signal.SIGSTOP)
    fewer = cluster.until_at_work(4, after=whole)
    assert not any(is_alive(pid) for pid in whole.pids)
    cluster.until_it_worked_for(fewer, 1.0)
    agents[1].send(signal.SIGCONT)
    again = cluster.until_at_work(6, after=fewer)
    assert again.restart_count == 0
    cluster.finish()


def test_who_died_while_the_serving_agent_was_stopped_is_missed_as_soon_as_it_goes_on(lab: Lab) -> None:
    """Not a lease later: that would be longer than this test waits."""
    cluster = Cluster(lab, "2:3", conf={"keep_alive_max_attempt": 300})
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGSTOP)
    cluster.until_it_worked_for(whole, 1.0)
    agents[2].send(signal.SIGKILL)
    agents[2].wait()
    cluster.until_it_worked_for(whole, 0.5, pids=whole.pids - whole.pids_on("node2"))
    agents[0].send(signal.SIGCONT)
    fewer = cluster.until_at_work(2, after=whole)
    assert set(fewer.hosts) == {"node0", "node1"}
    cluster.finish(*agents[:2])


def test_nobody_goes_on_without_a_serving_agent_that_is_stopped_for_long(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGSTOP)
    cluster.until_it_worked_for(whole, LEASE_S + 1.0)
    agents[0].send(signal.SIGCONT)
    cluster.until_it_worked_for(whole, 1.0)
    cluster.finish()


def test_generations_and_budget_are_counted_on_after_the_death_of_all_agents(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    first = cluster.until_at_work(3)
    (lab.shared / "fail-1").touch()
    second = cluster.until_at_work(3, after=first)
    assert second.restart_count == 1
    for agent in agents:
        agent.send(signal.SIGKILL)
    agents = cluster.start(*lab)
    third = cluster.until_at_work(3, after=second)
    assert third.restart_count == 1
    cluster.finish(*agents)
