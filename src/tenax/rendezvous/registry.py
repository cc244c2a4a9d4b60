"""Creates rendezvous handlers from a backend's name and parameters."""

from __future__ import annotations

from tenax._engines.local import LOOPBACK
from tenax._engines.store_address import may_use_agent_store, store_allow
from tenax.rendezvous._engine_handler import LocalRendezvousHandler
from tenax.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

__all__ = ["get_rendezvous_handler"]

_ENTRY_POINT_GROUP = "torchrun.handlers"
# With one node all of them use the local engine. ``static`` is the tcp engine with fixed ranks.
_TCP_BACKENDS = ("tcp", "c10d", "static")
_ETCD_BACKENDS = ("etcd", "etcd-v2")
_OWN_BACKENDS = ("local", *_TCP_BACKENDS, *_ETCD_BACKENDS)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler for these parameters: built-in, registered, or from an installed package."""
    if params.backend not in rendezvous_handler_registry:
        _register_from_entry_points(params.backend)
    return rendezvous_handler_registry.create_handler(params)


def _create_own_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.max_nodes > 1:
        return _create_multi_node_handler(params)
    addr, port = params.local_addr or LOOPBACK, 0
    if params.backend == "static" and params.endpoint:
        host, _, digits = params.endpoint.rpartition(":")
        addr, port = (host.strip("[]") or LOOPBACK, int(digits)) if digits.isdigit() else (params.endpoint, 0)
    return LocalRendezvousHandler(
        params.run_id,
        backend=params.backend,
        master_addr=addr,
        master_port=port,
        use_agent_store=may_use_agent_store(params),
        store_allow=store_allow(params),
    )


def _create_multi_node_handler(params: RendezvousParameters) -> RendezvousHandler:
    if params.backend in _ETCD_BACKENDS:
        from tenax.rendezvous._etcd_handler import EtcdEngineHandler

        return EtcdEngineHandler(params)
    if params.backend not in _TCP_BACKENDS:
        raise ValueError(
            f"the rendezvous backend {params.backend!r} supports one node, not {params.max_nodes}; use 'tcp' with "
            "--rdzv-endpoint HOST[:PORT], or register your own RendezvousHandler"
        )
    if params.backend == "static" and (params.min_nodes != params.max_nodes or params.get("rank") is None):
        raise ValueError(
            "the rendezvous backend 'static' needs a fixed number of nodes and the rank of each (--node-rank); "
            "for a variable number of nodes use 'tcp'"
        )
    from tenax.rendezvous._tcp_handler import TcpRendezvousHandler

    return TcpRendezvousHandler(params)


def _register_from_entry_points(backend: str) -> None:
    """Register the backend from its entry point: a function without arguments that returns the creator."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=_ENTRY_POINT_GROUP):
        if entry.name == backend:
            try:
                creator = entry.load()()
            except Exception as error:
                raise ValueError(
                    f"cannot load the rendezvous backend {backend!r} from {entry.value!r} ({type(error).__name__}: "
                    f"{error})"
                ) from error
            rendezvous_handler_registry.register(backend, creator)


for _name in _OWN_BACKENDS:
    rendezvous_handler_registry.register(_name, _create_own_handler)
