"""Real training with torch over gloo on three nodes, through every kind of fault.

The parameters in the end must be those of an uninterrupted run of one process (``--check``), whatever happened.
"""

from __future__ import annotations

import os
import signal
from itertools import pairwise

import pytest

from .cluster import Cluster
from .history import Generation
from .lab import Lab, requires_netns

pytestmark = [requires_netns, pytest.mark.timeout(300)]

PATIENCE_S = 90.0  # three processes import torch on whatever cores there are


def until_training(cluster: Cluster, world_size: int, after: Generation | None = None) -> Generation:
    return cluster.until_at_work(world_size, after=after, timeout_s=PATIENCE_S)


def assert_each_went_on_where_the_one_before_was(cluster: Cluster) -> None:
    trained = [generation for generation in cluster.history.in_order() if generation.last_step]
    assert trained[0].first_step == 1
    for old, new in pairwise(trained):
        # A step may have been saved before anybody noted it, or noted by others before rank 0 could save it.
        assert abs(new.first_step - (old.last_step + 1)) <= 1, f"{new} began with step {new.first_step}\n{old}"


def test_training_goes_on_from_its_checkpoint_after_every_kind_of_fault(lab: Lab) -> None:
    pytest.importorskip("torch.distributed")
    cluster = Cluster(lab, "2:3", script="ddp_train.py", words=("--step-s", "0.02", "--check", "--no-ddp"))
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

    # A node is cut off, and comes back.
    lab[1].cut()
    generation = until_training(cluster, 2, after=generation)
    assert set(generation.hosts) == {"node0", "node2"}
    lab[1].heal()
    generation = until_training(cluster, 3, after=generation)

    # A node is asked to leave, and does.
    agents[2].send(signal.SIGTERM)
    generation = until_training(cluster, 2, after=generation)
    assert agents[2].wait().code != 0

    assert generation.restart_count == 1, "only the worker that was killed is charged for"
    cluster.finish(*agents[:2])
    assert_each_went_on_where_the_one_before_was(cluster)


def test_ddp_trains_on_three_nodes_and_resumes_after_a_worker_was_killed(lab: Lab) -> None:
    """One worker on each: importing what DDP needs takes longer than everything else here."""
    pytest.importorskip("torch.distributed")
    cluster = Cluster(lab, 3, script="ddp_train.py", words=("--step-s", "0.02", "--check"))
    cluster.start(*lab)
    first = until_training(cluster, 3)
    os.kill(first.by_rank()[0].pid, signal.SIGKILL)  # the one that saves
    second = until_training(cluster, 3, after=first)
    assert second.restart_count == 1
    cluster.finish()
    assert_each_went_on_where_the_one_before_was(cluster)
