"""Two agents in two processes with a dynamic rendezvous: they form a group, restart together, and end together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes import on_linux
from tenax.store import StoreServer

pytestmark = [on_linux, pytest.mark.process]

LIMIT_S = 100

AGENT = """
import json, sys
from datetime import timedelta
from tenax.agent.server import LocalElasticAgent, WorkerSpec
from tenax._logs.specs import DefaultLogsSpecs
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from tenax.store import TCPStore

port, node, folder, script, workers = sys.argv[1:]
store = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=60))
handler = DynamicRendezvousHandler.from_backend(
    "run", store, C10dRendezvousBackend(store, "run"), 2, 2, "127.0.0.1",
    RendezvousTimeout(join=timedelta(seconds=60)), keep_alive_interval=1, keep_alive_max_attempt=30)
spec = WorkerSpec(
    role="trainer", local_world_size=int(workers), rdzv_handler=handler, entrypoint=sys.executable,
    args=(script, node, folder), max_restarts=1, monitor_interval=0.05)
agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=f"{folder}/logs-{node}"), exit_barrier_timeout=60)
result = agent.run()
handler.shutdown()
print(json.dumps({
    "state": result.state.value,
    "ranks": sorted(result.return_values),
    "restarts_left": agent._remaining_restarts,
    "torch": "torch" in sys.modules,
}))
"""

# All workers use the workers' store, which is new in every round. In the first round a worker of node b fails and those
# of node a hang, as in a collective, so the agents must stop them.
WORKER = """
import json, os, pathlib, signal, sys
from datetime import timedelta
from tenax.store import TCPStore

node, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
arrived = store.add("arrived", 1)
assert arrived <= world_size, "keys of the last round are still there"
if arrived == world_size:
    store.set("all", b"1")
store.wait(["all"])
failed = folder / "failed"
if node == "b" and os.environ["LOCAL_RANK"] == "0":
    store.set("verdict", b"go" if failed.exists() else b"fail")
    if not failed.exists():
        failed.touch()
        sys.exit(3)
if store.get("verdict") == b"fail":
    signal.pause()
(folder / f"rank-{rank}").write_text(json.dumps([node, world_size, os.environ["TORCHELASTIC_RESTART_COUNT"]]))
"""


def run_two_agents(folder: Path, worker: str, workers: int) -> dict[str, Any]:
    """Return what each agent prints at its end."""
    (folder / "worker.py").write_text(worker)
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        agents = {
            node: subprocess.Popen(
                [sys.executable, "-c", AGENT, str(server.port), node, folder, folder / "worker.py", str(workers)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in "ab"
        }
        results = {}
        try:
            for node, agent in agents.items():
                stdout, stderr = agent.communicate(timeout=LIMIT_S)
                assert agent.returncode == 0, stderr
                results[node] = json.loads(stdout.splitlines()[-1])
        finally:
            for agent in agents.values():
                agent.kill()
                agent.communicate()
    return results


def test_a_failure_on_one_node_restarts_both(tmp_path: Path) -> None:
    """Node b uses a restart, node a follows uncharged: with such a handler each agent has its own budget."""
    results = run_two_agents(tmp_path, WORKER, workers=2)
    assert {node: (each["state"], each["restarts_left"], each["torch"]) for node, each in results.items()} == {
        "a": ("SUCCEEDED", 1, False),
        "b": ("SUCCEEDED", 0, False),
    }
    assert sorted(results["a"]["ranks"] + results["b"]["ranks"]) == [0, 1, 2, 3]
    wrote = {rank: json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(4)}
    assert {rank for rank, (node, _, _) in wrote.items() if node == "a"} == set(results["a"]["ranks"])
    assert {world_size for _, world_size, _ in wrote.values()} == {4}
