"""Nodes that are killed or drained, one or all of them: what the others do. No restart is charged."""

from __future__ import annotations

import signal

import pytest

from kit.cluster import Cluster, same_report
from kit.processes import gone
from tenax._core.link import wire

SIGTERMED = 128 + signal.SIGTERM


@pytest.mark.parametrize("who", ["the serving agent", "another agent"])
def test_the_others_continue_without_a_killed_agent(cluster: Cluster, who: str) -> None:
    """Its workers are gone within a second, and no restart is charged."""
    agents = cluster.start_in_order(3, nodes=(2, 3), workers=2)
    first = cluster.hub.generation(6)
    victim = agents[0] if who == "the serving agent" else agents[1]
    survivors = [agent for agent in agents if agent is not victim]
    cluster.kill(victim)
    second = cluster.hub.generation(4, number=2)
    assert {worker.agent for worker in second} == {agent.name for agent in survivors}
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
    assert gone([worker.pid for worker in first], 1.0)
    cluster.finish(second, *survivors)
    assert {agent.report["restarts_used"] for agent in survivors} == {0}
    assert victim.wait() == -signal.SIGKILL


def test_several_agents_killed_together_are_detected_at_once(cluster: Cluster) -> None:
    """Long before a lease expires, although messages about the first death are sent to agents that are dead too."""
    conf = {"keep_alive_interval": 30, "keep_alive_max_attempt": 10}
    agents = cluster.start_in_order(4, nodes=(1, 4), conf=conf)
    cluster.hub.generation(4)
    for victim in agents[1:]:
        cluster.kill(victim)
    last: list[int] = []
    while not last or last[-1] > 1:
        last.append(int(cluster.hub.next().env["WORLD_SIZE"]))
    cluster.finish(cluster.hub.workers[-1:], agents[0])


def test_no_worker_of_an_old_generation_is_alive_when_the_next_starts(cluster: Cluster) -> None:
    """Also if the workers of all agents ignore SIGTERM."""
    agents = cluster.start_in_order(3, nodes=(2, 3), grace_s=1)
    first = cluster.hub.generation(3)
    for worker in first:
        assert worker.ask("ignore") == "ignoring"
    cluster.kill(agents[1])
    second = cluster.hub.generation(2, number=2)
    assert gone([worker.pid for worker in first], 0.0)
    cluster.finish(second, agents[0], agents[2])


def test_an_agent_that_gets_sigterm_drains_and_the_others_continue(cluster: Cluster) -> None:
    agents = cluster.start_in_order(3, nodes=(2, 3))
    first = cluster.hub.generation(3)
    agents[1].send(signal.SIGTERM)
    assert agents[1].wait() == SIGTERMED
    second = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
    assert "was drained" in second[0].env["TENAX_GENERATION_REASON"]
    assert gone([worker.pid for worker in first], 0.0)
    cluster.finish(second, agents[0], agents[2])
    assert agents[0].report["drains"] == 1


def test_the_others_keep_working_until_a_draining_nodes_workers_have_exited(cluster: Cluster) -> None:
    """So all can save a checkpoint together; every worker of every node gets the notice."""
    agents = cluster.start_in_order(2, nodes=(1, 2), workers=2)
    workers = cluster.hub.generation(4)
    leaving = cluster.workers_of(agents[1], workers)
    staying = cluster.workers_of(agents[0], workers)
    for worker in leaving:
        assert worker.ask("report") == "will report"
    agents[1].send(signal.SIGTERM)
    for worker in leaving:
        assert worker.receive() == "got SIGTERM"
        assert worker.ask("notice")["is_this_host"]
    for worker in staying:
        notice = worker.ask("notice")
        assert not notice["is_this_host"]
        assert notice["why"] == "its agent received SIGTERM"
        assert 0 < notice["left"] <= 30
        assert worker.ask("generation") == 1, "it is still working"
    for worker in leaving:
        worker.send("exit 0")
    assert agents[1].wait() == SIGTERMED
    second = cluster.hub.generation(2, number=2)
    cluster.finish(second, agents[0])


def test_the_serving_agent_stays_until_the_others_are_done(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.hub.generation(2)
    agents[0].send(signal.SIGTERM)
    second = cluster.hub.generation(1, number=2)
    assert second[0].agent == agents[1].name
    agents[0].until_printed("it stays until the other nodes are done; another signal (Ctrl-C) ends it at once")
    second[0].send("exit 5")
    third = cluster.hub.generation(1, number=3)
    assert third[0].env["TORCHELASTIC_RESTART_COUNT"] == "1", "its coordinator still counts restarts"
    assert agents[0].is_running
    cluster.finish(third, agents[1])
    assert agents[0].wait() == SIGTERMED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_serving_agent_and_another_takes_over(
    cluster: Cluster, number: signal.Signals
) -> None:
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.hub.generation(2)
    agents[0].send(signal.SIGTERM)
    second = cluster.hub.generation(1, number=2)
    agents[0].until_printed("it stays until the other nodes are done")
    agents[0].send(number)
    assert agents[0].wait() == SIGTERMED
    agents[1].until_printed("this node takes over the coordinator")
    assert second[0].ask("generation") == 2, "its worker was not restarted"
    cluster.finish(second, agents[1])


def test_the_serving_agent_exits_when_the_last_other_node_leaves(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.hub.generation(2)
    agents[0].send(signal.SIGTERM)
    cluster.hub.generation(1, number=2)
    agents[0].until_printed("it stays until the other nodes are done")
    agents[1].send(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [SIGTERMED] * 2


def test_sigterm_to_all_agents_ends_the_run(cluster: Cluster) -> None:
    """As a scheduler stops a whole job."""
    agents = cluster.start(3, nodes=(1, 3), workers=2)
    workers = cluster.hub.generation(6)
    for agent in agents:
        agent.send(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [SIGTERMED] * 3
    assert gone([worker.pid for worker in workers], 0.0)


def test_no_process_is_left_when_all_agents_are_killed(cluster: Cluster) -> None:
    agents = cluster.start(3, nodes=(1, 3), workers=2)
    workers = cluster.hub.generation(6)
    for agent in agents:
        cluster.kill(agent)
    assert [agent.wait() for agent in agents] == [-signal.SIGKILL] * 3
    assert gone([worker.pid for worker in workers], 1.0)


def test_a_run_of_fixed_size_waits_for_a_replacement_and_names_the_lost_node(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2, nodes=(2, 2))
    first = cluster.hub.generation(2)
    lost_rank = cluster.workers_of(agents[1], first)[0].rank
    cluster.kill(agents[1])
    agents[0].until_printed("s for 1 more; lost: ")
    (replacement,) = cluster.start(nodes=(2, 2))
    second = cluster.hub.generation(2, number=2)
    assert cluster.workers_of(replacement, second)[0].rank == lost_rank, "it gets the lost rank"
    cluster.finish(second, agents[0], replacement)


def test_an_operators_cancel_ends_every_node_with_the_same_verdict(cluster: Cluster) -> None:
    agents = cluster.start(2)
    workers = cluster.hub.generation(2)
    cluster.operate(wire.Cancel("the budget of the project is spent"))
    report = same_report(agents, 130)
    assert (report["outcome"], report["why"]) == ("cancelled", "the budget of the project is spent")
    assert gone([worker.pid for worker in workers], 0.0)


def test_workers_get_their_full_grace_period_when_the_run_is_over(cluster: Cluster) -> None:
    """Although the serving agent, and the lease with it, is gone by then."""
    agents = cluster.start_in_order(2, conf={"keep_alive_interval": 0.5, "keep_alive_max_attempt": 4})
    workers = cluster.hub.generation(2)
    (slow,) = cluster.workers_of(agents[1], workers)
    assert slow.ask("report") == "will report"
    cluster.operate(wire.Cancel("enough"))
    assert slow.receive() == "got SIGTERM"
    assert agents[0].wait(60) == 130
    assert not slow.is_active_within(2.5), "longer than the lease: it is not killed"
    assert slow.ask("generation") == 1, "it is alive and can still save its work"
    slow.send("exit 0")
    assert agents[1].wait() == 130
