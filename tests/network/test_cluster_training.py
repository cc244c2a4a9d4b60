"""Real training with torch over gloo on three nodes, through every kind of fault.

The final parameters must equal those of an uninterrupted run in one process (``--check``).
"""

from __future__ import annotations

import os
import signal
from itertools import pairwise

from kit.processes import TIMEOUT_S, needs_torch

from .cluster import Cluster
from .history import Generation
from .lab import Lab, requires_netns

pytestmark = [requires_netns, needs_torch]


def until_training(cluster: Cluster, world_size: int, after: Generation | None = None) -> Generation:
    return cluster.until_at_work(world_size, after=after, timeout_s=TIMEOUT_S)


def assert_generations_resume_from_the_checkpoint(cluster: Cluster) -> None:
    trained = [generation for generation in cluster.history.in_order() if generation.last_step]
    assert trained[0].first_step == 1
    for old, new in pairwise(trained):
        # A step may be saved before it is traced, or traced by other ranks before rank 0 saves it.
        assert abs(new.first_step - (old.last_step + 1)) <= 1, f"{new} began with step {new.first_step}\n{old}"


def test_training_resumes_from_its_checkpoint_after_every_kind_of_fault(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3", script="torch_train.py", arguments=("--step-s", "0.02", "--check"))
    agents = cluster.start(*lab)
    generation = until_training(cluster, 3)

    # A worker is killed.
    os.kill(generation.by_rank()[2].pid, signal.SIGKILL)
    generation = until_training(cluster, 3, after=generation)
    assert generation.restart_count == 1

    # An agent is killed; later another node joins.
    agents[2].send(signal.SIGKILL)
    generation = until_training(cluster, 2, after=generation)
    assert set(generation.hosts) == {"node0", "node1"}
    agents[2] = cluster.start(lab[2])[0]
    generation = until_training(cluster, 3, after=generation)

    # A node is cut off and reconnects.
    lab[1].cut()
    generation = until_training(cluster, 2, after=generation)
    assert set(generation.hosts) == {"node0", "node2"}
    lab[1].heal()
    generation = until_training(cluster, 3, after=generation)

    # A node is drained.
    agents[2].send(signal.SIGTERM)
    generation = until_training(cluster, 2, after=generation)
    assert agents[2].wait().code != 0

    assert generation.restart_count == 1, "only the killed worker uses up a restart"
    cluster.finish(*agents[:2])
    assert_generations_resume_from_the_checkpoint(cluster)
