"""A run that a scheduler started: defaults of flags, its secret, what each node prints, its exit code, the requeue.

Imported only if a scheduler started this process.

1. The allocation fills in flags that were not given. Flags and ``PET_*`` variables override it, and ``--standalone``
   runs on this node alone.
2. The tasks of a step print to one place, so the report is printed in full by one of them: the node of rank 0.
3. A task that leaves a run which continues without it exits with ``leave_code``, 0 under Slurm, which takes the highest
   exit code of the step; the node that serves the coordinator leaves last, and sees whether all nodes left.
4. A job that is being preempted is requeued by its first node, after the workers have exited. A cancelled one is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tenax._core.agent import AgentState
from tenax._core.events import LeaveNoticed
from tenax._core.model import Outcome, Verdict
from tenax._failures.exit_codes import INTERNAL_ERROR, exit_code_for
from tenax._node.job import DEFAULT_SHUTDOWN_TIMEOUT_S
from tenax._node.journal import Step
from tenax._node.node import Node
from tenax.cli.flags import BY_DEST, UsageError, usage_errors
from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS, ONE_NODE_BACKENDS, FlagValues, Options
from tenax.scheduler import Allocation, Scheduler, find_scheduler


class Refused(UsageError):
    """The scheduler started the wrong processes. All of them are refused; the message is empty except in the first."""

    hint = ""


def find_allocation(scheduler: Scheduler, flags: FlagValues, environ: Mapping[str, str]) -> Allocation | None:
    """Return what the scheduler gave this process, and set the flags that were not given. Raises ``UsageError``."""
    with usage_errors():
        allocation = scheduler.allocation(environ, _nodes(flags))
    if allocation is None:
        return None
    if allocation.refusal:
        raise Refused(allocation.refusal if allocation.is_first else "")
    for dest, value in _defaults(allocation, flags, environ).items():
        if value and not flags.given(dest):
            flags.values[dest], flags.sources[dest] = value, f"{allocation.scheduler}'s {BY_DEST[dest].name}"
    return allocation


def _nodes(flags: FlagValues) -> int:
    """Return the maximum number of nodes that was given; 0: none, or not a number, which is rejected later."""
    if flags["standalone"]:
        return 1
    most = flags["nnodes"].rpartition(":")[2].strip() if flags.given("nnodes") else ""
    return int(most) if most.isdecimal() else 0


def _defaults(allocation: Allocation, flags: FlagValues, environ: Mapping[str, str]) -> dict[str, Any]:
    backend, several = flags["rdzv_backend"], allocation.nodes > 1
    defaults: dict[str, Any] = {"rdzv_id": allocation.run_id}
    if several:
        defaults["nnodes"] = str(allocation.nodes)
    has_endpoint = any(map(flags.given, ("rdzv_endpoint", "master_addr", "master_port")))
    if several and backend in MANY_NODES_BACKENDS - ETCD_BACKENDS and not has_endpoint:
        defaults["rdzv_endpoint"] = allocation.endpoint
    if allocation.workers:
        defaults["nproc_per_node"] = str(allocation.workers)
    if backend in ONE_NODE_BACKENDS and allocation.notice_signals not in flags["signals_to_handle"].split(","):
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


# --- the run ----------------------------------------------------------------------------------------------------------


def with_secret(options: Options, environ: Mapping[str, str]) -> Options:
    """Create the user's secret for all nodes if the options name it. If it cannot be created, the run has none."""
    path = options.rdzv_configs.get("token_file", "")
    if not path or path != shared_secret_path(environ.get("HOME", "")):
        return options
    from tenax._engines.secret import make_shared_secret

    try:
        make_shared_secret(path)
    except OSError as error:
        configs = {key: value for key, value in options.rdzv_configs.items() if key != "token_file"}
        why = f"because {path} could not be created: {error.strerror}"
        note = f"the run has no secret, {why}; to set one: --rdzv-conf token_file=FILE"
        return msgspec.structs.replace(options, rdzv_configs=configs, notes=(*options.notes, note))
    return options


def run_scheduled(
    node: Node, allocation: Allocation, environ: Mapping[str, str], report: Callable[[Verdict], str]
) -> tuple[Verdict, int]:
    """Run the node and return the verdict with the exit code for the scheduler."""
    membership = Membership()
    code = INTERNAL_ERROR  # until there is a verdict

    def final_text(verdict: Verdict) -> str:
        nonlocal code
        code = exit_code_for(verdict)
        text = report(verdict)
        is_asked = allocation.is_first and verdict.outcome is Outcome.CANCELLED
        scheduler = find_scheduler(environ) if is_asked else None
        requeued = scheduler.requeue(allocation.job) if scheduler is not None else ""
        if allocation.is_step and not requeued and membership.does_run_continue(verdict):
            code = allocation.leave_code
            return "tenax: this node has left the run, which continues without it\n"
        if text and allocation.is_step and not membership.is_first(allocation):
            text = f"tenax: the run {verdict.outcome.text}: {verdict.why}; the first node prints the report\n"
        return text + (f"tenax: {requeued}\n" if requeued else "")

    return node.run(final_text, membership.observe), code


class Membership:
    """What this node knows of the nodes of its last generation: how many there were, and which of them leave."""

    def __init__(self) -> None:
        self._generation = 0
        self._others = 0
        self._rank = -1  # of this node; -1: it was in no generation
        self._has_left = False
        self._leaving: set[str] = set()

    def observe(self, step: Step, state: AgentState) -> None:
        self._has_left = state.leave is not None
        if state.assignment is not None and state.generation != self._generation:
            self._generation, self._leaving = state.generation, set()
            self._rank, self._others = state.assignment.group_rank, state.assignment.group_world_size - 1
        if isinstance(step.event, LeaveNoticed) and step.event.generation == self._generation:
            self._leaving.add(step.event.host)

    def does_run_continue(self, verdict: Verdict) -> bool:
        """Whether this node left on request and another one stayed."""
        return self._has_left and verdict.outcome is Outcome.CANCELLED and len(self._leaving) < self._others

    def is_first(self, allocation: Allocation) -> bool:
        return allocation.is_first if self._rank < 0 else self._rank == 0
