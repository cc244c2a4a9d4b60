"""Slurm: the allocation of a step, from its ``SLURM_*`` variables, and what only its controller knows (``scontrol``).

1. A step of several nodes is one run. Its tasks are its agents, one per node, in the order of the nodes.
2. A step of one node is a run of its own, unless --nnodes asks for more: then all such steps of the job are one run.
3. Two runs have different run ids and ports, also if they share a node: job, step and restart count are in the id.
4. Outside of a step (a batch script without srun), and in a shell of ``srun --pty``, there is only this node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product

import msgspec

from tenax._schedulers import FIRST_PORT, PORTS, read_text
from tenax.scheduler import Allocation, Scheduler

_DEFAULT_KILL_WAIT_S = 30
_STEPS_APART = 31  # neighbouring jobs with this many steps have different ports
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: the batch script, an interactive shell, external processes
_CONF_FILES = ("/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf")
_TIMEOUT_S = 10.0
_JOB_ID = re.compile(r"(\d+(?:_\d+)?)(?:\.(\d+))?(?:-r\d+)?")


class Slurm(Scheduler):
    """``read``: returns the content of a file, or raises OSError. It reads slurm.conf."""

    def __init__(self, read: Callable[[str], str] = read_text) -> None:
        self._read = read

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation:
        job, restarts = environ["SLURM_JOB_ID"], _number(environ, "SLURM_RESTART_COUNT")
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        name = f"{array}_{task}" if array and task else job
        ending = f"-r{restarts}" if restarts else ""
        gpus = environ.get("SLURM_STEP_GPUS", "")
        found = Allocation(
            scheduler="Slurm",
            job=job,
            run_id=f"{name}{ending}",
            restarts=restarts,
            workers=gpus.count(",") + 1 if gpus else _number(environ, "SLURM_GPUS_ON_NODE"),
            is_step=True,
            has_shared_home=True,
            notice_signals="SIGUSR1",
            kill_wait_s=self._kill_wait_s(environ),
        )
        step = _number(environ, "SLURM_STEP_ID", -1)
        if 0 <= step < _SPECIAL_STEPS and "SLURM_PTY_PORT" not in environ:
            return _in_step(found, step, f"{name}.{step}{ending}", environ, nodes)
        count = _number(environ, "SLURM_JOB_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
        if count < 2 or nodes:
            return found
        note = f"using only this node of the {count} nodes of Slurm job {job}; to use all, start it with srun"
        return msgspec.structs.replace(found, note=note)

    def seconds_left(self, job: str) -> float | None:
        """Return the seconds until the job's time limit, or until the end of the grace time of a preemption."""
        import time

        try:
            found = records(scontrol("show", "job", job))
        except OSError:
            return None
        end = found[0].get("EndTime", "") if found else ""
        return max(1.0, int(end) - time.time()) if end.isdecimal() else None

    def requeue(self, job: str) -> str:
        """Requeue the job if it is being preempted and its batch script would otherwise end it."""
        try:
            found = records(scontrol("show", "job", job))
            if not found or not should_requeue(found[0]):
                return ""
            scontrol("requeue", job)
        except OSError as error:
            return f"could not requeue the preempted Slurm job {job}: {error}"
        return f"requeued the preempted Slurm job {job}"

    def _kill_wait_s(self, environ: Mapping[str, str]) -> int:
        for path in filter(None, (environ.get("SLURM_CONF", ""), *_CONF_FILES)):
            with suppress(OSError):
                found = re.search(r"(?im)^\s*KillWait\s*=\s*(\d+)", self._read(path))
                return int(found[1]) if found else _DEFAULT_KILL_WAIT_S
        return _DEFAULT_KILL_WAIT_S


def _in_step(found: Allocation, step: int, run_id: str, environ: Mapping[str, str], nodes: int) -> Allocation:
    """``run_id``: of this step alone."""
    count = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", count))
    is_first = _number(environ, "SLURM_PROCID") == 0
    if tasks > count and nodes not in (1, tasks):
        where = "1 node" if count == 1 else f"{count} nodes"
        refusal = f"this step has {tasks} tasks on {where}; tenax needs one per node: add --ntasks-per-node=1 to srun"
        return msgspec.structs.replace(found, is_first=is_first, refusal=refusal)
    if nodes == 1 or (count == 1 and not nodes):
        return msgspec.structs.replace(found, run_id=run_id)
    if count > 1:
        what = f"Slurm step {found.job}.{step}"
        reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
        port = int(reserved[0]) if reserved else _port(found.job, step)
        listed = environ.get("SLURM_STEP_NODELIST", "")
        order = environ.get("SLURM_PROCID" if tasks > count else "SLURM_NODEID", "")
    else:  # one step per node
        run_id, what = found.run_id, f"the steps of Slurm job {found.job}"
        port = _port(found.job)
        listed = environ.get("SLURM_JOB_NODELIST", "")
        here = environ.get("SLURMD_NODENAME")
        count, order = nodes, str(next((index for index, name in enumerate(hosts(listed)) if name == here), 0))
    endpoint = f"{next(hosts(listed))}:{port}"
    is_first = order == "0"
    note = f"{what} on {listed}: run {run_id}, endpoint {endpoint}" if is_first else ""
    return msgspec.structs.replace(
        found, run_id=run_id, nodes=count, endpoint=endpoint, node_order=order, is_first=is_first, note=note
    )


def _port(job: str, step: int = -1) -> int:
    return FIRST_PORT + (int(job) * _STEPS_APART + step) % PORTS


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the names in a list of Slurm's: ``n[1-3,7],rack[01-02]n5``. Raises ValueError if it is empty."""
    if not nodelist:
        raise ValueError("Slurm's list of nodes is empty")
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\]]*)\]", part)  # text, range, text, range, ..., text
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        yield from ("".join(chosen) for chosen in product(*choices))


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [first]
    return found


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


# --- the controller ---------------------------------------------------------------------------------------------------


def scontrol(*arguments: str) -> str:
    """Return what scontrol prints. Times are in seconds since the epoch. Raises OSError with the reason."""
    import subprocess

    command = ("env", "SLURM_TIME_FORMAT=%s", "scontrol", "-o", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"scontrol did not answer within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise OSError((done.stderr.strip() or f"scontrol exited with {done.returncode}").splitlines()[-1])
    return done.stdout


def records(text: str) -> list[dict[str, str]]:
    """Parse the output of ``scontrol -o show``: one record per line."""
    return [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in text.splitlines()]


def should_requeue(record: dict[str, str]) -> bool:
    """Whether a job that still runs is being preempted. A job that was cancelled has another state."""
    return (
        record.get("JobState") == "RUNNING"
        and record.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
        and record.get("Requeue") == "1"
        and record.get("BatchFlag") == "1"
    )


def runs_of(name: str, ask: Callable[..., str] = scontrol) -> list[tuple[str, str]]:
    """Return run id and endpoint of the runs of several nodes that ``name`` may mean: a job, a step or a run id.

    The description of the job and its steps is turned into the variables that the agents had, and ``allocation``
    derives both from them.
    """
    found = _JOB_ID.fullmatch(name)
    if found is None:
        return []
    try:
        jobs = records(ask("show", "job", found[1]))
        steps = [step for job in jobs for step in records(ask("show", "step", job["JobId"]))]
    except OSError:
        return []
    runs = dict.fromkeys(_runs(jobs, steps))
    return [run for run in runs if found[2] is None or name in (run[0], run[0].partition("-")[0])]


def _runs(jobs: list[dict[str, str]], steps: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
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
