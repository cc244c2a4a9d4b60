"""The local engine: a group of one node, agreed at once, in this process.

Every generation gets a fresh port for the workers' store, so that no key of an older generation can be read.
"""

from __future__ import annotations

from tenax.core.events import GenerationFormed, JoinRefused
from tenax.core.model import Assignment
from tenax.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from tenax.rendezvous.port import free_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.ports import Emit

LOOPBACK = "127.0.0.1"


class LocalRendezvous:
    """Implements ``ports.Rendezvous``."""

    def __init__(self, run_id: str, master_addr: str = LOOPBACK, master_port: int = 0) -> None:
        self.run_id = run_id
        self._master_addr = master_addr
        self._master_port = master_port  # 0: a fresh one for every generation
        self._emit: Emit = lambda _: None

    def open(self, emit: Emit) -> None:
        self._emit = emit

    def join(self, generation: int, local_world_size: int, role: str) -> None:  # noqa: ARG002 - one node, one role
        try:
            port = self._master_port or free_port()
        except OSError as error:
            self._emit(JoinRefused(f"there is no free port for the workers' store: {error}"))
            return
        self._emit(
            GenerationFormed(
                Assignment(
                    generation=generation,
                    world_size=local_world_size,
                    role_world_size=local_world_size,
                    master_addr=self._master_addr,
                    master_port=port,
                )
            )
        )

    def close(self) -> None:
        """There is nothing to release."""


class LocalRendezvousHandler(RendezvousHandler):
    """The same for people who hold a handler: one node, always ready. One node needs no store, so ``store`` is None."""

    def __init__(
        self, run_id: str, *, backend: str = "local", master_addr: str = LOOPBACK, master_port: int = 0
    ) -> None:
        self._run_id = run_id
        self._backend = backend
        self._closed = False
        self.master_addr = master_addr
        self.master_port = master_port

    def engine(self, master_addr: str | None = None, master_port: int | None = None) -> LocalRendezvous:
        """What the runtime uses instead of the blocking methods below. A spec may name the workers' store itself."""
        return LocalRendezvous(self._run_id, master_addr or self.master_addr, master_port or self.master_port)

    def get_backend(self) -> str:
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the run {self._run_id!r} was closed")
        port = self.master_port or free_port()
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
