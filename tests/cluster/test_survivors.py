"""Workers that opt in are held when their generation ends, and continue in the next one in the same process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from kit.cluster import Agent, Cluster, Worker
from kit.jobs import is_alive, until

SCRIPT = str(Path(__file__).with_name("survivor_worker_main.py"))


def held(workers: Sequence[Worker]) -> None:
    """Wait until these workers have acknowledged the end of their generation."""
    assert [worker.receive() for worker in workers] == ["held"] * len(workers)


def pids(workers: Sequence[Worker]) -> list[int]:
    return [worker.pid for worker in workers]


def kill(worker: Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def held_without_the_other_node(cluster: Cluster, workers: int, **env: str) -> tuple[Agent, list[Worker]]:
    """Return the agent of a node whose workers are held, because the other node was lost and two are required."""
    first, second = cluster.start_in_order(2, workers=workers, script=SCRIPT, env=env)
    group = cluster.hub.generation(2 * workers)
    cluster.kill(second)
    second.wait()
    kept = cluster.workers_of(first, group)
    held(kept)
    first.until_printed("1 of 2 nodes ready")
    return first, kept


def test_one_of_three_is_killed_and_the_others_continue_in_the_same_process(cluster: Cluster) -> None:
    (agent,) = cluster.start(nodes=(1, 1), workers=3, script=SCRIPT)
    first = cluster.hub.generation(3)
    kept, lost = first[0].ask("child"), first[1].ask("child")
    kill(first[1])
    held([first[0], first[2]])
    second = cluster.hub.generation(3, number=2)
    assert [second[0].pid, second[2].pid] == [first[0].pid, first[2].pid]
    assert second[1].pid != first[1].pid
    assert [worker.rank for worker in second] == [0, 1, 2]
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    assert {worker.env["MASTER_PORT"] for worker in second} != {first[0].env["MASTER_PORT"]}
    assert is_alive(kept), "what a survivor started stays"
    assert not is_alive(lost), "what the dead worker left behind was ended"
    cluster.finish(second, agent)
    assert "2 workers continue, starting 1 worker, ranks 0 to 2 of 3" in agent.text
    until(lambda: not is_alive(kept), "the end of the survivor's child")


def test_a_worker_survives_several_failures(cluster: Cluster) -> None:
    (agent,) = cluster.start(nodes=(1, 1), workers=2, script=SCRIPT)
    group = cluster.hub.generation(2)
    survivor = group[0].pid
    for number in (2, 3, 4):
        kill(group[1])
        group = cluster.hub.generation(2, number=number)
        assert group[0].pid == survivor
    cluster.finish(group, agent)


def test_a_deaf_worker_is_stopped_alone_and_replaced(cluster: Cluster) -> None:
    (agent,) = cluster.start(nodes=(1, 1), workers=3, script=SCRIPT, env={"HOLD_TIMEOUT": "0.2"}, grace_s=0.2)
    first = cluster.hub.generation(3)
    assert first[2].ask("deaf") == "deaf"
    assert first[2].ask("ignore") == "ignoring"
    kill(first[0])
    second = cluster.hub.generation(3, number=2)
    assert second[1].pid == first[1].pid
    assert not set(pids(second)) & {first[0].pid, first[2].pid}
    cluster.finish(second, agent)
    assert "stopping rank 2: it did not acknowledge the end of its generation within 0.2 s (SIGTERM)" in agent.text


def test_a_worker_that_sends_garbage_cannot_be_held(cluster: Cluster) -> None:
    (agent,) = cluster.start(nodes=(1, 1), workers=3, script=SCRIPT)
    first = cluster.hub.generation(3)
    assert first[2].ask("garbage") == "sent"
    kill(first[0])
    second = cluster.hub.generation(3, number=2)
    assert second[1].pid == first[1].pid
    assert second[2].pid != first[2].pid
    cluster.finish(second, agent)


def test_workers_of_two_nodes_survive(cluster: Cluster) -> None:
    agents = cluster.start(2, workers=2, script=SCRIPT)
    first = cluster.hub.generation(4)
    kill(first[3])
    second = cluster.hub.generation(4, number=2)
    assert pids(second)[:3] == pids(first)[:3]
    assert second[3].pid != first[3].pid
    cluster.finish(second, *agents)


def test_workers_survive_the_loss_of_another_node(cluster: Cluster) -> None:
    """They are held until a new node has joined."""
    first, kept = held_without_the_other_node(cluster, 2)
    (third,) = cluster.start(workers=2, script=SCRIPT)
    second = cluster.hub.generation(4, number=2)
    assert pids(second)[:2] == pids(kept)
    cluster.finish(second, first, third)


def test_a_held_worker_that_dies_is_replaced(cluster: Cluster) -> None:
    first, kept = held_without_the_other_node(cluster, 2)
    kill(kept[0])
    (third,) = cluster.start(workers=2, script=SCRIPT)
    second = cluster.hub.generation(4, number=2)
    assert second[0].pid != kept[0].pid
    assert second[1].pid == kept[1].pid
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}, "it is no failure"
    cluster.finish(second, first, third)


def test_no_held_worker_outlives_a_killed_agent(cluster: Cluster) -> None:
    first, kept = held_without_the_other_node(cluster, 2)
    cluster.kill(first)
    first.wait()
    until(lambda: not any(map(is_alive, pids(kept))), "the end of every worker", timeout_s=1)


def test_an_interrupt_stops_held_workers(cluster: Cluster) -> None:
    first, kept = held_without_the_other_node(cluster, 2)
    first.send(signal.SIGINT)
    assert first.wait() == 130
    assert not any(map(is_alive, pids(kept)))


def test_a_held_worker_that_handles_sigterm_exits_when_it_is_stopped(cluster: Cluster) -> None:
    """Its handler returns into the wait for the next generation, so the channel is closed too."""
    (agent,) = cluster.start(nodes=(1, 1), workers=2, script=SCRIPT, max_restarts=0, grace_s=600)
    group = cluster.hub.generation(2)
    assert group[0].ask("ignore") == "ignoring"
    kill(group[1])
    held(group[:1])
    assert agent.wait() == 137, "that of the worker that was killed, within the grace period"
    assert not is_alive(group[0].pid)
