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
    @abstractmethod
    def engine(self, master_addr: str | None = None, master_port: int | None = None) -> Control:
        """A new engine for one run. A worker spec may say where the workers' store is to be."""
