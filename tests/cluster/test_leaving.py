"""Nodes that leave: killed, asked to, or all of them; what the others do, and what the run is charged: nothing."""

from __future__ import annotations

import signal

import pytest

from kit.cluster import Cluster, told_alike
from kit.processes import gone
from tenax._engines.tcp import wire

SIGTERMED = 128 + signal.SIGTERM


@pytest.mark.parametrize("who", ["the one that serves", "another one"])
def test_the_others_go_on_without_an_agent_that_was_killed(cluster: Cluster, who: str) -> None:
    """Its workers are gone within a second, and nobody is charged."""
    agents = cluster.start_in_order(3, nodes=(2, 3), workers=2)
    first = cluster.desk.generation(6)
    victim = agents[0] if who == "the one that serves" else agents[1]
    survivors = [agent for agent in agents if agent is not victim]
    cluster.kill(victim)
    second = cluster.desk.generation(4, number=2)
    assert {worker.agent for worker in second} == {agent.name for agent in survivors}
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
    assert gone([worker.pid for worker in first], 1.0)
    cluster.finish(second, *survivors)
    assert {agent.report["restarts_used"] for agent in survivors} == {0}
    assert victim.wait() == -signal.SIGKILL


def test_several_that_are_killed_at_once_are_noticed_at_once(cluster: Cluster) -> None:
    """Long before any lease is over: what the others are told of the first death, nobody reads at the second."""
    conf = {"keep_alive_interval": 30, "keep_alive_max_attempt": 10}
    agents = cluster.start_in_order(4, nodes=(1, 4), conf=conf)
    cluster.desk.generation(4)
    for victim in agents[1:]:
        cluster.kill(victim)
    last: list[int] = []
    while not last or last[-1] > 1:
        last.append(int(cluster.desk.next().env["WORLD_SIZE"]))
    cluster.finish(cluster.desk.workers[-1:], agents[0])


def test_no_worker_of_an_old_generation_lives_when_the_next_begins(cluster: Cluster) -> None:
    """Also when the survivors' workers are deaf and the dead agent's were."""
    agents = cluster.start_in_order(3, nodes=(2, 3), grace_s=1)
    first = cluster.desk.generation(3)
    for worker in first:
        assert worker.ask("ignore") == "deaf"
    cluster.kill(agents[1])
    second = cluster.desk.generation(2, number=2)
    assert gone([worker.pid for worker in first], 0.0)
    cluster.finish(second, agents[0], agents[2])


def test_an_agent_that_is_asked_to_leave_drains_and_the_others_go_on(cluster: Cluster) -> None:
    agents = cluster.start_in_order(3, nodes=(2, 3))
    first = cluster.desk.generation(3)
    agents[1].send(signal.SIGTERM)
    assert agents[1].wait() == SIGTERMED
    second = cluster.desk.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
    assert "was drained" in second[0].env["TENAX_GENERATION_REASON"]
    assert gone([worker.pid for worker in first], 0.0)
    cluster.finish(second, agents[0], agents[2])
    assert agents[0].report["drains"] == 1


def test_the_others_work_on_until_a_leaving_nodes_workers_have_ended(cluster: Cluster) -> None:
    """All may want to save their work together; every worker of every node sees the notice."""
    agents = cluster.start_in_order(2, nodes=(1, 2), workers=2)
    workers = cluster.desk.generation(4)
    leaving = cluster.workers_of(agents[1], workers)
    staying = cluster.workers_of(agents[0], workers)
    for worker in leaving:
        assert worker.ask("tell") == "will tell"
    agents[1].send(signal.SIGTERM)
    for worker in leaving:
        assert worker.hear() == "got SIGTERM"
        assert worker.ask("notice")["is_this_host"]
    for worker in staying:
        notice = worker.ask("notice")
        assert not notice["is_this_host"]
        assert notice["why"] == "its agent received SIGTERM"
        assert 0 < notice["left"] <= 30
        assert worker.ask("generation") == 1, "it is still at work"
    for worker in leaving:
        worker.tell("exit 0")
    assert agents[1].wait() == SIGTERMED
    second = cluster.desk.generation(2, number=2)
    cluster.finish(second, agents[0])


def test_the_one_that_serves_stays_until_the_others_are_done(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.desk.generation(2)
    agents[0].send(signal.SIGTERM)
    second = cluster.desk.generation(1, number=2)
    assert second[0].agent == agents[1].name
    agents[0].until_said("it stays until the other nodes are done; another signal (Ctrl-C) ends it at once")
    second[0].tell("exit 5")
    third = cluster.desk.generation(1, number=3)
    assert third[0].env["TORCHELASTIC_RESTART_COUNT"] == "1", "it still keeps the ledger"
    assert agents[0].is_running
    cluster.finish(third, agents[1])
    assert agents[0].wait() == SIGTERMED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_one_that_serves_and_the_other_takes_its_place(
    cluster: Cluster, number: signal.Signals
) -> None:
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.desk.generation(2)
    agents[0].send(signal.SIGTERM)
    second = cluster.desk.generation(1, number=2)
    agents[0].until_said("it stays until the other nodes are done")
    agents[0].send(number)
    assert agents[0].wait() == SIGTERMED
    agents[1].until_said("this node takes over the coordinator")
    assert second[0].ask("generation") == 2, "its worker was not touched"
    cluster.finish(second, agents[1])


def test_the_last_one_leaves_too(cluster: Cluster) -> None:
    """Who served stays for the other; when that one leaves as well, both are gone."""
    agents = cluster.start_in_order(2, nodes=(1, 2))
    cluster.desk.generation(2)
    agents[0].send(signal.SIGTERM)
    cluster.desk.generation(1, number=2)
    agents[0].until_said("it stays until the other nodes are done")
    agents[1].send(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [SIGTERMED] * 2


def test_all_are_asked_at_once_and_all_leave(cluster: Cluster) -> None:
    """As a scheduler does with a whole job."""
    agents = cluster.start(3, nodes=(1, 3), workers=2)
    workers = cluster.desk.generation(6)
    for agent in agents:
        agent.send(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [SIGTERMED] * 3
    assert gone([worker.pid for worker in workers], 0.0)


def test_all_are_killed_at_once_and_nothing_is_left(cluster: Cluster) -> None:
    agents = cluster.start(3, nodes=(1, 3), workers=2)
    workers = cluster.desk.generation(6)
    for agent in agents:
        cluster.kill(agent)
    assert [agent.wait() for agent in agents] == [-signal.SIGKILL] * 3
    assert gone([worker.pid for worker in workers], 1.0)


def test_a_fixed_size_run_waits_for_a_replacement_and_says_whom_it_misses(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2, nodes=(2, 2))
    first = cluster.desk.generation(2)
    lost_rank = cluster.workers_of(agents[1], first)[0].rank
    cluster.kill(agents[1])
    agents[0].until_said("s for 1 more; lost: ")
    (replacement,) = cluster.start(nodes=(2, 2))
    second = cluster.desk.generation(2, number=2)
    assert cluster.workers_of(replacement, second)[0].rank == lost_rank, "it fills the hole"
    cluster.finish(second, agents[0], replacement)


def test_an_operators_cancel_ends_every_node_with_the_same_verdict(cluster: Cluster) -> None:
    agents = cluster.start(2)
    workers = cluster.desk.generation(2)
    cluster.operate(wire.Cancel("the budget of the project is spent"))
    report = told_alike(agents, 130)
    assert (report["outcome"], report["why"]) == ("cancelled", "the budget of the project is spent")
    assert gone([worker.pid for worker in workers], 0.0)


def test_workers_have_their_whole_grace_when_the_run_is_over(cluster: Cluster) -> None:
    """Although whoever served is gone by then, and its lease with it."""
    agents = cluster.start_in_order(2, conf={"keep_alive_interval": 0.5, "keep_alive_max_attempt": 4})
    workers = cluster.desk.generation(2)
    (slow,) = cluster.workers_of(agents[1], workers)
    assert slow.ask("tell") == "will tell"
    cluster.operate(wire.Cancel("enough"))
    assert slow.hear() == "got SIGTERM"
    assert agents[0].wait(60) == 130
    assert not slow.is_heard_within(2.5), "longer than the lease: nobody ends it"
    assert slow.ask("generation") == 1, "it lives, and can still save its work"
    slow.tell("exit 0")
    assert agents[1].wait() == 130
