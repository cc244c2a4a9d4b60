"""Nodes that join: in time, late, as spares, with other sizes and roles, with the wrong secret, or not at all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from kit.cluster import Cluster, same_report


def test_a_new_node_joins_at_once_without_a_charged_restart(cluster: Cluster) -> None:
    options = {"nodes": (2, 3), "workers": 2, "conf": {"last_call_timeout": 0}}
    agents = cluster.start_in_order(2, **options)
    first = cluster.hub.generation(4)
    agents += cluster.start(**options)
    second = cluster.hub.generation(6, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"0"}
    assert "joined" in second[0].env["TENAX_GENERATION_REASON"]
    old = {worker.agent: worker.env["GROUP_RANK"] for worker in first}
    new = {worker.agent: worker.env["GROUP_RANK"] for worker in second}
    assert new == {**old, agents[2].name: "2"}, "members keep their ranks"
    cluster.finish(second, *agents)
    assert agents[0].report["membership_changes"] == 1


def test_with_scale_up_restart_a_new_node_waits_for_the_next_restart(cluster: Cluster) -> None:
    options = {"nodes": (2, 3), "conf": {"scale_up": "restart", "last_call_timeout": 0}}
    agents = cluster.start_in_order(2, **options)
    first = cluster.hub.generation(2)
    agents += cluster.start(**options)
    agents[2].until_printed("generation 1 is running; this node will join the next one")
    assert {worker.ask("generation") for worker in first} == {1}
    first[0].send("exit 5")
    second = cluster.hub.generation(3, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *agents)


def test_a_node_beyond_the_maximum_is_a_spare_and_replaces_a_lost_node(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2)
    first = cluster.hub.generation(2)
    agents += cluster.start()
    agents[2].until_printed("this node is a spare: the run has its maximum of 2 nodes")
    lost_rank = cluster.workers_of(agents[1], first)[0].rank
    cluster.kill(agents[1])
    second = cluster.hub.generation(2, number=2)
    assert cluster.workers_of(agents[2], second)[0].rank == lost_rank
    cluster.finish(second, agents[0], agents[2])


def test_a_spare_that_was_not_needed_succeeds_with_the_run(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2)
    workers = cluster.hub.generation(2)
    agents += cluster.start()
    agents[2].until_printed("this node is a spare")
    cluster.finish(workers, *agents)


def test_a_node_that_finishes_early_neither_ends_nor_delays_the_others(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2)
    workers = cluster.hub.generation(2)
    (early,) = cluster.workers_of(agents[0], workers)
    (late,) = cluster.workers_of(agents[1], workers)
    early.send("exit 0")
    agents[0].until_printed("all workers of this node succeeded; waiting for the other nodes")
    assert late.ask("generation") == 1
    assert agents[0].is_running
    late.send("exit 0")
    same_report(agents, 0)


def test_a_failure_after_an_early_finish_restarts_all_nodes(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2)
    workers = cluster.hub.generation(2)
    cluster.workers_of(agents[0], workers)[0].send("exit 0")
    agents[0].until_printed("all workers of this node succeeded")
    cluster.workers_of(agents[1], workers)[0].send("exit 5")
    second = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *agents)


def test_the_death_of_a_node_that_finished_early_is_not_a_loss(cluster: Cluster) -> None:
    agents = cluster.start_in_order(2)
    workers = cluster.hub.generation(2)
    (early,) = cluster.workers_of(agents[1], workers)
    (late,) = cluster.workers_of(agents[0], workers)
    early.send("exit 0")
    agents[1].until_printed("all workers of this node succeeded")
    cluster.kill(agents[1])
    agents[1].wait()
    assert late.ask("generation") == 1
    cluster.finish([late], agents[0])


def test_after_the_join_timeout_too_few_nodes_end_the_run_on_every_node_with_a_reason(cluster: Cluster) -> None:
    agents = cluster.start(2, nodes=(3, 3), conf={"join_timeout": 2})
    report = same_report(agents, 71)
    assert report["why"].startswith("only 2 of at least 3 nodes joined within 2 s")
    for agent in agents:
        assert "join_timeout=SECONDS" in agent.printed_report, agent


def test_a_node_without_a_reachable_coordinator_gives_up_with_a_message(cluster: Cluster) -> None:
    """At an address that no host has."""
    (agent,) = cluster.start(conf={"join_timeout": 1}, endpoint="192.0.2.1:29400")
    assert agent.wait() == 71
    assert "192.0.2.1:29400" in agent.printed_report


def test_uneven_nodes_and_roles_are_numbered_as_torchelastic_does(cluster: Cluster) -> None:
    """By sums over the nodes before, in the order of group ranks; role ranks within the role."""
    shapes = {"node0": ("trainer", 1), "node1": ("reader", 3), "node2": ("trainer", 2)}
    agents = [
        agent for role, count in shapes.values() for agent in cluster.start(nodes=(3, 3), role=role, workers=count)
    ]
    workers = cluster.hub.generation(6)
    in_order = sorted({(int(worker.env["GROUP_RANK"]), worker.agent) for worker in workers})
    assert [rank for rank, _ in in_order] == [0, 1, 2]
    expected = []
    first, in_role = 0, {"trainer": 0, "reader": 0}
    for group_rank, name in in_order:
        role, count = shapes[name]
        for local_rank in range(count):
            expected.append((first + local_rank, local_rank, group_rank, role, in_role[role] + local_rank))
        first += count
        in_role[role] += count
    found = [
        (
            worker.rank,
            int(worker.env["LOCAL_RANK"]),
            int(worker.env["GROUP_RANK"]),
            worker.env["ROLE_NAME"],
            int(worker.env["ROLE_RANK"]),
        )
        for worker in workers
    ]
    assert found == expected
    for worker in workers:
        role, count = shapes[worker.agent]
        assert worker.env["LOCAL_WORLD_SIZE"] == str(count)
        assert worker.env["ROLE_WORLD_SIZE"] == "3"
        assert (worker.env["WORLD_SIZE"], worker.env["GROUP_WORLD_SIZE"]) == ("6", "3")
    cluster.finish(workers, *agents)


def test_requested_node_ranks_are_assigned(cluster: Cluster) -> None:
    agents = [agent for rank in (2, 0, 1) for agent in cluster.start(nodes=(3, 3), conf={"rank": rank})]
    workers = cluster.hub.generation(3)
    assert [worker.agent for worker in workers] == [agents[1].name, agents[2].name, agents[0].name]
    cluster.finish(workers, *agents)


def test_a_secret_works_from_a_file_from_the_environment_and_from_an_option(cluster: Cluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a swordfish of tests\n")
    token.chmod(0o600)
    agents = [
        *cluster.start(nodes=(3, 3), conf={"token_file": str(token)}),
        *cluster.start(nodes=(3, 3), env={"TENAX_RDZV_TOKEN": "a swordfish of tests"}),
        *cluster.start(nodes=(3, 3), conf={"token": "a swordfish of tests"}),
    ]
    cluster.finish(cluster.hub.generation(3), *agents)
    assert not any("swordfish" in agent.text for agent in agents)


@pytest.mark.parametrize("secret", [{}, {"token": "a guess of 16 bytes"}], ids=["none", "another"])
def test_a_node_without_the_secret_is_rejected_and_the_run_is_not_affected(
    cluster: Cluster, secret: dict[str, str]
) -> None:
    agents = cluster.start_in_order(1, nodes=(1, 2), conf={"token": "a swordfish of tests", "last_call_timeout": 0})
    workers = cluster.hub.generation(1)
    (intruder,) = cluster.start(nodes=(1, 2), conf=secret)
    assert intruder.wait() == 71
    assert "rejected this node: it serves another run" in intruder.printed_report.replace("\n", " ")
    assert workers[0].ask("generation") == 1
    cluster.finish(workers, *agents)


def test_another_run_on_the_same_endpoint_is_rejected(cluster: Cluster) -> None:
    """The message contains the remedy, but not the id of the run that is there."""
    agents = cluster.start_in_order(1, nodes=(1, 2), conf={"last_call_timeout": 0})
    workers = cluster.hub.generation(1)
    (other,) = cluster.start(nodes=(1, 2), run_id="other")
    assert other.wait() == 71
    report = other.printed_report.replace("\n", " ")
    assert "rejected this node: it serves another run, has a secret, or belongs to another user" in report
    assert "'run'" not in report
    cluster.finish(workers, *agents)


def test_the_next_run_on_the_same_endpoint_starts_when_the_last_has_ended(cluster: Cluster) -> None:
    for run_id in ("first", "second"):
        agents = cluster.start(2, run_id=run_id)
        workers = cluster.hub.all(len(cluster.hub.workers) + 2)[-2:]
        assert {worker.env["TORCHELASTIC_RUN_ID"] for worker in workers} == {run_id}
        assert {worker.generation for worker in workers} == {1}
        cluster.finish(workers, *agents)


def test_a_waiting_node_leaves_at_once_on_sigterm(cluster: Cluster) -> None:
    (waiting,) = cluster.start(nodes=(2, 2))
    waiting.until_printed("for 1 more")
    waiting.send(signal.SIGTERM)
    assert waiting.wait() == 128 + signal.SIGTERM


def test_functions_return_their_values_under_global_ranks(cluster: Cluster) -> None:
    agents = cluster.start(2, workers=2, script="a function")
    assert [agent.wait() for agent in agents] == [0, 0], agents
    values = [json.loads(line) for agent in agents for line in agent.text.splitlines() if line.startswith("{")]
    together = {int(rank): tuple(value) for each in values for rank, value in each.items()}
    assert together == {rank: (rank, 4) for rank in range(4)}
