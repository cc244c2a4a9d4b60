"""``tenax start``: what it gives the agents that it starts, and how it lists hosts. Pure.

The agents share one console and one exit code, so they are tasks of one step. Within a job of Slurm, everything but the
hosts is as for a step on each node: run id, port, secret, GPUs, notices, restart count.
"""

from __future__ import annotations

import re
import zlib

import msgspec

from tenax._core.start import Host
from tenax._schedulers.slurm import Slurm, hosts
from tenax.scheduler import Allocation, Scheduler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

VARIABLE = "TENAX_START"
_FIRST_PORT, _PORTS = 16384, 16381  # below the ports that Linux gives to outgoing connections
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
    endpoint = f"{host_name(first)}:{_FIRST_PORT + zlib.crc32(run_id.encode()) % _PORTS}"
    return f"{run_id} {endpoint} {nodes} {order} {slots}"


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
    """Raises ValueError."""
    found: dict[str, Host] = {}
    for host in (host for part in parts if part.strip() for host in _expand(part.strip())):
        if host.name in found:
            raise ValueError(f"the host {host.name} is listed twice")
        found[host.name] = host
    return list(found.values())


def _expand(part: str) -> Iterator[Host]:
    match = _HOST.fullmatch(part)
    names: list[str] = []
    if match is not None and _NAME.fullmatch(match["name"]):
        names = list(hosts(match["name"]))
    if match is None or not names:
        raise ValueError(f"{part!r} is not a host; expected NAME, NAME:SLOTS, NAME[0-3] or NAME slots=N")
    slots = int(match["count"] or match["slots"] or 0)
    return (Host(name, slots) for name in names)
