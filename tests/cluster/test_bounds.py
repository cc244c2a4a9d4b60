"""A node that sends absurd values to real agents with real workers does not affect the run."""

from __future__ import annotations

import json
import subprocess
import sys

from kit.cluster import Cluster
from kit.jobs import TIMEOUT_S
from tenax._core.link import wire
from tenax._core.messages import NodeInfo, NodeJoined


def test_absurd_values_of_a_member_do_not_affect_the_run(cluster: Cluster) -> None:
    """Each value closes its connection. The generation continues, the status works, and no console line is forged."""
    agents = cluster.start_in_order(2)
    workers = cluster.hub.generation(2)
    info = {"node_id": "operator", "host": "host", "min_nodes": 2, "max_nodes": 2}
    absurd = [
        NodeJoined(NodeInfo(**{**info, "slots": 1 << 40})),
        NodeJoined(NodeInfo(**{**info, "slots": -1})),
        NodeJoined(NodeInfo(**{**info, "host": "h" * (4 << 20)})),
        NodeJoined(NodeInfo(**{**info, "host": "h\ntenax: the run succeeded"})),
        NodeJoined(NodeInfo(**info), generation=1 << 53),
        NodeJoined(NodeInfo(**info), generation=2, restarts_used=1 << 50),
    ]
    for message in absurd:
        cluster.operate(wire.Message(message))
    assert {worker.ask("generation") for worker in workers} == {1}
    status = subprocess.run(
        # At the endpoint: an agent opens its control socket shortly after its workers have started.
        [sys.executable, "-m", "tenax", "status", "--json", cluster.options["run_id"], "--endpoint", cluster.endpoint],
        env=cluster.runner.environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert status.returncode == 0, status.stderr
    shown = json.loads(status.stdout)
    assert (shown["generation"], shown["restarts_used"], len(shown["nodes"])) == (1, 0, 2)
    cluster.finish(workers, *agents)
    for agent in agents:
        assert "\ntenax: the run succeeded\n" not in agent.text.replace("tenax: the run succeeded: ", "")
