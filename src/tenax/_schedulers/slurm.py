"""Slurm: the allocation of a step, from its ``SLURM_*`` variables. Pure, except for the methods that run ``scontrol``.

1. A step of several nodes is one run. Its tasks are its agents, one per node, in the order of the nodes.
2. A step of one node is a run of its own, unless --nnodes asks for more: then all such steps of the job are one run.
3. Two runs have different run ids and ports, also if they share a node: job, step and restart count are in the id.
4. Outside of a step (a batch script without srun), and in a shell of ``srun --pty``, there is only this node.
"""

from __future__ import annotations

import os
import re
from itertools import product

from tenax.scheduler import Allocation, Scheduler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_DEFAULT_KILL_WAIT_S = 30
_FIRST_PORT, _PORTS = 16384, 16381  # below the ports that Linux gives to outgoing connections
_STEPS_APART = 31  # neighbouring jobs with this many steps have different ports
_SPECIAL_STEPS = 0xFFFFFFF0  # from here on: the batch script, an interactive shell, external processes
_CONF_FILES = ("/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf")


class Slurm(Scheduler):
    """``read``: returns the content of a file, or raises OSError. It reads slurm.conf."""

    def __init__(self, read: Callable[[str], str] | None = None) -> None:
        self._read = _read if read is None else read

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation:
        job = environ["SLURM_JOB_ID"]
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        restarts = _number(environ, "SLURM_RESTART_COUNT")
        names = _Names(f"{array}_{task}" if array and task else job, int(job), restarts)
        found = Allocation(
            scheduler="Slurm",
            job=job,
            run_id=names.run_id(),
            restarts=restarts,
            workers=_gpus(environ),
            is_step=True,
            has_shared_home=True,
            notice_signals="SIGUSR1",
            kill_wait_s=self._kill_wait_s(environ),
        )
        step = _number(environ, "SLURM_STEP_ID", -1)
        if not 0 <= step < _SPECIAL_STEPS or "SLURM_PTY_PORT" in environ:
            return _outside_of_steps(found, environ, nodes)
        return _in_step(found, names, step, environ, nodes)

    def seconds_left(self, job: str) -> float | None:
        from tenax._schedulers.slurm_commands import seconds_left

        return seconds_left(job)

    def requeue(self, job: str) -> str:
        from tenax._schedulers.slurm_commands import requeue

        return requeue(job)

    def _kill_wait_s(self, environ: Mapping[str, str]) -> int:
        for path in filter(None, (environ.get("SLURM_CONF", ""), *_CONF_FILES)):
            try:
                text = self._read(path)
            except OSError:
                continue
            found = re.search(r"(?im)^\s*KillWait\s*=\s*(\d+)", text)
            return int(found[1]) if found else _DEFAULT_KILL_WAIT_S
        return _DEFAULT_KILL_WAIT_S


class _Names:
    """The run ids and ports of one job."""

    def __init__(self, job: str, number: int, restarts: int) -> None:
        self._job = job
        self._number = number
        self._restarts = restarts

    def run_id(self, step: int = -1) -> str:
        """Return the id of a step's run; without a step, of the job's."""
        name = self._job if step < 0 else f"{self._job}.{step}"
        return f"{name}-r{self._restarts}" if self._restarts else name

    def port(self, step: int = -1, reserved: str = "") -> int:
        """Return the first reserved port, or one that neighbouring jobs and steps do not use."""
        if found := re.match(r"\d+", reserved):
            return int(found[0])
        return _FIRST_PORT + (self._number * _STEPS_APART + step) % _PORTS


def _outside_of_steps(found: Allocation, environ: Mapping[str, str], nodes: int) -> Allocation:
    count = _number(environ, "SLURM_JOB_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    if count < 2 or nodes:
        return found
    note = f"using only this node of the {count} nodes of Slurm job {found.job}; to use all, start it with srun"
    return _replace(found, note=note)


def _in_step(found: Allocation, names: _Names, step: int, environ: Mapping[str, str], nodes: int) -> Allocation:
    count = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", count))
    is_first = _number(environ, "SLURM_PROCID") == 0
    if tasks > count and nodes not in (1, tasks):
        where = "1 node" if count == 1 else f"{count} nodes"
        refusal = f"this step has {tasks} tasks on {where}; tenax needs one per node: add --ntasks-per-node=1 to srun"
        return _replace(found, is_first=is_first, refusal=refusal)
    if nodes == 1 or (count == 1 and not nodes):
        return _replace(found, run_id=names.run_id(step))
    if count > 1:
        run_id, what = names.run_id(step), f"Slurm step {found.job}.{step}"
        port = names.port(step, environ.get("SLURM_STEP_RESV_PORTS", ""))
        listed = environ.get("SLURM_STEP_NODELIST", "")
        order = environ.get("SLURM_PROCID" if tasks > count else "SLURM_NODEID", "")
    else:  # one step per node
        run_id, what = names.run_id(), f"the steps of Slurm job {found.job}"
        port = names.port()
        listed = environ.get("SLURM_JOB_NODELIST", "")
        count, order = nodes, str(_position(environ.get("SLURMD_NODENAME", ""), listed))
    endpoint = f"{next(hosts(listed))}:{port}"
    is_first = order == "0"
    note = f"{what} on {listed}: run {run_id}, endpoint {endpoint}" if is_first else ""
    return _replace(
        found, run_id=run_id, nodes=count, endpoint=endpoint, node_order=order, is_first=is_first, note=note
    )


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


def _position(host: str, nodelist: str) -> int:
    return next((index for index, name in enumerate(hosts(nodelist)) if name == host), 0)


def _gpus(environ: Mapping[str, str]) -> int:
    if listed := environ.get("SLURM_STEP_GPUS", ""):
        return listed.count(",") + 1
    return _number(environ, "SLURM_GPUS_ON_NODE")


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _replace(allocation: Allocation, **changes: object) -> Allocation:
    import msgspec

    return msgspec.structs.replace(allocation, **changes)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read() if os.path.isfile(path) else ""
