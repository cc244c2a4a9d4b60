"""The registry: from a backend's name and parameters to a handler."""

from __future__ import annotations

from tenax.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from tenax.rendezvous.local import LOOPBACK, LocalRendezvousHandler

__all__ = ["get_rendezvous_handler"]

_ENTRY_POINT_GROUP = "torchrun.handlers"
# Names on old command lines that mean "one node" when there is one node.
_SINGLE_NODE_BACKENDS = ("local", "tcp", "c10d", "static", "etcd", "etcd-v2")


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for these parameters: a built-in one, a registered one, or one from an installed package."""
    if params.backend not in rendezvous_handler_registry:
        _register_from_entry_points(params.backend)
    return rendezvous_handler_registry.create_handler(params)


def _create_single_node_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.max_nodes > 1:
        raise ValueError(
            f"the rendezvous backend {params.backend!r} was asked for up to {params.max_nodes} nodes, but this release "
            "of tenax runs one node; bring a RendezvousHandler of your own or use one node"
        )
    addr, port = params.local_addr or LOOPBACK, 0
    if params.backend == "static" and params.endpoint:
        host, _, digits = params.endpoint.rpartition(":")
        addr, port = (host.strip("[]") or LOOPBACK, int(digits)) if digits.isdigit() else (params.endpoint, 0)
    return LocalRendezvousHandler(params.run_id, backend=params.backend, master_addr=addr, master_port=port)


def _register_from_entry_points(backend: str) -> None:
    """An entry point is a function without arguments that returns the creator. A broken one is an error of its own."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=_ENTRY_POINT_GROUP):
        if entry.name == backend:
            rendezvous_handler_registry.register(backend, entry.load()())


for _name in _SINGLE_NODE_BACKENDS:
    rendezvous_handler_registry.register(_name, _create_single_node_handler)
