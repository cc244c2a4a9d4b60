"""A handler with an engine: one whose runs need no polling.

Our own handlers offer, besides the blocking methods that TorchElastic documents, an engine (``ports.Control``) that
tells instead of being asked. The runtime takes that; only agents with hooks of their own use the blocking methods.
"""

from __future__ import annotations

from abc import abstractmethod

from tenax.rendezvous.api import RendezvousHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.ports import Control


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
