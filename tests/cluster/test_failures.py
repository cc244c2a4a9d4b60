"""A worker fails on one of several nodes: one end of the generation, one charged restart, one report."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.cluster import Cluster, same_report


def test_one_failure_ends_the_generation_everywhere_and_is_charged_once(cluster: Cluster) -> None:
    agents = cluster.start(3, nodes=(3, 3), workers=2)
    first = cluster.hub.generation(6)
    first[3].send("exit 5")
    for worker in first:
        worker.until_gone()
    second = cluster.hub.generation(6, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    assert {worker.env["TENAX_GENERATION_REASON"] for worker in second} == {"restart 1 of 3"}
    assert len({(worker.env["MASTER_ADDR"], worker.env["MASTER_PORT"]) for worker in second}) == 1
    assert second[0].env["MASTER_PORT"] != first[0].env["MASTER_PORT"], "no key of the old store can be read"
    old, new = ({worker.agent: worker.env["GROUP_RANK"] for worker in group} for group in (first, second))
    assert old == new, "nodes keep their ranks"
    cluster.finish(second, *agents)


def test_simultaneous_failures_on_two_nodes_cause_one_restart(cluster: Cluster) -> None:
    agents = cluster.start(2, max_restarts=1)
    first = cluster.hub.generation(2)
    for worker in first:
        worker.send("exit 5")
    second = cluster.hub.generation(2, number=2)
    assert {worker.env["TORCHELASTIC_RESTART_COUNT"] for worker in second} == {"1"}
    cluster.finish(second, *agents)


def test_the_restart_budget_belongs_to_the_run_and_not_to_each_node(cluster: Cluster) -> None:
    """With one restart, a failure on one node and then one on the other end the run for both."""
    agents = cluster.start(2, max_restarts=1)
    first = cluster.hub.generation(2)
    first[0].send("exit 5")
    second = cluster.hub.generation(2, number=2)
    second[1].send("exit 6")
    report = same_report(agents, 6)
    assert report["outcome"] == "failed"
    assert report["restarts_used"] == 1
    assert (report["first_cause"]["rank"], report["other_failures"]) == (1, [])
    assert len(report["history"]) == 1
    for agent in agents:
        assert "rank 1" in agent.printed_report, agent
        assert "the only restart is used" in agent.printed_report.replace("\n", " "), agent


def test_the_report_is_the_same_on_every_node_and_names_the_first_cause(cluster: Cluster) -> None:
    agents = cluster.start(3, nodes=(3, 3), max_restarts=0)
    workers = cluster.hub.generation(3)
    workers[1].send("raise")
    report = same_report(agents, 1)
    cause = report["first_cause"]
    assert (cause["rank"], cause["pid"], cause["message"]) == (1, workers[1].pid, "RuntimeError: requested to fail")
    assert sorted(each["rank"] for each in report["stopped"]) == [0, 2]
    in_full = [agent for agent in agents if agent.printed_report]
    assert 1 <= len(in_full) <= 2  # the node of the first cause, and that of rank 0
    for agent in agents:
        assert "RuntimeError: requested to fail" in agent.text, agent
        assert agent.text.count("First cause") == (agent in in_full)
        assert ("; report on " in agent.text) == (agent not in in_full), agent


def test_a_syntax_error_is_not_restarted(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(:\n")
    agents = cluster.start(2, workers=2, script=str(broken))
    report = same_report(agents, 1)
    assert report["restarts_used"] == 0
    texts = [agent.text.replace("\n", " ") for agent in agents if agent.printed_report]
    assert texts
    assert all("SyntaxError at startup is an error in the program itself" in text for text in texts)


def test_a_fatal_exit_code_is_not_restarted(cluster: Cluster) -> None:
    agents = cluster.start(2, fatal_exit_codes=[3])
    first = cluster.hub.generation(2)
    first[0].send("exit 4")
    second = cluster.hub.generation(2, number=2)
    second[1].send("exit 3")
    report = same_report(agents, 3)
    assert report["restarts_used"] == 1
    for agent in agents:
        assert "exit code 3 is marked as fatal" in agent.printed_report.replace("\n", " "), agent


def test_a_worker_that_ignores_sigterm_only_delays_the_next_generation(cluster: Cluster) -> None:
    """No generation starts while a worker of the last one is alive on any node."""
    agents = cluster.start(2, grace_s=1)
    first = cluster.hub.generation(2)
    assert first[0].ask("ignore") == "ignoring"
    first[1].send("exit 5")
    first[0].until_gone()
    second = cluster.hub.generation(2, number=2)
    cluster.finish(second, *agents)


def test_processes_left_by_workers_are_killed_before_the_next_generation(cluster: Cluster) -> None:
    from kit.processes import is_alive

    agents = cluster.start(2, grace_s=1)
    first = cluster.hub.generation(2)
    left = first[0].ask("daemon")
    assert is_alive(left)
    first[1].send("exit 5")
    second = cluster.hub.generation(2, number=2)
    assert not is_alive(left)
    cluster.finish(second, *agents)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_script_that_does_not_exist_fails_on_every_node_with_exit_code_2(cluster: Cluster, max_restarts: int) -> None:
    """It is the exit code of the Python interpreter."""
    agents = cluster.start(2, script="/no/such/script.py", max_restarts=max_restarts)
    same_report(agents, 2)
