"""A handler with an engine: one whose runs need no polling.

Our own handlers offer, besides the blocking methods that TorchElastic documents, an engine (``ports.Control``) that
tells instead of being asked. The runtime takes that; only agents with hooks of their own use the blocking methods.
"""

from __future__ import annotations

from abc import abstractmethod

from tenax._engines.local import LOOPBACK, LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._io.ports import Control
    from tenax.rendezvous.api import RendezvousParameters


class EngineRendezvousHandler(RendezvousHandler):
    def __init__(self) -> None:
        self._engine: Control | None = None  # of the run that is going on, if it goes by the engine

    def engine(self, master_addr: str | None = None, master_port: int | None = None) -> Control:
        """A new engine for one run. A worker spec may say where the workers' store is to be."""
        self._engine = self._make_engine(master_addr, master_port)
        return self._engine

    @abstractmethod
    def _make_engine(self, master_addr: str | None, master_port: int | None) -> Control: ...

    def set_closed(self) -> None:
        """An operator's cancel: the run ends for every node, as soon as it can. From any thread."""
        if self._engine is not None:
            self._engine.cancel("set_closed() of its rendezvous handler was called")


class AskedRendezvousHandler(EngineRendezvousHandler):
    """One that can also be asked.

    The blocking methods are for agents with hooks of their own, which can only ask: they go through
    ``DynamicRendezvousHandler`` over a backend at the same place. All nodes of a run must go the same way.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__()
        self._params = params
        self._closed = False
        self._asked: RendezvousHandler | None = None

    @abstractmethod
    def _make_asked(self) -> RendezvousHandler: ...

    def _by_asking(self) -> RendezvousHandler:
        if self._asked is None:
            self._asked = self._make_asked()
        return self._asked

    def get_backend(self) -> str:
        return self._params.backend

    def get_run_id(self) -> str:
        return self._params.run_id

    @property
    def use_agent_store(self) -> bool:
        return self._by_asking().use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._by_asking().next_rendezvous()

    def is_closed(self) -> bool:
        return self._closed if self._engine is not None else self._by_asking().is_closed()

    def set_closed(self) -> None:
        if self._engine is None:
            self._by_asking().set_closed()
        self._closed = True
        super().set_closed()

    def num_nodes_waiting(self) -> int:
        return self._by_asking().num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._asked.shutdown() if self._asked is not None else True

    def leave(self) -> None:
        if self._asked is not None:
            self._asked.leave()


class LocalRendezvousHandler(EngineRendezvousHandler):
    """The handler of a run of one node, which has a store for itself alone."""

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
        super().__init__()
        self._run_id = run_id
        self._backend = backend
        self._closed = False
        self._use_agent_store = use_agent_store
        self._store_allow = store_allow
        self.master_addr = master_addr
        self.master_port = master_port

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> LocalEngine:
        place = StoreAddress(
            master_addr or self.master_addr,
            master_port or self.master_port,
            in_agent=self._use_agent_store,
            allow=self._store_allow,
        )
        return LocalEngine(self._run_id, place)

    def get_backend(self) -> str:
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the run {self._run_id!r} was closed")
        from tenax._engines.free_port import free_port
        from tenax.store import MemoryStore

        port = self.master_port or free_port()
        return RendezvousInfo(MemoryStore(), 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        super().set_closed()
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
