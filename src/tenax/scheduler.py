"""Schedulers: how ``tenax run`` finds out which nodes a cluster's scheduler gave it.

A scheduler turns the environment variables of this process into an ``Allocation``, whose fields are the defaults of
the flags that were not given. Slurm, Kubernetes, LSF and PBS are recognised by their variables. A package offers
another one in the entry point group ``tenax.schedulers``; ``TENAX_SCHEDULER=NAME`` (or ``MODULE:CLASS``) selects it,
and ``TENAX_SCHEDULER=none`` disables all of them.

    from tenax.scheduler import Allocation, Scheduler

    class Grid(Scheduler):
        def allocation(self, environ, nodes):
            hosts = environ["GRID_HOSTS"].split()
            return Allocation(
                scheduler="Grid",
                run_id=environ["GRID_JOB"],
                nodes=len(hosts),
                endpoint=f"{hosts[0]}:29400",
                node_order=environ["GRID_NODE"],
            )
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Allocation", "Scheduler", "find_scheduler"]

VARIABLE = "TENAX_SCHEDULER"
_GROUP = "tenax.schedulers"
# The variable that identifies each scheduler, with its module and class. The first one that is set counts.
_OWN = {
    "TENAX_START": ("started", "Started"),
    "SLURM_JOB_ID": ("slurm", "Slurm"),
    "LWS_LEADER_ADDRESS": ("kubernetes", "LeaderWorkerSet"),
    "JOB_COMPLETION_INDEX": ("kubernetes", "IndexedJob"),
    "LSB_JOBID": ("host_lists", "Lsf"),
    "PBS_NODEFILE": ("host_lists", "Pbs"),
    "MASTER_ADDR": ("kubernetes", "MasterVariables"),
}


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler gave this process. An empty field sets no default."""

    scheduler: str  # its name, for people
    job: str = ""  # the scheduler's id of the job, for its commands
    run_id: str = ""  # default of --rdzv-id
    nodes: int = 1  # default of --nnodes
    endpoint: str = ""  # default of --rdzv-endpoint, used if there are several nodes
    node_order: str = ""  # the position of this node, which decides its rank
    workers: int = 0  # default of --nproc-per-node: the GPUs of this node
    restarts: int = 0  # how often the scheduler has restarted the job: the higher part of the fencing token
    is_first: bool = True  # this process prints what concerns all nodes
    is_step: bool = False  # the agents are tasks of one program: they share its output and its exit code
    leave_code: int = 0  # exit code of a task that leaves a run which continues without it
    has_shared_home: bool = False  # all nodes have the home folder, so it can hold a secret
    notice_signals: str = ""  # default of --notice-signals
    kill_wait_s: int = 0  # seconds from SIGTERM to SIGKILL: the default grace period is shorter
    note: str = ""  # what was found, in a sentence
    refusal: str = ""  # why nothing can be started, in a sentence


class Scheduler:
    """One kind of scheduler. ``allocation`` is a pure function; the others may run its commands."""

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation | None:
        """Return what these variables describe; None: nothing.

        ``nodes``: the maximum of --nnodes if it was given (1 with --standalone), else 0.
        """
        raise NotImplementedError

    def seconds_left(self, job: str) -> float | None:  # noqa: ARG002
        """Return the seconds until the scheduler stops the job; None: unknown."""
        return None

    def requeue(self, job: str) -> str:  # noqa: ARG002
        """Requeue the job if the scheduler is preempting it. Return what happened, in a sentence; empty: nothing."""
        return ""


def find_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Return the scheduler that started this process, or None. Raises ValueError for an unknown TENAX_SCHEDULER.

    A worker of tenax has the variables of its agent's allocation, which is taken: a run inside it gets none.
    """
    if chosen := environ.get(VARIABLE, ""):
        from tenax._io.handler_names import make_one

        own = {"none": Scheduler()} | {name.lower(): _own(module, name) for module, name in _OWN.values()}
        scheduler: Scheduler = make_one(chosen, "scheduler", own, _GROUP, "allocation")
        return scheduler if chosen != "none" else None
    if "TENAX_GENERATION" in environ:
        return None
    return next((_own(*_OWN[variable]) for variable in _OWN if environ.get(variable)), None)


def _own(module: str, name: str) -> Scheduler:
    from importlib import import_module

    scheduler: Scheduler = getattr(import_module(f"tenax._schedulers.{module}"), name)()
    return scheduler
