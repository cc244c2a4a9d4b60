"""Finds a run by the job id of a scheduler, from a host without a node of it: ``tenax status 33`` on the login host.

The scheduler's description of the job and its steps is turned into the variables that the agents had, and the same
function as in ``tenax run`` derives the run id and the endpoint from them.
"""

from __future__ import annotations

import os
import re

from tenax._schedulers.slurm import Slurm
from tenax._schedulers.slurm_commands import records, scontrol
from tenax.cli.job import JobSelector
from tenax.cli.scheduler_options import shared_secret_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_JOB_ID = re.compile(r"(\d+(?:_\d+)?)(?:\.(\d+))?(?:-r\d+)?")


def scheduled_runs(name: str, ask: Callable[..., str] = scontrol) -> list[JobSelector]:
    """Return the runs of several nodes that ``name`` may mean: a job, a step or a run id. Empty: it means none."""
    found = _JOB_ID.fullmatch(name)
    if found is None:
        return []
    try:
        jobs = records(ask("show", "job", found[1]))
        steps = [step for job in jobs for step in records(ask("show", "step", job["JobId"]))]
    except OSError:
        return []
    conf = f"token_file={shared_secret_path(os.path.expanduser('~'))}"
    runs = dict.fromkeys(run for run in _runs(jobs, steps) if found[2] is None or name in (run[0], _step_of(run[0])))
    return [JobSelector(run_id, endpoint, "tcp", conf) for run_id, endpoint in runs]


def _step_of(run_id: str) -> str:
    return run_id.partition("-")[0]


def _runs(jobs: list[dict[str, str]], steps: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the run id and the endpoint of every run of several nodes."""
    for job in jobs:
        numbers = {job["JobId"], f"{job.get('ArrayJobId')}_{job.get('ArrayTaskId')}"}
        for step in steps:
            number, _, step_id = step.get("StepId", "").partition(".")
            if job.get("JobState") == "RUNNING" and number in numbers and step_id.isdecimal():
                nodes = 0 if step.get("Nodes", "1") != "1" else int(job.get("NumNodes", "1"))
                allocation = Slurm(lambda _: "").allocation(_variables(job, step, step_id), nodes)
                if allocation.endpoint:
                    yield allocation.run_id, allocation.endpoint


def _variables(job: Mapping[str, str], step: Mapping[str, str], step_id: str) -> dict[str, str]:
    """Return the variables of the first task of a step."""
    return {
        "SLURM_JOB_ID": job["JobId"],
        "SLURM_ARRAY_JOB_ID": job.get("ArrayJobId", ""),
        "SLURM_ARRAY_TASK_ID": job.get("ArrayTaskId", ""),
        "SLURM_RESTART_COUNT": job.get("Restarts", "0"),
        "SLURM_JOB_NODELIST": job.get("NodeList", ""),
        "SLURM_STEP_ID": step_id,
        "SLURM_STEP_NUM_NODES": step.get("Nodes", "1"),
        "SLURM_STEP_NUM_TASKS": step.get("Nodes", "1"),
        "SLURM_STEP_NODELIST": step.get("NodeList", ""),
        "SLURM_STEP_RESV_PORTS": step.get("ResvPorts", ""),
        "SLURM_NODEID": "0",
    }
