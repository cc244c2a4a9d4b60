"""The environment variables that tenax sets for a worker.

Names and formats are TorchElastic's, so that scripts written for torchrun work unchanged.
"""

from __future__ import annotations

import msgspec

from tenax._core.model import AgentSettings, Assignment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
GENERATIONS_PER_JOB_START = 1_000_000  # the fencing token of a restarted job is greater than all of its earlier ones


class WorkerEnvironment(msgspec.Struct, frozen=True):
    """Options that are the same for all workers of a node during the whole run."""

    virtual_local_rank: bool = False
    omp_num_threads: tuple[int, ...] = ()  # by local rank; empty: leave the variable unchanged
    job_restarts: int = 0  # how often the scheduler has restarted the job


def worker_environment(
    settings: AgentSettings,
    assignment: Assignment,
    local_rank: int,
    inherited: Mapping[str, str],
    options: WorkerEnvironment = WorkerEnvironment(),  # noqa: B008 - frozen
) -> dict[str, str]:
    """Return the variables that tenax sets for one worker, in addition to those it inherits."""
    added = {
        "RANK": str(assignment.first_global_rank + local_rank),
        "LOCAL_RANK": "0" if options.virtual_local_rank else str(local_rank),
        "GROUP_RANK": str(assignment.group_rank),
        "ROLE_RANK": str(assignment.first_role_rank + local_rank),
        "ROLE_NAME": settings.role,
        "LOCAL_WORLD_SIZE": str(settings.local_world_size),
        "WORLD_SIZE": str(assignment.world_size),
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_WORLD_SIZE": str(assignment.role_world_size),
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restarts_used),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts(settings, assignment)),
        "TORCHELASTIC_RUN_ID": settings.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(assignment.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "TENAX_GENERATION": str(options.job_restarts * GENERATIONS_PER_JOB_START + assignment.generation),
        "TENAX_GENERATION_REASON": assignment.why.replace("\0", " "),  # a variable cannot contain NUL
    }
    # A crash in native code then writes its Python stack to stderr, where the failure report finds it.
    added["PYTHONFAULTHANDLER"] = inherited.get("PYTHONFAULTHANDLER", "1")
    if options.omp_num_threads and "OMP_NUM_THREADS" not in inherited:
        added["OMP_NUM_THREADS"] = str(options.omp_num_threads[local_rank])
    if options.virtual_local_rank:
        added[CUDA_VISIBLE_DEVICES] = only_device(inherited.get(CUDA_VISIBLE_DEVICES), local_rank)
    return added


def max_restarts(settings: AgentSettings, assignment: Assignment | None) -> int:
    """Return the limit of the run, which is that of the coordinator's node."""
    limit = assignment.max_restarts if assignment is not None else None
    return settings.max_restarts if limit is None else limit


def lasting_environment(
    settings: AgentSettings,
    inherited: Mapping[str, str],
    options: WorkerEnvironment = WorkerEnvironment(),  # noqa: B008 - frozen
) -> tuple[dict[str, str], set[str]]:
    """Return the variables that are the same for every worker of every generation, and the names of all others.

    Found by comparing two generations that have no value in common.
    """
    first, *others = [
        lasting_of_worker(settings, rank, inherited, options) for rank in range(settings.local_world_size)
    ]
    lasting = {name: value for name, value in first.items() if all(env.get(name) == value for env in others)}
    return lasting, worker_environment(settings, _DIFFERENT[0], 0, inherited, options).keys() - lasting.keys()


def lasting_of_worker(
    settings: AgentSettings,
    local_rank: int,
    inherited: Mapping[str, str],
    options: WorkerEnvironment = WorkerEnvironment(),  # noqa: B008 - frozen
) -> dict[str, str]:
    """Return the variables of one worker that are the same in every generation."""
    first, other = [worker_environment(settings, each, local_rank, inherited, options) for each in _DIFFERENT]
    return {name: value for name, value in first.items() if other.get(name) == value}


_DIFFERENT = (
    Assignment(1, 2, 3, 4, 5, 6, 7, "a", 8, False, 9, "b", 0, max_restarts=10),
    Assignment(11, 12, 13, 14, 15, 16, 17, "c", 18, True, 19, "d", 1, max_restarts=20),
)


def only_device(visible: str | None, local_rank: int) -> str:
    """Return the one device that a worker sees in virtual-local-rank mode."""
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    if local_rank >= len(devices):
        raise ValueError(
            f"--virtual-local-rank needs one device per worker, but {CUDA_VISIBLE_DEVICES}={visible!r} names "
            f"{len(devices)} and there is a worker with local rank {local_rank}; name more devices or start fewer"
        )
    return devices[local_rank]
