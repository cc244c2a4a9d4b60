"""Nodes join in any order, with any kind of endpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .cluster import PORT, Cluster, in_one_line
from .lab import Lab, requires_ipv6, requires_netns

pytestmark = requires_netns

MakeLab = Callable[..., Lab]


def test_the_serving_node_may_start_last(lab: Lab) -> None:
    cluster = Cluster(lab, 3, nproc=2)
    early = cluster.start(lab[2], lab[1])
    for agent in early:
        cluster.until_printed(agent, f"no coordinator at {cluster.endpoint}: Connection refused; retrying for")
    cluster.start(lab[0])
    generation = cluster.until_at_work(6)
    assert sorted(generation.hosts) == ["node0", "node0", "node1", "node1", "node2", "node2"]
    cluster.finish()


@requires_ipv6
@pytest.mark.parametrize("family", ["v4", "v6", "both"])
def test_the_endpoint_may_be_a_host_name(make_lab: MakeLab, family: str) -> None:
    lab = make_lab(3, family=family)
    cluster = Cluster(lab, 3, endpoint=f"node1:{PORT}")
    cluster.start(*lab)
    cluster.until_at_work(3)
    cluster.finish()


@requires_ipv6
def test_a_run_needs_no_ipv4(make_lab: MakeLab) -> None:
    lab = make_lab(3, family="v6")
    cluster = Cluster(lab, 3)
    assert cluster.endpoint.startswith("[fd")
    cluster.start(*lab)
    generation = cluster.until_at_work(3)
    assert generation.master[0] in {host.address for host in lab}
    cluster.finish()


def test_a_hosts_own_name_may_resolve_to_loopback(lab: Lab) -> None:
    """As in Debian's /etc/hosts. The others must still reach the endpoint and the workers' store."""
    cluster = Cluster(lab, 3, endpoint=f"node0:{PORT}")
    own_name = ["sh", "-c", 'echo "127.0.1.1 node0" > /etc/hosts; exec "$@"', "sh"]
    serving = cluster.start(lab[0], wrapper=own_name)
    cluster.until_printed(serving[0], "this node serves the coordinator")
    cluster.start(lab[1], lab[2])
    generation = cluster.until_at_work(3)
    assert generation.hosts[0] == "node0", "the first node hosts the store"
    cluster.finish()


@pytest.mark.parametrize("dns", ["dead", "silent"])
def test_an_address_as_endpoint_needs_no_name_service(lab: Lab, dns: str) -> None:
    """A lookup at the silent name server would take 10 s."""
    cluster = Cluster(lab, 3)
    cluster.start(*lab, dns=dns)
    cluster.until_at_work(3, timeout_s=9)
    cluster.finish()


def test_an_address_as_endpoint_causes_no_lookups(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    cluster.start(*lab, dns="slow")
    first = cluster.until_at_work(3)
    (lab.shared / "fail-1").touch()
    cluster.until_at_work(3, after=first)
    assert [host.names_queried for host in lab] == [[], [], []]
    cluster.finish()


def test_only_the_endpoints_name_is_looked_up(lab: Lab) -> None:
    cluster = Cluster(lab, 3, endpoint=f"node0:{PORT}")
    cluster.start(*lab, dns="slow")
    cluster.until_at_work(3)
    for host in lab:
        assert set(host.names_queried) == {"node0"}
    cluster.finish()


def test_two_hosts_with_the_same_name_are_two_nodes(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    cluster.start(lab[0])
    cluster.start(lab[1], lab[2], hostname="twin")
    generation = cluster.until_at_work(3)
    assert sorted(generation.hosts) == ["node0", "twin", "twin"]
    (lab.shared / "fail-1").touch()
    again = cluster.until_at_work(3, after=generation)
    assert again.restart_count == 1
    cluster.finish()


def test_another_run_at_the_same_endpoint_is_rejected(lab: Lab) -> None:
    """It prints the cause and the remedy, but not the id of the serving run, which is not affected."""
    mine = Cluster(lab, 2, run_id="mine")
    mine.start(lab[0], lab[1])
    generation = mine.until_at_work(2)
    elsewhere = lab.home / "yours"
    elsewhere.mkdir()
    yours = Cluster(lab, 2, run_id="yours", folder=elsewhere)
    agents = yours.start(lab[1], lab[2])
    for result in yours.over():
        assert result.code != 0
        shown = in_one_line(result.err)
        assert "rejected this node: it serves another run or has another secret" in shown
        assert "the same --rdzv-id and the same secret" in shown
        assert "'mine'" not in shown
        assert "run mine" not in shown
        assert "Traceback" not in result.err
    assert len(agents) == 2
    assert not list(elsewhere.iterdir()), "a worker of the rejected run was started"
    mine.until_worked_for(generation, 0.2)
    mine.finish()


def test_a_requested_node_rank_is_assigned_once(lab: Lab) -> None:
    cluster = Cluster(lab, 3)
    ranks = {lab[0]: 2, lab[1]: 0}
    agents = [cluster.start(host, options=["--node-rank", str(rank)])[0] for host, rank in ranks.items()]
    cluster.until_printed(agents[1], "2 of 3 nodes ready (node0, node1); waiting up to ")
    (twice,) = cluster.start(lab[2], options=["--node-rank", "0"])
    refused = twice.wait()
    assert refused.code != 0
    assert "this node requests node rank 0, which node1 has; give each node its own" in in_one_line(refused.err)
    agents += cluster.start(lab[2], options=["--node-rank", "1"])
    generation = cluster.until_at_work(3)
    assert generation.hosts == ["node1", "node2", "node0"]
    (lab.shared / "fail-1").touch()
    assert cluster.until_at_work(3, after=generation).hosts == ["node1", "node2", "node0"]
    cluster.finish(*agents)
