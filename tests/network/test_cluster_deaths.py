"""Power failures, killed and stopped agents: the run continues, with one group of workers at a time."""

from __future__ import annotations

import signal

from kit.processes import is_alive

from .cluster import LEASE_S, Cluster
from .lab import Lab, requires_netns

pytestmark = requires_netns

# A longer lease where nothing must happen: on a busy machine a pause lasts longer than intended.
LONG_LEASE = {"keep_alive_max_attempt": 30}


def test_a_host_without_power_is_lost_and_accepted_again(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[1].power_off()
    fewer = cluster.until_at_work(2, after=whole)
    assert sorted(fewer.hosts) == ["node0", "node2"]
    lab[1].power_on()
    agents[1] = cluster.start(lab[1])[0]
    again = cluster.until_at_work(3, after=fewer)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_the_run_resumes_when_the_endpoints_host_is_back(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[0].power_off()
    for agent in agents[1:]:
        cluster.until_printed(agent, "killing all remaining processes: ")
    lab[0].power_on()
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_the_endpoints_host_may_reboot_before_it_is_lost(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    lab[0].power_off()
    lab[0].power_on()
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_workers_of_other_nodes_keep_running_without_the_serving_agent(lab: Lab) -> None:
    """No other generation can form meanwhile, so they are not stopped until there is a coordinator again."""
    cluster = Cluster(lab, 3)
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGKILL)
    agents[0].wait()
    for agent in agents[1:]:
        cluster.until_printed(agent, ": connection closed; workers keep running while this node reconnects")
    others = whole.pids - whole.pids_on("node0")
    cluster.until_worked_for(whole, 1.0, pids=others)
    assert all(is_alive(pid) for pid in others)
    agents[0] = cluster.start(lab[0])[0]
    again = cluster.until_at_work(3, after=whole)
    assert again.restart_count == 0
    cluster.finish(*agents)


def test_workers_of_a_killed_agent_end_before_the_others_restart(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", nproc=2)
    agents = cluster.start(lab[0], lab[1])
    agents += cluster.start(lab[2], env={"STOP_DELAY_S": "20"})
    whole = cluster.until_at_work(6)
    agents[2].send(signal.SIGKILL)
    fewer = cluster.until_at_work(4, after=whole)
    assert set(fewer.hosts) == {"node0", "node1"}
    agents[2] = cluster.start(lab[2])[0]
    cluster.until_at_work(6, after=fewer)
    cluster.finish(*agents)


def test_a_pause_of_an_agent_shorter_than_the_lease_has_no_effect(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", conf=LONG_LEASE)
    agents = cluster.start(*lab)
    generation = cluster.until_at_work(3)
    for agent in agents[:2]:  # the serving one, and another
        agent.send(signal.SIGSTOP)
        cluster.until_worked_for(generation, 1.0)
        agent.send(signal.SIGCONT)
    cluster.until_worked_for(generation, 1.0)
    cluster.finish()


def test_workers_of_a_stopped_agent_end_before_the_others_restart(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", nproc=2)
    agents = [cluster.start(host, env=env)[0] for host, env in zip(lab, ({}, {"STOP_DELAY_S": "20"}, {}), strict=True)]
    whole = cluster.until_at_work(6)
    agents[1].send(signal.SIGSTOP)
    fewer = cluster.until_at_work(4, after=whole)
    assert not any(is_alive(pid) for pid in whole.pids)
    cluster.until_worked_for(fewer, 1.0)
    agents[1].send(signal.SIGCONT)
    again = cluster.until_at_work(6, after=fewer)
    assert again.restart_count == 0
    cluster.finish()


def test_a_death_while_the_serving_agent_is_stopped_is_detected_when_it_continues(lab: Lab) -> None:
    """At once, not after a lease, which is longer than this test waits."""
    cluster = Cluster(lab, "2:3", conf={"keep_alive_max_attempt": 300})
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGSTOP)
    cluster.until_worked_for(whole, 1.0)
    agents[2].send(signal.SIGKILL)
    agents[2].wait()
    cluster.until_worked_for(whole, 0.5, pids=whole.pids - whole.pids_on("node2"))
    agents[0].send(signal.SIGCONT)
    fewer = cluster.until_at_work(2, after=whole)
    assert set(fewer.hosts) == {"node0", "node1"}
    cluster.finish(*agents[:2])


def test_a_long_stop_of_the_serving_agent_has_no_effect(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    agents = cluster.start(*lab)
    whole = cluster.until_at_work(3)
    agents[0].send(signal.SIGSTOP)
    cluster.until_worked_for(whole, LEASE_S + 1.0)
    agents[0].send(signal.SIGCONT)
    cluster.until_worked_for(whole, 1.0)
    cluster.finish()


def test_generations_and_restarts_are_counted_across_the_death_of_all_agents(lab: Lab) -> None:
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
