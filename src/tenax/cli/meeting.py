"""The meeting of several nodes: by which rendezvous, at which place, and as which node.

Decides from what was asked for, and touches nothing. Imported only when there are several nodes. Its rules:

1. The place is named by the user, the same on every node, and one that the others can reach. None is made up: nodes
   that each take themselves for the place wait for each other for ever.
2. tcp, c10d and static are one engine. torchrun's default, static, is only a name for ranks that are given. With etcd
   and etcd-v2, which are one engine too, the place is etcd's.
3. A rank is given exactly as it was asked for, or refused. A cluster that numbers nodes which may come and go
   (``PET_NODE_RANK``) says in which order they belong.
"""

from __future__ import annotations

from tenax.cli.flags import UsageError
from tenax.cli.options import ETCD_BACKENDS, MANY_NODES_BACKENDS, check_endpoint, is_host, split_endpoint, types_master

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tenax.cli.options import Asked

_DEFAULT_MASTER_PORT = 29500
_WILDCARDS = frozenset({"0.0.0.0", "::", "*", "0", "::0"})  # noqa: S104 - recognised, not bound
# What the engine reads when --rdzv-conf does not say it.
ORDER_VARIABLE = "TENAX_NODE_ORDER"
TOKEN_VARIABLE = "TENAX_RDZV_TOKEN"  # noqa: S105 - the variable's name


def meeting_place_of_many(
    asked: Asked, least: int, most: int, settings: dict[str, Any], environ: Mapping[str, str]
) -> tuple[str, str, dict[str, Any]]:
    """Backend, endpoint and settings of the rendezvous."""
    backend = _backend(asked)
    if backend not in MANY_NODES_BACKENDS:
        _check_flags_beside_a_stranger(asked)
        return backend, asked["rdzv_endpoint"], settings
    endpoint = _etcds_place(asked) if backend in ETCD_BACKENDS else _place(asked, settings)
    is_static = backend == "static" and asked.typed("rdzv_backend")
    if is_static and least != most:
        raise UsageError(
            f"{asked.words('rdzv_backend')} needs a fixed number of nodes, but {asked.words('nnodes')} lets them come "
            "and go; use '--rdzv-backend tcp'"
        )
    _settle_rank(asked, least, most, settings, environ)
    if is_static and "rank" not in settings:
        raise UsageError(
            f"{asked.words('rdzv_backend')} needs the number of each node: add --node-rank, or use "
            "'--rdzv-backend tcp', which numbers them itself"
        )
    if backend == "static" and "rank" not in settings:
        backend = "tcp"
    if "is_host" in settings:
        is_elected = backend in ETCD_BACKENDS
        who = "is elected leads" if is_elected else f"can listen at {endpoint} serves it"
        asked.notes.append(f"is_host in {asked.name('rdzv_conf')} has no effect: whoever {who}")
    return backend, endpoint, settings


def _backend(asked: Asked) -> str:
    backend = str(asked["rdzv_backend"])
    if not backend:
        raise UsageError(f"{asked.name('rdzv_backend')} needs a name, such as 'tcp' or 'static'")
    is_theirs = asked.from_environment("rdzv_backend")
    if is_theirs and types_master(asked) and backend not in MANY_NODES_BACKENDS - ETCD_BACKENDS:
        asked.note_unused("rdzv_backend", types_master(asked))
        return "static"
    if backend in MANY_NODES_BACKENDS:
        return backend
    if backend == "local":
        raise UsageError(f"{asked.words('rdzv_backend')} is for one node, but {asked.words('nnodes')} asks for several")
    return backend


def _check_flags_beside_a_stranger(asked: Asked) -> None:
    """What the rendezvous of others cannot be told by flags."""
    for dest, whose in (
        ("master_addr", "the static rendezvous"),
        ("master_port", "the static rendezvous"),
        ("node_rank", "a rendezvous of tenax"),
    ):
        if asked.typed(dest):
            raise UsageError(
                f"{asked.words(dest)} is for {whose}, but {asked.words('rdzv_backend')} names another; drop one of them"
            )
        if asked.given(dest):
            asked.note_unused(dest, "rdzv_backend")


# --- the place --------------------------------------------------------------------------------------------------------


def _place(asked: Asked, settings: Mapping[str, Any]) -> str:
    if settings.get("store_type") == "file":
        raise UsageError(
            f"several nodes cannot meet in a file in this release; drop store_type from {asked.name('rdzv_conf')} and "
            "name a host with --rdzv-endpoint"
        )
    endpoint = asked["rdzv_endpoint"].strip()
    if endpoint and asked.from_environment("rdzv_endpoint") and types_master(asked):
        asked.note_unused("rdzv_endpoint", types_master(asked))
        endpoint = ""
    if endpoint:
        _check_other_place(asked, endpoint)
        _check_reachable(asked, "rdzv_endpoint", *split_endpoint(endpoint))
        check_endpoint(asked)
        return str(endpoint)
    return _masters_place(asked)


def _etcds_place(asked: Asked) -> str:
    """Of etcd's members, who need not be nodes of the job. What is wrong with them is said by who knows etcd."""
    for dest in ("master_addr", "master_port"):
        if asked.typed(dest):
            raise UsageError(
                f"{asked.words(dest)} names a place that a node serves, but with {asked.words('rdzv_backend')} nodes "
                "meet at etcd; name its members with --rdzv-endpoint, and drop that"
            )
        if asked.given(dest):
            asked.note_unused(dest, "rdzv_backend")
    endpoint = str(asked["rdzv_endpoint"]).strip()
    if not endpoint:
        raise UsageError(
            f"{asked.words('rdzv_backend')} needs to know where etcd is: add '--rdzv-endpoint HOST:PORT,HOST:PORT', "
            "its members and the same on all nodes"
        )
    return endpoint


def _masters_place(asked: Asked) -> str:
    if not asked.given("master_addr"):
        if asked.given("master_port"):
            raise UsageError(
                f"{asked.words('master_port')} names the port, but not the machine where the nodes meet: add "
                "--master-addr HOST, of one of them"
            )
        raise UsageError(
            f"{asked.words('nnodes')} asks for several nodes, and they need a place to meet: add "
            "'--rdzv-endpoint HOST', one of them and the same on all, or run on this machine alone with --standalone"
        )
    host = asked["master_addr"].strip().strip("[]")
    port = _DEFAULT_MASTER_PORT if asked["master_port"] is None else asked["master_port"]
    _check_reachable(asked, "master_addr" if port else "master_port", host, str(port))
    if not is_host(host):
        raise UsageError(f"{asked.name('master_addr')} takes a host, with its port in --master-port, not {host!r}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_other_place(asked: Asked, endpoint: str) -> None:
    """A master beside the endpoint, and not the same. A cluster's variables give way, as under torchrun."""
    host, port = split_endpoint(endpoint)
    for dest, is_same in (
        ("master_addr", asked["master_addr"] == host),
        ("master_port", str(asked["master_port"]) == port),
    ):
        if not asked.given(dest) or is_same:
            continue
        if asked.typed(dest):
            raise UsageError(
                f"{asked.words('rdzv_endpoint')} and {asked.words(dest)} name two different meeting places; "
                "drop one of them"
            )
        asked.note_unused(dest, "rdzv_endpoint")


def _check_reachable(asked: Asked, dest: str, host: str, port: str) -> None:
    if host in _WILDCARDS:
        raise UsageError(
            f"{asked.words(dest)} is an address of every machine, so that each node would serve it and be alone; name "
            "one of them, as the others reach it"
        )
    if port.isdecimal() and int(port) == 0:
        raise UsageError(
            f"{asked.words(dest)} leaves the port open, so that nobody could find it; name one, such as 29400"
        )


# --- the rank ---------------------------------------------------------------------------------------------------------


def _settle_rank(asked: Asked, least: int, most: int, settings: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Which node this is, if somebody says so: becomes ``rank``, or ``node_order`` where the number may change."""
    _merge_rank(asked, settings)
    if "rank" not in settings:
        return
    rank = settings["rank"]
    dest = "node_rank" if asked.given("node_rank") else "rdzv_conf"
    words = asked.words("node_rank") if dest == "node_rank" else f"rank={rank} in {asked.name('rdzv_conf')}"
    order = settings.get("node_order") or environ.get(ORDER_VARIABLE, "")
    if order and asked.typed(dest):
        raise UsageError(
            f"{words} fixes the number of this node, but node_order={order} orders it among the others; "
            "drop one of them"
        )
    if order:
        asked.notes.append(f"{words} is not used, because of node_order={order}")
        del settings["rank"]
    elif least != most and asked.typed(dest):
        raise UsageError(
            f"{words} cannot be fixed where nodes come and go ({asked.words('nnodes')}); order them with "
            "--rdzv-conf node_order=..., or leave it out"
        )
    elif least != most:
        asked.notes.append(f"{words} only orders the nodes, because their number may change ({asked.words('nnodes')})")
        settings["node_order"] = str(settings.pop("rank"))
    elif rank >= most:
        numbers = "0 and 1" if most == 2 else f"0 to {most - 1}"
        if asked.typed(dest) or not asked.typed("nnodes"):
            raise UsageError(f"{words} is not a node of this job, whose {most} nodes have the numbers {numbers}")
        asked.notes.append(f"{words} is not used, because of {asked.words('nnodes')}")
        del settings["rank"]


def _merge_rank(asked: Asked, settings: dict[str, Any]) -> None:
    """--node-rank and a rank in --rdzv-conf mean the same, and so must say the same."""
    text = settings.get("rank")
    if text is not None:
        if not text.isdecimal():
            raise UsageError(f"rank in {asked.name('rdzv_conf')} takes a whole number of at least 0, not {text!r}")
        settings["rank"] = int(text)
    if not asked.given("node_rank"):
        return
    if text is not None and settings["rank"] != asked["node_rank"]:
        raise UsageError(
            f"{asked.words('node_rank')} and rank={text} in {asked.name('rdzv_conf')} name two different nodes; "
            "drop one of them"
        )
    settings["rank"] = asked["node_rank"]
