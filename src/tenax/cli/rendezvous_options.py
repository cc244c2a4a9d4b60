"""The rendezvous of several nodes: backend, endpoint and node rank, from the flags. Pure.

Imported only when there are several nodes.

1. The user names the endpoint: the same on every node, and reachable from all of them. There is no default, because
   nodes that each assume to be the endpoint would wait for each other forever.
2. tcp, c10d and static are one engine; torchrun's default, static, only means that ranks are given. etcd and etcd-v2
   are one engine; their endpoint is etcd's.
3. A rank is assigned exactly as requested, or rejected. Where nodes may come and go, a cluster's ``PET_NODE_RANK`` only
   sets the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenax.cli.flags import UsageError
from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS, FlagValues, is_host, split_endpoint

_DEFAULT_MASTER_PORT = 29500
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", "0", "::0"})  # noqa: S104 - recognised, not bound
# Read by the engine where --rdzv-conf does not set them.
ORDER_VARIABLE = "TENAX_NODE_ORDER"
TOKEN_VARIABLE = "TENAX_RDZV_TOKEN"  # noqa: S105 - the variable's name


def many_node_rendezvous(
    flags: FlagValues, least: int, most: int, settings: dict[str, Any], environ: Mapping[str, str]
) -> tuple[str, str, dict[str, Any]]:
    """Return the backend, endpoint and settings of the rendezvous."""
    backend = _backend(flags)
    if backend not in MANY_NODES_BACKENDS:
        for dest in ("master_addr", "master_port", "node_rank"):
            whose = "tenax's own backends" if dest == "node_rank" else "the static backend"
            flags.drop(dest, "rdzv_backend", why=f"{flags.name(dest)} is for {whose}")
        return backend, flags["rdzv_endpoint"], settings
    endpoint = _etcd_endpoint(flags) if backend in ETCD_BACKENDS else _tcp_endpoint(flags, settings)
    is_static = backend == "static" and flags.typed("rdzv_backend")
    if is_static and least != most:
        why = "static needs a fixed number of nodes"
        raise UsageError(flags.conflict("rdzv_backend", "nnodes", why, "use '--rdzv-backend tcp'"))
    _decide_rank(flags, least, most, settings, environ)
    if backend == "static" and "rank" not in settings:
        if is_static:
            advice = "add --node-rank, or use '--rdzv-backend tcp', which assigns ranks"
            raise UsageError(f"{flags.quote('rdzv_backend')} needs the rank of each node; {advice}")
        backend = "tcp"
    if "is_host" in settings:
        server = "the elected node" if backend in ETCD_BACKENDS else f"the node that can listen at {endpoint}"
        flags.notes.append(f"is_host in {flags.name('rdzv_conf')} has no effect: {server} serves the coordinator")
    return backend, endpoint, settings


def _backend(flags: FlagValues) -> str:
    backend = str(flags["rdzv_backend"])
    if not backend:
        raise UsageError(f"{flags.name('rdzv_backend')} needs a name, such as 'tcp' or 'static'")
    is_default = flags.from_environment("rdzv_backend")
    if is_default and flags.typed_master() and backend not in MANY_NODES_BACKENDS - ETCD_BACKENDS:
        flags.note_unused("rdzv_backend", flags.typed_master())
        return "static"
    if backend == "local":
        raise UsageError(flags.conflict("rdzv_backend", "nnodes", "local is for one node"))
    return backend


# --- endpoint ---------------------------------------------------------------------------------------------------------


def _tcp_endpoint(flags: FlagValues, settings: Mapping[str, Any]) -> str:
    if settings.get("store_type") == "file":
        advice = f"remove it from {flags.name('rdzv_conf')} and set '--rdzv-endpoint HOST'"
        raise UsageError(f"store_type=file is not supported for several nodes; {advice}")
    endpoint = flags["rdzv_endpoint"].strip()
    if endpoint and not flags.overrides_endpoint():
        for dest, refusal in flags.other_addresses():  # a cluster's variables are ignored, as under torchrun
            flags.drop(dest, "rdzv_endpoint", refusal)
        _check_reachable(flags, "rdzv_endpoint", *split_endpoint(endpoint))
        flags.check_endpoint()
        return str(endpoint)
    return _master_address(flags)


def _etcd_endpoint(flags: FlagValues) -> str:
    """Return the addresses of etcd's members, which need not be nodes of the job. The etcd handler checks them."""
    for dest in ("master_addr", "master_port"):
        advice = f"set the etcd members with --rdzv-endpoint and remove {flags.name(dest)}"
        flags.drop(dest, "rdzv_backend", flags.conflict(dest, "rdzv_backend", advice=advice))
    endpoint = str(flags["rdzv_endpoint"]).strip()
    if not endpoint:
        advice = "add '--rdzv-endpoint HOST:PORT,HOST:PORT' with its members, the same on all nodes"
        raise UsageError(f"{flags.quote('rdzv_backend')} needs the addresses of etcd; {advice}")
    return endpoint


def _master_address(flags: FlagValues) -> str:
    if not flags.given("master_addr"):
        if flags.given("master_port"):
            raise UsageError(f"{flags.quote('master_port')} needs a host; add '--master-addr HOST' of one of the nodes")
        raise UsageError(
            f"{flags.quote('nnodes')} needs an endpoint; add '--rdzv-endpoint HOST' with the host of one node, the "
            "same on all nodes, or use --standalone to run on this node alone"
        )
    host = flags["master_addr"].strip().strip("[]")
    port = _DEFAULT_MASTER_PORT if flags["master_port"] is None else flags["master_port"]
    _check_reachable(flags, "master_addr" if port else "master_port", host, str(port))
    if not is_host(host):
        raise UsageError(f"{flags.name('master_addr')} takes a host, without the port (--master-port), not {host!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_reachable(flags: FlagValues, dest: str, host: str, port: str) -> None:
    if host in _WILDCARDS:
        raise UsageError(
            f"{flags.quote(dest)} is not the address of one host, so every node would serve its own job; use an "
            "address at which the other nodes reach one of them"
        )
    if port.isdecimal() and int(port) == 0:
        raise UsageError(f"{flags.quote(dest)}: other nodes cannot connect to port 0; set another, such as 29400")


# --- rank -------------------------------------------------------------------------------------------------------------


def _decide_rank(
    flags: FlagValues, least: int, most: int, settings: dict[str, Any], environ: Mapping[str, str]
) -> None:
    """Set ``rank``, or ``node_order`` where the number of nodes may change, if the node's rank was given."""
    text = settings.get("rank")
    if text is not None:
        if not text.isdecimal():
            raise UsageError(f"rank in {flags.name('rdzv_conf')} takes a whole number, at least 0, not {text!r}")
        if flags.given("node_rank") and int(text) != flags["node_rank"]:
            other = f"rank={text} in {flags.name('rdzv_conf')}"
            raise UsageError(f"{flags.quote('node_rank')} and {other} are different ranks; remove one of them")
    elif not flags.given("node_rank"):
        return
    rank = settings["rank"] = flags["node_rank"] if text is None else int(text)
    dest = "node_rank" if flags.given("node_rank") else "rdzv_conf"
    given = flags.quote("node_rank") if dest == "node_rank" else f"rank={rank} in {flags.name('rdzv_conf')}"
    order = settings.get("node_order") or environ.get(ORDER_VARIABLE, "")
    if order and flags.typed(dest):
        why = "one sets the rank of this node, the other its position"
        raise UsageError(f"{given} and node_order={order} cannot be combined: {why}; remove one of them")
    if order:
        flags.notes.append(f"{given} is ignored because of node_order={order}")
        del settings["rank"]
    elif least != most and flags.typed(dest):
        raise UsageError(
            f"{given} and {flags.quote('nnodes')} cannot be combined: ranks change when nodes join and leave; use "
            "--rdzv-conf node_order=..., or remove it"
        )
    elif least != most:
        flags.notes.append(f"{given} only sets the order of the nodes, because of {flags.quote('nnodes')}")
        settings["node_order"] = str(settings.pop("rank"))
    elif rank >= most:
        numbers = "0 and 1" if most == 2 else f"0 to {most - 1}"
        if flags.typed(dest) or not flags.typed("nnodes"):
            raise UsageError(f"{given} is out of range: the {most} nodes have the ranks {numbers}")
        flags.notes.append(f"{given} is ignored because of {flags.quote('nnodes')}")
        del settings["rank"]
