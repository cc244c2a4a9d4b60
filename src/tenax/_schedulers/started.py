"""``tenax start``: what it gives the agents that it starts, and how it lists hosts. Pure.

The agents share one console and one exit code, so they are tasks of one step. Within a job of Slurm, everything but the
hosts is as for a step on each node: run id, port, secret, GPUs, notices, restart count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from tenax._core.start import Host
from tenax._schedulers import port_for
from tenax._schedulers.slurm import Slurm, hosts
from tenax.scheduler import Allocation, Scheduler

VARIABLE = "TENAX_START"
_LEFT = 143  # 0 is the success of the run
_HOST = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(?:\s+max[-_]slots\s*=\s*\d+)?)?")
_NAME = re.compile(r"(?!-)[^\[\]]*(\[\d+(-\d+)?(,\d+(-\d+)?)*\][^\[\]]*)*")


class Started(Scheduler):
    def allocation(self, environ: Mapping[str, str], nodes: int) -> Allocation:
        run_id, endpoint, count, order, slots = environ[VARIABLE].split()
        nodes = nodes or int(count)
        found = Allocation(scheduler="tenax start", run_id=run_id, nodes=nodes, endpoint=endpoint, is_step=True)
        if environ.get("SLURM_JOB_ID"):
            found = Slurm().allocation(environ, nodes)
            endpoint = f"{endpoint.partition(':')[0]}:{found.endpoint.rpartition(':')[2]}"
        return msgspec.structs.replace(
            found,
            endpoint=endpoint,
            node_order=order,
            is_first=order == "0",
            workers=int(slots) or found.workers,
            leave_code=_LEFT,
        )


def describe(run_id: str, first: str, nodes: int, order: int, slots: int) -> str:
    """Return the value of ``TENAX_START`` for one agent. ``first``: the host of the endpoint."""
    return f"{run_id} {host_name(first)}:{port_for(run_id)} {nodes} {order} {slots}"


def host_name(host: str) -> str:
    """Return the name without the user: ``alice@host0``."""
    return host.rpartition("@")[2]


def parse_list(text: str) -> list[Host]:
    """Return the hosts in a list like that of Slurm, each with its slots if given: ``h[0-3],gpu7:8``."""
    return _parse(re.split(r",(?![^\[]*\])", text))


def parse_file(text: str) -> list[Host]:
    """Return the hosts of a host file or a discovery script: ``h0``, ``h[1-3] slots=4`` or ``h4:8`` on each line."""
    return _parse(line.partition("#")[0] for line in text.splitlines())


def _parse(parts: Iterable[str]) -> list[Host]:
    found: dict[str, Host] = {}
    for part in filter(None, map(str.strip, parts)):
        match = _HOST.fullmatch(part)
        names = list(hosts(match["name"])) if match is not None and _NAME.fullmatch(match["name"]) else []
        if match is None or not names:
            raise ValueError(f"{part!r} is not a host; expected NAME, NAME:SLOTS, NAME[0-3] or NAME slots=N")
        for name in names:
            if name in found:
                raise ValueError(f"the host {name} is listed twice")
            found[name] = Host(name, int(match["count"] or match["slots"] or 0))
    return list(found.values())
