"""Rendezvous handlers with an engine, whose runs need no polling.

Besides TorchElastic's blocking methods, tenax's own handlers offer an engine (``interfaces.Control``) that reports
changes as events. The runtime uses the engine; only agents with their own hooks use the blocking methods.
"""

from __future__ import annotations

from abc import abstractmethod

from tenax._core.bounds import MAX_NODES
from tenax._engines.local import LOOPBACK, LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from tenax._io.interfaces import Control
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend


class EngineRendezvousHandler(RendezvousHandler):
    """A handler that can create an engine for a run."""

    max_nodes = MAX_NODES  # of the run; a handler that knows its number sets it

    def __init__(self, backend: str = "", run_id: str = "") -> None:
        self._backend = backend
        self._run_id = run_id
        self._closed = False
        self._engine: Control | None = None  # of the current run, if it uses one

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    def engine(self, master_addr: str | None = None, master_port: int | None = None) -> Control:
        """Create the engine for one run. The arguments override the address of the workers' store."""
        self._engine = self._make_engine(master_addr, master_port)
        return self._engine

    @abstractmethod
    def _make_engine(self, master_addr: str | None, master_port: int | None) -> Control: ...

    def set_closed(self) -> None:
        """Cancel the run for every node. Safe to call from any thread."""
        self._closed = True
        if self._engine is not None:
            self._engine.cancel("set_closed() of its rendezvous handler was called")


class ForwardingRendezvousHandler(RendezvousHandler):
    """Forwards the blocking methods to another handler."""

    @abstractmethod
    def _target(self) -> RendezvousHandler: ...

    @property
    def use_agent_store(self) -> bool:
        return self._target().use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._target().next_rendezvous()

    def is_closed(self) -> bool:
        return self._target().is_closed()

    def set_closed(self) -> None:
        self._target().set_closed()

    def num_nodes_waiting(self) -> int:
        return self._target().num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._target().shutdown()

    def leave(self) -> None:
        self._target().leave()


class PolledRendezvousHandler(ForwardingRendezvousHandler, EngineRendezvousHandler):
    """A handler whose blocking methods work, too.

    Agents with their own hooks poll: for them the blocking methods use a ``DynamicRendezvousHandler`` over a backend at
    the same endpoint. All nodes of a run must use the same of the two ways.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(params.backend, params.run_id)
        self._params = params
        self.max_nodes = params.max_nodes
        self._polled: RendezvousHandler | None = None

    @abstractmethod
    def _create_backend(self) -> tuple[RendezvousBackend, Any]:
        """Return the backend for the blocking methods, and its store."""

    def _target(self) -> RendezvousHandler:
        if self._polled is None:
            from tenax.rendezvous.dynamic_rendezvous import create_handler

            backend, store = self._create_backend()
            self._polled = create_handler(store, backend, self._params)
        return self._polled

    def is_closed(self) -> bool:
        return self._closed if self._engine is not None else super().is_closed()

    def set_closed(self) -> None:
        EngineRendezvousHandler.set_closed(self)
        if self._engine is None:
            super().set_closed()

    def shutdown(self) -> bool:
        return self._polled.shutdown() if self._polled is not None else True

    def leave(self) -> None:
        if self._polled is not None:
            self._polled.leave()


class LocalRendezvousHandler(EngineRendezvousHandler):
    """The handler for a run of one node, with a store of its own."""

    max_nodes = 1

    def __init__(
        self,
        run_id: str,
        *,
        backend: str = "local",
        master_addr: str = LOOPBACK,
        master_port: int = 0,
        use_agent_store: bool = True,
        store_allow: Sequence[str] = (),
    ) -> None:
        super().__init__(backend, run_id)
        self._use_agent_store = use_agent_store
        self._store_allow = store_allow
        self.master_addr = master_addr
        self.master_port = master_port

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> LocalEngine:
        store_address = StoreAddress(
            master_addr or self.master_addr,
            master_port or self.master_port,
            in_agent=self._use_agent_store,
            allow=self._store_allow,
        )
        return LocalEngine(self._run_id, store_address)

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the run {self._run_id!r} was closed")
        from tenax._engines.free_port import free_port
        from tenax.store import MemoryStore

        port = self.master_port or free_port()
        return RendezvousInfo(MemoryStore(), 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def is_closed(self) -> bool:
        return self._closed

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True
