"""Defaults from the cluster's scheduler: the allocation fills in flags that were not given. Pure.

Imported only if a scheduler started this process. Flags and ``PET_*`` variables override the scheduler, and
``--standalone`` runs on this node alone.
"""

from __future__ import annotations

import os

from tenax._node.job import DEFAULT_SHUTDOWN_TIMEOUT_S
from tenax.cli.flags import BY_DEST, UsageError, usage_errors
from tenax.cli.options import MANY_NODES_BACKENDS, ONE_NODE_BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tenax.cli.options import FlagValues
    from tenax.scheduler import Allocation, Scheduler

_ENDPOINTS = ("rdzv_endpoint", "master_addr", "master_port")


class Refused(UsageError):
    """The scheduler started the wrong processes. All of them are refused; the message is empty except in the first."""

    hint = ""


def find_allocation(
    scheduler: Scheduler, values: dict[str, Any], sources: dict[str, str], environ: Mapping[str, str]
) -> Allocation | None:
    """Return what the scheduler gave this process, and set the flags that were not given. Raises ``UsageError``."""
    with usage_errors():
        allocation = scheduler.allocation(environ, _nodes(values, sources))
    if allocation is None:
        return None
    if allocation.refusal:
        raise Refused(allocation.refusal if allocation.is_first else "")
    for dest, value in _defaults(allocation, values, sources, environ).items():
        if dest not in sources and value:
            values[dest], sources[dest] = value, f"{allocation.scheduler}'s {BY_DEST[dest].name}"
    return allocation


def _nodes(values: Mapping[str, Any], sources: Mapping[str, str]) -> int:
    """Return the maximum number of nodes that was given; 0: none, or not a number, which is rejected later."""
    if values["standalone"]:
        return 1
    most = values["nnodes"].rpartition(":")[2].strip() if "nnodes" in sources else ""
    return int(most) if most.isdecimal() else 0


def _defaults(
    allocation: Allocation, values: Mapping[str, Any], sources: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Any]:
    backend, several = values["rdzv_backend"], allocation.nodes > 1
    defaults: dict[str, Any] = {"rdzv_id": allocation.run_id}
    if several:
        defaults["nnodes"] = str(allocation.nodes)
    if several and backend in MANY_NODES_BACKENDS and "etcd" not in backend and sources.keys().isdisjoint(_ENDPOINTS):
        defaults["rdzv_endpoint"] = allocation.endpoint
    if allocation.workers:
        defaults["nproc_per_node"] = str(allocation.workers)
    if backend in ONE_NODE_BACKENDS and allocation.notice_signals not in values["signals_to_handle"].split(","):
        defaults["notice_signals"] = allocation.notice_signals
    if allocation.kill_wait_s and not environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        defaults["shutdown_timeout"] = grace_within(allocation.kill_wait_s)
    return defaults


def grace_within(kill_wait_s: int) -> int:
    """Return a grace period after which there is time to kill the workers and to report before the scheduler kills."""
    return min(DEFAULT_SHUTDOWN_TIMEOUT_S, max(kill_wait_s - 5, kill_wait_s // 2))


def add_settings(
    flags: FlagValues, allocation: Allocation, settings: dict[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings of the rendezvous with the node's position and the secret, unless they are given."""
    if flags["rdzv_backend"] in MANY_NODES_BACKENDS and not environ.get("TENAX_NODE_ORDER") and "rank" not in settings:
        settings = {"node_order": allocation.node_order, **settings} if allocation.node_order else settings
    has_secret = not settings.keys().isdisjoint(("token", "token_file")) or environ.get("TENAX_RDZV_TOKEN")
    uses_endpoint = flags["rdzv_endpoint"] == allocation.endpoint and not flags.typed("rdzv_endpoint")
    if allocation.has_shared_home and uses_endpoint and not has_secret and (home := environ.get("HOME")):
        settings = {**settings, "token_file": shared_secret_path(home)}
    return settings


def shared_secret_path(home: str) -> str:
    """Return the file with the secret of this user on all hosts that share the home folder."""
    return os.path.join(home, ".config", "tenax", "cluster-secret")


def notes(flags: FlagValues, allocation: Allocation, workers: int) -> list[str]:
    """Return the remarks of the first process. ``workers``: how many this node will have."""
    if not allocation.is_first:
        return []
    found = [allocation.note] if allocation.note else []
    if allocation.workers and flags["nproc_per_node"] in ("auto", "gpu") and workers != allocation.workers:
        found.append(
            f"{flags.quote('nproc_per_node')} found {workers}, but {allocation.scheduler} gave this node "
            f"{allocation.workers} GPUs; to start one worker for each, leave the flag out"
        )
    wait_s, grace_s = allocation.kill_wait_s, flags["shutdown_timeout"]
    if wait_s and grace_s is not None and grace_s >= wait_s:
        found.append(
            f"{flags.quote('shutdown_timeout')} has no effect beyond {wait_s} s: then {allocation.scheduler} kills the "
            "workers (KillWait), and there is no report"
        )
    return found
