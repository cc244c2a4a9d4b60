"""One verdict for the run: every node prints the same report and exits with the same code."""

from __future__ import annotations

from pathlib import Path

from .cluster import Cluster, in_one_line
from .lab import Lab, requires_netns

pytestmark = requires_netns

FAILS_ON_RANK_3 = """
import os, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
if os.environ["RANK"] == "3":
    raise RuntimeError("rank 3 fails")
while True:
    time.sleep(60)
"""


def program(lab: Lab, text: str) -> Path:
    path = lab.home / "program.py"
    path.write_text(text)
    return path


def test_every_node_reports_the_same_first_cause_and_exit_code(lab: Lab) -> None:
    cluster = Cluster(lab, 3, nproc=2, max_restarts=0, script=str(program(lab, FAILS_ON_RANK_3)), arguments=())
    for number, host in enumerate(lab):
        cluster.start(host, options=["--node-rank", str(number)])
    results = cluster.over()
    for result in results:
        printed = in_one_line(result.err)
        assert "rank 3 on node1" in printed
        assert "RuntimeError: rank 3 fails" in printed
    in_full = [in_one_line(result.err) for result in results if "First cause" in result.err]
    assert len(in_full) == 2, "on the node of the first cause and on that of rank 0"
    for printed in in_full:
        assert 'raise RuntimeError("rank 3 fails")' in printed
        assert "no restarts are allowed (--max-restarts 0)" in printed
    assert len({result.code for result in results}) == 1
    assert results[0].code != 0


def test_all_nodes_share_one_restart_budget(lab: Lab) -> None:
    """Two restarts in total, whichever node fails. Then every node names the same first cause."""
    cluster = Cluster(lab, 3, max_restarts=2)
    cluster.start(*lab)
    generation = cluster.until_at_work(3)
    for count, rank in enumerate((0, 1)):
        assert generation.restart_count == count
        (lab.shared / f"fail-{rank}").touch()
        generation = cluster.until_at_work(3, after=generation)
    assert generation.restart_count == 2
    host = generation.hosts[2]
    (lab.shared / "fail-2").touch()
    results = cluster.over()
    for result in results:
        printed = in_one_line(result.err)
        assert f"rank 2 on {host}" in printed
        if "First cause" in printed:
            assert "rank 2 fails as requested" in printed
            assert "all 2 restarts are used" in printed
    assert {result.code for result in results} == {results[0].code} != {0}
    cluster.check()
