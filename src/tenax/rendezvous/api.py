"""TorchElastic's rendezvous names: handlers, their results, parameters, errors and the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]

_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")


class RendezvousError(Exception):
    """Base class of rendezvous errors."""


class RendezvousClosedError(RendezvousError):
    """The run is over and cannot be joined any more."""


class RendezvousTimeoutError(RendezvousError):
    """The group did not form in time."""


class RendezvousConnectionError(RendezvousError):
    """The rendezvous backend cannot be reached."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous is invalid."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not needed and may exit. Not a failure."""


class RendezvousStoreInfo:
    """The address of the workers' store of one group."""

    MASTER_ADDR_KEY: ClassVar[str] = "MASTER_ADDR"
    MASTER_PORT_KEY: ClassVar[str] = "MASTER_PORT"

    def __init__(self, master_addr: str, master_port: int) -> None:
        self.master_addr = master_addr
        self.master_port = master_port

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RendezvousStoreInfo) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RendezvousStoreInfo(master_addr={self.master_addr!r}, master_port={self.master_port!r})"

    @staticmethod
    def build(rank: int, store: Any, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Publish the address in ``store`` (rank 0) or read it there (other ranks)."""
        if rank == 0:
            import socket

            from tenax._engines.free_port import free_port

            addr = local_addr or socket.getfqdn()
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, addr.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(server_port or free_port()).encode())
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode())
        return RendezvousStoreInfo(addr, port)


class RendezvousInfo:
    """The result of a rendezvous: this node's rank, the size of the group and its store."""

    def __init__(
        self, store: Any, rank: int, world_size: int, bootstrap_store_info: RendezvousStoreInfo | None
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bootstrap_store_info = bootstrap_store_info

    @property
    def store(self) -> Any:
        return self._store

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def bootstrap_store_info(self) -> RendezvousStoreInfo | None:
        """None: the agents agree on it through the store."""
        return self._bootstrap_store_info


class RendezvousHandler(ABC):
    """Brings nodes together. Implement it for your own rendezvous; register it by name or pass it to the agent."""

    def get_backend(self) -> str:
        """Return the name under which it is registered. A handler that is passed directly needs none."""
        return ""

    @property
    def use_agent_store(self) -> bool:
        """Whether workers may use the store that the agent serves."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next group and return this node's rank in it."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the run is over."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the run for all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the run."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release all resources. Return whether that succeeded."""

    def leave(self) -> None:  # noqa: B027 - optional for third-party handlers
        """Leave the run, which continues without this node. Not in TorchElastic."""


class RendezvousParameters:
    """Parameters for creating a handler."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("the name of the rendezvous backend is empty; give one, such as 'tcp'")
        if min_nodes < 1:
            raise ValueError(f"min_nodes is {min_nodes}; expected at least 1")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes is {max_nodes}; expected at least min_nodes, which is {min_nodes}")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def __repr__(self) -> str:
        """Leaves out the values of options: some are secrets."""
        return (
            f"RendezvousParameters(backend={self.backend!r}, run_id={self.run_id!r}, min_nodes={self.min_nodes}, "
            f"max_nodes={self.max_nodes}, config={sorted(self.config)})"
        )

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise ValueError(f"the rendezvous option {key!r} is {value!r}; expected yes or no")
        return text in _TRUE

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError(f"the rendezvous option {key!r} is {value!r}; expected a whole number") from None


class RendezvousHandlerRegistry:
    """Handlers by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        if not backend:
            raise ValueError("a rendezvous backend needs a name")
        known = self._registry.setdefault(backend, creator)
        if known != creator:
            raise ValueError(f"the rendezvous backend {backend!r} is already registered, as {known}; use another name")

    def __contains__(self, backend: str) -> bool:
        return backend in self._registry

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        creator = self._registry.get(params.backend)
        if creator is None:
            raise ValueError(
                f"unknown rendezvous backend {params.backend!r}; known backends: "
                f"{', '.join(sorted(self._registry))}; register it, or publish it under the entry point group "
                "'torchrun.handlers'"
            )
        handler = creator(params)
        if handler.get_backend() not in ("", params.backend):
            raise RuntimeError(
                f"get_backend() of the handler for the rendezvous backend {params.backend!r} returned "
                f"{handler.get_backend()!r}; it must return the name it is registered under"
            )
        return handler


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]
rendezvous_handler_registry = RendezvousHandlerRegistry()
