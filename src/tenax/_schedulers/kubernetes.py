"""Kubernetes: what the variables of its kinds of jobs mean. Pure, except for the name of this pod.

Each pod has its own output and is replaced on its own, so the agents are not tasks of one step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from tenax._schedulers import read_text
from tenax.scheduler import Allocation, Scheduler

_PORT = 29400


def _full_name() -> str:
    """Return this host's name with its domain: Kubernetes writes it to /etc/hosts if the pod has a subdomain."""
    host = os.uname().nodename
    with suppress(OSError):
        return next((name for name in read_text("/etc/hosts").split() if name.startswith(f"{host}.")), host)
    return host


class IndexedJob(Scheduler):
    """A Job with completionMode Indexed, also one of a JobSet. The number of pods is not in its variables.

    ``pod_name``: returns the full name of this pod: ``train-2.train.default.svc.cluster.local``.
    """

    def __init__(self, pod_name: Callable[[], str] = _full_name) -> None:
        self._pod_name = pod_name

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation:
        index = environ["JOB_COMPLETION_INDEX"]
        if not nodes:
            refusal = (
                f"this is pod {index} of an Indexed Job, which does not tell how many pods it has; add --nnodes N, or "
                "--standalone to run in each pod alone"
            )
            return Allocation(scheduler="Kubernetes", refusal=refusal)
        host, dot, domain = self._pod_name().partition(".")
        job, _, suffix = host.rpartition("-")
        if nodes == 1 or not dot or suffix != index:  # without a subdomain, pods cannot resolve each other's names
            return Allocation(scheduler="Kubernetes")
        return Allocation(
            scheduler="Kubernetes",
            run_id=job,
            nodes=nodes,
            endpoint=f"{job}-0.{domain}:{_PORT}",
            node_order=index,
            is_first=index == "0",
        )


class LeaderWorkerSet(Scheduler):
    """A group of a LeaderWorkerSet: the leader and its workers are one run."""

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation | None:
        leader, size = environ["LWS_LEADER_ADDRESS"], environ.get("LWS_GROUP_SIZE", "")
        index = environ.get("LWS_WORKER_INDEX", "")
        if nodes == 1 or not (size.isdecimal() and index.isdecimal()) or int(size) < 2:
            return None
        return Allocation(
            scheduler="LeaderWorkerSet",
            run_id=leader.partition(".")[0],
            nodes=int(size),
            endpoint=f"{leader}:{_PORT}",
            node_order=index,
            is_first=index == "0",
            note=f"this is node {index} of the {size} nodes of a LeaderWorkerSet group, endpoint {leader}:{_PORT}",
        )


class MasterVariables(Scheduler):
    """MASTER_ADDR and WORLD_SIZE without PET_*: set for torch by the platform, not for a launcher."""

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation | None:
        size = environ.get("WORLD_SIZE", "")
        if nodes or "TORCHELASTIC_RUN_ID" in environ or not size.isdecimal() or int(size) < 2:
            return None
        note = (
            f"MASTER_ADDR and WORLD_SIZE={size} are not used, and this node runs alone; for one run of {size} nodes "
            f"add --nnodes {size} --node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
        )
        return Allocation(scheduler="the platform", note=note)
