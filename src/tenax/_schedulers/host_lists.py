"""LSF and PBS: schedulers that list the hosts of a job and leave it to the script to start a program on each.

The variables do not tell whether this process is the only one or one of several. So the list is used if --nnodes says
that there are several; otherwise the run is on this host alone, with a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tenax._schedulers import port_for, read_text
from tenax.scheduler import Allocation, Scheduler


class Lsf(Scheduler):
    """``host``: the name of this host; empty: as the system reports it."""

    def __init__(self, host: str = "") -> None:
        self._host = host

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation:
        index = environ.get("LSB_JOBINDEX", "0")
        job = environ["LSB_JOBID"] + (f"_{index}" if index != "0" else "")
        hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # name, slots, name, slots
        return _allocation("LSF", job, hosts, self._host, nodes)


class Pbs(Scheduler):
    """``host``: as above; ``read``: returns the content of the file with the hosts, or raises OSError."""

    def __init__(self, host: str = "", read: Callable[[str], str] = read_text) -> None:
        self._host = host
        self._read = read

    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation | None:
        try:
            hosts = list(dict.fromkeys(self._read(environ["PBS_NODEFILE"]).split()))  # one line per slot
        except OSError:
            return None
        job = re.sub(r"\[(\d+)\]", r"_\1", environ.get("PBS_JOBID", "").partition(".")[0])
        return _allocation("PBS", job, hosts, self._host, nodes)


def _allocation(scheduler: str, job: str, hosts: Sequence[str], host: str, nodes: int) -> Allocation:
    alone = Allocation(scheduler=scheduler, job=job, run_id=job)
    if len(hosts) < 2 or nodes == 1:
        return alone
    short = (host or os.uname().nodename).partition(".")[0]
    order = next((index for index, name in enumerate(hosts) if name.partition(".")[0] == short), None)
    if nodes and order is None:
        return alone
    if not nodes:
        note = (
            f"using only this host of the {len(hosts)} hosts of {scheduler} job {job}; to use all, start tenax on each "
            f"of them with --nnodes {len(hosts)}"
        )
        return msgspec.structs.replace(alone, note=note)
    endpoint = f"{hosts[0]}:{port_for(job)}"
    return msgspec.structs.replace(
        alone,
        nodes=nodes,
        endpoint=endpoint,
        node_order=str(order),
        is_first=order == 0,
        is_step=True,
        has_shared_home=True,
        note=f"{scheduler} job {job} on {len(hosts)} hosts: run {job}, endpoint {endpoint}" if order == 0 else "",
    )
