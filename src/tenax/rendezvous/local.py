"""The local engine: a run of one node. The coordinator lives in the agent's own process and is asked directly.

Every generation has a store of its own, on a port of its own, so that no key of an older generation can be read.
"""

from __future__ import annotations

import os

from tenax.core.coordinator import CancelRequested, Heard, Opened, RunSettings
from tenax.core.events import GenerationFormed, JoinRefused
from tenax.core.messages import NodeInfo, NodeJoined, NodeReady
from tenax.rendezvous.api import RendezvousClosedError, RendezvousInfo, RendezvousStoreInfo
from tenax.rendezvous.engine import EngineRendezvousHandler
from tenax.rendezvous.seat import CoordinatorSeat
from tenax.rendezvous.store_place import StorePlace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tenax.core.coordinator import Say
    from tenax.core.messages import FromNode
    from tenax.core.requests import AnyRequest, OfNode
    from tenax.ports import ControlledNode, Emit, EventLoop, Reply
    from tenax.rendezvous.desk import Desk

_NODE_ID = "local"
LOOPBACK = "127.0.0.1"


class LocalRendezvous:
    """Implements ``ports.Control``. Without a ``place`` there is no store: nobody will look for one."""

    def __init__(self, run_id: str, place: StorePlace | None = None) -> None:
        self.run_id = run_id
        self._place = place
        self._emit: Emit = lambda _: None
        self._loop: EventLoop | None = None
        self._seat: CoordinatorSeat | None = None
        self._desk: Desk | None = None
        self._answer: Callable[[OfNode, Reply], None]

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None:
        settings = node.settings
        self._emit, self._loop = emit, loop
        if self._place is not None:
            self._place.open(loop, node.say)
        run = RunSettings(
            self.run_id,
            max_restarts=settings.max_restarts,
            serving_node=_NODE_ID,
            on_hang=settings.on_hang,
            hang_after_s=settings.hang_after_s,
        )
        self._seat = CoordinatorSeat(run, node.policy, loop, self._deliver, node.record_run(run))
        self._answer = node.answer
        node.serves(self.desk)
        info = NodeInfo(_NODE_ID, os.uname().nodename, settings.local_world_size, settings.role)
        self._seat.step(Opened())
        self._seat.step(Heard(info.node_id, NodeJoined(info)))

    def tell(self, message: FromNode) -> None:
        assert self._seat is not None, "opened before"
        if isinstance(message, NodeReady) and self._place is not None:
            try:
                message = self._place.offer(message)
            except OSError as error:
                self._emit(JoinRefused(self._place.why_not(error)))
                return
        self._seat.step(Heard(_NODE_ID, message))

    def _deliver(self, say: Say) -> None:
        if isinstance(say.event, GenerationFormed) and self._place is not None:
            self._place.serve(say.event.assignment)
        self._emit(say.event)

    def cancel(self, why: str) -> None:
        if self._loop is not None:
            self._loop.soon(lambda: self._cancel(why))

    def _cancel(self, why: str) -> None:
        if self._seat is not None:
            self._seat.step(CancelRequested(why))

    def desk(self) -> Desk:
        if self._desk is None:
            from tenax.rendezvous.desk import Desk

            assert self._seat is not None, "opened before"
            assert self._loop is not None, "opened before"
            self._desk = Desk(self._seat, self._loop, lambda _, request, reply: self._answer(request, reply))
        return self._desk

    def ask(self, request: AnyRequest, reply: Reply) -> None:
        self.desk().ask(request, reply)

    @property
    def where(self) -> str:
        return ""

    def stays_for_others(self) -> bool:
        return False

    def close(self) -> None:
        self._loop = None
        if self._desk is not None:
            self._desk.close()
        if self._seat is not None:
            self._seat.close()
        if self._place is not None:
            self._place.close()


class LocalRendezvousHandler(EngineRendezvousHandler):
    """The same for people who hold a handler: one node, always ready, with a store for itself alone."""

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

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> LocalRendezvous:
        place = StorePlace(
            master_addr or self.master_addr,
            master_port or self.master_port,
            in_agent=self._use_agent_store,
            allow=self._store_allow,
        )
        return LocalRendezvous(self._run_id, place)

    def get_backend(self) -> str:
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"the run {self._run_id!r} was closed")
        from tenax.rendezvous.port import free_port
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
